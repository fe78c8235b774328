"""A drafter made of others: one that looks text up, and another one for where nothing matches.

It knows neither part's ways. Each part keeps its own state per request; which part drafts depends on the text alone.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..engine.draft import Draft
from ..engine.drafting import Budget, Drafter, DraftSettings, Outcome, limits_of
from ..engine.option import Option
from ..engine.sequence import Sequence
from . import draft_model, eagle, early_exit, exit_adapter, medusa, plain, prompt_lookup, suffix
from .parts import Parts

__all__ = ["Hybrid", "hybrid", "options"]

_LOOKUPS = ("suffix", "prompt_lookup")


@dataclass(slots=True)
class _Pair:
    """What stands in `Sequence.drafting`: the state of each part."""
    states: list[Any]


class Hybrid:
    """Asks its parts one after the other, each for those sequences that those before have nothing for. A batch splits accordingly.

    skip: (settings, part) -> whether a request leaves that part out.
    """
    name = "hybrid"

    def __init__(self, *parts: Drafter, skip: Callable[[DraftSettings, Drafter], bool] = lambda settings, part: False) -> None:
        self._parts, self._skip = parts, skip
        self.part_names = tuple(part.name for part in parts)
        self.needs: tuple[int, ...] = tuple(sorted({layer for part in parts for layer in part.needs}))

    def limits(self, settings: DraftSettings) -> dict[str, int]:
        """See `drafting.limits_of`."""
        found = {}
        for part in self._parts:
            limit = 0 if self._skip(settings, part) else limits_of(part, settings).get("")
            if limit is not None:
                found[part.name] = limit
        return found

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        drafts = [Draft()] * len(sequences)
        asked = list(range(len(sequences)))
        for i, part in enumerate(self._parts):
            own = {at: _own_budget(budgets[at], i) for at in asked if not self._skip(sequences[at].settings, part)}
            taken = [at for at, budget in own.items() if budget.nodes or not budget.parts]
            mine = [sequences[at] for at in taken]
            with self._as_part(i, mine):
                found = part.propose(mine, [own[at] for at in taken]) if mine else []
            for at, draft in zip(taken, found, strict=True):
                drafts[at] = replace(draft, by=part.name) if len(draft) else draft
            asked = [at for at in asked if not len(drafts[at])]
        return drafts

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """All parts hear of every step, whoever drafted: what was emitted is the text of all."""
        for i, part in enumerate(self._parts):
            with self._as_part(i, [outcome.sequence for outcome in outcomes]):
                part.observe([self._for_part(part, outcome) for outcome in outcomes])

    def fork(self, source: Sequence, target: Sequence, length: int) -> int:
        """As far as all parts can follow; each forks from its own state, or from another drafter's request where it can."""
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


def _own_budget(budget: Budget, part: int) -> Budget:
    if not budget.parts:
        return budget
    nodes = budget.parts[part]
    return replace(budget, nodes=nodes, depth=min(budget.depth, nodes))


def _second(parts: Parts) -> tuple[Callable[[Parts], Drafter], tuple[Option, ...]]:
    """What drafts where nothing matches, and its options: the draft model or the heads that are loaded; early exit if there are none and
    the target was trained for it; or else nothing."""
    rows = {"eagle3": (eagle.Eagle3, eagle.grown_options), "eagle": (eagle.Eagle2, eagle.grown_options), "medusa": (medusa.Medusa, medusa.options),
            "exit_adapter": (exit_adapter.ExitAdapter, exit_adapter.options)}
    if parts.draft is not None and parts.preferred not in parts.heads:
        return draft_model.DraftModel, draft_model.options(parts)
    for kind in sorted(rows, key=lambda each: each != parts.preferred):
        if kind in parts.heads:
            create, declared = rows[kind]
            return create, declared(parts)
    if parts.trained_exits:
        return early_exit.EarlyExit, early_exit.options(parts)
    return plain.Plain, ()


def _shortest(parts: Parts) -> int:
    """A model's guesses are better than a short match's, so with one the match must be longer."""
    return 2 if _second(parts)[0] is plain.Plain else 3


def options(parts: Parts) -> tuple[Option, ...]:
    """What can be set: which lookup comes first, its options, and those of the drafter for the rest."""
    words = {"suffix": "suffix decoding", "prompt_lookup": "prompt lookup"}
    lookup = [replace(option, default=_shortest(parts)) if option.name == "min_match" else option for option in suffix.options(parts)]
    return (Option("first", "Looks text up by", "choice", "suffix", "What is asked first. Share and branches are suffix decoding's alone.",
                   choices=tuple((name, words[name]) for name in _LOOKUPS)), *lookup, *_second(parts)[1])


def hybrid(parts: Parts) -> Hybrid:
    """Suffix decoding or prompt lookup, as a request asks, and `_second` where nothing matches."""
    shortest = _shortest(parts)

    def skip(settings: DraftSettings, part: Drafter) -> bool:
        return part.name in _LOOKUPS and part.name != settings.option("first", "suffix")
    return Hybrid(suffix.Suffix(parts, min_match=shortest), prompt_lookup.PromptLookup(parts, min_match=shortest), _second(parts)[0](parts), skip=skip)
