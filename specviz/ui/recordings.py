"""Recorded runs that the page can show before any model is there. It knows nothing of Gradio and imports no torch."""
from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import TraceError
from ..trace import Trace, load

__all__ = ["Recording", "bundled", "opening", "titles"]

TRACES = Path(__file__).resolve().parents[2] / "assets" / "traces"


@dataclass(frozen=True, slots=True)
class Recording:
    """A run to begin with; trace is None where there is none. problem: a sentence for people if the file that was asked for is broken."""
    name: str = ""
    trace: Trace | None = None
    problem: str = ""


def bundled(folder: Path = TRACES) -> list[Path]:
    """The recorded runs that come with the program, in the order of their names."""
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def titles(folder: Path = TRACES) -> dict[str, Path]:
    """The bundled runs by a title made of their file name: "02-copy-draft_model.json" is "copy, draft model"."""
    return {re.sub(r"^\d+[-_]", "", file.stem).replace("-", ", ").replace("_", " "): file for file in bundled(folder)}


def opening(path: Path | None, folder: Path = TRACES) -> Recording:
    """What the page shows first: the trace at `path`, or else the first bundled one that can be read."""
    problem = ""
    if path is not None:
        try:
            return Recording(path.name, load(path))
        except TraceError as error:
            problem = str(error)
    for file in bundled(folder):
        try:
            return Recording(file.stem, load(file), problem)
        except TraceError as error:
            problem = problem or str(error)
    return Recording(problem=problem)
