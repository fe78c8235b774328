"""Server-sent events out of a byte stream, as the WHATWG standard describes them. It knows nothing of what the events say.

Bytes may be cut anywhere: in the middle of a line, of a line break, or of a character.
"""
from __future__ import annotations

import codecs

__all__ = ["SseParser"]


class SseParser:
    """`feed` bytes as they come, get the data of each event that is complete. Comments, blank events and other fields are passed over."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._rest = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        text = self._rest + self._decode(chunk)
        held = text.endswith("\r")                      # perhaps half of a "\r\n"
        lines = (text[:-1] if held else text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._rest = lines.pop() + ("\r" if held else "")
        return [event for line in lines for event in self._line(line)]

    def finish(self) -> list[str]:
        """What a stream leaves that ended without its last blank line."""
        events = self.feed(b"\n\n")
        return events

    def _line(self, line: str) -> list[str]:
        if not line:
            event, self._data = "\n".join(self._data), []
            return [event] if event else []
        field, _, value = line.partition(":")
        if field == "data":
            self._data.append(value.removeprefix(" "))
        return []
