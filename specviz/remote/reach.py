"""How a server is reached besides its address and key: extra headers, a CA file, patience. It knows no server and sends nothing.

Header values are secrets like the key: no repr, error sentence or record of this program holds them.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InputError

__all__ = ["MOST_SECONDS", "Reach", "read_header", "read_seconds"]

MOST_SECONDS = 86_400
NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")                      # a token of RFC 9110, 5.6.2
VALUE = re.compile(r"[\t\x20-\x7e]*")                                # what the HTTP client encodes; a line break would begin another header
OURS = ("content-length", "transfer-encoding")                         # they would contradict what is sent


@dataclass(frozen=True, slots=True)
class Reach:
    """headers: (name, value), sent with every request. ca_file: certificates to trust, None for the system's. timeout_s: how long the
    server may be silent."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    ca_file: Path | None = None
    timeout_s: float = 300.0

    @property
    def header_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.headers)

    def changed(self, headers: str = "", ca_file: str = "", timeout: Any = None) -> Reach:
        """With what somebody typed. headers: one "Name: value" a line, besides those here; one of the same name takes its place.
        ca_file: "" is none. timeout: seconds, None keeps the one here. Raises InputError, which names lines and never quotes them."""
        typed = tuple(read_header(line, f"Line {number} of the extra headers")
                      for number, line in enumerate(headers.splitlines(), 1) if line.strip())
        taken = {name.lower() for name, _ in typed}
        path = ca_file.strip()
        return replace(self, headers=(*(pair for pair in self.headers if pair[0].lower() not in taken), *typed),
                       ca_file=Path(path).expanduser() if path else None,
                       timeout_s=self.timeout_s if timeout is None else read_seconds(timeout))


def read_header(line: str, what: str = "An extra header") -> tuple[str, str]:
    """(name, value) of "Name: value". what: how an error calls it. Raises InputError."""
    name, colon, value = (part.strip() for part in line.partition(":"))
    if not (colon and NAME.fullmatch(name) and value and VALUE.fullmatch(value)):
        raise InputError(f"{what} is no header; expected Name: value, in plain ASCII.")
    if name.lower() in OURS:
        raise InputError(f"{what} is {name}, which is worked out for each request. Leave it out.")
    return name, value


def read_seconds(value: Any) -> float:
    """Seconds that a server may be silent. Raises InputError outside of 0 to a day."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds <= MOST_SECONDS:
        raise InputError(f"The timeout is {value!r}; expected seconds, above 0 and at most {MOST_SECONDS:,}.")
    return seconds
