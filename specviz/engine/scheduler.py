"""Who runs in the next step, how much of each prompt is read, and which finished rows stay for reuse. It knows nothing of drafts."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .cache import KVCache
from .sequence import Sequence, Status

__all__ = ["SHARED", "Scheduled", "Scheduler"]

SHARED = "*"                  # the scope of texts that anyone's prompt may begin with, such as the operator's own system prompt


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence in the next step. pending: tokens it feeds before any draft. decoding: its prompt is read, so it may draft.
    complete: the step reaches the last known token, so that a next one can be chosen."""
    sequence: Sequence
    pending: list[int]
    decoding: bool
    complete: bool


class Scheduler:
    """First come, first served; decoding rows before prompts.

    max_rows: sequences that run at a time. token_budget: prompt tokens read per step, so that long prompts do not stall the others and
    can be cancelled. max_parked: finished rows kept for prefix reuse. max_tokens: cached tokens that all rows together may come to; a request waits
    until its prompt and longest answer fit, and parked rows go to make room. None: no limit.
    """

    def __init__(self, cache: KVCache, *, max_rows: int = 8, token_budget: int = 256, max_parked: int = 4,
                 max_tokens: int | None = None) -> None:
        self._cache = cache
        self.max_rows = max_rows
        self.token_budget = token_budget
        self.max_parked = max_parked
        self.max_tokens = max_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.parked: list[Sequence] = []            # least recently used first
        self.shared: list[Sequence] = []            # ended requests of the scope SHARED; they stay

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def make_room(self) -> list[Sequence]:
        """Parked rows that must go so that the first one waiting fits; the engine releases them."""
        if not self.waiting or len(self.running) >= self.max_rows or self.max_tokens is None:
            return []
        gone = []
        for candidate in sorted(self.parked, key=lambda parked: parked.scope == self.waiting[0].scope):      # stable: its own text last
            if not self._is_over(self.waiting[0]):
                break
            self.parked.remove(candidate)
            gone.append(candidate)
        return gone

    def _is_over(self, sequence: Sequence) -> bool:
        """Whether its longest course beside all others' exceeds the limit."""
        if self.max_tokens is None:
            return False
        held = sum(map(self._most, self.running)) + sum(self._cache.length(each.row) for each in (*self.parked, *self.shared))
        return held + self._most(sequence) > self.max_tokens

    def _most(self, sequence: Sequence) -> int:
        """Entries that a row may come to: prompt, answer and a draft."""
        return min(self._cache.capacity, sequence.num_prompt_tokens + sequence.params.max_new_tokens + sequence.settings.k)

    def schedule(self) -> list[Scheduled]:
        """Admit what fits, in order of arrival, then hand out the token budget. One that is alone always runs."""
        while self.waiting and len(self.running) < self.max_rows and not (self.running and self._is_over(self.waiting[0])):
            sequence = self.waiting.popleft()
            self._admit(sequence)
            self.running.append(sequence)
        budget = self.token_budget
        batch = []
        for sequence in sorted(self.running, key=lambda s: s.num_new_tokens == 0):       # stable: decoding first, then by arrival
            pending = sequence.tokens[self._cache.length(sequence.row):]
            decoding = sequence.num_new_tokens > 0
            chunk = pending if decoding else pending[:budget]
            if not chunk:
                continue
            if not decoding:
                budget -= len(chunk)
            batch.append(Scheduled(sequence, chunk, decoding, len(chunk) == len(pending)))
        return batch

    def _admit(self, sequence: Sequence) -> None:
        """Give it a row: a fork of the parked row with the longest prefix that its drafter can follow, or an empty one."""
        sequence.status = Status.RUNNING
        found = []
        for parked in (*self.parked, *self.shared):
            if parked.scope in (sequence.scope, SHARED):
                common = min(_common(parked.tokens, sequence.tokens), self._cache.length(parked.row), len(sequence.tokens) - 1)
                found.append((common, parked))
        for common, best in sorted(found, key=lambda pair: -pair[0]):        # a longer one is of no use to a drafter that has no state for it
            if common and (length := min(common, sequence.drafter.fork(best, sequence, common))):
                break
            sequence.drafter.release(sequence)
        else:
            sequence.row = self._cache.allocate()
            return
        sequence.row = self._cache.fork(best.row, length)
        sequence.num_reused = length
        if best in self.parked:
            self.parked.remove(best)
            self.parked.append(best)

    def retire(self, sequence: Sequence) -> list[Sequence]:
        """A sequence ended: park its row. Returns the parked ones that had to go; the engine releases them."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.row is not None:
            (self.shared if sequence.scope == SHARED else self.parked).append(sequence)
        gone = self.parked[:max(0, len(self.parked) - self.max_parked)]
        del self.parked[:len(gone)]
        return gone


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n
