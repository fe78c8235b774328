"""The lessons of `assets/lessons/`: read, checked against the recordings that they play on, and made ready for the viewer.

A stop names its step by a condition ("first rejection") and quotes numbers by name ("{speed_up}"), so a lesson holds for any recording in
which what it talks about happens. It knows nothing of Gradio, of models or of how a stop looks.
"""
from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..trace import Trace
from .prose import blocks, words
from .steps import find_node, find_step, values

__all__ = ["FOCUS", "LESSONS", "Lesson", "PHASES", "Question", "Stop", "VIEWS", "course", "read_lesson", "ready", "teacher"]

LESSONS = Path(__file__).resolve().parents[2] / "assets" / "lessons"
FORMAT, VERSION = "specviz-lesson", 1
VIEWS = ("tokens", "why", "tree", "race")
PHASES = ("", "draft", "verify", "judge", "emit")
HIDES = ("step", "figures", "")
# What a stop may point at. The viewer has a place for each; a test in a browser finds them all.
FOCUS = ("", "step", "draft", "verdict", "outcome", "node", "times", "caches", "tree", "speed_up", "tokens_per_step", "acceptance",
         "tokens_per_s", "badge", "race", "config")

_COMPARE: dict[str, Callable[[float, float], bool]] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
                                                       "=": operator.eq}
_DIGITS = {"speed_up": 2, "tokens_per_step": 2, "tokens_per_s": 1, "plain_tokens_per_s": 1, "acceptance_percent": 0, "alpha": 2,
           "verify_ratio": 2, "draft_ratio": 2, "temperature": 1, "fed": 0}


@dataclass(frozen=True, slots=True)
class Question:
    """answer: index of the right choice. why: shown after the answer. hides: what stays covered until then: the step's outcome, the
    run's figures, or nothing."""
    ask: str
    choices: tuple[str, ...]
    answer: int
    why: str
    hides: str = "step"


@dataclass(frozen=True, slots=True)
class Stop:
    """One card of a lesson. step: a condition of `steps.find_step`. node: a kind of `steps.NODES`, for texts and focus. on: "a" or "b",
    which of the lesson's recordings is shown. phase: how much of the step is shown. expect: what must hold for the text to be true,
    such as "speed_up > 1"."""
    text: str
    step: str = "first draft"
    phase: str = ""
    view: str = "tokens"
    focus: str = ""
    node: str = ""
    on: str = "a"
    question: Question | None = None
    expect: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lesson:
    """A lesson on one recording or two. trace, trace_b: names of recordings, without ".json"."""
    id: str
    title: str
    summary: str
    trace: str
    stops: tuple[Stop, ...]
    trace_b: str = ""


