"""One engine in a thread of its own: opens it, drives it, and hands every request its steps.

It knows nothing of prompts' text, of other engines or of screens. All work on the model happens in its thread; other threads leave
commands and read records. Two drivers can live side by side: one answers while the other is still loading.
"""
from __future__ import annotations

import gc
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from .engine.drafting import DraftSettings
from .engine.rules import RULES
from .errors import NotEnoughMemory, SpecvizError
from .freed_memory import Freed
from .job import END, Job, scope_of
from .limits import Limits
from .opening import Opened
from .shared_prompt import SharedPrompt
from .trace import StepTrace

__all__ = ["Driver", "Job", "LoadCancelled"]


class LoadCancelled(Exception):
    """Raised out of `progress` in the middle of loading, so that everything taken so far is let go."""


class Driver:
    """Opens an engine and runs it until it is retired or closed.

    open_engine: called with `progress(message, fraction)`, in the driver's thread. settled: called with the driver, in its thread, once
    opening has ended: `opened` is there, or `problem` says why not ("" when it was cancelled). disturbed: what else the machine is busy
    with, asked before and after every step; "" for nothing. limits: how many answers run at a time, and how many may wait.
    """

    def __init__(self, open_engine: Callable[[Callable[..., None]], Opened], settled: Callable[[Driver], None],
                 disturbed: Callable[[Driver], str] = lambda driver: "", limits: Limits = Limits()) -> None:
        self.opened: Opened | None = None
        self.problem = ""
        self.progress: tuple[str, float | None] = ("Starting.", None)
        self.measuring: float | None = None       # how much of the cost table is measured, while it is
        self._open_engine, self._settled, self._disturbed, self._limits = open_engine, settled, disturbed, limits
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._open: set[Job] = set()              # chat turns that have not ended, waiting ones included
        self._waiting_alone: deque[Job] = deque()
        self._measurements: set[Job] = set()
        self._cancelled, self._closing, self._retired = threading.Event(), threading.Event(), threading.Event()
        self._freed = Freed()
        self._retune = self._ended = False
        self._then: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._main, name="specviz-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- what any thread may ask --------------------------------------------------------------------------------------
    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> bool:
        """Queue a chat turn; a measurement in progress makes way. False if this engine takes no more. Raises TooManyRequests."""
        with self._lock:
            if self._retired.is_set():
                return False
            if len(self._open) >= self._limits.most_open:
                raise self._limits.queue_full()
            job.place = max(0, len(self._open) - self._limits.at_once + 1)
            self._open.add(job)
        self._commands.put(self._make_way)
        self._commands.put(lambda: self._start(job))
        return True

    def measure(self, job: Job) -> bool:
        """Queue a job that has the engine to itself: it starts once nobody else runs, and ends as "interrupted" when somebody comes. False
        if this engine takes no more."""
        with self._lock:
            if self._retired.is_set() or len(self._measurements) >= self._limits.most_open:
                return False
            self._measurements.add(job)
        self._commands.put(lambda: self._waiting_alone.append(job))
        return True

    @property
    def num_answers(self) -> int:
        """Answers that are being written or wait for it."""
        return len(self._open)

    def forget(self, conversation: str) -> None:
        """Free what the engine keeps of a conversation's ended requests."""
        self._commands.put(lambda: self.opened.engine.forget(scope_of(conversation)))

    def cancel(self, job: Job) -> None:
        self._commands.put(lambda: self._cancel_now(job))

    def events(self, job: Job) -> Iterator[StepTrace]:
        """A job's records until it ends. Raises the error that ended it."""
        while (event := job.events.get()) is not END:
            if isinstance(event, Exception):
                raise event
            yield event

    @property
    def is_answering(self) -> bool:
        """Whether this engine computes: an answer or a measurement."""
        return bool(self._open or any(job.place == 0 for job in list(self._measurements)))

    def cancel_loading(self) -> None:
        """Give up loading at its next report of progress."""
        self._cancelled.set()

    def retire(self, then: Callable[[], None] | None = None) -> None:
        """Take no more requests; running answers end first, measurements end now, then the memory is freed and `then` is called."""
        with self._lock:
            self._retired.set()
            measurements = list(self._measurements)
            if not self._ended:
                self._then, then = then or self._then, None
        if then is not None:
            then()
        for measurement in measurements:
            self.cancel(measurement)
        self._commands.put(lambda: None)

    def retune(self) -> None:
        """Choose the number of threads again, once nobody is being answered: it was measured beside another engine."""
        def due() -> None:
            self._retune = True
        self._commands.put(due)

    def close(self, timeout_s: float = 10) -> None:
        """End at once; running answers are cancelled."""
        self._cancelled.set()
        self._closing.set()
        self.retire()
        self.join(timeout_s)

    def join(self, timeout_s: float | None = None) -> None:
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(timeout_s)

    # ---- its own thread -----------------------------------------------------------------------------------------------
    def _main(self) -> None:
        self._load()
        if self.opened is None:
            self._let_go()                        # first the memory, then the word that it failed
            self._settled(self)
        else:
            self._settled(self)
            self._drive()
            self._let_go()
        with self._lock:
            self._ended = True
        if self._then is not None:
            self._then()

    def _load(self) -> None:
        try:
            opened = self._open_engine(self._report)
            opened.engine.scheduler.max_rows = self._limits.at_once
            opened.engine.scheduler.max_parked = max(opened.engine.scheduler.max_parked, self._limits.at_once)
            self._report("Ready.", 1.0)           # the last moment at which it can be cancelled
            self.opened = opened
        except LoadCancelled:
            pass
        except Exception as error:
            if not self.cancelled:
                self.problem = _sentence(error)

    def _report(self, message: str, fraction: float | None = None) -> None:
        if self._cancelled.is_set():
            raise LoadCancelled
        self.progress = (message, fraction)

    def _drive(self) -> None:
        engine = self.opened.engine
        shared = self._shared = SharedPrompt(self.opened.shared, ("plain", self.opened.default_method))
        while not self._closing.is_set() and not (self._retired.is_set() and not self._open):
            if engine.idle and shared.is_due:
                shared.begin(self.opened)
            rest_s = self._tidied(engine.cache.num_freed_bytes, engine.idle)
            self._obey(engine.idle and not self._waiting_alone and not self._retune and self.opened.trial is None, rest_s)
            if engine.idle and self._waiting_alone and not self._retune:
                self._start(self._waiting_alone.popleft())
            try:
                if engine.idle and self._retune:
                    self._retune = False
                    self.opened.tune()
                if engine.idle and self.opened.trial is not None:
                    self.measuring = self.opened.measure_piece()      # whoever asks something meanwhile waits for this piece only
                beside = "" if engine.idle else self._disturbed(self)
                stepped = engine.step()
                beside = beside or (self._disturbed(self) if stepped else "")
            except Exception as error:
                self._fail(error)
                continue
            for result in stepped:
                job = self._jobs.get(result.sequence.id)
                if job is None:                   # the operator's system prompt was read
                    continue
                if result.trace.kind == "prefill":
                    shared.heard(job.request.method, result.trace.num_reused)
                job.events.put(replace(result.trace, disturbed=beside) if beside else result.trace)
                if result.sequence.reason:
                    self._end(job, result.sequence.reason)
            self._tell_places()
        for job in [*self._open, *self._measurements]:
            self._cancel_now(job)

    def _let_go(self) -> None:
        """Drop everything that holds weights and give the memory back."""
        if self.opened is not None:
            self.opened.trial = None
        self.opened = None
        self._jobs.clear()
        self._waiting_alone.clear()
        while not self._commands.empty():
            self._commands.get_nowait()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._freed.give_back()

    def _tidied(self, num_freed_bytes: int, is_idle: bool) -> float | None:
        """Give memory back if it is time for it. Returns how long until then, None if nothing is to be given back."""
        if not is_idle:
            self._freed.work()
            return None
        if (rest_s := self._freed.rest_s(num_freed_bytes)) == 0:
            self._freed.give_back()
            return None
        return rest_s

    def _obey(self, wait: bool, rest_s: float | None) -> None:
        """Carry out the commands that lie there; `wait` for one when there is nothing else to do, rest_s at most."""
        try:
            self._commands.get(block=wait, timeout=rest_s if wait else None)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            pass

    def _start(self, job: Job) -> None:
        if job.reason:                            # cancelled before its turn
            return
        try:
            settings = DraftSettings(job.k, job.options)
            job.request_id = self.opened.engine.add(
                job.prompt, job.request.sampling, job.drafter, settings, job.sink, eos_ids=self.opened.eos_ids,
                scope=scope_of(job.request.conversation), keep_probs=job.request.keep_probs or job.alone,
                rule=RULES[job.request.verification],
                pilot=self.opened.pilot(job.drafter, settings) if job.request.auto_k and not job.alone else None)
        except SpecvizError as error:
            job.events.put(error)
            self._end(job, "error")
            return
        self._jobs[job.request_id] = job
        if job.alone:
            job.moved(0)

    def _tell_places(self) -> None:
        """Who waits learns how long the queue before it is, who has a row that its turn has come."""
        places = {sequence.id: place for place, sequence in enumerate(self.opened.engine.scheduler.waiting, 1)}
        for request_id, job in self._jobs.items():
            if not job.begun.is_set():
                job.moved(places.get(request_id, 0))

    def _make_way(self) -> None:
        """End the measurement in progress, if any; whoever reads it may queue it again."""
        for job in [job for job in self._jobs.values() if job.alone]:
            self._cancel_now(job, "interrupted")

    def _cancel_now(self, job: Job, reason: str = "cancelled") -> None:
        if job.reason:
            return
        if job.request_id is not None:
            self.opened.engine.cancel(job.request_id)
        self._end(job, reason)

    def _end(self, job: Job, reason: str) -> None:
        self._jobs.pop(job.request_id, None)
        with self._lock:
            self._measurements.discard(job)
            self._open.discard(job)
        if job in self._waiting_alone:
            self._waiting_alone.remove(job)
        job.end(reason)

    def _fail(self, error: Exception) -> None:
        """A step failed: everybody in it is told, the engine starts afresh, and the next request can run."""
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            error = NotEnoughMemory("The model ran out of memory in the middle of an answer. Shorten the chat, close other programs, or "
                                    "start with a smaller model or a stronger quantization.")
        if not isinstance(error, SpecvizError):
            traceback.print_exception(error, file=sys.stderr)
        self.opened.engine.abort()
        self._shared.lost()
        for job in list(self._jobs.values()):
            job.events.put(error)
            self._end(job, "error")


def _sentence(error: Exception) -> str:
    """What the page says of a load that failed; only what nobody foresaw goes to the terminal as well."""
    if isinstance(error, SpecvizError):
        return str(error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return ("The memory does not suffice for this model. Choose a smaller one or a stronger quantization, or unload the present one "
                "first.")
    traceback.print_exception(error, file=sys.stderr)
    return (f"The model could not be loaded ({type(error).__name__}: {error}). The terminal shows where; recorded runs can be played "
            "meanwhile.")
