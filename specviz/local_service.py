"""The service on this machine's own engine: loads it, drives it in one thread, and hands every request its steps.

It knows nothing of screens. All work on the model happens in the engine's thread; other threads leave commands and read records.
"""
from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from . import __version__
from .drafters import DRAFTERS
from .driver import Driver
from .engine.drafting import Drafter
from .engine.option import settled
from .engine.rules import RULES
from .errors import Busy, InputError, PromptTooLong
from .job import Job
from .local_run import AnswerText, LocalRun
from .opening import Opened, open_engine
from .options import Options
from .remembered import Remembered
from .service import ChatRequest, Choice, Inspection, Line, MethodInfo, Offer, Status
from .shared_prompt import common_start, under
from .shelf import Shelf

__all__ = ["LocalService"]

_UNLOADED = "No model is loaded. Choose one under Models."


@dataclass(eq=False)
class _Load:
    """One attempt to load. fallback: what to load should it fail, where the pair in use was unloaded for it or a remembered one is tried.

    reason: the sentence to go on showing while the fallback is loaded. is_waiting: for former engines to end, which costs nothing.
    """
    choice: Choice
    unload_first: bool = False
    is_first: bool = False
    is_fallback: bool = False
    fallback: Choice | None = None
    reason: str = ""
    held_bytes: int = 0
    is_waiting: bool = False
    driver: Driver = field(init=False)


