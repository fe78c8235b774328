"""Puts an engine together: loads target and drafter, chooses precision and threads by measuring, and makes the drafters.

It knows nothing of requests and screens.
"""
from __future__ import annotations

import math
import platform
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .catalog import Catalog
from .cost import CostStore, CostTable
from .cost_trial import Measuring, measure
from .default_model import default_cache_dir
from .drafters import DRAFTERS, Heads, Parts
from .drafters.checkpoints import load_heads
from .drafters.self_check import ANSWER, QUESTION, checked
from .engine.autopilot import Autopilot
from .engine.drafting import Drafter, DraftSettings, limits_of, parts_of
from .engine.engine import Engine
from .engine.linear import describe_machine
from .engine.model import LanguageModel, Row
from .engine.native.build import sources_hash
from .engine.native.kernel import find_kernel
from .engine.option import Option, settled
from .engine.record import Recorder
from .engine.smooth import CALIBRATION_TEXT
from .engine.threads import choose_threads
from .errors import InputError, SpecvizError
from .held_memory import held
from .gguf_file import brief
from .gpu_model import Gpu, GpuSettings
from .head_source import FoundHeads, find_heads
from .loading import Loaded, choose_placement
from .machine import available
from .options import Options
from .shipped import Shipped, find_shipped
from .text import TextCodec, special_ids

__all__ = ["Opened", "language_model", "open_engine"]

_MAX_CONTEXT = 8192                # tokens per row; a longer context would only cost memory on the machines this is for
_CACHE_SHARE = 0.5                 # of the memory that is free once the model is there, for the rows of everyone who asks
_LAYERSKIP = re.compile(r"\bfacebook/layerskip-", re.IGNORECASE)
_TYPICAL_CONTEXT = 512             # tokens of text behind which a method's defaults suppose that it drafts
_MOST_UNREST = 0.3
_FUSED_ON_CUDA = 8                 # tokens that the 4-bit kernels of most cards take in one piece; no default goes beyond before it is measured
_DEFAULT_METHOD = "prompt_lookup"  # needs nothing that was trained for the target


@dataclass(slots=True)
class Opened:
    """A running engine and what belongs to it. config: the effective configuration as the status line and traces show it.

    costs: what a step costs here, None until it is measured. trial: measures it piece by piece, None when there is nothing to measure; its
    return value is the table. tune: choose the number of threads anew, in the calling thread, which must be the one that uses the engine;
    what was measured with another number is dropped. memory: what the models hold, see `held_memory.held`. shared: the tokens that all
    prompts begin with, see `shared_prompt.common_start`.
    """
    engine: Engine
    parts: Parts
    codec: TextCodec
    eos_ids: frozenset[int]
    config: dict[str, Any]
    machine: dict[str, Any]
    default_method: str = _DEFAULT_METHOD
    tune: Callable[[], None] = lambda: None
    costs: CostTable | None = None
    trial: Measuring | None = None
    memory: dict[str, int] = field(default_factory=dict)
    shared: tuple[int, ...] = ()
    _drafters: dict[str, Drafter] = field(default_factory=dict)

    def pilot(self, drafter: Drafter, settings: DraftSettings) -> Autopilot | None:
        """What chooses the draft lengths of a new request, where it is known what steps cost."""
        return Autopilot(self.costs, parts_of(drafter), limits_of(drafter, settings)) if self.costs is not None else None

    def measure_piece(self) -> float | None:
        """Measure a piece of what a step costs, in the thread that uses the engine. Returns the share that is done, None at the end."""
        try:
            return next(self.trial) if self.trial is not None else None
        except StopIteration as end:
            self.costs = end.value
        except (MemoryError, RuntimeError, SpecvizError):       # answers work without a table
            pass
        self.trial = None
        return None

    def drafter(self, name: str) -> Drafter:
        """The one drafter of this method, made when first asked for."""
        if name not in self._drafters:
            self._drafters[name] = DRAFTERS[name].create(self.parts)
        return self._drafters[name]

    def options(self, name: str) -> tuple[Option, ...]:
        """What can be set of this method, with defaults that follow what a step was measured to cost here, once it was."""
        costs, parts = self.costs, self.parts
        if costs is not None:
            parts = replace(parts, verify_cost=lambda num_tokens: costs.v(num_tokens, _TYPICAL_CONTEXT),
                            pass_cost=costs.pass_cost(_TYPICAL_CONTEXT))
        elif parts.target.device.type == "cuda":
            parts = replace(parts, verify_cost=lambda num_tokens: 1.0 if num_tokens <= _FUSED_ON_CUDA else math.inf)
        return tuple(DRAFTERS[name].options(parts))

    def drafter_name(self, method: str) -> str | None:
        """The heads or the model that a method cannot do without, by name; None if it needs none."""
        row = DRAFTERS[method]
        if row.heads:
            return self.parts.heads[row.heads].name
        return self.config.get("drafter") if row.missing(replace(self.parts, draft=None)) else None


