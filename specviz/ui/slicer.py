"""Turns the stream of step and token records into few, small messages for the viewer, and keeps them for a resync.

It knows nothing of Gradio, models or figures; a message is one JSON string with `run` and a growing `seq`.
"""
from __future__ import annotations

import json
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from .. import trace as records
from ..trace import PlainToken, StepTrace

__all__ = ["Archive", "MAX_MESSAGE_BYTES", "SLICE_S", "Slicer", "encode"]

SLICE_S = 0.05               # 20 messages a second: more costs the server time that a CPU engine needs, and the eye sees no difference
MAX_MESSAGE_BYTES = 16_000
_ENVELOPE_BYTES = 400        # run, seq, type and a status line around the records


def encode(body: dict[str, Any]) -> str:
    """Compact JSON. A lone surrogate, which no socket can send as UTF-8, becomes U+FFFD."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode("utf-8") if any("\ud800" <= char <= "\udfff" for char in text) else text


class Archive:
    """The messages of the last runs, so that a page that missed some can ask again.

    Run ids are random (uuid4): whoever cannot see a run cannot name it. At most `max_runs` runs of one visitor and `max_bytes` of text in
    all are kept, the oldest run goes first; the run being written is never dropped.
    """

    def __init__(self, max_runs: int = 4, max_bytes: int = 64_000_000) -> None:
        self.max_runs, self.max_bytes = max_runs, max_bytes
        self._runs: OrderedDict[str, list[str]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._owners: dict[str, str] = {}
        self._lock = threading.Lock()

    def keep(self, run: str, message: str, owner: str = "") -> None:
        """owner: the visitor whose run it is."""
        with self._lock:
            self._runs.setdefault(run, []).append(message)
            self._runs.move_to_end(run)
            self._owners[run] = owner
            self._sizes[run] = self._sizes.get(run, 0) + len(message.encode())
            theirs = [each for each in self._runs if self._owners[each] == owner]
            for each in theirs[:-self.max_runs]:
                self._drop(each)
            while len(self._runs) > 1 and sum(self._sizes.values()) > self.max_bytes:
                self._drop(next(iter(self._runs)))

    def forget(self, owner: str) -> None:
        """Drop all runs of a visitor."""
        with self._lock:
            for run in [run for run, name in self._owners.items() if name == owner]:
                self._drop(run)

    def _drop(self, run: str) -> None:
        del self._runs[run], self._sizes[run], self._owners[run]

    def resync(self, run: str, from_seq: int) -> str:
        """A `resync` message with every kept message of `run` from `from_seq` on; empty for an unknown run or a bad number.

        Both arguments come from a browser and are not trusted.
        """
        valid = isinstance(run, str) and isinstance(from_seq, int) and not isinstance(from_seq, bool) and from_seq >= 0
        with self._lock:
            messages = list(self._runs.get(run, ())[from_seq:]) if valid else []
        known = '"run":' + encode(run) + "," if valid else ""
        return '{"v":1,"type":"resync",' + known + '"messages":[' + ",".join(messages) + "]}"


class Slicer:
    """Collects the records of one run and hands back the messages that are due.

    Every method returns a list of messages, usually empty or with one entry, to be sent in order:

        for step in run:
            for message in slicer.step(step):
                yield message

    A message leaves when `slice_s` have passed since the last one, or when the next record would take it over `max_bytes` of UTF-8; a
    single record above `max_bytes` goes alone. So there are at most 1 + duration / slice_s messages plus those forced out by size.
    `clock` returns seconds and is injected for tests.
    """

    def __init__(self, run: str | None = None, *, archive: Archive | None = None, clock: Callable[[], float] = time.monotonic,
                 slice_s: float = SLICE_S, max_bytes: int = MAX_MESSAGE_BYTES, owner: str = "") -> None:
        self.run = run or uuid.uuid4().hex
        self.archive = archive if archive is not None else Archive()
        self.slice_s, self.max_bytes, self._owner = slice_s, max_bytes, owner
        self._clock = clock
        self._seq = 0
        self._sent_s: float | None = None
        self._kind = ""              # what `_parts` holds: "steps" or "plain"
        self._parts: list[str] = []
        self._bytes = 0
        self._status: str | None = None

    @property
    def seq(self) -> int:
        """Number of the next message."""
        return self._seq

    def start(self, body: dict[str, Any]) -> list[str]:
        """The first message of a run; `body` is what `viewer.start_body` made."""
        return self.flush() + [self._send("start", encode(body))]

    def status(self, text: str) -> None:
        """The status line that the next message carries."""
        self._status = text

    def step(self, step: StepTrace) -> list[str]:
        return self._add("steps", encode(records.to_dict(step)))

    def plain(self, token: PlainToken) -> list[str]:
        return self._add("plain", encode(records.to_dict(token)))

    def flush(self) -> list[str]:
        """What has been collected, whether due or not."""
        if not self._parts:
            return []
        key = "steps" if self._kind == "steps" else "tokens"
        body = '{"' + key + '":[' + ",".join(self._parts) + "]}"
        kind, self._parts, self._bytes = self._kind, [], 0
        return [self._send(kind, body)]

    def end(self, body: dict[str, Any]) -> list[str]:
        """Everything left and the `end` message: `stats`, `compare`, `reason`, `status`."""
        return self.flush() + [self._send("end", encode(body))]

    def error(self, kind: str, message: str) -> list[str]:
        """Everything left and an `error` message; `message` is a sentence for people."""
        return self.flush() + [self._send("error", encode({"error": {"kind": kind, "message": message}}))]

    def trace(self, body: dict[str, Any]) -> list[str]:
        """A whole recording in one message; `body` is what `viewer.trace_body` made."""
        return self.flush() + [self._send("trace", encode(body))]

    def resync(self, run: str, from_seq: int) -> str:
        """See `Archive.resync`."""
        return self.archive.resync(run, from_seq)

    def _add(self, kind: str, record: str) -> list[str]:
        size, out = len(record.encode()) + 1, []
        if self._parts and (kind != self._kind or self._bytes + size > self.max_bytes - _ENVELOPE_BYTES):
            out += self.flush()
        self._kind = kind
        self._parts.append(record)
        self._bytes += size
        if self._sent_s is None or self._clock() - self._sent_s >= self.slice_s:
            out += self.flush()
        return out

    def _send(self, kind: str, body: str) -> str:
        head = {"v": 1, "type": kind, "run": self.run, "seq": self._seq}
        if self._status is not None and kind in ("steps", "plain"):
            head["status"], self._status = self._status, None
        message = encode(head)[:-1] + ("," + body[1:] if len(body) > 2 else "}")
        self._seq += 1
        self._sent_s = self._clock()
        self.archive.keep(self.run, message, self._owner)
        return message
