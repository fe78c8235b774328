"""What a step costs on this machine: milliseconds to verify some tokens behind a text, measured once per configuration and kept.

It knows nothing of how it is measured (`cost_trial.py`), of engines or of screens, and needs no package besides Python itself.
"""
from __future__ import annotations

import hashlib
import json
import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError

__all__ = ["CostStore", "CostTable", "monotone"]


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured times of one forward of the target, of one token of the draft model, and of one pass of an EAGLE head.

    num_tokens: the measured sizes M, rising from 1. context_lengths: tokens in the cache before, rising. times_ms: one row per context
    length, [contexts][sizes], never falling along either axis. num_rows: sequences in one forward, rising from 1. batch_sizes: sizes M
    measured for more than one, rising. batch_factors: one row per number of sequences beyond 1, [num_rows - 1][batch_sizes]: what R
    sequences of M tokens each take, over one sequence of R M tokens. draft_ms: one token of the draft model, None without one. head_ms:
    one pass of the EAGLE head, likewise. measured: ISO date and time. unrest: how far the times of single tokens lay apart while it was
    measured, (upper quartile - lower) / median.
    """
    num_tokens: tuple[int, ...]
    context_lengths: tuple[int, ...]
    times_ms: tuple[tuple[float, ...], ...]
    draft_ms: float | None = None
    measured: str = ""
    unrest: float = 0.0
    num_rows: tuple[int, ...] = (1,)
    batch_sizes: tuple[int, ...] = ()
    batch_factors: tuple[tuple[float, ...], ...] = ()
    head_ms: float | None = None

    def verify_ms(self, num_tokens: int, context_length: int, num_rows: int = 1) -> float:
        """T(M): one forward of `num_tokens` tokens behind `context_length` others, linear between what was measured.

        num_rows: sequences in the forward, each with as many tokens: one line of M times rows, as the engine feeds them, which takes
        longer than one sequence's as measured, since each has an attention of its own.
        """
        if num_rows > 1:
            return self.batch_factor(num_tokens, num_rows) * self.verify_ms(num_tokens * num_rows, context_length)
        size = num_tokens
        first, second = self._contexts_around(context_length)
        low = self._row_ms(first, size)
        if first == second:
            return low
        start, end = self.context_lengths[first], self.context_lengths[second]
        share = max(0.0, (context_length - start) / (end - start))
        return low + share * (self._row_ms(second, size) - low)

    def batch_factor(self, num_tokens: int, num_rows: int) -> float:
        """See `batch_factors`: linear between what was measured, constant beyond it, 1 where nothing was."""
        if not self.batch_factors or num_rows <= 1:
            return 1.0
        measured = [(rows, _between(self.batch_sizes, factors, num_tokens)) for rows, factors in zip(self.num_rows[1:], self.batch_factors)]
        known = [(1, 1.0), *measured]
        return _between([rows for rows, _ in known], [factor for _, factor in known], num_rows)

    def v(self, num_tokens: int, context_length: int, num_rows: int = 1) -> float:
        """T(M) / T(1) for the same rows: what verifying M tokens costs, in plain steps."""
        return self.verify_ms(num_tokens, context_length, num_rows) / self.verify_ms(1, context_length, num_rows)

    def pass_cost(self, context_length: int) -> float | None:
        """One pass of the EAGLE head, in plain steps; None if there is none."""
        return None if self.head_ms is None else self.head_ms / self.verify_ms(1, context_length)

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON: "num_tokens", "context_lengths", "verify_ms" [contexts][sizes], "draft_ms", "head_ms", "measured", "unrest",
        and, where more than one sequence was measured, "num_rows", "batch_sizes", "batch_factors" [num_rows - 1][batch_sizes]."""
        batch = {"num_rows": list(self.num_rows), "batch_sizes": list(self.batch_sizes),
                 "batch_factors": [[round(factor, 4) for factor in row] for row in self.batch_factors]} if self.batch_factors else {}
        return {"num_tokens": list(self.num_tokens), "context_lengths": list(self.context_lengths),
                "verify_ms": [[round(ms, 4) for ms in row] for row in self.times_ms], "draft_ms": self.draft_ms,
                "head_ms": self.head_ms, "measured": self.measured, "unrest": round(self.unrest, 3), **batch}

    @classmethod
    def from_json(cls, data: Any) -> CostTable:
        """The table that `to_json` wrote. Raises InputError for anything else, since files and traces are not trusted."""
        try:
            table = cls(tuple(data["num_tokens"]), tuple(data["context_lengths"]), tuple(tuple(map(float, row)) for row in data["verify_ms"]),
                        None if data["draft_ms"] is None else float(data["draft_ms"]), str(data["measured"]), float(data.get("unrest", 0)),
                        tuple(data.get("num_rows", (1,))), tuple(data.get("batch_sizes", ())),
                        tuple(tuple(map(float, row)) for row in data.get("batch_factors", ())),
                        None if data.get("head_ms") is None else float(data["head_ms"]))
            sizes, contexts, rows = table.num_tokens, table.context_lengths, table.times_ms
            good = (all(type(n) is int for n in (*sizes, *contexts)) and sizes[0] == 1 and _rising(sizes) and contexts[0] >= 0 and _rising(contexts)
                    and len(rows) == len(contexts) and all(len(row) == len(sizes) for row in rows)
                    and all(math.isfinite(ms) and ms > 0 for row in rows for ms in row)
                    and all(type(n) is int for n in (*table.num_rows, *table.batch_sizes))
                    and table.num_rows[0] == 1 and _rising(table.num_rows) and _rising(table.batch_sizes) and all(size > 0 for size in table.batch_sizes)
                    and len(table.batch_factors) == len(table.num_rows) - 1
                    and all(len(row) == len(table.batch_sizes) > 0 for row in table.batch_factors)
                    and all(math.isfinite(factor) and factor > 0 for row in table.batch_factors for factor in row)
                    and all(ms is None or math.isfinite(ms) and ms > 0 for ms in (table.draft_ms, table.head_ms)))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError):
            good = False
        if not good:
            raise InputError("This is no table of verification costs; expected num_tokens and context_lengths, both rising, and verify_ms with one row "
                             "per context length. Measure it again.")
        return table

    def _contexts_around(self, context_length: int) -> tuple[int, int]:
        """Rows between which (or beyond which) a context length lies; below the shortest that row alone counts."""
        if len(self.context_lengths) == 1 or context_length <= self.context_lengths[0]:
            return 0, 0
        first = min(bisect_right(self.context_lengths, context_length) - 1, len(self.context_lengths) - 2)
        return first, first + 1

    def _row_ms(self, row: int, size: int) -> float:
        """Linear between the measured sizes and, with the last slope, beyond them."""
        sizes, times = self.num_tokens, self.times_ms[row]
        if len(sizes) == 1:
            return times[0] * size
        at = min(max(bisect_right(sizes, size) - 1, 0), len(sizes) - 2)
        share = (size - sizes[at]) / (sizes[at + 1] - sizes[at])
        return times[at] + share * (times[at + 1] - times[at])


