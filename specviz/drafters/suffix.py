"""Suffix decoding: find the text's last words wherever this conversation had them before, and follow what came next most often.

It knows nothing of models. Oliaro et al. 2024, arXiv 2411.04975, with an index of positions in place of a tree of all suffixes.
"""
from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field

from ..engine.draft import ROOT, Draft
from ..engine.drafting import Budget
from ..engine.option import Option
from ..engine.sequence import Sequence
from .parts import Parts
from .plain import Stateless

__all__ = ["Suffix", "SuffixIndex", "options"]

_LONGEST = 64                  # matches are measured up to this length
_PLACES = 256                  # most recent places that are compared
_SETS = 4                      # match lengths that compete, longest first
_OLD_TEXTS = 4                 # earlier answers that are no part of the prompt any more (asked again, or edited)


def options(parts: Parts) -> tuple[Option, ...]:
    """What can be set."""
    return (Option("min_match", "Shortest match", "whole", 2, "Tokens that must have appeared before, in a row.", 1, 16),
            Option("max_match", "Longest match measured", "whole", _LONGEST, "Longer matches count as this long.", 1, 256),
            Option("growth", "Draft per matched token", "number", 2.0, "A match of n tokens is worth a draft of at most this many times n.",
                   0.5, 8),
            Option("min_share", "Smallest share", "number", 0.25, "A continuation that fewer of the matching places went to is left out.",
                   0, 1),
            Option("branches", "Branches", "flag", True, "Draft a tree of what followed; off is a chain of what followed most often."))


Place = tuple[int, int]        # (text, end): a match that ends before this position of that text


class SuffixIndex:
    """Where each n-gram of a conversation's texts ended. The last text is the one that grows.

    size: tokens per n-gram. markers: tokens that no match may contain.
    """

    def __init__(self, size: int, markers: frozenset[int] = frozenset()) -> None:
        self.size, self._markers = size, markers
        self._texts: list[list[int]] = []
        self._starts: list[int] = []                    # tokens of a text before this are those of the text before
        self._indexed = 0                               # n-grams of the last text that end before this are in the index
        self._ends: dict[tuple[int, ...], list[Place]] = {}

    def begin(self, tokens: list[int]) -> None:
        """Go on with this text: in place of the last one if it only adds to that, beside it otherwise. `tokens` is kept and may grow."""
        if not self._texts:
            self._texts, self._starts = [tokens], [0]
            return
        last = self._texts[-1]
        common = next((i for i, (a, b) in enumerate(zip(last, tokens)) if a != b), min(len(last), len(tokens)))
        if common == len(last):
            self._texts[-1] = tokens
            return
        self._extend(len(last))
        self._texts[-1] = list(last)
        self._texts.append(tokens)
        self._starts.append(common)
        self._indexed = common
        if len(self._texts) > _OLD_TEXTS + 1:
            self._forget_oldest()

    def copy(self) -> SuffixIndex:
        """An index that can grow in its own way; the texts so far are shared and never change."""
        new = SuffixIndex(self.size, self._markers)
        new._texts, new._starts, new._indexed = list(self._texts), list(self._starts), self._indexed
        new._ends = {gram: list(places) for gram, places in self._ends.items()}
        return new

    def extend(self) -> None:
        """Add what the last text has gained, but for the n-gram that ends it: the text's own end never matches itself."""
        self._extend(len(self._texts[-1]) - 1)

    def matches(self, most: int = _LONGEST) -> list[tuple[int, list[Place]]]:
        """(length, places, most recent first) for matches of the text's last tokens, longest first; shorter ones have more places.
        most: they are measured up to this length."""
        tokens = self._texts[-1]
        places = self._ends.get(tuple(tokens[-self.size:]), ())[:-_PLACES - 1:-1]
        found, length = [], self.size
        while places:
            longer = []
            if length < min(most, len(tokens)) and (wanted := tokens[-length - 1]) not in self._markers:
                longer = [(text, end) for text, end in places if end > length and self._texts[text][end - length - 1] == wanted]
            if len(longer) < len(places):
                found.append((length, places))
            places, length = longer, length + 1
        return found[::-1]

    def following(self, place: Place, path: Seq[int]) -> int | None:
        """The token that stands behind a place and a path of tokens after it; None at the end of an old text. A match that runs into the
        text's own end goes on with the path."""
        text, end = place
        tokens, at = self._texts[text], end + len(path)
        if at < len(tokens):
            return tokens[at]
        return path[at - len(tokens)] if text == len(self._texts) - 1 and at - len(tokens) < len(path) else None

    def _extend(self, last_end: int) -> None:
        tokens, text = self._texts[-1], len(self._texts) - 1
        for end in range(max(self._indexed, self.size), last_end + 1):
            gram = tuple(tokens[end - self.size:end])
            if self._markers.isdisjoint(gram):
                self._ends.setdefault(gram, []).append((text, end))
        self._indexed = max(self._indexed, last_end + 1)

    def _forget_oldest(self) -> None:
        """Drop the oldest text and index the rest anew; what the next text shared with it becomes that one's own."""
        texts, starts = self._texts[1:], [0, *self._starts[2:]]
        self._texts, self._starts, self._ends = [], [], {}
        for text, start in zip(texts, starts):
            self._texts.append(text)
            self._starts.append(start)
            self._indexed = start
            if text is not texts[-1]:
                self._extend(len(text))


