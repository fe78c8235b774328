"""Doubles with which losslessness is proved: table models, whole runs, on top of the exact laws of `specviz.museum`.

They know nothing of torch or of any method. A drafter here is `propose(tokens, step, noise) -> Draft`, a verifier
`(draft, rows, noise, position) -> emitted tokens`.
"""
from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from specviz.museum.exact import (Choices, EnumeratingNoise, FractionVector, Law, Model, Propose, Verifier, honest, law, one_hot, one_step,
                                  speculative_law, target_law, vector)
from specviz.museum.meter import chi_square

__all__ = ["Choices", "EnumeratingNoise", "FractionVector", "Law", "Table", "chi_square", "chi_square_limit", "honest", "law", "one_hot",
           "one_step", "speculative_law", "target_law", "vector", "whole_law"]


class Table:
    """A model whose distribution is an arbitrary but fixed function of the whole prefix; some tokens are impossible."""

    def __init__(self, name: str, size: int, greedy: bool = False) -> None:
        self.size = size
        self._name = name
        self._greedy = greedy

    def __call__(self, prefix: Sequence[int]) -> FractionVector:
        source = random.Random(f"{self._name} {tuple(prefix)}")
        weights = [source.randint(0, 4) for _ in range(self.size)]
        if not any(weights):
            weights[source.randrange(self.size)] = 1
        return one_hot(weights.index(max(weights)), self.size) if self._greedy else vector(*weights)


def whole_law(target: Model, make_propose: Callable[[], Propose], length: int, verifier: Verifier = honest,
              noise: Callable[[Choices], Any] = EnumeratingNoise) -> Law:
    """As `speculative_law`, with drafter and noise living through all steps of a run, so that they may remember."""
    def run(choices: Choices) -> tuple[int, ...]:
        tokens: list[int] = []
        propose, source, step = make_propose(), noise(choices), 0
        while len(tokens) < length:
            tokens += one_step(tokens, step, target, propose, source, verifier)
            step += 1
        return tuple(tokens[:length])
    return law(run)


def chi_square_limit(freedom: int, exponent: float = 14.5) -> float:
    """A chi-square variable exceeds this with a chance below e^-exponent, 5.1e-7 as it stands (Laurent and Massart 2000, Lemma 1)."""
    return freedom + 2 * math.sqrt(freedom * exponent) + 2 * exponent
