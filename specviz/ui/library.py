"""What a page can ask for by name: the recorded runs and the course that plays on them. It knows nothing of Gradio, and loads no model."""
from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import SpecvizError
from ..museum.desk import RECORDED
from ..trace import Trace, load
from .lessons import LESSONS, course, teacher
from .recordings import TRACES, titles
from .slicer import encode

__all__ = ["COURSE", "Library", "MUSEUM"]

COURSE, MUSEUM = "course", "museum"


class Library:
    """The recorded runs of `recordings` (which the page lists) and those of the lessons.

    look: figures, formulas and Plotly's address as `bodies.look` makes them, for runs that no engine has sent. Names are those of the
    files without ".json"; a name from a browser is looked up here and never becomes a path.
    """

    def __init__(self, look: Mapping[str, Any], *, recordings: Path = TRACES, lessons: Path = LESSONS) -> None:
        self._look, self._recordings, self._lessons = dict(look), recordings, lessons

    @cached_property
    def files(self) -> dict[str, Path]:
        """Every recorded run by its name."""
        folders = (self._lessons / "traces", self._recordings)
        return {file.stem: file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.json"))}

    @cached_property
    def traces(self) -> dict[str, Trace]:
        """All of them, read. Raises TraceError."""
        return {name: load(file) for name, file in self.files.items()}

    @cached_property
    def course(self) -> dict[str, Any]:
        """Lessons, the teacher's page, the runs that can be chosen, and the look. Raises SpecvizError where a lesson does not hold."""
        runs = [{"name": file.stem, "title": title} for title, file in titles(self._recordings).items()]
        return {"lessons": course(self.traces, self._lessons), "teacher": teacher(self._lessons), "runs": runs, "look": self._look}

    @property
    def museum(self) -> dict[str, Any]:
        """What came out of every proof and every fault, as `python -m specviz.museum` wrote it. Raises OSError."""
        return {"results": json.loads(RECORDED.read_text(encoding="utf-8"))}

    def answer(self, name: object) -> str:
        """JSON: the course for `COURSE`, recorded experiments for `MUSEUM`, a run's file for its name, else {"error": a sentence}.

        `name` comes from a browser and is not trusted.
        """
        try:
            if name == COURSE:
                return encode(self.course)
            if name == MUSEUM:
                return encode(self.museum)
            if isinstance(name, str) and name in self.files:
                return self.files[name].read_text(encoding="utf-8")
            return encode({"error": f"There is no recorded run of the name {str(name)[:80]!r} here."})
        except (SpecvizError, OSError) as error:
            return encode({"error": str(error)})