def open_engine(options: Options, progress: Callable[[str, float | None], None], *, dry: bool = False) -> Opened:
    """Load and build everything that the options ask for. Raises SpecvizError children; runs in the thread that will use the model.

    dry: run nothing on the model and measure nothing, because its device can only be used later (ZeroGPU).
    mps is untested: where it was chosen by itself and does not work, the CPU takes its place and says so.
    """
    if options.device != "auto" or choose_placement(options.device, options.dtype, _quantization(options)).device.type != "mps":
        return _open(options, progress, dry)
    try:
        return _open(options, progress, dry)
    except (RuntimeError, TypeError) as error:
        reason = brief(error)
    progress("The device mps did not work; loading for the CPU", None)
    opened = _open(replace(options, device="cpu"), progress, dry)
    opened.config["notes"] = [f"The device mps did not work ({reason.rstrip('.')}), so the model runs on the CPU.", *opened.config["notes"]]
    return opened


def _open(options: Options, progress: Callable[[str, float | None], None], dry: bool) -> Opened:
    if options.method is not None and options.method not in DRAFTERS:
        raise InputError(f"There is no drafting method {options.method!r}; --method takes one of {', '.join(DRAFTERS)}.")
    catalog = Catalog(cache_dir=options.cache_dir, offline=options.offline)
    quantization = _quantization(options)
    found = None
    if options.draft and not catalog.card(options.draft):
        found = find_heads(options.draft, offline=options.offline, progress=progress)
    loaded = catalog.open_target(options.target or "default", device=options.device, dtype=options.dtype, quantization=quantization,
                                 draft=options.draft if found is None else None, progress=progress)
    drafter_loaded = None
    if options.draft and found is None:
        drafter_loaded = catalog.open_draft(options.draft, loaded, quantization=quantization, progress=progress)
    progress("Preparing the model for this machine", None)
    gpu = _gpu(options, loaded, dry)
    target = language_model(loaded, gpu)
    shipped = _shipped(options, catalog, loaded)
    draft = language_model(drafter_loaded, gpu, is_draft=True) if drafter_loaded else None
    if shipped is not None:
        progress(f"Loading the drafters of {shipped.name}", None)
        # not in INT8 by torch: oneDNN takes a hundred times as long for one row of a layer this narrow (measured with 256 inputs and AMX)
        narrow = loaded.placement if find_kernel() else replace(loaded.placement, quantization="none")
        draft = shipped.draft_model(target, lambda model: language_model(replace(loaded, model=model, placement=narrow), gpu, is_draft=True))
    cache = target.new_cache(_MAX_CONTEXT)
    threads = None if dry and not options.threads else _choose_threads(target, options.threads)
    codec = TextCodec(loaded.tokenizer)
    eos_ids = frozenset(loaded.eos_ids)
    heads = _heads(found, target, loaded.name, codec, progress, dry) if found is not None else shipped.heads(target, loaded.name) if shipped else {}
    parts = Parts(target, cache, draft, marker_ids=eos_ids | special_ids(loaded.tokenizer), trained_exits=_trained_exits(loaded),
                  heads=heads, preferred=shipped.preferred if shipped is not None else "")
    drafter = found or drafter_loaded or shipped
    config = {
        "target": loaded.name, "drafter": drafter.name if drafter else None, "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."), "quantization": loaded.placement.quantization, "threads": threads,
        "context": cache.capacity, "linears": target.linears, "decoder": "lean" if target.is_lean else "transformers",
        "exactness": _exactness(target), "weights": dict(loaded.facts),
        "notes": [*loaded.notes, *_operator_notes(target), *(f"{each.name}: {each.warning}." for each in heads.values() if each.warning)],
    }
    for model in (target, draft):
        if model is not None and model.graphs is not None:
            model.graphs.notes = config["notes"]                # whether steps can be captured shows only when they are
    machine = {"system": platform.system(), "processor": platform.processor() or platform.machine(), "cores": torch.get_num_threads(),
               **describe_machine()}
    preferred = shipped.default_method if shipped is not None and shipped.default_method in DRAFTERS else _DEFAULT_METHOD
    default = options.method or next(name for name in (preferred, _DEFAULT_METHOD, "plain") if not DRAFTERS[name].missing(parts))
    opened = Opened(Engine(target, cache, Recorder(codec.piece)), parts, codec, eos_ids, config, machine, default)
    if dry:
        return opened
    opened.memory = held(target, draft, heads)
    per_token = opened.memory["cache_bytes_per_token"] + opened.memory.get("drafter_cache_bytes_per_token", 0)
    opened.engine.scheduler.max_tokens = max(cache.capacity, int(_CACHE_SHARE * available(target.device) / max(1, per_token)))
    store = CostStore((options.cache_dir or default_cache_dir()) / "costs")

    def tune() -> None:
        config.update(threads=_choose_threads(target, options.threads))
        _look_up_costs(opened, store)
    opened.tune = tune
    _look_up_costs(opened, store)
    if options.method_options:
        settled(opened.options(default), dict(options.method_options), DRAFTERS[default].label)      # a bad value is told at once
    _warm_up(target)
    return opened


