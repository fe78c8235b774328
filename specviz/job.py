"""One request on its way through an engine's thread: what it asks for, where its records go, and its place in the queue.

It knows nothing of engines, threads or text.
"""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.drafting import Drafter
    from .engine.sequence import TextSink
    from .service import ChatRequest

__all__ = ["END", "Job", "scope_of"]

END = object()                # behind a job's last record


@dataclass(eq=False)
class Job:
    """drafter: dropped at the end, or an ended answer would keep a model alive. alone: a plain measurement, which nobody else may disturb.
    options: all of the method's, see `option.settled`. events: `StepTrace` records, or the error that ended it, and then `END`.

    begun: set once the engine works on it, and at the end in any case. place: 0 from then on; before, its number in the queue. reason: why
    it ended; "interrupted" for a measurement that made way for an answer.
    """
    prompt: list[int]
    request: ChatRequest
    drafter: Drafter | None
    k: int
    sink: TextSink
    alone: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    events: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    request_id: int | None = None
    reason: str = ""
    begun: threading.Event = field(default_factory=threading.Event)
    place: int = 0

    def moved(self, place: int) -> None:
        """Its place is now this one; 0 for good."""
        self.place = place
        if not place:
            self.begun.set()

    def end(self, reason: str) -> None:
        """No record comes after this."""
        self.reason, self.drafter = reason, None
        self.moved(0)
        self.events.put(END)


def scope_of(conversation: str) -> str:
    """The engine's name for whose text something is. Whatever a visitor calls a conversation, it is never that of the operator's own."""
    return f"of {conversation}"
