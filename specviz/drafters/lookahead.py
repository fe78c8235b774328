"""Lookahead decoding: the target itself guesses several places ahead in parallel, and what it guessed before is tried as draft.

It knows nothing of other models. Fu et al. 2024, arXiv 2402.02057. One forward carries both branches: a window of Jacobi iterates, fed
and never judged, whose n-grams go to a pool, and guesses from the pool, which are judged like any chosen draft.
"""
from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

from ..engine.draft import ROOT, Draft
from ..engine.drafting import Budget, Outcome
from ..engine.option import Option
from ..engine.sampling import argmax
from ..engine.sequence import Sequence
from .parts import Parts
from .plain import Stateless

__all__ = ["Lookahead", "Pool", "Size", "Window", "best_size", "options"]

# How often a guessed token is right, and after how many steps the pool has something to say: what the authors fitted for a 7B chat model.
# They only shape the choice of a size; nothing is promised by them.
_ALPHA, _EVERY = 0.425, 3.106
_WIDEST, _LONGEST, _MOST = 20, 7, 20


@dataclass(frozen=True, slots=True)
class Size:
    """window, ngram, guesses: W columns, n-grams of N tokens, at most G of them tried at a time."""
    window: int
    ngram: int
    guesses: int

    @property
    def num_fed(self) -> int:
        """Tokens in one forward at most: the last committed one, window and guesses."""
        return (self.window + self.guesses) * (self.ngram - 1) + 1

    @property
    def tokens_per_step(self) -> float:
        """Expected, if every guessed token were right with the supposed chance: equations 4 and 5 of the paper, with as many guesses
        as columns at most."""
        length, tried = self.ngram - 1, min(self.window, self.guesses)
        expected = 1 + length - sum((1 - _ALPHA ** i) ** tried for i in range(1, length + 1))
        return (_EVERY - 1 + expected) / _EVERY


_DEFAULT = Size(4, 3, 4)


def best_size(verify_cost: Callable[[int], float] | None) -> Size:
    """W, N and G for this machine: the size with the most expected tokens per unit of time, the smallest of equals.

    verify_cost: v(M), what a forward of M tokens takes over one of a single token; None where it was not measured, then a small size
    that suits a CPU. The paper's own choice for an A100 is W 15, N 5, G 15: there a step costs hardly more than a single token.
    """
    if verify_cost is None:
        return _DEFAULT
    sizes = [Size(wide, long, wide) for long in range(2, _LONGEST + 1) for wide in range(2, _WIDEST + 1)]
    costs = {num_fed: max(1e-9, float(verify_cost(num_fed))) for num_fed in sorted({size.num_fed for size in sizes})}
    return max(sorted(sizes, key=lambda size: size.num_fed), key=lambda size: size.tokens_per_step / costs[size.num_fed])


def options(parts: Parts) -> tuple[Option, ...]:
    """What can be set; the defaults follow from the measured cost of a forward."""
    size = best_size(parts.verify_cost)
    measured = "" if parts.verify_cost is None else " The default follows from what a step was measured to cost here."
    return (Option("window", "Window W", "whole", size.window, f"Places guessed in parallel.{measured}", 1, _WIDEST),
            Option("ngram", "N-gram length N", "whole", size.ngram, "Tokens that the pool keeps together; a guess has N - 1.", 2, _LONGEST),
            Option("guesses", "Guesses G", "whole", size.guesses, "N-grams kept for each first token, and tried together.", 1, _MOST))



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

    def copy(self, num_guesses: int | None = None) -> Pool:
        """A pool that can grow in its own way, and may keep another number of each."""
        new = Pool(num_guesses or self._num_guesses, self._max_keys)
        for key, rests in self._ngrams.items():
            new._ngrams[key] = OrderedDict.fromkeys(list(rests)[-new._num_guesses:])
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
    the window's W (N - 1) nodes come on top of it. By default they follow from the measured cost of a forward (`best_size`); on a CPU
    each fed token costs a good part of a step, and the method often loses there. Windows never change the text: their nodes are not
    judged, and guesses are chosen, not drawn.
    """
    name = "lookahead"

    def __init__(self, parts: Parts | None = None, *, window: int | None = None, ngram: int | None = None,
                 guesses: int | None = None) -> None:
        best = best_size(parts.verify_cost if parts else None)
        self._size = Size(window or best.window, ngram or best.ngram, guesses or best.guesses)
        assert self._size.ngram >= 2, "n-grams of at least two tokens"
        self._markers = parts.marker_ids if parts else frozenset()

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        drafts = []
        for sequence, budget in zip(sequences, budgets):
            if sequence.drafting is None:
                sequence.drafting = self._new(sequence, Pool(self._wanted(sequence).guesses))
            window: Window = sequence.drafting
            drafts.append(window.draft(sequence.tokens, budget) if budget.depth > 0 else Draft(stop="budget"))
        return drafts

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """The target's first choice behind the window's last row is the next iterate."""
        for outcome in outcomes:
            window = outcome.sequence.drafting
            if window is None or outcome.verdict is None or not window.fed:
                continue
            feedback = argmax(outcome.logits[[1 + node for node in window.fed]]).tolist()
            window.learn(feedback, outcome.sequence.tokens, len(outcome.verdict.path) + 1)

    def fork(self, source: Sequence, target: Sequence, length: int) -> int:
        """The conversation's pool goes on to its next turn; the window starts anew, for its places are gone."""
        if isinstance(source.drafting, Window):
            target.drafting = self._new(target, source.drafting.pool.copy(self._wanted(target).guesses))
        return length

    def _wanted(self, sequence: Sequence) -> Size:
        option, size = sequence.settings.option, self._size
        return Size(option("window", size.window), option("ngram", size.ngram), option("guesses", size.guesses))

    def _new(self, sequence: Sequence, pool: Pool) -> Window:
        size = self._wanted(sequence)
        return Window(size.window, size.ngram, pool, self._markers)