def _quantization(options: Options) -> str:
    """What "auto" means: on a CPU in float32 the per-row INT8 linears, elsewhere the weights as they are."""
    if options.quantization != "auto":
        return options.quantization
    placement = choose_placement(options.device, options.dtype)
    return "int8" if placement.device.type == "cpu" and placement.dtype == torch.float32 else "none"


def _gpu(options: Options, loaded: Loaded, dry: bool) -> Gpu | None:
    """What the options ask of a CUDA device; None elsewhere, and where the layers are spread over several. dry: it is not there yet, and
    what is captured lasts for one process only."""
    if loaded.placement.device.type != "cuda" or loaded.placement.spread:
        return None
    settings = GpuSettings(graphs=False, fuse=False) if dry else GpuSettings(options.graphs, options.same_kernels, options.quantize_head)
    return Gpu(loaded.placement.device, settings)


def language_model(loaded: Loaded, gpu: Gpu | None = None, is_draft: bool = False) -> LanguageModel:
    """On a CPU with our own linears; on a GPU as transformers and bitsandbytes made it, or as `gpu` makes it ready. is_draft: it guesses only."""
    placement = loaded.placement
    num_tokens = len(loaded.tokenizer)
    if gpu is not None:
        return gpu.language_model(loaded.model, placement.quantization, num_tokens, is_draft=is_draft)
    if placement.device.type != "cpu" or placement.dtype != torch.float32:
        return LanguageModel(loaded.model, num_tokens=num_tokens, exact=placement.device.type == "cpu")
    if placement.quantization == "int8":
        return LanguageModel(loaded.model, num_tokens=num_tokens, precision="int8", calibration=TextCodec(loaded.tokenizer).encode(CALIBRATION_TEXT))
    return LanguageModel(loaded.model, num_tokens=num_tokens, precision="fp32")


def _heads(found: FoundHeads, target: LanguageModel, target_name: str, codec: TextCodec, progress: Callable[[str, float | None], None],
           dry: bool) -> dict[str, Heads]:
    """The heads by kind, tried on a short text where they can be."""
    progress(f"Loading {found.name}", None)
    heads = load_heads(found.folder, found.name, target, target_name)
    if dry:
        return {heads.kind: heads}
    progress(f"Trying {found.name} on a short text", None)
    return {heads.kind: checked(heads, target, codec.render([{"role": "user", "content": QUESTION}]), codec.encode(ANSWER))}


