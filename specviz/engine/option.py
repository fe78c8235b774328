"""One setting that a drafting method declares for itself, and how a given value is read.

It knows nothing of methods and screens, and imports nothing heavy: a page draws its controls from these records.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError

__all__ = ["KINDS", "Option", "settled"]

KINDS = ("whole", "number", "flag", "choice", "text")
_ON, _OFF = ("on", "yes", "true", "1"), ("off", "no", "false", "0")


@dataclass(frozen=True, slots=True)
class Option:
    """A setting of one method. Values are plain data: int, float, bool or str.

    name: its key in `DraftSettings.options`, on the command line and in traces. label, help: words for people. kind: one of `KINDS`.
    low, high: the range of a whole or other number, both included. choices: (value, words) of a choice. check: of a text, called with
    it; raises ValueError with a sentence that says what was expected.
    """
    name: str
    label: str
    kind: str
    default: Any
    help: str = ""
    low: float = 0
    high: float = 0
    choices: tuple[tuple[str, str], ...] = ()
    check: Callable[[str], Any] | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS and self.name.isidentifier()
        assert self.read(self.default) == self.default, f"the default of {self.name} is no value of its own"

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.kind == "whole":
            return f"a whole number from {self.low:g} to {self.high:g}"
        if self.kind == "number":
            return f"a number from {self.low:g} to {self.high:g}"
        if self.kind == "flag":
            return "on or off"
        return f"one of {', '.join(value for value, _ in self.choices)}" if self.kind == "choice" else "a text"

    def read(self, value: Any) -> Any:
        """The value in its own type, from that or from text. Raises InputError."""
        def refused(expected: str) -> InputError:
            return InputError(f"The option {self.name} is {value!r}; expected {expected}.")
        if self.kind in ("whole", "number"):
            try:
                number = float(value)
            except (TypeError, ValueError) as error:
                raise refused(self.expected) from error
            is_whole = math.isfinite(number) and number == int(number)
            if isinstance(value, bool) or not self.low <= number <= self.high or (self.kind == "whole" and not is_whole):
                raise refused(self.expected)
            return int(number) if self.kind == "whole" else number
        if self.kind == "flag":
            word = str(value).strip().lower()
            if word not in _ON + _OFF:
                raise refused(self.expected)
            return word in _ON
        if not isinstance(value, str):
            raise refused(self.expected)
        word = value.strip()
        if self.kind == "choice" and word not in (known for known, _ in self.choices):
            raise refused(self.expected)
        if self.check is not None:
            try:
                self.check(word)
            except ValueError as error:
                raise refused(str(error)) from error
        return word


def settled(options: Sequence[Option], given: Mapping[str, Any], method: str) -> tuple[tuple[str, Any], ...]:
    """Every option of a method with its value, given or default, in the order of declaration. method: for the eye.

    Raises InputError for a name that the method does not have, and for a value that is none.

    >>> settled([Option("width", "Width", "whole", 3, low=1, high=8)], {"width": "5"}, "Tree")
    (('width', 5),)
    """
    if unknown := [name for name in given if name not in {option.name for option in options}]:
        has = f"its options are {', '.join(option.name for option in options)}" if options else "it has none"
        raise InputError(f"{method} has no option {unknown[0]!r}; {has}.")
    return tuple((option.name, option.read(given[option.name]) if option.name in given else option.default) for option in options)
