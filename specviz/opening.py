"""Puts an engine together: loads target and drafter, chooses precision and threads by measuring, and makes the drafters.

It knows nothing of requests and screens.
"""
from __future__ import annotations

import platform
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .catalog import Catalog
from .drafters import DRAFTERS, Heads, Parts
from .drafters.checkpoints import load_heads
from .drafters.self_check import ANSWER, QUESTION, checked
from .engine.drafting import Drafter
from .engine.engine import Engine
from .engine.linear import describe_machine
from .engine.model import LanguageModel, Row
from .engine.record import Recorder
from .engine.smooth import CALIBRATION_TEXT
from .engine.threads import choose_threads
from .errors import InputError
from .head_source import FoundHeads, find_heads
from .loading import Loaded, choose_placement
from .options import Options
from .text import TextCodec, special_ids

__all__ = ["Opened", "open_engine"]

_MAX_CONTEXT = 8192                # tokens per row; a longer context would only cost memory on the machines this is for
_LAYERSKIP = re.compile(r"\bfacebook/layerskip-", re.IGNORECASE)
_DEFAULT_METHOD = "prompt_lookup"  # needs nothing that was trained for the target


@dataclass(slots=True)
class Opened:
    """A running engine and what belongs to it. config: the effective configuration as the status line and traces show it.

    tune: choose the number of threads anew, in the calling thread, which must be the one that uses the engine.
    """
    engine: Engine
    parts: Parts
    codec: TextCodec
    eos_ids: frozenset[int]
    config: dict[str, Any]
    machine: dict[str, Any]
    default_method: str = _DEFAULT_METHOD
    tune: Callable[[], None] = lambda: None
    _drafters: dict[str, Drafter] = field(default_factory=dict)

    def drafter(self, name: str) -> Drafter:
        """The one drafter of this method, made when first asked for."""
        if name not in self._drafters:
            self._drafters[name] = DRAFTERS[name].create(self.parts)
        return self._drafters[name]

    def drafter_name(self, method: str) -> str | None:
        """The heads or the model that a method cannot do without, by name; None if it needs none."""
        row = DRAFTERS[method]
        if row.heads:
            return self.parts.heads[row.heads].name
        return self.config.get("drafter") if row.missing(replace(self.parts, draft=None)) else None


def open_engine(options: Options, progress: Callable[[str, float | None], None]) -> Opened:
    """Load and build everything that the options ask for. Raises SpecvizError children; runs in the thread that will use the model."""
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
    target = _language_model(loaded)
    draft = _language_model(drafter_loaded) if drafter_loaded else None
    cache = target.new_cache(_MAX_CONTEXT)
    threads = _choose_threads(target, options.threads)
    codec = TextCodec(loaded.tokenizer)
    eos_ids = frozenset(loaded.eos_ids)
    heads = _heads(found, target, loaded.name, codec, progress) if found is not None else {}
    parts = Parts(target, cache, draft, marker_ids=eos_ids | special_ids(loaded.tokenizer), trained_exits=_trained_exits(loaded),
                  heads=heads)
    drafter = found or drafter_loaded
    config = {
        "target": loaded.name, "drafter": drafter.name if drafter else None, "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."), "quantization": loaded.placement.quantization, "threads": threads,
        "context": cache.capacity, "linears": target.linears, "decoder": "lean" if target.is_lean else "transformers",
        "exactness": _exactness(target), "weights": dict(loaded.facts),
        "notes": [*loaded.notes, *_operator_notes(target), *(f"{each.name}: {each.warning}." for each in heads.values() if each.warning)],
    }
    machine = {"system": platform.system(), "processor": platform.processor() or platform.machine(), "cores": torch.get_num_threads(),
               **describe_machine()}
    default = options.method or (_DEFAULT_METHOD if not DRAFTERS[_DEFAULT_METHOD].missing(parts) else "plain")
    opened = Opened(Engine(target, cache, Recorder(codec.piece)), parts, codec, eos_ids, config, machine, default,
                    lambda: config.update(threads=_choose_threads(target, options.threads)))
    _warm_up(target)
    return opened


def _quantization(options: Options) -> str:
    """What "auto" means: on a CPU in float32 the per-row INT8 linears, elsewhere the weights as they are."""
    if options.quantization != "auto":
        return options.quantization
    placement = choose_placement(options.device, options.dtype)
    return "int8" if placement.device.type == "cpu" and placement.dtype == torch.float32 else "none"


def _language_model(loaded: Loaded) -> LanguageModel:
    """On a CPU with our own linears; on a GPU as transformers and bitsandbytes made it."""
    placement = loaded.placement
    num_tokens = len(loaded.tokenizer)
    if placement.device.type != "cpu" or placement.dtype != torch.float32:
        return LanguageModel(loaded.model, num_tokens=num_tokens, exact=placement.device.type == "cpu")
    if placement.quantization == "int8":
        return LanguageModel(loaded.model, num_tokens=num_tokens, precision="int8", calibration=TextCodec(loaded.tokenizer).encode(CALIBRATION_TEXT))
    return LanguageModel(loaded.model, num_tokens=num_tokens, precision="fp32")


def _heads(found: FoundHeads, target: LanguageModel, target_name: str, codec: TextCodec, progress: Callable[[str, float | None], None]
           ) -> dict[str, Heads]:
    """The heads by kind, tried on a short text."""
    progress(f"Loading {found.name}", None)
    heads = load_heads(found.folder, found.name, target, target_name)
    progress(f"Trying {found.name} on a short text", None)
    return {heads.kind: checked(heads, target, codec.render([{"role": "user", "content": QUESTION}]), codec.encode(ANSWER))}


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


def _operator_notes(target: LanguageModel) -> list[str]:
    """What to say where the packed operators, which are private to torch and tried on every processor, did not work."""
    if target.device.type != "cpu" or target.dtype != torch.float32 or "torch" not in target.linears.get("kernel", "").split(" + "):
        return []
    return ["The fast CPU operators do not work on this processor or with this PyTorch, so PyTorch's own are used: slower, and equal to plain "
            "decoding up to rounding only."]


def _exactness(target: LanguageModel) -> str:
    """What greedy equality with plain decoding rests on here."""
    if target.device.type == "cpu" and target.exact and target.linears.get("row_independent"):
        return "drafted chains and trees are bitwise equal to plain decoding"
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
