"""What a drafter may be built from. It knows nothing of requests."""
from __future__ import annotations

from dataclasses import dataclass

from ..engine.cache import KVCache
from ..engine.model import LanguageModel

__all__ = ["Parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """The loaded target with its cache, an optional draft model, and facts about their text.

    marker_ids: special tokens that end or begin a turn; no lookup copies across them. trained_exits: layers after which the target was
    trained to exit.
    """
    target: LanguageModel
    cache: KVCache
    draft: LanguageModel | None = None
    marker_ids: frozenset[int] = frozenset()
    trained_exits: tuple[int, ...] = ()
