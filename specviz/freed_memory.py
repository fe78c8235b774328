"""Giving freed memory back to the system, where the C library would keep it for later.

It knows nothing of models, rows or threads. glibc keeps what is freed between pieces still in use, which after heavy load is gigabytes.
"""
from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Freed", "give_back"]

LEAST_BYTES = 64 << 20           # freed before it is worth asking: the next rows then have to be faulted in anew
REST_S = 2.0                     # without any work before it is done; the heap is locked meanwhile


def give_back() -> bool:
    """Ask glibc to return all unused pages of its heaps. False, and nothing happens, on systems whose C library has no way or no need."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):          # musl has no malloc_trim
            return bool(ctypes.CDLL(None).malloc_trim(0))
    return False


class Freed:
    """When to give back: once much was freed since the last time, after a while in which nobody was answered.

    give_back: what does it, for tests.
    """

    def __init__(self, give_back: Callable[[], bool] = give_back, clock: Callable[[], float] = time.monotonic) -> None:
        self._give_back, self._clock = give_back, clock
        self._returned = self._freed = 0
        self._worked_s = clock()

    def work(self) -> None:
        """Somebody is being answered."""
        self._worked_s = self._clock()

    def rest_s(self, num_freed_bytes: int) -> float | None:
        """How long to wait for work until `give_back` is due, 0 if it is; None where too little was freed. num_freed_bytes: in all so far."""
        self._freed = num_freed_bytes
        if num_freed_bytes - self._returned < LEAST_BYTES:
            return None
        return max(0.0, self._worked_s + REST_S - self._clock())

    def give_back(self) -> None:
        self._returned = self._freed
        self._give_back()
