"""A drafter made of two: one that looks text up, and another one for where nothing matches.

It knows neither part's ways. Each part keeps its own state per request; which part drafts depends on the text alone.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..engine.draft import Draft
from ..engine.drafting import Budget, Drafter, Outcome
from ..engine.sequence import Sequence
from .draft_model import DraftModel
from .eagle import Eagle2, Eagle3
from .early_exit import EarlyExit
from .medusa import Medusa
from .parts import Parts
from .plain import Plain
from .suffix import Suffix

__all__ = ["Hybrid", "hybrid"]


@dataclass(slots=True)
class _Pair:
    """What stands in `Sequence.drafting`: the state of each part."""
    states: list[Any]


class Hybrid:
    """Asks the first part, and the second one for those sequences that the first has nothing for. A batch splits accordingly."""
    name = "hybrid"

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._parts = (first, second)
        self.needs: tuple[int, ...] = tuple(sorted({*first.needs, *second.needs}))

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        drafts = [Draft()] * len(sequences)
        asked = list(range(len(sequences)))
        for i, part in enumerate(self._parts):
            mine = [sequences[at] for at in asked]
            with self._as_part(i, mine):
                found = part.propose(mine, [budgets[at] for at in asked]) if mine else []
            for at, draft in zip(asked, found, strict=True):
                drafts[at] = replace(draft, by=part.name) if len(draft) else draft
            asked = [at for at in asked if not len(drafts[at])]
        return drafts

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """Both parts hear of every step, whoever drafted: what was emitted is the text of both."""
        for i, part in enumerate(self._parts):
            with self._as_part(i, [outcome.sequence for outcome in outcomes]):
                part.observe([self._for_part(part, outcome) for outcome in outcomes])

    def fork(self, source: Sequence, target: Sequence, length: int) -> int:
        """As far as both parts can follow; each forks from its own state, or from another drafter's request where it can."""
        ours = isinstance(source.drafting, _Pair) and source.drafter is self
        for i, part in enumerate(self._parts):
            with self._as_part(i, [source, target] if ours else [target]):
                length = min(length, part.fork(source, target, length))
        return length

    def release(self, sequence: Sequence) -> None:
        for i, part in enumerate(self._parts):
            with self._as_part(i, [sequence]):
                part.release(sequence)
        sequence.drafting = None

    @contextmanager
    def _as_part(self, i: int, sequences: Seq[Sequence]) -> Iterator[None]:
        """Let the sequences look as if part `i` were their drafter."""
        pairs = []
        for sequence in sequences:
            pair = sequence.drafting if isinstance(sequence.drafting, _Pair) else _Pair([None] * len(self._parts))
            pairs.append(pair)
            sequence.drafting, sequence.drafter = pair.states[i], self._parts[i]
        try:
            yield
        finally:
            for sequence, pair in zip(sequences, pairs, strict=True):
                pair.states[i] = sequence.drafting
                sequence.drafting, sequence.drafter = pair, self

    def _for_part(self, part: Drafter, outcome: Outcome) -> Outcome:
        """The outcome with the hidden states that this part asked for."""
        if outcome.hidden is None or part.needs == self.needs:
            return outcome
        if not part.needs:
            return replace(outcome, hidden=None)
        columns = outcome.hidden.chunk(len(self.needs), -1)
        return replace(outcome, hidden=torch.cat([columns[self.needs.index(layer)] for layer in part.needs], -1))


def hybrid(parts: Parts) -> Hybrid:
    """Suffix decoding, and where nothing matches the draft model or the heads that are loaded; early exit if there are none and the target was
    trained for it; or else nothing. A model's guesses are better than a short match's, so with one the match must be longer."""
    if parts.draft is not None:
        return Hybrid(Suffix(parts, min_match=3), DraftModel(parts))
    for kind, method in (("eagle3", Eagle3), ("eagle", Eagle2), ("medusa", Medusa)):
        if kind in parts.heads:
            return Hybrid(Suffix(parts, min_match=3), method(parts))
    if parts.trained_exits:
        return Hybrid(Suffix(parts, min_match=3), EarlyExit(parts))
    return Hybrid(Suffix(parts), Plain(parts))
