"""A small model with the same tokenizer guesses a chain, one token at a time (Leviathan et al. 2023; Chen et al. 2023).

It has a cache of its own. Whatever it has not read yet of a sequence, prompt included, is pending and is caught up in `propose`.
"""
from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile

from ..engine.draft import Draft
from ..engine.drafting import Budget, Outcome
from ..engine.model import Row
from ..engine.option import Option
from ..engine.sequence import Sequence
from .chain import CONFIDENCE, Chain, grow
from .parts import Parts

__all__ = ["DraftModel", "missing", "options"]

_CHUNK = 256                   # tokens of a long prompt read at a time


def missing(parts: Parts) -> str:
    """Why this method cannot run."""
    sentence = "no draft model is loaded; choose one with the target's tokenizer as drafter under Models, or start with --draft"
    return "" if parts.draft is not None else sentence


def options(parts: Parts) -> tuple[Option, ...]:
    """What can be set."""
    return (CONFIDENCE,)


@dataclass(slots=True)
class _State:
    """Per request: its row in the draft model's cache, how many pending tokens the last proposal fed, and where behind them each node of
    the draft that it fed lies among the staged entries."""
    row: int
    num_pending: int = 0
    staged: dict[int, int] = field(default_factory=dict)


class DraftModel:
    """Drafts with `parts.draft`."""
    name = "draft_model"
    needs: tuple[int, ...] = ()

    def __init__(self, parts: Parts) -> None:
        self._model, self._num_tokens = parts.draft, parts.target.num_tokens
        self._cache = parts.draft.new_cache(parts.cache.capacity)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        chains = [self._chain(*each) for each in zip(sequences, budgets)]
        grow([chain for chain in chains if isinstance(chain, Chain)], self._model, self._cache)
        return [chain.draft() if isinstance(chain, Chain) else Draft(stop=chain) for chain in chains]

    def _chain(self, sequence: Sequence, budget: Budget) -> Chain | str:
        """A chain to grow, with everything but its last pending tokens read; or why nothing can be drafted."""
        length = min(budget.nodes, budget.depth, self._cache.capacity + 1 - len(sequence.tokens))
        if length <= 0:
            return "budget"
        if sequence.drafting is None:
            sequence.drafting = _State(self._cache.allocate())
        state: _State = sequence.drafting
        if max(sequence.tokens[self._cache.length(state.row):]) >= self._model.num_tokens:
            return "a token that the draft model does not know"
        while len(pending := sequence.tokens[self._cache.length(state.row):]) > _CHUNK:
            self._model.forward([Row(state.row, pending[:_CHUNK], num_logits=0)], self._cache)
            self._cache.keep(state.row, range(_CHUNK))
        state.num_pending = len(pending)
        state.staged = {node: len(pending) + node for node in range(length - 1)}
        return Chain(sequence, length, state.row, pending, self._num_tokens)

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """Keep what was pending and the accepted path, as far as it was fed: the last token of a chain, or a leaf, never was."""
        for outcome in outcomes:
            sequence, state = outcome.sequence, outcome.sequence.drafting
            sequence.draft_kv = None
            if state is None or not self._cache.fed(state.row):
                continue
            known = len(sequence.tokens) - self._cache.length(state.row)      # a block cut by EOS or a stop is shorter than its path
            path = takewhile(state.staged.__contains__, outcome.verdict.path)
            kept = [*range(state.num_pending), *(state.staged[node] for node in path)][:known]
            sequence.draft_kv = self._cache.keep(state.row, kept)

    def fork(self, source: Sequence, target: Sequence, length: int) -> int:
        """Copy the row as far as it goes; what is missing is caught up later."""
        if source.drafter is self and source.drafting is not None:
            row = source.drafting.row
            target.drafting = _State(self._cache.fork(row, min(length, self._cache.length(row))))
        return length

    def release(self, sequence: Sequence) -> None:
        if sequence.drafting is not None:
            self._cache.free(sequence.drafting.row)
            sequence.drafting = None
