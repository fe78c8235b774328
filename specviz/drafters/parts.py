"""What a drafter may be built from. It knows nothing of requests."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..engine.cache import KVCache
from ..engine.model import LanguageModel

__all__ = ["Heads", "Parts"]


@dataclass(frozen=True, slots=True)
class Heads:
    """Trained drafting heads as a checkpoint gives them, under specviz's own names and checked against the target (`checkpoints.py`).

    kind: "medusa", "eagle", "eagle3" or "exit_adapter". name: for the eye. tensors: as stored, on the CPU. facts: what the configuration says, in plain
    values. warning: what the self-check found, "" if all is well or nothing was checked.
    """
    kind: str
    name: str
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    warning: str = ""


@dataclass(frozen=True, slots=True)
class Parts:
    """The loaded target with its cache, an optional draft model, and facts about their text.

    marker_ids: special tokens that end or begin a turn; no lookup copies across them. trained_exits: layers after which the target was
    trained to exit. heads: loaded heads by kind. verify_cost: v(M), what a forward of M tokens takes over one of a single token, as
    measured here; None if it was not. pass_cost: one pass of the EAGLE head over such a forward, likewise. preferred: the kind of heads that a method takes which could take several or the draft model.
    """
    target: LanguageModel
    cache: KVCache
    draft: LanguageModel | None = None
    marker_ids: frozenset[int] = frozenset()
    trained_exits: tuple[int, ...] = ()
    heads: Mapping[str, Heads] = field(default_factory=dict)
    verify_cost: Callable[[int], float] | None = None
    pass_cost: float | None = None
    preferred: str = ""