@dataclass(slots=True)
class _Guess:
    """A draft in the making. shares: for each node, how many of the matching places go that way."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    stop: str = ""

    @property
    def score(self) -> float:
        """Tokens that would be accepted if the text went on as often in each way as it did before."""
        return sum(self.shares)


class Suffix(Stateless):
    """Proposes the most frequent continuations, as a small tree or a chain.

    For the longest match and up to three shorter ones with more places, nodes are taken in the order of their share of the places; the
    match whose shares add up to the most tokens wins (the paper's score). min_match: shortest match worth a verification, in tokens.
    growth: nodes per matched token at most. min_share: a node that fewer of the places go to is left out. tree: siblings too.
    """
    name = "suffix"

    def __init__(self, parts: Parts | None = None, *, min_match: int = 2, growth: float = 2.0, min_share: float = 0.25,
                 tree: bool = True) -> None:
        self._markers = parts.marker_ids if parts else frozenset()
        self._min_match, self._growth, self._min_share, self._tree = min_match, growth, min_share, tree

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        return [self._propose(*each) for each in zip(sequences, budgets)]

    def fork(self, source: Sequence, target: Sequence, length: int) -> int:
        """The conversation's texts so far go on to its next turn, whoever drafted for them."""
        if isinstance(source.drafting, SuffixIndex) and source.drafting.size == self._shortest(target):
            index = source.drafting.copy()
        else:
            index = self._index(source.tokens, self._shortest(target))
        index.begin(target.tokens)
        target.drafting = index
        return length

    def _shortest(self, sequence: Sequence) -> int:
        return sequence.settings.option("min_match", self._min_match)

    def _index(self, tokens: list[int], size: int) -> SuffixIndex:
        index = SuffixIndex(size, self._markers)
        index.begin(tokens)
        return index

    def _propose(self, sequence: Sequence, budget: Budget) -> Draft:
        if sequence.drafting is None:
            sequence.drafting = self._index(sequence.tokens, self._shortest(sequence))
        index: SuffixIndex = sequence.drafting
        index.extend()
        if min(budget.nodes, budget.depth) <= 0:
            return Draft(stop="budget")
        matches = index.matches(sequence.settings.option("max_match", _LONGEST))
        guesses = [self._guess(sequence, index, length, places, budget) for length, places in matches[:_SETS]]
        if not guesses:
            return Draft(stop="no match")
        best = max(guesses, key=lambda guess: guess.score)               # the first, longest one of equals
        return Draft(tuple(best.tokens), tuple(best.parents), scores=tuple(best.shares), stop=best.stop)

    def _guess(self, sequence: Sequence, index: SuffixIndex, length: int, places: list[Place], budget: Budget) -> _Guess:
        """Take nodes by falling share until there are enough."""
        settings, guess = sequence.settings, _Guess(stop="few agree")
        most = min(budget.nodes, max(1, int(settings.option("growth", self._growth) * length)))
        min_share, tree = settings.option("min_share", self._min_share), settings.option("branches", self._tree)
        heap: list[tuple[float, int, int, int, list[Place], tuple[int, ...]]] = []
        order = 0

        def push(parent: int, at: list[Place], path: tuple[int, ...]) -> None:
            nonlocal order
            if len(path) >= budget.depth:
                guess.stop = "length"
                return
            for token, going in self._branches(index, at, path, tree):
                if token in self._markers:
                    guess.stop = "end of turn"
                elif len(going) >= min_share * len(places):
                    heapq.heappush(heap, (-len(going) / len(places), order, token, parent, going, (*path, token)))
                    order += 1

        push(ROOT, places, ())
        while heap:
            if len(guess.tokens) >= most:
                guess.stop = "length" if most == budget.nodes else "match length"
                break
            share, _, token, parent, going, path = heapq.heappop(heap)
            guess.tokens.append(token)
            guess.parents.append(parent)
            guess.shares.append(-share)
            push(len(guess.tokens) - 1, going, path)
        return guess

    def _branches(self, index: SuffixIndex, places: list[Place], path: tuple[int, ...], tree: bool) -> Iterator[tuple[int, list[Place]]]:
        """What follows and where, most frequent first, the more recent of equals first; for a chain only the first."""
        groups: dict[int, list[Place]] = {}
        for place in places:
            if (token := index.following(place, path)) is not None:
                groups.setdefault(token, []).append(place)
        ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
        yield from ordered if tree else ordered[:1]
