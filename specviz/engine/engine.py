"""The decoding loop: draft, verify, keep, for a batch of sequences. It knows no method by name, no text and no thread."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from ..errors import InputError, PromptTooLong, UnsupportedModel
from ..trace import StepTrace
from .autopilot import Autopilot
from .cache import KVCache
from .device_clock import CudaClock, DeviceClock
from .draft import ROOT
from .drafting import Budget, Drafter, DraftSettings, Outcome
from .model import LanguageModel, Row
from .reading import fetch, look
from .record import Recorder, Times, Work
from .rules import REJECTION, Rule
from .sampling import SamplingParams, penalized, points, shaped
from .scheduler import Scheduler
from .sequence import Sequence, Status, TextSink

__all__ = ["Engine", "Stepped"]


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step did for one sequence."""
    sequence: Sequence
    trace: StepTrace


class Engine:
    """Runs a target model and any number of drafters over a batch of sequences; batch size one is a list of one.

    recorder: makes the trace of each step. cache: may be shared with drafters that run the target's own layers. device_clock: of the device
    where that works behind the host; None chooses by the target's device.
    """
    sequence_type = Sequence                       # what a request becomes; a subclass may cut blocks otherwise

    def __init__(self, target: LanguageModel, cache: KVCache, recorder: Recorder, scheduler: Scheduler | None = None,
                 clock: Callable[[], float] = perf_counter, device_clock: DeviceClock | None = None) -> None:
        self.target = target
        self.cache = cache
        self.recorder = recorder
        self.scheduler = scheduler or Scheduler(cache)
        self.one_transfer = target.device.type == "cuda"      # judge where the logits are: every question to a GPU waits for all it has to do
        self._device_clock = device_clock or (CudaClock() if self.one_transfer else None)
        self._now = clock
        self._recording_s = 0.0                    # time spent on records so far: the decode clock stands still meanwhile
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0

    # ---- requests -----------------------------------------------------------------------------------------------------
    def add(self, prompt: Seq[int], params: SamplingParams, drafter: Drafter, drafting: DraftSettings, sink: TextSink, *,
            eos_ids: frozenset[int] = frozenset(), scope: str = "", keep_probs: bool = True, rule: Rule = REJECTION,
            pilot: Autopilot | None = None) -> int:
        """Queue a request and return its id. Raises InputError for an empty prompt, PromptTooLong where not even one token would fit."""
        if not prompt:
            raise InputError("The prompt is empty; at least one token is needed.")
        if len(prompt) >= self.cache.capacity:
            raise PromptTooLong(f"The prompt has {len(prompt)} tokens; this model has room for {self.cache.capacity - 1} and the answer. "
                                "Shorten it or start a new chat.")
        sequence = self.sequence_type(self._next_id, prompt, params, drafter, drafting, sink, eos_ids, scope, keep_probs, rule)
        sequence.pilot = pilot
        self._next_id += 1
        self._sequences[sequence.id] = sequence
        self.scheduler.add(sequence)
        return sequence.id

    def cancel(self, request_id: int) -> None:
        """End a request now; what came so far is kept. Unknown ids are ignored: it may just have ended."""
        if sequence := self._sequences.get(request_id):
            sequence.finish("cancelled")
            self._retire(sequence)

    def abort(self) -> list[Sequence]:
        """Drop every request and every cached row, after a failure in the middle of a step. Returns the requests that were cut off."""
        cut = list(self._sequences.values())
        for sequence in cut:
            sequence.finish("error")
            self._retire(sequence)
        self.forget()
        return cut

    def forget(self, scope: str | None = None) -> None:
        """Free the parked rows of a scope, or all, shared ones included."""
        for kept in (self.scheduler.parked, self.scheduler.shared):
            for sequence in [each for each in kept if scope is None or each.scope == scope]:
                kept.remove(sequence)
                self._release(sequence)

    @property
    def idle(self) -> bool:
        return not self._sequences

    # ---- one step -----------------------------------------------------------------------------------------------------
    def step(self) -> list[Stepped]:
        """One draft and one verification for everyone who is scheduled; an empty list when nobody is."""
        begun = self._now()
        for gone in self.scheduler.make_room():
            self._release(gone)
        batch = [Work(item) for item in self.scheduler.schedule()]
        if not batch:
            return []
        scheduled = self._now()
        self._mark("scheduled")
        self._propose(batch)
        drafted = self._now()
        self._mark("drafted")
        self._forward(batch)
        self._verify(batch)
        verified = self._now()
        self._extend(batch)
        self._keep(batch)
        self._observe(batch)
        self._learn(batch, (drafted - scheduled) / max(verified - drafted, 1e-9))
        ended = self._now()
        times = Times(begun - self._recording_s, drafted - scheduled, verified - drafted, scheduled - begun + ended - verified,
                      self._device_ms("scheduled", "drafted"), self._device_ms("drafted", "verified"))
        return self._finish(batch, times, ended)

    def _mark(self, name: str) -> None:
        if self._device_clock is not None:
            self._device_clock.mark(name)

    def _device_ms(self, first: str, second: str) -> float | None:
        return None if self._device_clock is None else self._device_clock.between_ms(first, second)

    def _propose(self, batch: list[Work]) -> None:
        """Drafts for all who are decoding, drafter by drafter."""
        num_rows = sum(work.item.decoding for work in batch)
        for drafter, works in _by_drafter(work for work in batch if work.item.decoding):
            sequences = [work.sequence for work in works]
            budgets = [self._budget(sequence, num_rows) for sequence in sequences]
            for work, draft, budget in zip(works, drafter.propose(sequences, budgets), budgets, strict=True):
                work.draft = draft.truncate(budget.nodes + min(budget.window, len(draft) - draft.num_judged))

    def _budget(self, sequence: Sequence, num_rows: int) -> Budget:
        """A step emits one token beyond the draft, so the last token never needs a draft; the cache must hold all that is fed."""
        left = min(sequence.tokens_left, self._room(sequence)) - 1
        place = max(0, self.cache.capacity - len(sequence.tokens)) if left > 0 else 0
        most, parts = min(sequence.settings.k, place), ()
        if sequence.pilot is not None:
            parts = sequence.pilot.choose(len(sequence.tokens), min(place, max(0, left)), num_rows)
            most = max(parts)
        return Budget(nodes=most, depth=max(0, min(most, left)), window=place - most, parts=parts)

    def _room(self, sequence: Sequence) -> int:
        """Tokens that may still be emitted before the context is full (the last one is never fed)."""
        return self.cache.capacity + 1 - len(sequence.tokens)

    def _forward(self, batch: list[Work]) -> None:
        """Everything pending, and every draft, in one pass of the target."""
        rows = []
        for work in batch:
            pending, draft = work.item.pending, work.draft
            last = len(pending) - 1
            parents = [*range(-1, last), *(last if parent == ROOT else last + 1 + parent for parent in draft.parents)]
            rows.append(Row(work.sequence.row, [*pending, *draft.tokens], parents, 1 + len(draft) if work.item.complete else 0))
        hidden = sorted({layer for work in batch for layer in work.sequence.drafter.needs})
        for work, output in zip(batch, self.target.forward(rows, self.cache, hidden=hidden), strict=True):
            work.output = output

    def _verify(self, batch: list[Work]) -> None:
        works = [work for work in batch if work.item.complete]
        for work in works:
            sequence, draft, histories = work.sequence, work.draft, None
            if sequence.params.repetition_penalty != 1:
                paths = [draft.path(node) for node in range(ROOT, len(draft))]
                histories = [sequence.tokens + [draft.tokens[node] for node in path] for path in paths]
            work.logits = penalized(work.output.logits, sequence.params, histories)
        if self.one_transfer:
            self._fetch(works)
        for work in works:
            sequence, position = work.sequence, len(work.sequence.tokens)
            if work.reading:
                finite = work.reading.finite
            elif sequence.params.greedy and sequence.rule.takes_points:
                work.probs, finite = points(work.logits)
            else:
                work.probs, finite = shaped(work.logits, sequence.params), bool(work.logits.sum().isfinite())
            if not finite:
                raise UnsupportedModel("The model computed values that are not numbers, so no token can be chosen. Its weights may be damaged, or "
                                       f"{self.target.dtype} is too narrow for it: start with --dtype float32 or bfloat16.".replace("torch.", ""))
            work.verdict = (work.reading.verdict(work.draft, sequence.noise, position) if work.reading else
                            sequence.rule.judge(work.draft, work.probs, sequence.noise, position))

    def _fetch(self, works: list[Work]) -> None:
        """Judge on the device and ask it once; what no device can judge is judged on the host, which takes all logits over for it."""
        for work in works:
            sequence, draft = work.sequence, work.draft
            if sequence.rule.on_device:
                work.reading = look(draft, work.logits, shaped(work.logits, sequence.params), sequence.params, sequence.noise, len(sequence.tokens),
                                    self.recorder.num_top if sequence.keep_probs else 0)
            else:
                work.logits = work.logits.cpu()
                work.draft = replace(draft, probs=_on_host(draft.probs), shown_probs=_on_host(draft.shown_probs))
        self._mark("verified")                     # before the host waits: what it waits for is no work of the device
        fetch([work.reading for work in works if work.reading])

    def _extend(self, batch: list[Work]) -> None:
        for work in batch:
            if verdict := work.verdict:
                tokens = [*(work.draft.tokens[node] for node in verdict.path), verdict.token]
                origins = [*("draft" for _ in verdict.path), verdict.origin]
                work.emitted = work.sequence.extend(tokens, origins, self._room(work.sequence))

    def _keep(self, batch: list[Work]) -> None:
        """Commit what was pending and the accepted path up to the cut."""
        for work in batch:
            num_pending = len(work.item.pending)
            path = work.verdict.path[:len(work.emitted)] if work.verdict else ()
            work.kept = self.cache.keep(work.sequence.row, [*range(num_pending), *(num_pending + node for node in path)])

    def _observe(self, batch: list[Work]) -> None:
        layers = sorted({layer for work in batch for layer in work.sequence.drafter.needs})
        for drafter, works in _by_drafter(batch):
            drafter.observe([Outcome(work.sequence, work.draft, work.verdict, work.output.logits if work.verdict else None,
                                     _columns(work.output.hidden, layers, drafter.needs)) for work in works])

    def _learn(self, batch: list[Work], draft_share: float) -> None:
        """Tell those who choose draft lengths what came of their choice."""
        for work in batch:
            if work.sequence.pilot is not None and work.item.decoding:
                work.sequence.pilot.observe(work.draft, work.verdict, draft_share)

    def _finish(self, batch: list[Work], times: Times, ended_s: float) -> list[Stepped]:
        """Write the records and let go of who is done."""
        stepped = []
        for work in batch:
            begun_s = self._now()
            if trace := self.recorder.record(work, times, len(batch)):
                stepped.append(Stepped(work.sequence, replace(trace, record_ms=1e3 * (self._now() - begun_s))))
            if work.sequence.status is Status.FINISHED:
                self._retire(work.sequence)
        self._recording_s += self._now() - ended_s
        return stepped

    # ---- endings ------------------------------------------------------------------------------------------------------
    def _retire(self, sequence: Sequence) -> None:
        if self._sequences.pop(sequence.id, None) is None:
            return
        for gone in self.scheduler.retire(sequence):
            self._release(gone)

    def _release(self, sequence: Sequence) -> None:
        sequence.drafter.release(sequence)
        if sequence.row is not None:
            self.cache.free(sequence.row)
            sequence.row = None


def _by_drafter(works: Iterable[Work]) -> list[tuple[Drafter, list[Work]]]:
    groups: dict[int, list[Work]] = {}
    for work in works:
        groups.setdefault(id(work.sequence.drafter), []).append(work)
    return [(group[0].sequence.drafter, group) for group in groups.values()]


def _on_host(probs: Tensor | None) -> Tensor | None:
    return None if probs is None else probs.cpu()


def _columns(hidden: Tensor | None, layers: list[int], needs: tuple[int, ...]) -> Tensor | None:
    """Of the batch's hidden states, the layers that one drafter asked for, in its own order."""
    if hidden is None or not needs:
        return None
    if list(needs) == layers:
        return hidden
    parts = hidden.chunk(len(layers), -1)
    return torch.cat([parts[layers.index(layer)] for layer in needs], -1)
