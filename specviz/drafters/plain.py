"""No draft at all: plain autoregressive decoding, the baseline every other method is measured against."""
from __future__ import annotations

from collections.abc import Sequence as Seq

from ..engine.draft import EMPTY, Draft
from ..engine.drafting import Budget, Outcome
from ..engine.sequence import Sequence
from .parts import Parts

__all__ = ["Plain", "Stateless"]


class Stateless:
    """A drafter that keeps nothing of its own between steps besides what is in the tokens; base of the simple ones."""
    needs: tuple[int, ...] = ()

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """Nothing to learn."""

    def fork(self, source: Sequence, target: Sequence, length: int) -> int:
        """No state that could lag behind: everything is taken over."""
        return length

    def release(self, sequence: Sequence) -> None:
        sequence.drafting = None


class Plain(Stateless):
    """Proposes nothing."""
    name = "plain"

    def __init__(self, parts: Parts | None = None) -> None:
        pass

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        return [EMPTY] * len(sequences)
