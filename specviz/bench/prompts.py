"""The prompts of a benchmark, from a JSONL file: the bundled set, written for this project, or any other. It knows nothing of models."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError

__all__ = ["BUNDLED", "BenchPrompt", "read", "some"]

BUNDLED = Path(__file__).resolve().parents[2] / "assets" / "prompts" / "bench.jsonl"


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A question and what kind it is. number: its place among those of its category, from 0."""
    category: str
    text: str
    number: int


def read(path: Path) -> list[BenchPrompt]:
    """All prompts of a file. Each line holds {"category", "prompt"}, or {"category", "turns"} as Spec-Bench has it, whose first turn counts.

    Raises InputError naming the line.
    """
    prompts: list[BenchPrompt] = []
    counts: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The prompts in {path} cannot be read: {error}. Give a JSONL file.") from error
    for at, line in enumerate(lines, 1):
        if line.strip():
            category, text = _parsed(line, f"{path.name}, line {at}")
            prompts.append(BenchPrompt(category, text, counts.get(category, 0)))
            counts[category] = counts.get(category, 0) + 1
    if not prompts:
        raise InputError(f"{path} holds no prompts; expected one JSON object per line.")
    return prompts


def some(prompts: Sequence[BenchPrompt], limit: int | None, categories: Sequence[str] = ()) -> list[BenchPrompt]:
    """At most `limit` prompts of each category (all of them if None), of these categories only (all if none are named).

    Raises InputError for a category that is not there.
    """
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    if unknown := [category for category in categories if category not in known]:
        raise InputError(f"There are no prompts of the category {unknown[0]!r}; expected one of {', '.join(known)}.")
    return [prompt for prompt in prompts if (limit is None or prompt.number < limit) and (not categories or prompt.category in categories)]


def _parsed(line: str, where: str) -> tuple[str, str]:
    wrong = InputError(f'{where} is no prompt; expected {{"category": text, "prompt": text}} or {{"category": text, "turns": [text, ...]}}.')
    try:
        data: Any = json.loads(line)
    except ValueError as error:
        raise wrong from error
    if not isinstance(data, dict) or not isinstance(data.get("category"), str):
        raise wrong
    turns = data.get("turns")
    text = data.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if not isinstance(text, str) or not text.strip():
        raise wrong
    return data["category"], text
