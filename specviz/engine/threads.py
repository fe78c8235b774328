"""Chooses how many threads a forward should use, by trying. It knows nothing of models: the trial is passed in."""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

__all__ = ["ThreadChoice", "choose_threads"]

_MOST_CANDIDATES = 6             # beyond that, powers of two and the number of cores


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """count: the chosen number of threads. timings: number of threads -> (milliseconds for one token, for six)."""
    count: int
    timings: Mapping[int, tuple[float, float]]


def choose_threads(trial: Callable[[int], None], candidates: Sequence[int] | None = None, repeats: int = 3,
                   clock: Callable[[], float] = perf_counter) -> ThreadChoice:
    """Time `trial(T)` for T = 1 and T = 6 with each number of threads and leave the calling thread at the best.

    trial: runs one forward of T tokens. candidates: by default 1 to the number of cores this process may use. torch keeps a count per
    thread, so this must run in the thread that will decode. Two threads can be far slower than one on a machine that is shared or that
    counts hyperthreads as cores, hence the measurement; a larger count must win by 5 % to be taken. Rounds are interleaved, so that a
    slow moment does not fall on one candidate, and the median counts.
    """
    counts = sorted(set(candidates or _default_candidates()))
    if len(counts) == 1:
        torch.set_num_threads(counts[0])
        return ThreadChoice(counts[0], {})
    seen: dict[int, tuple[list[float], list[float]]] = {count: ([], []) for count in counts}
    for repeat in range(repeats + 1):
        for count in counts:
            torch.set_num_threads(count)
            for num_tokens, times in zip((1, 6), seen[count]):
                start = clock()
                trial(num_tokens)
                if repeat:                       # the first round warms up
                    times.append((clock() - start) * 1e3)
    timings = {count: (median(one), median(six)) for count, (one, six) in seen.items()}
    best = counts[0]
    for count in counts[1:]:
        if sum(timings[count]) < 0.95 * sum(timings[best]):
            best = count
    torch.set_num_threads(best)
    return ThreadChoice(best, timings)


def _default_candidates() -> list[int]:
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if most <= _MOST_CANDIDATES:
        return list(range(1, most + 1))
    return sorted({1, most, *(2 ** i for i in range(1, most.bit_length()) if 2 ** i < most)})
