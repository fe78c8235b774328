"""Prompt lookup: find the last words earlier in the text and propose what followed them (Saxena 2023).

It needs no model. The text's n-grams are kept in a hash index that grows with the text; nothing is scanned.
"""
from __future__ import annotations

from collections.abc import Sequence as Seq

from ..engine.draft import Draft
from ..engine.drafting import Budget
from ..engine.option import Option
from ..engine.sequence import Sequence
from .parts import Parts
from .plain import Stateless

__all__ = ["NGramIndex", "PromptLookup", "options"]

_CANDIDATES = 8                # most recent places that are compared for the longest match
_LONGEST = 32                  # matches are measured up to this length


def options(parts: Parts) -> tuple[Option, ...]:
    """What can be set."""
    return (Option("min_match", "Shortest match", "whole", 2, "Tokens that must have appeared before. Shorter matches are found more often "
                   "and copied less reliably.", 1, 16),
            Option("max_match", "Longest match measured", "whole", _LONGEST, "Of several places the one with the longest match is copied; a "
                   "draft is at most twice as long as its match.", 1, 64))


class NGramIndex:
    """Where each n-gram of a text ended, most recent last.

    size: tokens per n-gram. markers: tokens that no n-gram may contain.
    """

    def __init__(self, size: int, markers: frozenset[int] = frozenset()) -> None:
        self._size = size
        self._markers = markers
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0              # n-grams ending before this position are in the index

    def extend(self, tokens: Seq[int]) -> None:
        """Add the n-grams of all tokens but the last: the text's own end never matches itself."""
        for end in range(max(self._indexed, self._size), len(tokens)):
            gram = tuple(tokens[end - self._size:end])
            if self._markers.isdisjoint(gram):
                self._ends.setdefault(gram, []).append(end)
        self._indexed = max(self._indexed, len(tokens))

    def longest(self, tokens: Seq[int], most: int = _LONGEST) -> tuple[int, int]:
        """(end of the earlier match, its length) for the longest match of the text's last tokens, the most recent of equals; (0, 0) if
        there is none. most: matches are measured up to this length."""
        best, length = 0, 0
        for end in self._ends.get(tuple(tokens[-self._size:]), ())[:-_CANDIDATES - 1:-1]:
            common = self._size
            while common < most and common < end and tokens[end - common - 1] == tokens[-common - 1]:
                if tokens[end - common - 1] in self._markers:
                    break
                common += 1
            if common > length:
                best, length = end, common
        return best, length


class PromptLookup(Stateless):
    """Proposes a chain. Its length grows with the match, since a short match rarely goes on for long.

    min_match: shortest match that is worth a verification, in tokens.
    """
    name = "prompt_lookup"

    def __init__(self, parts: Parts | None = None, *, min_match: int = 2) -> None:
        self._markers = parts.marker_ids if parts else frozenset()
        self._min_match = min_match

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        return [self._propose(*each) for each in zip(sequences, budgets)]

    def _propose(self, sequence: Sequence, budget: Budget) -> Draft:
        tokens, most = sequence.tokens, min(budget.nodes, budget.depth)
        if sequence.drafting is None:
            sequence.drafting = NGramIndex(sequence.settings.option("min_match", self._min_match), self._markers)
        index: NGramIndex = sequence.drafting
        index.extend(tokens)
        if most <= 0:
            return Draft(stop="budget")
        end, match = index.longest(tokens, sequence.settings.option("max_match", _LONGEST))
        if not match:
            return Draft(stop="no match")
        wanted = min(most, 2 * match - 1)
        guess: list[int] = []
        stop = "length" if wanted == most else "match length"
        for i in range(end, end + wanted):
            token = tokens[i] if i < len(tokens) else guess[i - len(tokens)]      # a match that runs into itself repeats
            if token in self._markers:
                stop = "end of turn"
                break
            guess.append(token)
        return Draft.chain(guess, stop=stop)