def monotone(values: Sequence[float]) -> list[float]:
    """The nearest never-falling series (least squares): neighbours out of order are replaced by their mean.

    More tokens never cost less, so what seems so is noise. Pool adjacent violators, Ayer et al. 1955.
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            before, num = blocks.pop()
            total, count = total + before, count + num
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]


def _between(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """Linear between the places, the first or last value beyond them."""
    if at <= places[0]:
        return values[0]
    for low, high, first, second in zip(places, places[1:], values, values[1:]):
        if at <= high:
            return first + (second - first) * (at - low) / (high - low)
    return values[-1]


def _rising(values: Sequence[float]) -> bool:
    return all(a < b for a, b in zip(values, values[1:]))


class CostStore:
    """Tables in a folder, one file per configuration. Losing them costs seconds, so nothing here ever raises."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, configuration: Mapping[str, Any]) -> CostTable | None:
        """The table of exactly this configuration; None if there is none that can be read."""
        try:
            content = json.loads(self._path(configuration).read_text(encoding="utf-8"))
            return CostTable.from_json(content["cost"]) if content["configuration"] == _plain(configuration) else None
        except (OSError, ValueError, KeyError, TypeError, InputError):
            return None

    def write(self, configuration: Mapping[str, Any], table: CostTable) -> None:
        path = self._path(configuration)
        part = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"configuration": _plain(configuration), "cost": table.to_json()}, indent=1), encoding="utf-8")
            os.replace(part, path)
        except OSError:
            pass

    def _path(self, configuration: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(_plain(configuration), sort_keys=True).encode()).hexdigest()
        return self._folder / f"{digest[:20]}.json"


def _plain(configuration: Mapping[str, Any]) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(configuration, default=str))
