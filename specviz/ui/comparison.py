"""One prompt through several drafting methods, one after the other, with one plain run for all of them.

It knows nothing of components: a generator over `service.submit()` yields the bodies of the viewer's `compare` messages. Methods are never
run at the same time, or each would disturb the other's times.
"""
from __future__ import annotations

import json
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import metrics
from ..errors import InputError, SpecvizError
from ..trace import PlainToken, Trace
from .bodies import trace_file
from .slicer import encode

if TYPE_CHECKING:                # the service imports torch; the page opens without waiting for it
    from ..service import ChatRequest, MethodInfo, Service

__all__ = ["Wanted", "choices", "compare"]

MOST_TOKENS, MOST_METHODS, MOST_CHARACTERS = 512, 16, 20_000
WARM_UP_TOKENS = 8
PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the page asked for. ticket: the page's own number for this comparison; it comes back with every message."""
    ticket: int
    prompt: str
    methods: tuple[MethodInfo, ...]
    num_tokens: int

    @classmethod
    def read(cls, event: Any, methods: Sequence[MethodInfo]) -> Wanted:
        """From the browser's event, which is not trusted. methods: those of the pair in use. Raises InputError."""
        ticket, prompt, names, num_tokens = (getattr(event, name, None) for name in ("ticket", "prompt", "methods", "num_tokens"))
        if not isinstance(prompt, str) or not prompt.strip():
            raise InputError("The prompt is empty; write one, or send one in the chat first.")
        if len(prompt) > MOST_CHARACTERS:
            raise InputError(f"The prompt has {len(prompt):,} characters; expected at most {MOST_CHARACTERS:,}.")
        known = {method.name: method for method in methods if method.available and method.name != "plain"}
        if not isinstance(names, list) or not names or len(names) > MOST_METHODS or any(name not in known for name in map(str, names)):
            raise InputError(f"The methods are {json.dumps(names)[:200]}; expected some of {', '.join(known) or 'those of a loaded model'}.")
        if not isinstance(num_tokens, int) or not 1 <= num_tokens <= MOST_TOKENS:
            raise InputError(f"The number of new tokens is {str(num_tokens)[:40]}; expected 1 to {MOST_TOKENS}.")
        return cls(ticket if isinstance(ticket, int) else 0, prompt.strip(), tuple(known[str(name)] for name in names), num_tokens)


def choices(service: Service) -> str:
    """JSON for the view's boxes: [{name, label, summary, reason, note}] of every method that drafts; empty until a model is loaded."""
    return encode([{"name": method.name, "label": method.label, "summary": method.summary, "reason": method.reason, "note": method.note}
                   for method in service.methods() if method.name != "plain"])


def compare(service: Service, wanted: Wanted, requests: Sequence[ChatRequest], is_stopped: Callable[[], bool],
            clock: Callable[[], float] = time.monotonic) -> Iterator[dict[str, Any]]:
    """Run the requests, one per method, in order. Before each measured run a short one, uncounted, warms everything up.

    Yields {"at", "phase", "num_tokens"} while a method runs, {"at", "trace"} with its whole file when it has ended, {"at", "failed"} with a
    sentence if it cannot run, and at the end {"state": "done" or "stopped"}. The plain run behind the first answer is everybody's baseline.
    """
    plain: tuple[PlainToken, ...] = ()
    for at, request in enumerate(requests):
        if is_stopped():
            break
        yield {"at": at, "phase": "warm-up", "num_tokens": 0}
        try:
            for _ in _run(service, replace(request, sampling=replace(request.sampling, max_new_tokens=WARM_UP_TOKENS)), is_stopped):
                pass
            if is_stopped():
                break
            last_s, trace = float("-inf"), None
            for phase, num_tokens, trace in _run(service, request, is_stopped, measure=not plain):
                if trace is None and clock() - last_s >= PROGRESS_S:
                    last_s = clock()
                    yield {"at": at, "phase": phase, "num_tokens": num_tokens}
            if trace is None:
                break
        except Exception as error:               # the other methods may work
            if not isinstance(error, SpecvizError):
                traceback.print_exception(error, file=sys.stderr)
            yield {"at": at, "failed": str(error) or type(error).__name__}
            continue
        plain = plain or trace.plain
        yield {"at": at, "trace": trace_file(_against(trace, plain))}
    yield {"state": "stopped" if is_stopped() else "done"}


def _run(service: Service, request: ChatRequest, is_stopped: Callable[[], bool], measure: bool = False) -> Iterator[tuple[str, int, Trace | None]]:
    """(phase, tokens so far, None) for every step, then the whole trace unless it was stopped."""
    run = service.submit(replace(request, conversation=uuid.uuid4().hex))    # nothing is taken over from the method before
    num_tokens = 0
    try:
        while not run.wait(PROGRESS_S):
            yield "waiting", 0, None
            if is_stopped():
                return
        for step in run:
            num_tokens += len(step.emitted)
            yield "answer", num_tokens, None
            if is_stopped():
                return
        if measure:
            with closing(run.measure_plain(num_tokens)) as tokens:
                num_done = 0
                for token in tokens:
                    num_done += isinstance(token, PlainToken)
                    yield "plain" if isinstance(token, PlainToken) else "waiting", num_done, None
                    if is_stopped():
                        return
        yield "done", num_tokens, run.trace()
    finally:
        run.cancel()


def _against(trace: Trace, plain: tuple[PlainToken, ...]) -> Trace:
    """The trace with the common baseline, and what follows from it."""
    trace = replace(trace, plain=plain)
    return replace(trace, stats=metrics.summarize(trace).to_dict(), compare=metrics.compare(trace))
