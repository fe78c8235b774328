"""The engine inside a function that somebody else runs, such as a ZeroGPU call: no thread, one answer per call, steps as JSON.

It knows nothing of Spaces or screens. `answer` is the body, which may run in a forked process: what goes in can be pickled, what comes out
is text, and nothing that it changes is seen outside. `InlineService` stays outside and makes steps of the text again.
"""
from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from . import errors
from .driver import Driver
from .engine.drafting import DraftSettings
from .engine.rules import RULES
from .errors import Busy, SpecvizError
from .job import Job
from .local_run import AnswerText
from .local_service import LocalService
from .opening import Opened, open_engine
from .options import Options
from .service import ChatRequest
from .trace import StepTrace, step_from, to_dict

__all__ = ["InlineDriver", "InlineService", "answer", "seconds_needed"]

Stream = Callable[[list[int], ChatRequest, int, tuple[tuple[str, Any], ...], bool], Iterator[str]]


def answer(opened: Opened, prompt: list[int], request: ChatRequest, k: int, options: tuple[tuple[str, Any], ...], alone: bool) -> Iterator[str]:
    """One answer by an engine that nobody else uses; each line has "step", the "text" it added and, at the end, the "reason".

    options: all of the method's. alone: a plain measurement, which keeps probabilities for its margins. An error is the last line,
    {"error": a sentence, "kind": its class}. Nothing of the text stays in the engine.
    """
    engine, sink, sent = opened.engine, AnswerText(opened.codec, request.sampling.stop), 0
    try:
        drafter, settings = opened.drafter(request.method), DraftSettings(k, options)
        engine.add(prompt, request.sampling, drafter, settings, sink, eos_ids=opened.eos_ids, keep_probs=request.keep_probs or alone,
                   rule=RULES[request.verification], pilot=opened.pilot(drafter, settings) if request.auto_k and not alone else None)
        while not engine.idle:
            for stepped in engine.step():
                text = sink.text
                yield json.dumps({"step": to_dict(stepped.trace), "text": text[sent:], "reason": stepped.sequence.reason})
                sent = len(text)
    except Exception as error:
        if not isinstance(error, SpecvizError):
            traceback.print_exception(error, file=sys.stderr)
        yield json.dumps({"error": str(error), "kind": type(error).__name__})
    finally:                                      # also when the caller has stopped listening
        engine.abort()


def seconds_needed(prompt: list[int], request: ChatRequest, k: int, options: tuple[tuple[str, Any], ...], alone: bool) -> int:
    """How long an answer is given: 15 seconds for the start and ten tokens a second, at most two minutes. A shorter call waits less."""
    return min(120, 15 + math.ceil(request.sampling.max_new_tokens / 10))


class InlineDriver(Driver):
    """A driver without a thread: it loads where it is started, and a job runs while somebody asks for its steps.

    stream: calls `answer` somewhere, with all arguments but the engine. Closing its iterator ends the answer after the step in progress.
    """

    def __init__(self, stream: Stream, *args: Any) -> None:
        super().__init__(*args)
        self._stream = stream
        self._stopped: set[Job] = set()

    def start(self) -> None:
        self._load()
        self._settled(self)

    def submit(self, job: Job) -> bool:
        with self._lock:
            if len(self._open) >= self._limits.most_open:
                raise self._limits.queue_full()
            self._open.add(job)
        job.moved(0)
        return True

    def measure(self, job: Job) -> bool:
        job.moved(0)
        return True

    def forget(self, conversation: str) -> None:
        pass                                      # nothing of an answer stays

    def cancel(self, job: Job) -> None:
        with self._lock:
            if job in self._open and not job.reason:
                self._stopped.add(job)
            else:
                self._finish(job, "cancelled")

    def events(self, job: Job) -> Iterator[StepTrace]:
        lines = self._stream(job.prompt, job.request, job.k, job.options, job.alone)
        try:
            for line in self._lines(lines):
                job.sink.text += line["text"]
                if line["reason"]:
                    self._finish(job, line["reason"])
                yield step_from(line["step"])
                if job in self._stopped:
                    self._finish(job, "cancelled")
                if job.reason:
                    return
            raise Busy("The answer ended too early, perhaps at a time limit. Try again, or ask for fewer new tokens.")
        except SpecvizError:
            self._finish(job, "error")
            raise
        finally:
            lines.close()
            self._finish(job, "cancelled")
            self._open.discard(job)
            self._stopped.discard(job)

    @staticmethod
    def _lines(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
        """The lines as data. Raises the error that ended the answer, whichever side of the call it came from."""
        try:
            for line in lines:
                data = json.loads(line)
                if "error" in data:
                    kind = getattr(errors, data["kind"], None)
                    raise kind(data["error"]) if kind else SpecvizError(f"The engine met an unexpected error ({data['kind']}: {data['error']}).")
                yield data
        except SpecvizError:
            raise
        except Exception as error:                # a queue, a quota or a time limit of whoever runs the call
            raise Busy(f"The call could not be finished: {error}. Try again in a moment, or ask for fewer new tokens.") from error

    @staticmethod
    def _finish(job: Job, reason: str) -> None:
        if not job.reason:
            job.end(reason)


class InlineService(LocalService):
    """See `service.Service`. The model is loaded when this returns; nothing has run on it yet."""

    def __init__(self, options: Options, stream: Stream, opener: Callable[..., Opened] | None = None) -> None:
        super().__init__(options, opener or (lambda given, progress: open_engine(given, progress, dry=True)),
                         make_driver=lambda *args: InlineDriver(stream, *args))

    @property
    def opened(self) -> Opened:
        """The engine, for `answer`. Raises Busy where it could not be loaded."""
        return self._ready()[0]
