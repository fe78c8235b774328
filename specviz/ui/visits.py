"""One update of the page's live outputs, and what the server remembers of an open page. It knows nothing of what is said there."""
from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gradio as gr

from .messages import Look, Message
from .slicer import Slicer

if TYPE_CHECKING:                # the service imports torch; the page opens without waiting for it
    from ..service import Run

__all__ = ["Pace", "SKIP", "Screen", "Visit", "Visits"]

SKIP = gr.skip()


class Screen(tuple):
    """One update of the page's live outputs, in the order of `FIELDS`; what is not named stays as it is."""
    FIELDS = ("viewer", "chat", "status", "prompt", "more", "bar")

    def __new__(cls, **changes: Any) -> Screen:
        assert changes.keys() <= set(cls.FIELDS)
        return super().__new__(cls, (changes.get(name, SKIP) for name in cls.FIELDS))

    def viewer_only(self) -> Screen:
        """For a turn that is over: the next question is on the screen already."""
        return Screen(viewer=self[0])


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass(slots=True)
class Visit:
    """What the server remembers of one open page.

    turn: number of the last question; a generator of an earlier turn must not touch the chat any more. busy: a question waits or is
    being answered. look: how texts are shown. chat: what the chat shows, as far as this turn has changed it. system: the last request's
    system prompt. num_dropped: turns that were left out of its prompt. pair: `Status.number` of the pair whose methods its menu shows.
    quiet: set unless a run of this page sends to its viewer. seen_s: when the page was last heard of. stopped: Stop was
    pressed. interrupted: someone waits, so end the plain measurement. halted: comparisons that were stopped, by ticket.
    """
    turn: int = 0
    busy: bool = False
    quiet: threading.Event = field(default_factory=_set)
    seen_s: float = 0.0
    stopped: threading.Event = field(default_factory=threading.Event)
    interrupted: threading.Event = field(default_factory=threading.Event)
    run: Run | None = None
    slicer: Slicer | None = None
    drafted: list[int] = field(default_factory=list)
    look: Look = Look()
    chat: list[Message] | None = None
    system: str = ""
    num_dropped: int = 0
    pair: int | None = None
    halted: set[int] = field(default_factory=set)

    @property
    def live(self) -> bool:
        return not self.quiet.is_set()


class Pace:
    """Says when the next update is due, at most one per `interval_s`."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self._interval_s, self._clock, self._last_s = interval_s, clock, float("-inf")

    def due(self) -> bool:
        now = self._clock()
        if now - self._last_s < self._interval_s:
            return False
        self._last_s = now
        return True


class Visits:
    """The open pages by their session hash. Who is silent for `forget_s` seconds is forgotten, beyond `max_visits` who was silent longest."""

    def __init__(self, max_visits: int = 256, forget_s: float = 3600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_visits, self._forget_s, self._clock = max_visits, forget_s, clock
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, request: gr.Request) -> Visit:
        key = str(request.session_hash)
        with self._lock:
            visit = self._visits.setdefault(key, Visit())
            self._visits.move_to_end(key)
            visit.seen_s = self._clock()
            return visit

    def forget(self, request: gr.Request) -> None:
        with self._lock:
            self._visits.pop(str(request.session_hash), None)

    def interrupt(self) -> None:
        """End plain measurements, everybody's: a conversation that waits comes first."""
        with self._lock:
            for visit in self._visits.values():
                visit.interrupted.set()

    def expired(self) -> list[str]:
        """Forget who was silent for too long, and beyond `max_visits` who was silent longest; returns their names."""
        now, gone = self._clock(), []
        with self._lock:
            for name, visit in list(self._visits.items()):          # longest silent first
                if not visit.busy and not visit.live and (now - visit.seen_s > self._forget_s or len(self._visits) > self._max_visits):
                    del self._visits[name]
                    gone.append(name)
        return gone
