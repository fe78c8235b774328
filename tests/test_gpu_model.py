"""How a model is made ready for a GPU, with a tape of operators in place of CUDA's graphs."""
from __future__ import annotations

import pytest
import torch
from engine_helpers import IdText
from tiny import tiny_model

from specviz.cost_trial import measure
from specviz.drafters import DRAFTERS, Parts
from specviz.engine.drafting import DraftSettings
from specviz.engine.engine import Engine
from specviz.engine.graph_backends import TapeBackend
from specviz.engine.model import LanguageModel
from specviz.engine.record import Recorder
from specviz.engine.sampling import SamplingParams
from specviz.gpu_model import SAME_SHAPE, Gpu, GpuSettings
from specviz.options import parse


def answer(target: LanguageModel, draft: LanguageModel, method: str) -> list[int]:
    cache = target.new_cache(128)
    drafter = DRAFTERS[method].create(Parts(target, cache, draft))
    engine = Engine(target, cache, Recorder(str))
    engine.one_transfer = True
    engine.add([5, 6, 7, 8] * 4, SamplingParams(max_new_tokens=24), drafter, DraftSettings(4), IdText())
    return [token.id for _ in range(40) if not engine.idle for stepped in engine.step() for token in stepped.trace.emitted]


@pytest.mark.parametrize("settings", [GpuSettings(), GpuSettings(graphs=False, same_kernels=True), GpuSettings(same_kernels=True, fuse=False)])
def test_everything_together(settings):
    """Joined, captured, padded, judged in one transfer, target and draft model on one backend: the texts of all methods are plain's own."""
    gpu = Gpu("cpu", settings, TapeBackend())
    target, draft = (gpu.language_model(tiny_model("qwen3", seed=seed, dtype=torch.float64), num_tokens=384, is_draft=bool(seed)) for seed in (0, 1))
    plain = LanguageModel(tiny_model("qwen3", dtype=torch.float64), exact=False)
    expected = answer(plain, plain, "plain")
    assert [answer(target, draft, method) for method in ("plain", "draft_model", "prompt_lookup")] == [expected] * 3
    assert target.linears["joined"] == (6 if settings.fuse else 0) and bool(target.graphs.num_replayed) is settings.graphs
    assert min((key.num_tokens for key in draft.graphs.keys), default=1) == 1
    assert {key.num_tokens for key in target.graphs.keys} == {SAME_SHAPE} if settings.same_kernels else {1, 5} <= {key.num_tokens for key in target.graphs.keys}


def test_costs_are_those_of_captured_steps():
    """What a step costs is measured once its shape is captured, never with the forwards before."""
    gpu = Gpu("cpu", GpuSettings(), TapeBackend())
    target, draft = (gpu.language_model(tiny_model("llama", seed=seed)) for seed in (0, 1))
    timed = []

    def clock() -> float:
        timed.append(target.graphs.num_captured + draft.graphs.num_captured)
        return float(len(timed))
    list(measure(target, draft, contexts=(20,), sizes=(1, 2, 4), clock=clock))
    changes = [at for at, (before, after) in enumerate(zip(timed, timed[1:])) if before != after]
    total = target.graphs.num_captured + draft.graphs.num_captured
    assert len(timed) > 20 and timed[-1] == total > 3 and len(changes) <= 3       # all at once before each kind of measurement, none between its times


def test_without_graphs_nothing_is_padded():
    """Where steps are neither captured nor padded, the model runs as it does elsewhere; a head is quantized only beside quantized layers."""
    made = Gpu("cpu", GpuSettings(graphs=False, quantize_head=True)).language_model(tiny_model("llama"))
    assert made.graphs is None and made.linears["head_precision"] == made.linears["precision"] == "float32" and not made.exact
    packed = Gpu("cpu", GpuSettings(graphs=False, quantize_head=True)).language_model(tiny_model("llama"), "nf4-double")
    assert packed.linears["head_precision"] == "nf4" and packed.num_tokens == 384


def test_nothing_wide_is_a_default_before_it_is_measured(monkeypatch):
    """On a CUDA device a step feeds at most eight tokens by default until costs are known; then the table decides, and on a CPU nothing changes."""
    from specviz.cost import CostTable
    from specviz.drafters.lookahead import Size
    from specviz.opening import Opened
    target = LanguageModel(tiny_model("llama"), exact=False)
    opened = Opened(None, Parts(target, target.new_cache(64)), None, frozenset(), {}, {})

    def width() -> int:
        values = {option.name: option.default for option in opened.options("lookahead")}
        return Size(values["window"], values["ngram"], values["guesses"]).num_fed
    usual = width()
    monkeypatch.setattr(target, "device", torch.device("cuda"))
    assert width() <= 8 < usual
    opened.costs = CostTable((1, 64), (10,), ((1.0, 1.001),))
    assert width() > 8


def test_the_command_line():
    """Graphs are on and the others off, unless asked otherwise."""
    usual, asked = parse([]), parse(["--no-graphs", "--same-kernels", "--quantize-head"])
    assert (usual.graphs, usual.same_kernels, usual.quantize_head) == (True, False, False)
    assert (asked.graphs, asked.same_kernels, asked.quantize_head) == (False, True, True)
