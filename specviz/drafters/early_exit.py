"""Early exit: the target's first layers, its final norm and its LM head guess a chain; all layers check it.

The draft shares the target's cache: its entries are dropped before the target verifies and the same slots are written again. Without
training for early exit few guesses are right. Draft & Verify (arXiv 2309.08168), LayerSkip (arXiv 2404.16710).
"""
from __future__ import annotations

from collections.abc import Sequence as Seq

from ..engine.draft import Draft
from ..engine.drafting import Budget
from ..engine.sequence import Sequence
from .chain import Chain, grow
from .parts import Parts
from .plain import Stateless

__all__ = ["EarlyExit", "missing", "untrained"]


def missing(parts: Parts) -> str:
    """Why this method cannot run."""
    return "" if parts.target.num_layers > 1 else "the target has one layer only; there is nothing to leave early"


def untrained(parts: Parts) -> bool:
    """Whether the target was never trained to exit early."""
    return not parts.trained_exits


class EarlyExit(Stateless):
    """Drafts with the first `exit_layer` layers; by default the first trained exit, or a third of the layers."""
    name = "early_exit"

    def __init__(self, parts: Parts, *, exit_layer: int | None = None) -> None:
        self._model, self._cache = parts.target, parts.cache
        default = parts.trained_exits[0] if parts.trained_exits else max(1, parts.target.num_layers // 3)
        self.exit_layer = exit_layer or default

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        chains = [Chain(sequence, min(budget.nodes, budget.depth), sequence.row, sequence.tokens[self._cache.length(sequence.row):],
                        self._model.num_tokens)
                  for sequence, budget in zip(sequences, budgets)]
        grow(chains, self._model, self._cache, self.exit_layer)
        for chain in chains:
            self._cache.keep(chain.row, ())
        return [chain.draft() if chain.length > 0 else Draft(stop="budget") for chain in chains]
