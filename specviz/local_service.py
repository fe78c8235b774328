"""The service on this machine's own engine: loads it, drives it in one thread, and hands every request its steps.

It knows nothing of screens. All work on the model happens in the engine's thread; other threads leave commands and read records.
"""
from __future__ import annotations

import math
import platform
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import torch

from . import __version__, metrics
from .drafters import DRAFTERS
from .engine.drafting import Drafter, DraftSettings
from .engine.engine import Engine
from .errors import Busy, InputError, NotEnoughMemory, PromptTooLong, SpecvizError
from .opening import Opened, open_engine
from .options import Options
from .service import ChatRequest, MethodInfo, Status
from .text import StopText, TextCodec
from .trace import PlainToken, StepTrace, Trace

__all__ = ["AnswerText", "LocalRun", "LocalService"]

_MAX_OPEN = 20
_END = object()


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


@dataclass(eq=False)
class _Job:
    """One request in the engine and where its records go."""
    prompt: list[int]
    request: ChatRequest
    drafter: Drafter
    k: int
    sink: AnswerText
    alone: bool = False
    events: queue.SimpleQueue | None = None
    request_id: int | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        self.events = queue.SimpleQueue()


class LocalRun:
    """See `service.Run`."""

    def __init__(self, service: LocalService, job: _Job, meta: dict[str, Any]) -> None:
        self.meta = meta
        self._service, self._job = service, job
        self._steps: list[StepTrace] = []
        self._plain: list[PlainToken] = []
        self._measuring: _Job | None = None
        self._cancelled = False

    @property
    def text(self) -> str:
        return self._job.sink.text

    @property
    def reason(self) -> str:
        return self._job.reason

    def __iter__(self) -> Iterator[StepTrace]:
        for step in self._service._events(self._job):
            self._steps.append(step)
            yield step

    def cancel(self) -> None:
        self._cancelled = True
        self._service._cancel(self._job)
        if measuring := self._measuring:
            self._service._cancel(measuring)

    def measure_plain(self, num_tokens: int = 128) -> Iterator[PlainToken]:
        answer = [token for step in self._steps for token in step.emitted]
        goal = min(len(answer), len(self._plain) + num_tokens)
        if len(self._plain) >= goal or (self._plain and self._plain[-1].id in self._service._eos_ids):
            return
        self._cancelled = False
        sampling = replace(self._job.request.sampling, max_new_tokens=goal - len(self._plain), stop=())
        request = replace(self._job.request, sampling=sampling, method="plain")
        job = self._measuring = self._service._measure([*self._job.prompt, *(token.id for token in self._plain)], request)
        try:
            for step in self._service._events(job):
                for token in self._plain_tokens(step):
                    self._plain.append(token)
                    yield token
        finally:
            self._service._cancel(job)
            self._measuring = None

    def _plain_tokens(self, step: StepTrace) -> Iterator[PlainToken]:
        """A plain step's token on the clock of the whole plain run. The first token of all comes with the prompt and starts the clock."""
        took_ms = step.draft_ms + step.verify_ms + step.other_ms
        if step.kind == "prefill":
            took_ms = step.verify_ms             # when a measurement goes on, this is its next step; copying the prefix is no part of it
        end_ms = self._plain[-1].t_ms + took_ms if self._plain else 0.0
        margin = None
        if step.top and len(step.top[0].rows) > 1 and step.top[0].temperature_one:
            (_, _, first, _), (_, _, second, _) = step.top[0].rows[:2]
            margin = math.log(first / second) if second > 0 else None
        for token in step.emitted:
            yield PlainToken(token.id, token.text, end_ms, took_ms, margin)

    def trace(self) -> Trace:
        trace = Trace(self.meta | {"reason": self.reason}, tuple(self._steps), tuple(self._plain))
        return replace(trace, stats=metrics.summarize(trace).to_dict(), compare=metrics.compare(trace))


