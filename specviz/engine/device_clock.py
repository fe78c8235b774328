"""When a device reached certain points of a step. It knows nothing of engines, and asks the device nothing by itself.

A GPU works behind the host: the host's clock says when work was handed over, events say when it was done. Times between two events can be
read once the host has waited for something later anyway, so timing costs no wait of its own.
"""
from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["CudaClock", "DeviceClock"]


class DeviceClock(Protocol):
    """Marks points by name in the order of the device's work; a name marked again means the later point."""

    def mark(self, name: str) -> None: ...

    def between_ms(self, first: str, second: str) -> float | None:
        """Milliseconds of the device between two points, None where one was not marked or not reached yet."""


class CudaClock:
    """`torch.cuda` events on the current stream, two sets used in turns. Written and not tried: no GPU was at hand."""

    def __init__(self) -> None:
        self._events: dict[str, list[torch.cuda.Event]] = {}
        self._marked: dict[str, torch.cuda.Event] = {}

    def mark(self, name: str) -> None:
        ring = self._events.setdefault(name, [torch.cuda.Event(enable_timing=True) for _ in range(2)])
        ring.reverse()
        ring[0].record()
        self._marked[name] = ring[0]

    def between_ms(self, first: str, second: str) -> float | None:
        events = self._marked.get(first), self._marked.get(second)
        if None in events or not all(event.query() for event in events):
            return None
        return events[0].elapsed_time(events[1])
