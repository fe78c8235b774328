"""Two tiny models as tables, a vocabulary of eight words, and ways of drafting with them. They know nothing of faults.

Each row gives the chances of the next word after one word, in hundredths; the first row is for the beginning. So everything about the
target is known exactly, and a law that is computed can be held against draws.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..engine.draft import ROOT, Draft
from .exact import FractionVector, Propose

__all__ = ["DRAFTER", "SHAPES", "TARGET", "WORDS", "Table", "chain", "chosen", "siblings"]

WORDS = (" the", " a", " cat", " dog", " sat", " ran", " here", ".")

# The drafter is the sort of model a drafter is: it has most things right, is too sure of some, and wrong about a few.
TARGET = (
    (40, 30, 6, 5, 4, 4, 7, 4), (3, 4, 38, 30, 5, 6, 8, 6), (4, 3, 29, 37, 8, 7, 6, 6), (6, 4, 3, 4, 41, 22, 9, 11),
    (5, 5, 4, 3, 18, 45, 10, 10), (12, 9, 4, 4, 3, 6, 34, 28), (8, 11, 4, 5, 5, 3, 40, 24), (13, 12, 5, 6, 6, 7, 4, 47),
    (44, 29, 5, 4, 4, 5, 6, 3))
DRAFTER = (
    (58, 14, 5, 5, 5, 4, 5, 4), (4, 4, 52, 16, 7, 6, 6, 5), (5, 4, 20, 50, 6, 5, 5, 5), (5, 5, 4, 5, 55, 12, 7, 7),
    (6, 5, 4, 4, 33, 32, 8, 8), (16, 6, 5, 5, 4, 5, 22, 37), (6, 8, 5, 6, 6, 4, 50, 15), (9, 8, 6, 6, 7, 7, 6, 51),
    (60, 15, 5, 4, 4, 4, 4, 4))


class Table:
    """A model of `WORDS`: called with a prefix it returns the next word's distribution, [8], as tensor or in exact fractions."""

    def __init__(self, hundredths: Sequence[Sequence[int]], exact: bool = False) -> None:
        assert all(sum(row) == 100 and len(row) == len(WORDS) for row in hundredths)
        self._rows = [FractionVector(row) / FractionVector(row).sum() if exact else torch.tensor(row, dtype=torch.float64) / 100
                      for row in hundredths]
        self._ranks = [sorted(range(len(row)), key=lambda token: -row[token]) for row in hundredths]

    def __call__(self, prefix: Sequence[int]) -> Any:
        return self._rows[prefix[-1] + 1 if prefix else 0]

    def ranking(self, prefix: Sequence[int]) -> list[int]:
        """The words, most probable first."""
        return self._ranks[prefix[-1] + 1 if prefix else 0]


def chain(model: Table, length: int = 2) -> Propose:
    """Words drawn one after the other from the drafter's own distribution."""
    return siblings(model, (1,) * length)


def siblings(model: Table, widths: Sequence[int]) -> Propose:
    """A tree whose nodes at depth d have `widths[d]` children, drawn independently of each other."""
    return _tree(model, widths, lambda q, prefix, step, noise, width: [noise.draw_draft(q, len(prefix), step, i) for i in range(width)], True)


def chosen(model: Table, widths: Sequence[int]) -> Propose:
    """A tree of the drafter's most probable words, taken by rank: nothing is drawn, so no probabilities are reported."""
    return _tree(model, widths, lambda q, prefix, step, noise, width: model.ranking(prefix)[:width], False)


def _tree(model: Table, widths: Sequence[int], pick: Callable[..., list[int]], drawn: bool) -> Propose:
    def propose(tokens: Sequence[int], step: int, noise: Any) -> Draft:
        nodes: list[int] = []
        parents: list[int] = []
        rows: list[Any] = []
        level = [(ROOT, tuple(tokens))]
        for width in widths:
            following = []
            for parent, prefix in level:
                q = model(prefix)
                for token in pick(q, prefix, step, noise, width):
                    following.append((len(nodes), (*prefix, token)))
                    nodes.append(token)
                    parents.append(parent)
                    rows.append(q)
            level = following
        return Draft(tuple(nodes), tuple(parents), rows if drawn else None)
    return propose


SHAPES: dict[str, Callable[[Table], Propose]] = {
    "chain": chain,
    "chosen": lambda model: chosen(model, (1, 1)),
    "siblings": lambda model: siblings(model, (2,)),
    "tree": lambda model: chosen(model, (3,)),
}