def _shipped(options: Options, catalog: Catalog, loaded: Loaded) -> Shipped | None:
    """The drafters that come with specviz for this target, where no other drafter was asked for."""
    card = catalog.card(loaded.source)
    return find_shipped(card.id, loaded.facts) if card is not None and not options.draft else None


def _trained_exits(loaded: Loaded) -> tuple[int, ...]:
    """Layers after which the target was trained to exit, as its config says, or as is known of LayerSkip's checkpoints.

    Those are ordinary models in which every layer was trained to exit (Elhoushi et al. 2024, arXiv 2404.16710); a quarter of the layers
    is a good place to begin.
    """
    num_layers = loaded.model.config.get_text_config().num_hidden_layers
    exits = getattr(loaded.model.config, "trained_exits", None)
    if exits is None and _LAYERSKIP.search(loaded.source):
        exits = (max(1, num_layers // 4),)
    return tuple(int(layer) for layer in exits or () if 0 < int(layer) < num_layers)


def _look_up_costs(opened: Opened, store: CostStore) -> None:
    """Costs that were measured earlier in exactly this configuration, or else the trial that measures and keeps them."""
    config, target, draft = opened.config, opened.parts.target, opened.parts.draft
    configuration = {**{name: config[name] for name in ("target", "drafter", "device", "dtype", "quantization", "threads", "linears", "decoder",
                                                        "weights")},
                     "heads": sorted(heads.name for heads in opened.parts.heads.values()), "machine": opened.machine,
                     "exact": target.exact, "torch": torch.__version__, "kernel": sources_hash(), "version": 5,
                     "card": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None}

    def trial() -> Measuring:
        growing = next((opened.drafter(name) for name in ("eagle3", "eagle2") if not DRAFTERS[name].missing(opened.parts)), None)
        with growing.single_pass() if growing else nullcontext() as single_pass:
            table = yield from measure(target, draft, single_pass)
        if table.unrest < _MOST_UNREST:          # a busy machine's table serves this run; the next start measures again
            store.write(configuration, table)
        return table
    opened.costs = store.read(configuration)
    opened.trial = None if opened.costs else trial()


def _operator_notes(target: LanguageModel) -> list[str]:
    """What to say where torch's packed operators, private to it and tried on every processor, did not work, or where nothing is compiled."""
    if target.device.type != "cpu" or target.dtype != torch.float32:
        return []
    if "torch" in target.linears.get("kernel", "").split(" + "):
        return ["The fast CPU operators do not work on this processor or with this PyTorch, so PyTorch's own are used: slower, and equal to plain "
                "decoding up to rounding only."]
    reason = target.linears.get("not_compiled")
    return [f"INT8 runs without the compiled kernel, which is slower: {reason}."] if reason else []


def _exactness(target: LanguageModel) -> str:
    """What greedy equality with plain decoding rests on here."""
    if target.device.type == "cpu" and target.exact and target.linears.get("row_independent"):
        return "drafted chains and trees are bitwise equal to plain decoding"
    if target.linears.get("same_kernels"):
        return "plain and drafted steps run the same kernels in one shape; what differs all the same is reported"
    return "equal to plain decoding up to rounding ties, which are reported"


def _trial(target: LanguageModel, num_tokens: int, context: int = 64) -> Callable[[int], None]:
    """A forward of T tokens behind a short text, to be timed."""
    cache = target.new_cache()
    generator = random.Random(0)
    row = cache.allocate()
    target.forward([Row(row, [generator.randrange(target.num_tokens) for _ in range(context)], num_logits=0)], cache)
    cache.keep(row, range(context))

    def run(count: int = num_tokens) -> None:
        target.forward([Row(row, [1] * count)], cache)
        cache.keep(row, ())
    return run


def _choose_threads(target: LanguageModel, asked: int | None) -> int | None:
    """The thread count that is fastest here, measured in the engine's own thread; None off the CPU."""
    if target.device.type != "cpu":
        return None
    if asked:
        torch.set_num_threads(asked)
        return asked
    return choose_threads(_trial(target, 1)).count


def _warm_up(target: LanguageModel) -> None:
    """First calls allocate and choose kernels; no measured run should pay for that."""
    run = _trial(target, 1)
    for count in (1, 2, 3, 4, 6, 8, 9, 12):
        run(count)
