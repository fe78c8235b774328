"""What could be loaded on this machine: the known targets with their fit, and the report on one choice before it is loaded.

It knows nothing of engines and requests, and loads no weights.
"""
from __future__ import annotations

from .options import Options
from .service import Choice, Inspection, Line, Offer

__all__ = ["Shelf"]


class Shelf:
    """The cards, seen from this machine."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def offers(self) -> list[Offer]:
        return []

    def advice(self) -> list[Line]:
        return []

    def suggestion(self) -> Choice | None:
        return None

    def inspect(self, choice: Choice, in_use: Choice | None) -> Inspection:
        return Inspection(())

    def check_here(self, choice: Choice) -> None:
        """Raise LoadError if something would have to be fetched first."""
