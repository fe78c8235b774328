"""One answer of this machine's own engine as whoever asked reads it: text, steps, and plain decoding measured afterwards.

It knows nothing of loading, queues or screens.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from . import metrics
from .driver import Driver
from .job import Job
from .service import Waiting
from .text import StopText, TextCodec
from .trace import PlainToken, StepTrace, Trace

__all__ = ["AnswerText", "LocalRun"]

_WAITING_S = 0.4              # how often a measurement that waits says so


class AnswerText:
    """The engine's `TextSink` for one answer: decodes as tokens come and holds back what may begin a stop string."""

    def __init__(self, codec: TextCodec, stops: tuple[str, ...]) -> None:
        self._codec, self._stream, self._stop = codec, codec.stream(), StopText(stops)
        self._raw = 0                     # characters decoded so far
        self.text = ""

    def push(self, token: int) -> tuple[str, bool]:
        """See `engine.sequence.TextSink`. A special token adds nothing to the text and is shown by its name."""
        piece = self._stream.push(token)
        released, stopped = self._stop.push(piece)
        self.text += released
        if stopped:
            piece = piece[:max(0, len(self.text) - self._raw)]
        self._raw += len(piece)
        return (self._codec.piece(token) if self._codec.is_special(token) else piece), stopped

    def finish(self) -> None:
        if self._stop.stop is None:
            released, _ = self._stop.push(self._stream.flush())
            self.text += released + self._stop.flush()


class LocalRun:
    """See `service.Run`."""

    def __init__(self, driver: Driver, job: Job, meta: dict[str, Any]) -> None:
        self.meta = meta
        self._driver, self._job = driver, job
        self._steps: list[StepTrace] = []
        self._plain: list[PlainToken] = []
        self._measuring: Job | None = None

    @property
    def text(self) -> str:
        return self._job.sink.text

    @property
    def reason(self) -> str:
        return self._job.reason

    @property
    def place(self) -> int:
        return self._job.place

    def wait(self, timeout_s: float) -> bool:
        return self._job.begun.wait(timeout_s)

    def __iter__(self) -> Iterator[StepTrace]:
        for step in self._driver.events(self._job):
            self._steps.append(step)
            yield step

    def cancel(self) -> None:
        self._driver.cancel(self._job)
        if measuring := self._measuring:
            self._driver.cancel(measuring)

    def measure_plain(self, num_tokens: int = 128) -> Iterator[PlainToken | Waiting]:
        goal = min(sum(len(step.emitted) for step in self._steps), len(self._plain) + num_tokens)
        while len(self._plain) < goal and (job := self._plain_job(goal)) and self._driver.measure(job):
            self._measuring = job
            try:
                while not job.begun.wait(_WAITING_S):
                    yield Waiting(self._driver.num_answers)
                for step in self._driver.events(job):
                    for token in self._plain_tokens(step):
                        self._plain.append(token)
                        yield token
            finally:
                self._driver.cancel(job)
                self._measuring = None
            if job.reason != "interrupted":
                return
            yield Waiting(self._driver.num_answers)

    def _plain_job(self, goal: int) -> Job | None:
        """What is still to be measured, None where nothing is. It begins with the last known token: the time that this one took is known,
        and the prompt may have to be read anew, which is no part of any token's time."""
        opened = self._driver.opened
        if opened is None or (self._plain and self._plain[-1].id in opened.eos_ids):
            return None
        known = [token.id for token in self._plain[:-1]]
        sampling = replace(self._job.request.sampling, max_new_tokens=goal - len(known), stop=())
        return Job([*self._job.prompt, *known], replace(self._job.request, sampling=sampling, method="plain"), opened.drafter("plain"), 1,
                   AnswerText(opened.codec, ()), alone=True)

    def _plain_tokens(self, step: StepTrace) -> Iterator[PlainToken]:
        """A plain step's token on the clock of the whole plain run. The first token of all comes with the prompt and starts the clock."""
        if step.kind == "prefill" and self._plain:
            if step.emitted[0].id != self._plain[-1].id:      # another rounding: what follows would belong to another text
                self._driver.cancel(self._measuring)
            return
        took_ms = step.draft_ms + step.verify_ms + step.other_ms if self._plain else step.verify_ms
        end_ms = self._plain[-1].t_ms + took_ms if self._plain else 0.0
        margin = step.margin
        if step.top and len(step.top[0].rows) > 1 and step.top[0].temperature_one:
            (_, _, first, _), (_, _, second, _) = step.top[0].rows[:2]
            margin = math.log(first / second) if second > 0 else None
        for token in step.emitted:
            yield PlainToken(token.id, token.text, end_ms, took_ms, margin, step.disturbed)

    def trace(self) -> Trace:
        trace = Trace(self.meta | {"reason": self.reason}, tuple(self._steps), tuple(self._plain))
        return replace(trace, stats=metrics.summarize(trace).to_dict() | metrics.autopilot(trace), compare=metrics.compare(trace))
