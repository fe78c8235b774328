"""Many clients at once against our own engine, some of whom leave, stop, or ask for nonsense: does everybody get what is theirs?

It knows nothing of drafting. Half of the requests go through the HTTP API, half through the service, as the page's do.

    python -m specviz.bench soak [--requests 200] [--clients 50] [--tokens 24] [--target MODEL]
"""
from __future__ import annotations

import argparse
import gc
import json
import queue
import random
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from ..errors import InputError, PromptTooLong, SpecvizError, TooManyRequests
from ..freed_memory import REST_S
from ..limits import Limits
from .own_server import OwnServer, own_server

if TYPE_CHECKING:
    from ..service import Service

__all__ = ["Case", "Report", "cases", "main", "soak"]

PROMPTS = ("Write the numbers from one to twenty as words.", "Repeat: a small model guesses, a large model checks. Repeat it again.",
           "Why is the sky blue?", "Write a Python function that adds two numbers, and call it.",
           "Name three rivers and say where they are.")
KINDS = ("full", "full", "full", "stop", "leave", "too long", "bad option")
LIMITS = Limits(at_once=8, waiting=24)
PATIENCE_S = 240.0               # for one answer, its waiting included; nothing is judged by how long it takes
READ_S = 0.05
MOST_GROWTH = 1.25               # of the process: allocators are never quite where they were


@dataclass(frozen=True, slots=True)
class Case:
    """One request. kind: one of `KINDS`. way: "stream", "whole" or "service". cut: steps or events after which the client leaves."""
    number: int
    kind: str
    prompt: int
    method: str
    way: str
    cut: int = 0


@dataclass(slots=True)
class Report:
    """What came of it. faults: one sentence for every request that did not end as it must; empty is good. ended: how requests ended, by
    kind. num_refused: times the queue was full and the client came back later. rows: cached rows before and after. memory_bytes: of the
    process, likewise, each time when the engine has rested. loaded_bytes: of the process at the end of the load. threads: names of those
    that were left."""
    took_s: float = 0.0
    ended: Counter = field(default_factory=Counter)
    num_refused: int = 0
    num_tokens: int = 0
    rows: tuple[int, int] = (0, 0)
    memory_bytes: tuple[int, int] = (0, 0)
    loaded_bytes: int = 0
    threads: tuple[str, ...] = ()
    faults: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.faults and self.rows[0] == self.rows[1] and not self.threads

    def lines(self) -> list[str]:
        """For the terminal."""
        counts = ", ".join(f"{number} {kind}: {reason}" for (kind, reason), number in sorted(self.ended.items()))
        megabytes = [f"{size / 1e6:.0f}" for size in (self.memory_bytes[0], self.loaded_bytes, self.memory_bytes[1])]
        return [f"{sum(self.ended.values())} requests in {self.took_s:.0f} s, {self.num_tokens} tokens: {counts}",
                f"The queue was full {self.num_refused} times; those clients came back.",
                f"Cached rows before and after: {self.rows[0]}, {self.rows[1]}.",
                f"Memory of the process before, at the end of the load, and when the engine had rested: {', '.join(megabytes)} MB.",
                f"Threads left: {', '.join(self.threads) or 'none'}.",
                *(self.faults[:20] or ["Every request ended as it must; every greedy text is that of a single run."])]


def cases(num_requests: int, methods: Sequence[str], seed: int = 0) -> list[Case]:
    """Requests of every kind, method and way, in random order; the same ones for the same seed."""
    source = random.Random(seed)
    return [Case(number, source.choice(KINDS), source.randrange(len(PROMPTS)), source.choice(methods),
                 source.choice(("stream", "whole", "service", "service")), source.randrange(1, 6)) for number in range(num_requests)]


