"""The pair that was chosen last, kept in the user's cache folder from one start to the next. It knows nothing of how a pair is loaded."""
from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path

from .service import Choice

__all__ = ["Remembered"]


class Remembered:
    """A small JSON file. Losing it costs a click, so nothing here ever raises."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "choice.json"

    def read(self) -> Choice | None:
        """What was written last; None for no file, a broken one, or one of another version."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            names = {field.name for field in fields(Choice)}
            if content.keys() != names:
                return None
            if not all(isinstance(content[name], str) or (name == "draft" and content[name] is None) for name in names):
                return None
            return Choice(**content)
        except (OSError, ValueError, AttributeError, TypeError):
            return None

    def write(self, choice: Choice) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(asdict(choice), ensure_ascii=False), encoding="utf-8")
            os.replace(part, self._path)
        except OSError:
            pass
