"""Lookahead decoding: the target itself guesses several places ahead in parallel, and what it guessed before is tried as draft.

It knows nothing of other models. Fu et al. 2024, arXiv 2402.02057. One forward carries both branches: a window of Jacobi iterates, fed
and never judged, whose n-grams go to a pool, and guesses from the pool, which are judged like any chosen draft.
"""
from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence as Seq

from ..engine.draft import ROOT, Draft
from ..engine.drafting import Budget, Outcome
from ..engine.sequence import Sequence
from .parts import Parts
from .plain import Stateless

__all__ = ["Lookahead", "Pool", "Window"]


class Pool:
    """N-grams by their first token, the latest `num_guesses` of each; among first tokens the least recently used go when it is full."""

    def __init__(self, num_guesses: int, max_keys: int = 4096) -> None:
        self._num_guesses, self._max_keys = num_guesses, max_keys
        self._ngrams: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._ngrams.values()))

    def add(self, ngram: Seq[int]) -> None:
        rests = self._ngrams.setdefault(ngram[0], OrderedDict())
        rests[tuple(ngram[1:])] = None
        rests.move_to_end(tuple(ngram[1:]))
        self._ngrams.move_to_end(ngram[0])
        if len(rests) > self._num_guesses:
            rests.popitem(last=False)
        if len(self._ngrams) > self._max_keys:
            self._ngrams.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed this token, the latest first."""
        if token not in self._ngrams:
            return []
        self._ngrams.move_to_end(token)
        return list(reversed(self._ngrams[token]))

    def copy(self) -> Pool:
        new = Pool(self._num_guesses, self._max_keys)
        new._ngrams = OrderedDict((key, OrderedDict(rests)) for key, rests in self._ngrams.items())
        return new


class Window:
    """One sequence's window, and the pool that it fills.

    width: W columns. size: N, the n-grams' length; the window has up to N - 1 rows. Entry (row, column) is an iterate for the token
    row + column + 1 places behind the last committed one. It is fed as a comb: row 0 is a chain from the root, column c hangs off its
    token c. The prediction behind the last row is the next iterate.
    """

    def __init__(self, width: int, size: int, pool: Pool, markers: frozenset[int] = frozenset()) -> None:
        self.width, self.size, self.pool = width, size, pool
        self._markers = markers
        self._rows: list[list[int]] = []
        self._last: list[int] | None = None            # nodes of the last row in the draft that is out; None: the window was not fed

    def draft(self, tokens: Seq[int], budget: Budget) -> Draft:
        """Guesses first, as many of the latest whole n-grams as the budget holds, then the window if the cache has place for all of it."""
        paths, num_nodes = [], 0
        for rest in self.pool.after(tokens[-1]):
            path = self._guess(rest, budget.depth)
            if path and num_nodes + len(path) <= budget.nodes:
                paths.append(path)
                num_nodes += len(path)
        guesses = Draft.from_paths(paths, stop="length" if paths else "no guess")
        nodes, parents = list(guesses.tokens), list(guesses.parents)
        self._last = None
        if not self._rows:
            self._rows = [self._filler(tokens, self.width, 1)[0]]
        if len(self._rows) * self.width <= budget.window:
            above = [ROOT] * self.width
            for r, row in enumerate(self._rows):
                below = []
                for column, token in enumerate(row):
                    parents.append((below[-1] if below else ROOT) if r == 0 else above[column])
                    below.append(len(nodes))
                    nodes.append(token)
                above = below
            self._last = above
        judged = tuple(i < len(guesses) for i in range(len(nodes)))
        return Draft(tuple(nodes), tuple(parents), judged=judged, stop=guesses.stop, num_pooled=len(self.pool))

    @property
    def fed(self) -> list[int]:
        """The nodes whose predictions `learn` wants, one per column; empty if the window was not fed."""
        return self._last or []

    def learn(self, feedback: Seq[int], tokens: Seq[int], num_new: int) -> None:
        """Take the predictions of the nodes `fed`: full columns become n-grams, and the window moves on by the `num_new` tokens that the
        step emitted. tokens: the text now, from which columns that come in on the right are filled."""
        self._last = None
        rows = [*self._rows, list(feedback)]
        if len(rows) == self.size:
            for ngram in zip(*rows):
                self.pool.add(ngram)
        if len(rows) == self.size:                      # an entry's place is row + column: one place on is one row or one column less
            rows, num_new = rows[1:], num_new - 1
        gone = min(num_new, self.width)
        filler = self._filler(tokens, gone, len(rows))
        self._rows = [row[gone:] + new for row, new in zip(rows, filler)]

    def _guess(self, rest: Seq[int], depth: int) -> list[int]:
        """A guess up to the end of a turn, at most `depth` tokens."""
        path = []
        for token in rest[:depth]:
            path.append(token)
            if token in self._markers:
                break
        return path

    def _filler(self, tokens: Seq[int], num_columns: int, num_rows: int) -> list[list[int]]:
        """Columns to start from: pieces of the text itself, from places that depend on its length only, so that a run can be repeated."""
        source = random.Random(len(tokens))
        columns = []
        for _ in range(num_columns):
            start = source.randrange(len(tokens))
            columns.append([tokens[min(start + r, len(tokens) - 1)] for r in range(num_rows)])
        return [[column[r] for column in columns] for r in range(num_rows)]


class Lookahead(Stateless):
    """Drafts with the target's own parallel guesses.

    window, ngram, guesses: W, N and G of the paper. The draft length K that a user sets limits the guessed nodes, as for every method;
    the window's W (N - 1) nodes come on top of it. The defaults are far below the paper's (W 15, N 5 on an A100), because on a CPU each
    fed token costs a good part of a step; even so the method often loses there. Chosen windows never change the text: its nodes are
    not judged, and guesses are chosen, not drawn.
    """
    name = "lookahead"

    def __init__(self, parts: Parts | None = None, *, window: int = 4, ngram: int = 3, guesses: int = 4) -> None:
        assert window >= 1 and ngram >= 2 and guesses >= 1, "a window of at least one column, n-grams of at least two tokens, one guess"
        self._markers = parts.marker_ids if parts else frozenset()
        self._window, self._ngram, self._guesses = window, ngram, guesses

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        drafts = []
        for sequence, budget in zip(sequences, budgets):
            if sequence.drafting is None:
                sequence.drafting = self._new(Pool(self._guesses))
            window: Window = sequence.drafting
            drafts.append(window.draft(sequence.tokens, budget) if budget.depth > 0 else Draft(stop="budget"))
        return drafts

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """The target's first choice behind the window's last row is the next iterate."""
        for outcome in outcomes:
            window = outcome.sequence.drafting
            if window is None or outcome.verdict is None or not window.fed:
                continue
            feedback = outcome.logits[[1 + node for node in window.fed]].argmax(-1).tolist()
            window.learn(feedback, outcome.sequence.tokens, len(outcome.verdict.path) + 1)

    def fork(self, source: Sequence, target: Sequence, length: int) -> int:
        """The conversation's pool goes on to its next turn; the window starts anew, for its places are gone."""
        if isinstance(source.drafting, Window):
            target.drafting = self._new(source.drafting.pool.copy())
        return length

    def _new(self, pool: Pool) -> Window:
        return Window(self._window, self._ngram, pool, self._markers)