def soak(own: OwnServer, todo: Sequence[Case], num_clients: int, num_tokens: int, prompts: Sequence[str] = PROMPTS) -> Report:
    """Ask for the texts of single runs first, then everything at once."""
    soaking = _Soak(own, num_tokens, prompts)
    report, waiting = soaking.report, queue.SimpleQueue()
    for case in todo:
        waiting.put(case)

    def client() -> None:
        with httpx.Client(base_url=f"http://{own.url}", headers={"Authorization": f"Bearer {own.key}"}, timeout=PATIENCE_S) as http:
            while True:
                try:
                    case = waiting.get_nowait()
                except queue.Empty:
                    return
                soaking.run(case, http)
    for method in dict.fromkeys(case.method for case in todo):       # what is made at a method's first use is there before
        soaking.single(prompts[0], method)
    before = _state(own.service)
    threads = [threading.Thread(target=client, name=f"soak-{number}", daemon=True) for number in range(num_clients)]
    begin_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S + 60)
    report.took_s, report.loaded_bytes = time.monotonic() - begin_s, psutil.Process().memory_info().rss
    report.faults += [f"{thread.name} was never answered." for thread in threads if thread.is_alive()]
    after = _state(own.service)
    report.rows, report.memory_bytes = (before[0], after[0]), (before[1], after[1])
    report.threads = tuple(thread.name for thread in threading.enumerate() if thread.name.startswith("specviz-answer"))
    return report


def _state(service: Service) -> tuple[int, int]:
    """Cached rows, once they stay as many, and bytes of the process, once the engine has had time to give back what was freed."""
    num_rows, same = service.num_cached_rows(), 0
    while same < 10:                             # who left is let go of in the next step
        time.sleep(READ_S)
        num_rows, last = service.num_cached_rows(), num_rows
        same = same + 1 if num_rows == last else 0
    gc.collect()
    time.sleep(2 * REST_S)
    return num_rows, psutil.Process().memory_info().rss


