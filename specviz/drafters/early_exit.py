"""Early exit: the target's first layers, its final norm and its LM head guess a chain; all layers check it.

The draft shares the target's cache: its entries are dropped before the target verifies and the same slots are written again. Without
training for early exit few guesses are right. Draft & Verify (arXiv 2309.08168), LayerSkip (arXiv 2404.16710).
"""
from __future__ import annotations

from collections.abc import Sequence as Seq

from ..engine.draft import Draft
from ..engine.drafting import Budget
from ..engine.option import Option
from ..engine.sequence import Sequence
from .chain import CONFIDENCE, Chain, grow
from .parts import Parts
from .plain import Stateless

__all__ = ["EarlyExit", "missing", "options", "untrained"]


def options(parts: Parts) -> tuple[Option, ...]:
    """What can be set."""
    trained = f" It was trained to exit after {', '.join(map(str, parts.trained_exits))}." if parts.trained_exits else ""
    most = max(1, parts.target.num_layers - 1)
    words = f"How many of the target's {parts.target.num_layers} layers guess.{trained}"
    return (Option("exit_layer", "Exit after layer", "whole", min(most, _default(parts)), words, 1, most), CONFIDENCE)


def missing(parts: Parts) -> str:
    """Why this method cannot run."""
    return "" if parts.target.num_layers > 1 else "the target has one layer only; there is nothing to leave early"


def untrained(parts: Parts) -> bool:
    """Whether the target was never trained to exit early."""
    return not parts.trained_exits


def _default(parts: Parts) -> int:
    return parts.trained_exits[0] if parts.trained_exits else max(1, parts.target.num_layers // 3)


class EarlyExit(Stateless):
    """Drafts with the first `exit_layer` layers; by default the first trained exit, or a third of the layers."""
    name = "early_exit"

    def __init__(self, parts: Parts, *, exit_layer: int | None = None) -> None:
        self._model, self._cache = parts.target, parts.cache
        self.exit_layer = exit_layer or _default(parts)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        chains = [Chain(sequence, min(budget.nodes, budget.depth), sequence.row, sequence.tokens[self._cache.length(sequence.row):],
                        self._model.num_tokens)
                  for sequence, budget in zip(sequences, budgets)]
        exits = [sequence.settings.option("exit_layer", self.exit_layer) for sequence in sequences]
        for layer in sorted(set(exits)):
            grow([chain for chain, exit_layer in zip(chains, exits) if exit_layer == layer], self._model, self._cache, layer)
        for chain in chains:
            self._cache.keep(chain.row, ())
        return [chain.draft() for chain in chains]
