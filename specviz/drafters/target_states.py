"""The target's hidden states that a drafter has heard of and not read yet, kept per request. It knows no drafter's network."""
from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from ..engine.cache import KVCache
from ..engine.drafting import Outcome

__all__ = ["HeardStates", "hear"]


@dataclass(slots=True)
class HeardStates:
    """Per request: its row in the drafter's own cache, and the target's states from that row's length on, `known` of all tokens counted."""
    row: int
    known: int = 0
    states: list[Tensor] = field(default_factory=list)       # [m, H'] each


def hear(outcomes: Seq[Outcome], cache: KVCache, target_cache: KVCache) -> None:
    """Store the target's states of all tokens that it committed in each sequence's `drafting`. cache: the drafter's own."""
    for outcome in outcomes:
        sequence = outcome.sequence
        if sequence.drafting is None:
            sequence.drafting = HeardStates(cache.allocate())
        state: HeardStates = sequence.drafting
        pending = len(outcome.hidden) - len(outcome.draft)
        path = outcome.verdict.path if outcome.verdict else ()
        kept = target_cache.length(sequence.row) - state.known         # a block cut by EOS or a stop is shorter than its path
        state.states.append(outcome.hidden[[*range(pending), *(pending + node for node in path)][:kept]])
        state.known += kept