class LocalService:
    """See `service.Service`. Loads as soon as it is made; `close` ends its thread.

    opener: loads and builds the engine; tests give a small one.
    """

    def __init__(self, options: Options, opener: Callable[..., Opened] = open_engine) -> None:
        self._options, self._opener = options, opener
        self._status = Status("loading", "Starting.")
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._opened: Opened | None = None
        self._jobs: dict[int, _Job] = {}
        self._open: set[_Job] = set()             # chat turns that have not ended, waiting ones included
        self._waiting_alone: deque[_Job] = deque()
        self._measurements: set[_Job] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="specviz-engine", daemon=True)
        self._thread.start()

    # ---- what anyone may ask ------------------------------------------------------------------------------------------
    def status(self) -> Status:
        return self._status

    def config(self) -> dict[str, Any]:
        return dict(self._opened.config) if self._opened else {}

    def methods(self) -> list[MethodInfo]:
        if not self._opened:
            return []
        parts, infos = self._opened.parts, []
        for method in DRAFTERS.values():
            reason = method.missing(parts)
            note = "untrained: expect few accepted" if not reason and method.untrained(parts) else ""
            infos.append(MethodInfo(method.name, method.label, method.summary, reason, note))
        return infos

    def default_method(self) -> str:
        return self._opened.default_method if self._opened else ""

    def submit(self, request: ChatRequest) -> LocalRun:
        opened = self._ready()
        drafter = self._drafter(request.method)
        if not 1 <= request.k <= 64:
            raise InputError(f"k is {request.k}; expected a draft length from 1 to 64.")
        prompt = opened.codec.render(request.messages)
        room = opened.parts.cache.capacity - len(prompt)
        if room < 1:
            raise PromptTooLong(f"The conversation has {len(prompt)} tokens; this model has room for {opened.parts.cache.capacity}, answer "
                                "included. Shorten the message or start a new chat.")
        if len(self._open) >= _MAX_OPEN:
            raise Busy(f"{_MAX_OPEN} requests are running or waiting already. Try again in a moment.")
        for measurement in list(self._measurements):
            self._cancel(measurement)
        job = _Job(prompt, request, drafter, request.k, AnswerText(opened.codec, request.sampling.stop))
        self._open.add(job)
        self._commands.put(lambda: self._start(job))
        return LocalRun(self, job, self._meta(request, prompt))

    def close(self) -> None:
        self._closing.set()
        self._commands.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)

    # ---- for runs -----------------------------------------------------------------------------------------------------
    @property
    def _eos_ids(self) -> frozenset[int]:
        return self._opened.eos_ids

    def _measure(self, prompt: list[int], request: ChatRequest) -> _Job:
        """A plain run that has the engine to itself: it starts once nobody else runs and ends when somebody comes."""
        job = _Job(prompt, request, self._drafter("plain"), 1, AnswerText(self._opened.codec, ()), alone=True)
        self._measurements.add(job)
        self._commands.put(lambda: self._waiting_alone.append(job))
        return job

    def _cancel(self, job: _Job) -> None:
        self._commands.put(lambda: self._cancel_now(job))

    def _events(self, job: _Job) -> Iterator[StepTrace]:
        """A job's records until it ends. Raises the error that ended it."""
        while (event := job.events.get()) is not _END:
            if isinstance(event, Exception):
                raise event
            yield event

    # ---- the engine's thread ------------------------------------------------------------------------------------------
    def _main(self) -> None:
        try:
            self._opened = self._opener(self._options, self._progress)
            self._status = Status("ready", "Ready.", 1.0)
        except SpecvizError as error:
            self._status = Status("failed", str(error))
            return
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            self._status = Status("failed", f"The model could not be loaded ({type(error).__name__}: {error}). The terminal shows where; "
                                            "recorded runs can be played meanwhile.")
            return
        engine = self._opened.engine
        while not self._closing.is_set():
            self._obey(wait=engine.idle and not self._waiting_alone)
            if engine.idle and self._waiting_alone:
                self._start(self._waiting_alone.popleft())
            try:
                stepped = engine.step()
            except Exception as error:
                self._fail(error)
                continue
            for result in stepped:
                job = self._jobs[result.sequence.id]
                job.events.put(result.trace)
                if result.sequence.reason:
                    self._end(job, result.sequence.reason)
        for job in list(self._jobs.values()):
            self._cancel_now(job)

    def _progress(self, message: str, fraction: float | None = None) -> None:
        self._status = Status("loading", message, fraction)

    def _obey(self, wait: bool) -> None:
        """Carry out the commands that lie there; `wait` for one when there is nothing else to do."""
        try:
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            pass

    def _start(self, job: _Job) -> None:
        if job.reason:                            # cancelled before its turn
            return
        engine: Engine = self._opened.engine
        try:
            job.request_id = engine.add(
                job.prompt, job.request.sampling, job.drafter, DraftSettings(job.k), job.sink, eos_ids=self._opened.eos_ids,
                scope=job.request.conversation, keep_probs=job.request.keep_probs or job.alone)
        except SpecvizError as error:
            job.events.put(error)
            self._end(job, "error")
            return
        self._jobs[job.request_id] = job

    def _cancel_now(self, job: _Job) -> None:
        if job.reason:
            return
        if job.request_id is not None:
            self._opened.engine.cancel(job.request_id)
        self._end(job, "cancelled")

    def _end(self, job: _Job, reason: str) -> None:
        job.reason = reason
        self._jobs.pop(job.request_id, None)
        self._measurements.discard(job)
        self._open.discard(job)
        if job in self._waiting_alone:
            self._waiting_alone.remove(job)
        job.events.put(_END)

    def _fail(self, error: Exception) -> None:
        """A step failed: everybody in it is told, the engine starts afresh, and the next request can run."""
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            error = NotEnoughMemory("The model ran out of memory in the middle of an answer. Shorten the chat, close other programs, or start "
                                    "with a smaller model or a stronger quantization.")
        if not isinstance(error, SpecvizError):
            traceback.print_exception(error, file=sys.stderr)
        self._opened.engine.abort()
        for job in list(self._jobs.values()):
            job.events.put(error)
            self._end(job, "error")

    # ---- helpers ------------------------------------------------------------------------------------------------------
    def _ready(self) -> Opened:
        if self._opened is None:
            status = self._status
            raise Busy(f"The model is still loading ({status.message}) Try again in a moment." if status.state == "loading" else
                       f"No model is loaded: {status.message}")
        return self._opened

    def _drafter(self, name: str) -> Drafter:
        opened = self._ready()
        if name not in DRAFTERS:
            raise InputError(f"There is no drafting method {name!r}; expected one of {', '.join(DRAFTERS)}.")
        if reason := DRAFTERS[name].missing(opened.parts):
            raise InputError(f"{DRAFTERS[name].label} cannot run: {reason}.")
        return opened.drafter(name)

    def _meta(self, request: ChatRequest, prompt: list[int]) -> dict[str, Any]:
        opened, sampling = self._opened, request.sampling
        config = self.config()
        return {
            "target": config["target"], "drafter": config.get("drafter") if request.method == "draft_model" else None,
            "method": request.method, "method_label": DRAFTERS[request.method].label,
            "config": {**config, "method": request.method, "k": request.k if request.method != "plain" else 0},
            "sampling": {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p,
                         "repetition_penalty": sampling.repetition_penalty, "seed": sampling.seed, "max_new_tokens": sampling.max_new_tokens,
                         "stop": list(sampling.stop)},
            "prompt": [dict(message) for message in request.messages], "prompt_tokens": len(prompt),
            "verification": "rejection", "clock": "perf_counter",
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {"specviz": __version__, "python": platform.python_version(), "torch": version("torch"),
                         "transformers": version("transformers")},
            "machine": opened.machine,
        }
