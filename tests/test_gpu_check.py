"""The check of a GPU, run on a CPU with toy shapes: the same code, so that a rented hour on a card is not spent on typing errors."""
from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from specviz.bench import gpu_check
from specviz.bench.gpu_steps import compared_texts
from specviz.bench.random_model import SHAPES, TOY_SHAPES, random_model
from specviz.cost import CostTable
from specviz.engine.model import LanguageModel
from specviz.errors import InputError
from specviz.trace import EmittedToken, StepTrace, TopTrace


@pytest.fixture(scope="module")
def result():
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)     # its own layout of 4-bit weights, on such CPUs only, is not joined
        patch.setattr(gpu_check, "measure", partial(gpu_check.measure, sizes=(1, 2, 6)))
        patch.setattr(gpu_check, "_ANSWER", 12)
        yield gpu_check.check("cpu", TOY_SHAPES, ("int8", "nf4"), contexts=(16, 64), say=lines.append), lines


def test_every_part_gives_its_numbers(result):
    """All models and precisions are made, cost tables can be read back, the drafter has a price, and the whole is JSON."""
    data, lines = result
    assert list(data["models"]) == ["0.6B bf16", *(f"{name} {precision}" for name in ("1B", "8B") for precision in ("int8", "nf4"))]
    assert not [facts for facts in data["models"].values() if "error" in facts]
    for name, facts in data["models"].items():
        assert facts["launch"]["1"]["eager_ms"] > 0
        if name != "0.6B bf16":
            assert CostTable.from_json(facts["cost"]).v(1, 16) == facts["v"]["16"]["1"] == 1 and facts["c_drafter"] > 0
    assert json.loads(json.dumps(data)) == data and len(lines) == 5
    assert gpu_check.summary(data).count("T(M)/T(1)") == gpu_check.summary(data).count("with the same kernels: same text") == 4


def test_every_way_to_run_a_step_is_compared(result):
    """Joined projections and captured steps give the logits of the steps before them up to rounding, both really happened, and drafted text is plain
    text or a tie of rounding, with drafts that were accepted."""
    for name, facts in result[0]["models"].items():
        assert set(facts["step_ms"]) >= {"separate", "graphs"} and facts["graphs"]["num_replayed"] > 0 and not facts["graphs"]["failure"]
        if name != "0.6B bf16":
            assert min(facts["c"].values()) > 0
            assert facts["joined"]["groups"] == 2 * (2 if name.startswith("1B") else 3)
            assert facts["joined"]["difference"] < 0.02 * facts["correctness"]["scale"] + 1e-6
            assert facts["graphs"]["difference"] < 0.15 * facts["correctness"]["scale"]
            for texts in facts["texts"].values():
                assert texts["verdict"] in ("same text", "rounding tie") and texts["tokens_per_step"] > 1.5 and texts["waits_per_step"] is None


def test_steps_agree_with_the_plain_forward(result):
    """Chains, trees and single tokens give the unmodified model's logits, up to what 16-bit numbers and int8 activations round."""
    for name, facts in result[0]["models"].items():
        if "correctness" in facts:
            found = facts["correctness"]
            assert all(found[part]["difference"] < 0.15 * found["scale"] for part in ("chain", "one_by_one", "tree", "chain_against_one_by_one")), name


def test_a_wrong_tree_would_be_seen():
    """If the engine fed another tree than the one that was asked about, the comparison would say so loudly."""
    model = random_model(TOY_SHAPES["1B"], "bf16", "cpu", torch.float32)
    tokens = torch.randint(3, 500, (54,), generator=torch.Generator().manual_seed(1)).tolist()
    reference = gpu_check.Reference(model, "cpu")
    expected = {"chain": reference(tokens)[-7:], "tree": torch.stack([reference([*tokens[:48], *(tokens[48 + n] for n in gpu_check._path(node))])[-1]
                                                                      for node in range(6)])}
    target = LanguageModel(model, exact=False)
    right = gpu_check.correctness(target, tokens, expected)
    assert right["tree"]["difference"] < 1e-4 and right["tree"]["same_top"] == 1 and right["chain"]["difference"] < 1e-4
    wrong = gpu_check.correctness(target, tokens, expected | {"tree": expected["tree"].flip(0)})
    assert wrong["tree"]["difference"] > 0.5 and wrong["tree"]["same_top"] < 1 and wrong["tree"]["top_two_gap"] > 0


def test_a_part_that_fails_does_not_end_the_others(monkeypatch):
    """An error is written down with its words, and time that is over is told as such; both leave a complete file."""
    monkeypatch.setattr(gpu_check, "measure", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("no kernel image")))
    data = gpu_check.check("cpu", TOY_SHAPES, ("bf16",), contexts=(16,), say=lambda line: None)
    assert "no kernel image" in data["models"]["8B bf16"]["error"] and "launch" in data["models"]["0.6B bf16"]
    late = gpu_check.check("cpu", TOY_SHAPES, ("bf16",), until=0, say=lambda line: None)
    assert all("left_out" in facts for facts in late["models"].values()) and "not measured" in gpu_check.summary(late)


def test_the_command_says_what_it_needs(monkeypatch, capsys, tmp_path):
    """Without CUDA it says so; on a CPU it wants --tiny; with it, it writes one file and tells to send it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2 and "no CUDA device" in capsys.readouterr().err
    assert gpu_check.main(["--device", "cpu"]) == 2 and "--tiny" in capsys.readouterr().err
    monkeypatch.setattr(gpu_check, "check", lambda device, shapes, precisions, **rest: {"environment": gpu_check.environment("cpu"), "models": {}})
    out = tmp_path / "deep" / "result.json"
    assert gpu_check.main(["--device", "cpu", "--tiny", "--out", str(out)]) == 0
    assert "send it" in capsys.readouterr().out and json.loads(out.read_text())["environment"]["device"] == "cpu"


def test_shapes_have_the_size_their_name_says():
    """Parameters, counted on no memory at all, are those of the models they stand for."""
    from transformers import AutoModelForCausalLM
    for name, billions in (("1B", 1.236), ("8B", 8.03), ("0.6B", 0.596)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(SHAPES[name].config())
        model.tie_weights()
        assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
    with pytest.raises(InputError, match="int3"):
        random_model(TOY_SHAPES["1B"], "int3", "cpu")


def test_texts_are_judged():
    """A difference is named with its place and gap; one that rounding explains is a tie, another is not, and none is the same text."""
    def run(ids, gap):
        probs = torch.tensor([gap, 0.0]).softmax(0).tolist()
        return [StepTrace("plain", 0, 0, 1, 0, emitted=(EmittedToken(token, str(token), "plain"),),
                          top=(TopTrace(-1, ((token, "", probs[0], None), (9, "", probs[1], None))),)) for token in ids]
    plain = run([5, 6, 7], 0.01)
    assert compared_texts(plain, run([5, 6, 7], 1), 0.0) == {"tokens": 3, "equal": 3, "verdict": "same text"}
    tie, other = (compared_texts(plain, run([5, 8, 7], 1), noise) for noise in (0.006, 0.004))
    assert (tie["first_difference"], tie["equal"], tie["verdict"], other["verdict"]) == (1, 1, "rounding tie", "another text")
    assert tie["gap"] == pytest.approx(0.01, abs=1e-4)