def read_lesson(path: Path) -> Lesson:
    """A lesson from its file. Raises InputError naming the file and the entry that is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"The lesson {path.name} cannot be read ({error}).") from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT or data.pop("version", None) != VERSION:
        raise InputError(f'The lesson {path.name} must begin with "format": "{FORMAT}" and "version": {VERSION}.')
    return _build(Lesson, data, path.name)


def _build(kind: type, data: Any, where: str) -> Any:
    known = {entry.name: entry for entry in fields(kind)}
    if not isinstance(data, dict) or data.keys() - known.keys():
        wrong = sorted(data.keys() - known.keys())[0] if isinstance(data, dict) else data
        raise InputError(f"{where}: {wrong!r} is not known; expected {', '.join(known)}.")
    for name, entry in known.items():
        if entry.default is MISSING and name not in data:
            raise InputError(f"{where}: {name} is missing.")
    made = dict(data)
    if kind is Lesson:
        made["stops"] = tuple(_build(Stop, stop, f"{where}, stop {i + 1}") for i, stop in enumerate(data["stops"]))
    elif kind is Stop:
        made["expect"] = tuple(data.get("expect", ()))
        made["question"] = _build(Question, data["question"], f"{where}, question") if data.get("question") else None
    else:
        made["choices"] = tuple(data["choices"])
    return kind(**made)


def ready(lesson: Lesson, traces: Mapping[str, Trace]) -> dict[str, Any]:
    """The lesson as the viewer plays it: steps by index, texts as words with their numbers in place.

    traces: every recording by name. Raises InputError naming the stop: a recording, step, node, number, view or focus that is not there,
    an expectation that does not hold, choices that are not distinct.
    """
    shown = {"a": lesson.trace, "b": lesson.trace_b or lesson.trace}
    for name in shown.values():
        _check(name in traces, lesson, None, f"the recording {name!r} is not there")
    stops = []
    for number, stop in enumerate(lesson.stops, 1):
        try:
            stops.append(_ready(lesson, stop, number, {key: traces[name] for key, name in shown.items()}) | {"trace": shown[stop.on]})
        except InputError as error:
            raise InputError(f"Lesson {lesson.id}, stop {number}: {error}") from error
    return {"id": lesson.id, "title": lesson.title, "summary": lesson.summary, "stops": stops}


def _ready(lesson: Lesson, stop: Stop, number: int, traces: Mapping[str, Trace]) -> dict[str, Any]:
    for value, known, what in ((stop.on, ("a", "b"), "on"), (stop.view, VIEWS, "view"), (stop.phase, PHASES, "phase"),
                               (stop.focus, FOCUS, "focus")):
        _check(value in known, lesson, stop, f"{what} is {value!r}; expected one of {', '.join(filter(None, known))}")
    trace = traces[stop.on]
    at = find_step(trace, stop.step)
    node = find_node(trace.steps[at], stop.node) if stop.node else None
    known = values(trace, at, node) | {f"{key}_{name}": value for key in ("a", "b") for name, value in values(traces[key]).items()}
    for text in stop.expect:
        _check(_holds(text, known), lesson, stop, f"expected {text}, but here {_quoted(text, known)}")
    out: dict[str, Any] = {"step": at, "view": stop.view, "phase": stop.phase, "focus": stop.focus, "node": node,
                           "text": [words(_filled(part, known)) for part in stop.text.split("\n")]}
    if question := stop.question:
        choices = [_filled(choice, known) for choice in question.choices]
        _check(len(set(choices)) == len(choices) >= 2, lesson, stop, f"the choices are not distinct: {choices}")
        _check(isinstance(question.answer, int) and 0 <= question.answer < len(choices), lesson, stop,
               "answer is not the index of a choice")
        _check(question.hides in HIDES, lesson, stop, f"hides is {question.hides!r}; expected step, figures or nothing")
        out["question"] = {"ask": words(_filled(question.ask, known)), "choices": [words(choice) for choice in choices],
                           "answer": question.answer, "why": words(_filled(question.why, known)), "hides": question.hides}
    return out


def _check(holds: bool, lesson: Lesson, stop: Stop | None, problem: str) -> None:
    if not holds:
        raise InputError(f"{problem}." if stop else f"Lesson {lesson.id}: {problem}.")


def _filled(text: str, known: Mapping[str, Any]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in known:
            raise InputError(f"the text quotes {{{name}}}, which this recording does not have.")
        return _said(name, known[name])
    return re.sub(r"\{(\w+)\}", value, text)


def _said(name: str, value: float | int | str) -> str:
    bare = name.removeprefix("a_").removeprefix("b_")
    if isinstance(value, str) or isinstance(value, int):
        return str(value)
    if bare.endswith("_ms") or bare == "step_ms_per_token":
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
    if bare in ("p", "q", "u", "accept", "p_t1", "q_t1", "residual_mass"):
        return "0" if value == 0 else "1" if value == 1 else "<0.001" if value < 0.001 else ">0.999" if value > 0.999 else f"{value:.3f}"
    return f"{value:.{_DIGITS.get(bare, 2)}f}"


def _holds(text: str, known: Mapping[str, Any]) -> bool:
    match = re.fullmatch(r"(\w+) (<=|>=|<|>|=) ([\w.]+)", text)
    if not match:
        raise InputError(f"{text!r} is no expectation; write it like 'speed_up > 1'.")
    left, right = (_number(part, known) for part in (match[1], match[3]))
    return _COMPARE[match[2]](left, right)


def _number(text: str, known: Mapping[str, Any]) -> float:
    if text in known and not isinstance(known[text], str):
        return float(known[text])
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"{text} is not a number of this recording.") from error


def _quoted(text: str, known: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} is {known[name]}" for name in re.findall(r"[a-z]\w*", text) if name in known)


def teacher(folder: Path = LESSONS) -> list[dict[str, Any]]:
    """The teacher's page as blocks of `prose.blocks`; empty where there is none."""
    file = folder / "teacher.md"
    return blocks(file.read_text(encoding="utf-8")) if file.is_file() else []


def course(traces: Mapping[str, Trace], folder: Path = LESSONS) -> list[dict[str, Any]]:
    """All lessons, ready, in the order of their file names. Raises InputError; see `ready`."""
    return [ready(read_lesson(path), traces) for path in sorted(folder.glob("*.json"))]
