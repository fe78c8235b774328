"""Runs slow work that cannot be interrupted, such as a download that waits for a silent server, so that its caller can still give up.

It knows nothing of what the work is.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Stopped", "watched"]

Result = TypeVar("Result")
_EVERY_S = 0.2


class Stopped(Exception):
    """Raised inside work whose caller has gone, to end it."""


def watched(work: Callable[[Callable[[], None]], Result], look: Callable[[], None]) -> Result:
    """What `work` returns or raises. It runs in a thread of its own; meanwhile `look` is called in this one, several times a second.

    What `look` raises ends the waiting at once. The work is then left behind: it is given a function that raises `Stopped` from that moment
    on, to be called wherever it may end.
    """
    stopped, done = threading.Event(), threading.Event()
    outcome: dict[str, Any] = {}

    def check() -> None:
        if stopped.is_set():
            raise Stopped

    def run() -> None:
        try:
            outcome["result"] = work(check)
        except BaseException as error:
            outcome["error"] = error
        finally:
            done.set()

    threading.Thread(target=run, name="specviz-fetch", daemon=True).start()
    try:
        while not done.wait(_EVERY_S):
            look()
        look()
    except BaseException:
        stopped.set()
        raise
    if error := outcome.pop("error", None):
        try:
            raise error
        finally:
            del error                             # an error holds the frames that it went through, and they would hold it
    return outcome["result"]
