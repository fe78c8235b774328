"""The meter: how far counts are from a law, and how unlikely that is by chance. It knows nothing of decoding.

Pearson 1900 for the statistic; its tail is the regularised incomplete gamma function Q(f/2, x/2), which torch has.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["LIMIT", "Reading", "chi_square", "p_value", "read", "total_variation"]

LIMIT = 1e-6                     # below this p-value the meter is red: honest decoding is accused once in a million readings


@dataclass(frozen=True, slots=True)
class Reading:
    """What the meter shows. freedom: cells that are possible, less one. distance: total variation between counts and law."""
    chi_square: float
    freedom: int
    p_value: float
    distance: float

    @property
    def fits(self) -> bool:
        return self.p_value >= LIMIT


def chi_square(counts: Sequence[int], probs: Sequence[Any]) -> float:
    """Pearson's statistic of counts against expected shares; a count where nothing is possible gives infinity."""
    total = sum(counts)
    if any(count for count, p in zip(counts, probs) if not p):
        return math.inf
    return float(sum((count - total * p) ** 2 / (total * p) for count, p in zip(counts, probs, strict=True) if p))


def p_value(statistic: float, freedom: int) -> float:
    """The chance that a chi-square variable with `freedom` degrees exceeds `statistic`, 0 to 1."""
    if math.isinf(statistic):
        return 0.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def total_variation(counts: Sequence[int], probs: Sequence[Any]) -> float:
    """Half the sum of |observed share - expected share|, 0 to 1."""
    total = sum(counts)
    return float(sum(abs(count / total - float(p)) for count, p in zip(counts, probs, strict=True)) / 2)


def read(counts: Sequence[int], probs: Sequence[Any]) -> Reading:
    """The meter's reading for counts of independent draws against the law they should follow."""
    statistic, freedom = chi_square(counts, probs), sum(p > 0 for p in probs) - 1
    return Reading(statistic, freedom, p_value(statistic, freedom), total_variation(counts, probs))