class _Soak:
    """One soak: the texts of single runs, and how each kind of request is asked and judged."""

    def __init__(self, own: OwnServer, num_tokens: int, prompts: Sequence[str]) -> None:
        self.report = Report()
        self._own, self._num_tokens, self._prompts, self._lock = own, num_tokens, prompts, threading.Lock()
        self._model = own.service.config()["target"]
        self._alone = [self.single(prompt) for prompt in prompts]

    def single(self, prompt: str, method: str = "plain") -> str:
        """The text of a run that has the engine to itself."""
        run = self._own.service.submit(self._request(prompt, method, ()))
        for _ in run:
            pass
        self._own.service.forget("soak")
        return run.text

    def _request(self, prompt: str, method: str, stop: Sequence[str], options: tuple[tuple[str, Any], ...] = (),
                 conversation: str = "soak") -> Any:
        from ..engine.sampling import SamplingParams
        from ..service import ChatRequest
        sampling = SamplingParams(max_new_tokens=self._num_tokens, stop=tuple(stop))
        return ChatRequest(({"role": "user", "content": prompt},), sampling, method, 4, keep_probs=False, conversation=conversation, options=options)

    def run(self, case: Case, http: httpx.Client) -> None:
        """Ask until there is room, and write down what came of it."""
        try:
            while (found := (self._through_service if case.way == "service" else self._through_http)(case, http)) is None:
                with self._lock:
                    self.report.num_refused += 1
                time.sleep(4 * READ_S)
            reason, text = found
            fault = self._judged(case, reason, text)
        except Exception as error:                   # whatever it is, it is the report's to tell
            reason, fault = "fault", f"{type(error).__name__}: {error}"
        with self._lock:
            self.report.ended[case.kind, reason] += 1
            if fault:
                self.report.faults.append(f"Request {case.number} ({case.kind}, {case.method}, {case.way}): {fault}")

    def _stop(self, case: Case) -> str:
        """A piece from the middle of the text of a single run."""
        text = self._alone[case.prompt]
        return text[len(text) // 2:len(text) // 2 + 3] if case.kind == "stop" else ""

    def _prompt(self, case: Case) -> str:
        return "word " * 20_000 if case.kind == "too long" else self._prompts[case.prompt]

    def _through_service(self, case: Case, http: httpx.Client) -> tuple[str, str] | None:
        conversation = uuid.uuid4().hex
        stop = [self._stop(case)] if case.kind == "stop" else []
        options = (("telepathy", 1),) if case.kind == "bad option" else ()
        try:
            run = self._own.service.submit(self._request(self._prompt(case), case.method, stop, options, conversation))
        except TooManyRequests:
            return None
        except PromptTooLong:
            return "too long", ""
        except InputError:
            return "refused", ""
        for number, step in enumerate(run):
            self._count(len(step.emitted))
            if case.kind == "leave" and number + 1 >= case.cut:
                run.cancel()
        self._own.service.forget(conversation)
        return run.reason, run.text

    def _through_http(self, case: Case, http: httpx.Client) -> tuple[str, str] | None:
        body: dict[str, Any] = {"model": self._model, "messages": [{"role": "user", "content": self._prompt(case)}], "temperature": 0,
                                "max_tokens": self._num_tokens, "stream": case.way == "stream" or case.kind == "leave",
                                "speculative": {"method": case.method, "k": 4}}
        if case.kind == "stop":
            body["stop"] = self._stop(case)
        if case.kind == "bad option":
            body["temperature"] = "warm"
        text, reason = "", "left"
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code == 429:
                return None
            if answer.status_code != 200:
                error = json.loads(answer.read())["error"]
                known = "too long" if error["code"] == "context_length_exceeded" else "refused"
                return known if answer.status_code == 400 else str(error), ""
            if not body["stream"]:
                whole = json.loads(answer.read())
                self._count(whole["usage"]["completion_tokens"])
                return whole["choices"][0]["finish_reason"], whole["choices"][0]["message"]["content"]
            for number, line in enumerate(line for line in answer.iter_lines() if line.startswith("data: {")):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return event["error"]["message"], text
                text += event["choices"][0]["delta"].get("content", "")
                reason = event["choices"][0]["finish_reason"] or reason
                if case.kind == "leave" and number >= case.cut:
                    break
        return reason, text

    def _count(self, num_tokens: int) -> None:
        with self._lock:
            self.report.num_tokens += num_tokens

    def _judged(self, case: Case, reason: str, text: str) -> str:
        """What is wrong with how a request ended; "" if nothing is."""
        alone, stop = self._alone[case.prompt], self._stop(case)
        expected = {"too long": ("too long",), "bad option": ("refused",), "stop": ("stop",)}.get(case.kind, ("length", "eos", "stop"))
        if case.kind == "leave":
            expected += ("cancelled", "left", "abort")
        if reason not in expected:
            return f"it ended with {reason!r}; expected {' or '.join(expected)}."
        if case.kind == "full" and text != alone:
            return f"its text is {text!r}; alone it is {alone!r}."
        if case.kind == "stop" and text != alone[:alone.index(stop)]:
            return f"its text before {stop!r} is {text!r}; alone it is {alone[:alone.index(stop)]!r}."
        if case.kind == "leave" and not alone.startswith(text):
            return f"its text so far is {text!r}; alone it begins {alone[:len(text)]!r}."
        return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Soak, print the report. Returns the process's exit code: 1 where anything was not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m specviz.bench soak", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200, metavar="N")
    parser.add_argument("--clients", type=int, default=50, metavar="N", help="clients that ask at the same time (default: 50)")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="tokens per answer at most (default: 24)")
    parser.add_argument("--target", metavar="MODEL", help="model (default: the default model)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    given = parser.parse_args(argv)
    try:
        with own_server(given.target, LIMITS) as own:
            methods = [method.name for method in own.service.methods() if method.available]
            report = soak(own, cases(given.requests, methods, given.seed), given.clients, given.tokens)
    except SpecvizError as error:
        print(f"specviz: {error}", file=sys.stderr)
        return 1
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("specviz")]
    report.threads += tuple(left)
    print("\n".join(report.lines()))
    return 0 if report.is_good and report.memory_bytes[1] < MOST_GROWTH * report.memory_bytes[0] else 1
