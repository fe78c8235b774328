"""What one person may take of a machine that many use: how long, how often, how many at a time. It knows nothing of engines or screens.

Every limit is an option of the command line (`options.py`); a refusal says which limit it was and what to do.
"""
from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from .errors import InputError, PromptTooLong, TooManyRequests

__all__ = ["Limits", "Turnstile"]

MINUTE_S = 60.0
MOST_VISITORS = 10_000            # whose last requests are remembered; a name is free to choose, so it must not cost memory without end


@dataclass(frozen=True, slots=True)
class Limits:
    """at_once: answers written at the same time, the engine's rows. waiting: requests that may wait for a row. prompt_tokens: longest
    prompt, None for what the model's context holds. new_tokens: longest answer. per_minute: requests of one visitor, 0 for no limit.
    runs_kept: runs of one visitor whose records stay on the server. forget_minutes: silence after which nothing of a visitor stays.
    """
    at_once: int = 8
    waiting: int = 32
    prompt_tokens: int | None = None
    new_tokens: int = 4096
    per_minute: int = 0
    runs_kept: int = 4
    forget_minutes: float = 60.0

    def __post_init__(self) -> None:
        for name, option, low, high in (("at_once", "--at-once", 1, 256), ("waiting", "--waiting", 0, 10_000),
                                        ("prompt_tokens", "--max-prompt", 1, 10_000_000), ("new_tokens", "--max-new-tokens", 1, 1_000_000),
                                        ("per_minute", "--per-minute", 0, 100_000), ("runs_kept", "--keep-runs", 1, 1000),
                                        ("forget_minutes", "--forget-after", 0.01, 100_000)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InputError(f"{option} is {value}; expected a number from {low} to {high}.")

    @property
    def most_open(self) -> int:
        return self.at_once + self.waiting

    def check_length(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Raises PromptTooLong, InputError."""
        if self.prompt_tokens is not None and num_prompt_tokens > self.prompt_tokens:
            raise PromptTooLong(f"The conversation has {num_prompt_tokens} tokens; the operator of this page allows {self.prompt_tokens}. "
                                "Shorten the message or start a new chat.")
        if max_new_tokens > self.new_tokens:
            raise InputError(f"{max_new_tokens} new tokens were asked for; the operator of this page allows {self.new_tokens}. "
                             "Ask for fewer.")

    def queue_full(self) -> TooManyRequests:
        """The refusal where every row is taken and nobody else may wait."""
        written = "1 answer is being written" if self.at_once == 1 else f"{self.at_once} answers are being written"
        waiting = f"{self.waiting} {'is' if self.waiting == 1 else 'are'} waiting already" if self.waiting else "nobody may wait"
        return TooManyRequests(f"{written} and {waiting}, which is all there is room for. Try again in a moment.", code="queue_full",
                               retry_s=5)


class Turnstile:
    """Lets a visitor pass so many times within any minute. Safe to use from several threads.

    by_address: a visitor is known by an address alone, which everybody behind one proxy may share; the refusal says so.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic, *, by_address: bool = False) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._whose = " from one address (everybody behind one proxy may count together)" if by_address else ""
        self._passed: OrderedDict[str, deque[float]] = OrderedDict()
        self._lock = threading.Lock()

    def enter(self, visitor: str) -> None:
        """Count one request. Raises TooManyRequests, which says when the next one is welcome; a refused one does not count."""
        if not self._per_minute:
            return
        with self._lock:
            now = self._clock()
            passed = self._passed.setdefault(visitor, deque())
            self._passed.move_to_end(visitor)
            while passed and passed[0] <= now - MINUTE_S:
                passed.popleft()
            if len(passed) >= self._per_minute:
                retry_s = max(1, int(passed[0] + MINUTE_S - now + 0.999))
                allowed = f"1 request a minute{self._whose} is" if self._per_minute == 1 else f"{self._per_minute} requests a minute{self._whose} are"
                raise TooManyRequests(f"{allowed} allowed here. The next one is welcome in {retry_s} "
                                      f"second{'s' * (retry_s != 1)}.", code="rate_limit_exceeded", retry_s=retry_s)
            passed.append(now)
            while len(self._passed) > MOST_VISITORS:
                self._passed.popitem(last=False)
