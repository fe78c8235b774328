"""Counts what a drafter would have gained on texts that the target wrote, without running the target again. It knows nothing of models.

A place in a text is the number of tokens known before it. For every place and depth a drafter has ranked the token that the target wrote
there (0: its first guess), given the tokens before. From those ranks follows every chain and every tree of guesses, since a guess is accepted
exactly where it is the token that the target wrote: greedily by the rule itself, and when sampling because a guess that was chosen, not
drawn, is accepted with the chance that the target draws it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Accept", "MISS", "Ranked", "Tally", "chain", "drawn", "hybrid", "interval", "rates", "tree", "walk"]

MISS = 255                     # the token is not among the guesses

Accept = Callable[["Ranked", int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Ranked:
    """One answer. ranks: uint8 [n, depth], row i for the place `start + i`; MISS where there is no guess. drafted: [n], guesses of a
    drafter that does not always have one; None for one that has. overlaps: float [n], the sum of min(p, q) at each place, which is the
    chance that a guess drawn from q is accepted."""
    start: int
    ranks: np.ndarray
    drafted: np.ndarray | None = None
    overlaps: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Tally:
    """One answer's steps. accepted: of every step. emitted: tokens, the last step cut at the end. possible: longest draft of every step."""
    accepted: tuple[int, ...]
    emitted: int
    possible: tuple[int, ...]

    @property
    def steps(self) -> int:
        return len(self.accepted)


def chain(length: int) -> Accept:
    """A chain of first guesses of this length."""
    def accept(ranked: Ranked, place: int) -> tuple[int, int]:
        row = ranked.ranks[place, :length]
        possible = min(length, len(row)) if ranked.drafted is None else min(length, int(ranked.drafted[place]))
        wrong = np.flatnonzero(row[:possible])
        return (int(wrong[0]) if len(wrong) else possible), possible
    return accept


def drawn(length: int, seed: int = 0) -> Accept:
    """A chain of guesses that are drawn, each accepted with the chance that its place has. The text goes on as it is, so this is right on
    average over texts, not for one."""
    chance = np.random.default_rng(seed)

    def accept(ranked: Ranked, place: int) -> tuple[int, int]:
        here = ranked.overlaps[place:place + length]
        refused = np.flatnonzero(chance.random(len(here)) >= here)
        return (int(refused[0]) if len(refused) else len(here)), length
    return accept


def tree(paths: Sequence[tuple[int, ...]]) -> Accept:
    """A tree of fixed shape, given as paths of ranks."""
    shape = frozenset(paths)
    deepest = max(map(len, paths))

    def accept(ranked: Ranked, place: int) -> tuple[int, int]:
        row = tuple(int(rank) for rank in ranked.ranks[place, :deepest])
        depth = 0
        while depth < len(row) and row[:depth + 1] in shape:
            depth += 1
        return depth, deepest
    return accept


def hybrid(first: Ranked, accept: Accept, other: Accept) -> Accept:
    """`accept` on `first` wherever that has a guess, `other` elsewhere."""
    def choose(ranked: Ranked, place: int) -> tuple[int, int]:
        if first.drafted is not None and first.drafted[place] == 0:
            return other(ranked, place)
        return accept(first, place)
    return choose


def walk(ranked: Ranked, accept: Accept) -> Tally:
    """Decode one answer: every step emits what was accepted and one token more, the last one up to the end only.

    The first token comes from reading the prompt, so steps begin behind it, as `metrics.py` counts them.
    """
    accepted, possible, place, end = [], [], 1, len(ranked.ranks)
    while place < end:
        found, longest = accept(ranked, place)
        left = end - place
        accepted.append(min(found, left))
        possible.append(min(longest, left))
        place += min(found + 1, left)
    return Tally(tuple(accepted), max(end - 1, 0), tuple(possible))


def interval(tallies: Sequence[Tally], *, draws: int = 1000, seed: int = 0) -> tuple[float, float, float]:
    """Tokens per step over all answers, and the bounds between which 95 % of bootstrap samples over answers lie."""
    emitted, steps = np.array([each.emitted for each in tallies], float), np.array([each.steps for each in tallies], float)
    if not steps.sum():
        return float("nan"), float("nan"), float("nan")
    picks = np.random.default_rng(seed).integers(0, len(tallies), (draws, len(tallies)))
    samples = emitted[picks].sum(1) / np.maximum(steps[picks].sum(1), 1)
    low, high = np.quantile(samples, [0.025, 0.975])
    return float(emitted.sum() / steps.sum()), float(low), float(high)


def rates(tallies: Sequence[Tally], depth: int) -> list[float]:
    """Acceptance at each depth, of the drafts that got so far."""
    found = []
    for i in range(depth):
        reached = sum(1 for each in tallies for a, p in zip(each.accepted, each.possible) if a >= i and p > i)
        right = sum(1 for each in tallies for a, p in zip(each.accepted, each.possible) if a > i and p > i)
        found.append(right / reached if reached else float("nan"))
    return found