class LocalService:
    """See `service.Service`. Loads as soon as it is made; `close` ends its threads.

    opener: loads and builds an engine; tests give a small one. remembered: where the choice is kept from one start to the next.
    make_driver: makes what runs an engine, with the arguments of `Driver`.
    """

    def __init__(self, options: Options, opener: Callable[..., Opened] = open_engine, remembered: Remembered | None = None,
                 make_driver: Callable[..., Driver] = Driver) -> None:
        self._options, self._opener, self._remembered, self._make_driver = options, opener, remembered, make_driver
        self._shelf = Shelf(options)
        self._lock = threading.RLock()
        self._driver: Driver | None = None        # the pair in use
        self._loading: _Load | None = None
        self._leaving: list[Driver] = []          # threads that may still hold memory
        self._choice: Choice | None = None
        self._error, self._number, self._held_bytes = "", 0, 0
        self._alone = threading.Lock()            # transformers changes global defaults while it builds a model
        first = Choice(options.target or "default", options.draft, options.quantization, options.device, options.dtype)
        last = remembered.read() if remembered and options.target is None and options.draft is None else None
        self._chosen = last is not None
        self._begin(_Load(last or first, is_first=True, fallback=first if last not in (None, first) else None))

    # ---- what anyone may ask ------------------------------------------------------------------------------------------
    def status(self) -> Status:
        with self._lock:
            message, fraction = self._loading.driver.progress if self._loading else (_ready_message(self._driver), 1.0)
            common = dict(is_loading=self._loading is not None, last_error=self._error, number=self._number)
            if self._driver:
                return Status("ready", message, fraction, **common)
            if self._loading:
                return Status("loading", message, fraction, **common)
            return Status("failed", self._error, **common) if self._error else Status("unloaded", _UNLOADED, **common)

    def config(self) -> dict[str, Any]:
        return dict(opened.config) if (opened := self._opened) else {}

    def methods(self) -> list[MethodInfo]:
        if not (opened := self._opened):
            return []
        parts, infos = opened.parts, []
        for method in DRAFTERS.values():
            infos.append(MethodInfo(method.name, method.label, method.summary, method.missing(parts), method.note(parts),
                                    opened.options(method.name)))
        return infos

    def default_method(self) -> str:
        return opened.default_method if (opened := self._opened) else ""

    def count_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        return len(opened.codec.render(under(self._options.system_prompt, messages))) if (opened := self._opened) else 0

    def submit(self, request: ChatRequest) -> LocalRun:
        (opened, driver), asked = self._ready(), request
        drafter = self._drafter(opened, request.method)
        if not 1 <= request.k <= 64:
            raise InputError(f"k is {request.k}; expected a draft length from 1 to 64.")
        if request.verification not in RULES:
            raise InputError(f"There is no rule of verification {request.verification!r}; expected one of {', '.join(RULES)}.")
        options = settled(opened.options(request.method), dict(request.options), DRAFTERS[request.method].label)
        if request.prompt is None:
            request = replace(request, messages=under(self._options.system_prompt, request.messages))
            prompt = opened.codec.render(request.messages)
        else:
            prompt = opened.codec.encode(request.prompt, add_special_tokens=True)
        room = opened.parts.cache.capacity - len(prompt)
        if room < 1:
            raise PromptTooLong(f"The conversation has {len(prompt)} tokens; this model has room for {opened.parts.cache.capacity}, answer "
                                "included. Shorten the message or start a new chat.")
        self._options.limits.check_length(len(prompt), request.sampling.max_new_tokens)
        job = Job(prompt, request, drafter, request.k, AnswerText(opened.codec, request.sampling.stop), options=options)
        if not driver.submit(job):
            return self.submit(asked)             # another pair came into use this very moment
        return LocalRun(driver, job, self._meta(opened, request, prompt, options))

    def num_cached_rows(self) -> int:
        """Rows of the target's cache in use: running answers, ended ones that may be of use again, and the operator's system prompt."""
        return len(opened.parts.cache) if (opened := self._opened) else 0

    @property
    def is_measuring(self) -> bool:
        """Whether what a step costs here is still being measured; runs that begin before the end carry no table of it."""
        return (opened := self._opened) is not None and opened.trial is not None

    def forget(self, conversation: str) -> None:
        with self._lock:
            if self._driver:
                self._driver.forget(conversation)

    def close(self) -> None:
        with self._lock:
            drivers = [*self._leaving, *([self._driver] if self._driver else []), *([self._loading.driver] if self._loading else [])]
        for driver in drivers:
            driver.close()

    # ---- which pair ---------------------------------------------------------------------------------------------------
    def choice(self) -> Choice | None:
        with self._lock:
            return self._choice if self._driver else None

    def offers(self) -> list[Offer]:
        return self._shelf.offers(self._held_bytes)

    def advice(self) -> list[Line]:
        return self._shelf.advice()

    def suggestion(self) -> Offer | None:
        return None if self._chosen or self._options.target else self._shelf.suggestion(self._held_bytes)

    def inspect(self, choice: Choice) -> Inspection:
        with self._lock:
            if self._loading:
                raise Busy(f"{self._loading.choice.target} is being loaded. Look again when that has ended.")
        with self._alone:
            return self._shelf.inspect(choice, self._held_bytes)

    def load(self, choice: Choice, *, unload_first: bool = False) -> None:
        with self._lock:
            if self._loading:
                raise Busy(f"{self._loading.choice.target} is being loaded already. Wait for it or cancel it first.")
            self._begin(_Load(choice, unload_first=unload_first))

    def cancel_load(self) -> None:
        with self._lock:
            if load := self._loading:
                load.driver.cancel_loading()
                self._leaving.append(load.driver)
                self._loading = None
                self._restore(load)

    def unload(self) -> None:
        with self._lock:
            if self._driver:
                self._retire(self._driver)
                self._driver, self._error, self._held_bytes = None, "", 0

    def _begin(self, load: _Load) -> None:
        """Let a new driver load in its own thread. Called with the lock held or before anyone else knows of the service."""
        def settled(driver: Driver) -> None:
            self._settled(load)
        self._loading, self._error = load, load.reason
        load.driver = self._make_driver(lambda progress: self._open(load, progress), settled, self._disturbance, self._options.limits)
        load.driver.start()

    def _open(self, load: _Load, progress: Callable[..., None]) -> Opened:
        """In the new driver's thread: make room, then load, one at a time."""
        with self._lock:
            if load.unload_first and self._driver and load is self._loading:
                load.fallback = self._choice
                self._retire(self._driver)
                self._driver, self._held_bytes = None, 0
            leaving = list(self._leaving) if load.unload_first or load.is_fallback else [d for d in self._leaving if d.cancelled]
        for driver in leaving:
            message = ("Waiting until the load that was cancelled has let go" if driver.opened is None else
                       "Waiting until the former model has ended its answers")
            progress(message)
            load.is_waiting = True
            while driver.is_alive:
                progress(message)
                driver.join(0.2)
        load.is_waiting = False
        with self._lock:
            self._leaving = [driver for driver in self._leaving if driver.is_alive]
        choice = load.choice
        method = self._options.method if load.is_first else None
        if load.is_first and load.fallback:
            self._shelf.check_here(choice)        # what was remembered may have been deleted: nothing is fetched unasked
        with self._alone:
            opened = self._opener(replace(self._options, target=choice.target, draft=choice.draft, quantization=choice.quantization,
                                          device=choice.device, dtype=choice.dtype, method=method,
                                          method_options=self._options.method_options if load.is_first else ()), progress)
            opened.shared = common_start(opened.codec, self._options.system_prompt, opened.parts.cache.capacity)
            load.held_bytes = self._shelf.held_bytes(choice)
            return opened

    def _settled(self, load: _Load) -> None:
        """In the driver's thread, when loading has ended: put the pair to use, or stay with the former one."""
        with self._lock:
            if load is not self._loading:         # it was cancelled, though too late to be noticed
                load.driver.retire()
                return
            self._loading = None
            if load.driver.opened is None:
                self._error = load.driver.problem
                self._restore(load)
                return
            former, self._driver, self._choice, self._held_bytes = self._driver, load.driver, load.choice, load.held_bytes
            self._number += 1
            if former:
                self._retire(former, then=load.driver.retune)
            if not (load.is_first or load.is_fallback):
                self._chosen = True
            if self._remembered and not (load.is_first or load.is_fallback):
                self._remembered.write(load.choice)

    def _restore(self, load: _Load) -> None:
        """After a load that came to nothing: what was unloaded for it, or the start without a remembered choice."""
        if load.fallback and not self._driver:
            self._begin(_Load(load.fallback, is_first=load.is_first, is_fallback=True, reason=self._error))

    def _disturbance(self, driver: Driver) -> str:
        """What this machine does besides the answers of one engine: asked by its thread at every step."""
        load, others = self._loading, [*self._leaving, self._driver]
        if (load and load.driver is not driver and not load.is_waiting) or any(each.is_alive and each.cancelled for each in self._leaving):
            return "a model was loading"
        return "another model was answering" if any(each and each is not driver and each.is_answering for each in others) else ""

    def _retire(self, driver: Driver, then: Callable[[], None] | None = None) -> None:
        self._leaving.append(driver)
        driver.retire(then)

    # ---- helpers ------------------------------------------------------------------------------------------------------
    @property
    def _opened(self) -> Opened | None:
        driver = self._driver
        return driver.opened if driver else None

    def _ready(self) -> tuple[Opened, Driver]:
        with self._lock:
            if self._driver and self._driver.opened:
                return self._driver.opened, self._driver
            status = self.status()
        if status.state == "loading":
            raise Busy(f"The model is still loading ({status.message}) Try again in a moment.")
        raise Busy(status.message if status.state == "unloaded" else f"No model is loaded: {status.message}")

    def _drafter(self, opened: Opened, name: str) -> Drafter:
        if name not in DRAFTERS:
            raise InputError(f"There is no drafting method {name!r}; expected one of {', '.join(DRAFTERS)}.")
        if reason := DRAFTERS[name].missing(opened.parts):
            raise InputError(f"{DRAFTERS[name].label} cannot run: {reason}.")
        return opened.drafter(name)

    def _meta(self, opened: Opened, request: ChatRequest, prompt: list[int], options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
        config, sampling, rule = dict(opened.config), request.sampling, RULES[request.verification]
        return {
            "target": config["target"], "drafter": opened.drafter_name(request.method),
            "method": request.method, "method_label": DRAFTERS[request.method].label,
            "config": {**config, "method": request.method, "k": request.k if request.method != "plain" else 0,
                       **({"auto_k": opened.costs is not None} if request.auto_k else {}),
                       "lossless": rule.lossless, "options": dict(options),
                       "changed_options": [option.name for option, (_, value) in zip(opened.options(request.method), options)
                                           if value != option.default]},
            "sampling": {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p,
                         "repetition_penalty": sampling.repetition_penalty, "seed": sampling.seed,
                         "max_new_tokens": sampling.max_new_tokens, "stop": list(sampling.stop)},
            "prompt": [dict(message) for message in request.messages], "prompt_tokens": len(prompt),
            **({"shared_tokens": len(opened.shared)} if opened.shared else {}),
            **({} if request.prompt is None else {"prompt_text": request.prompt}),
            "opens_thinking": opened.codec.decode(prompt[-8:]).rstrip().endswith("<think>"),
            "verification": rule.name, "promise": rule.promise, "clock": "perf_counter",
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {"specviz": __version__, "python": platform.python_version(), "torch": version("torch"),
                         "transformers": version("transformers")},
            "machine": opened.machine, "memory": opened.memory, "guesses_by_text": DRAFTERS[request.method].by_text,
            **({"cost": opened.costs.to_json()} if opened.costs else {}),
        }


def _ready_message(driver: Driver | None) -> str:
    """What the state "ready" says: also how far measuring has come."""
    share = driver.measuring if driver else None
    return "Ready." if share is None else f"Ready. Measuring what a step costs on this machine: {share:.0%}."
