"""Training texts on disk: token ids and the target's states, in shards that are complete or absent. It knows nothing of models.

A shard is a folder: `index.json`, `tokens.bin` (uint16, or uint32 for large vocabularies) and `states.bin` (float16 [N, width], one row per
token, memory-mapped when read). The states are scratch: `tokens.bin` and `index.json` alone are enough to compute them again.
"""
from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError

__all__ = ["Store", "Text"]


@dataclass(frozen=True, slots=True)
class Text:
    """One conversation. tokens: ids of all of it. answers: (start, end) of what the target wrote, ends included in it.

    states: float16 [n, width] or None; row i is the target's state after token i. The last row may be zero: the last token is never fed.
    """
    tokens: np.ndarray
    answers: tuple[tuple[int, int], ...]
    category: str
    source: str
    temperature: float
    states: np.ndarray | None = None

    @property
    def num_answer_tokens(self) -> int:
        return sum(end - start for start, end in self.answers)


class Store:
    """A folder of shards. facts: what the shards were made with; opening a folder that was made otherwise raises InputError."""

    def __init__(self, folder: Path, facts: dict[str, Any] | None = None) -> None:
        self.folder = folder
        path = folder / "facts.json"
        if path.exists():
            self.facts = json.loads(path.read_text(encoding="utf-8"))
            for key, value in (facts or {}).items():
                if self.facts.get(key) != value:
                    raise InputError(f"{folder} was made with {key} = {self.facts.get(key)!r}, asked for is {value!r}; take another folder.")
        elif facts is None:
            raise InputError(f"{folder} holds no training texts; make some with `python -m specviz.train generate`.")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self.facts = facts
            path.write_text(json.dumps(facts, indent=1), encoding="utf-8")

    def has(self, number: int) -> bool:
        return self._path(number).is_dir()

    def numbers(self) -> list[int]:
        return sorted(int(path.name.removeprefix("shard-")) for path in self.folder.glob("shard-?????"))

    def write(self, number: int, texts: Sequence[Text]) -> None:
        """Write one shard; it appears under its name only when it is whole."""
        part = self.folder / f"part-{number:05}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        kind = np.uint16 if self.facts["vocab_size"] <= 1 << 16 else np.uint32
        np.concatenate([text.tokens for text in texts]).astype(kind).tofile(part / "tokens.bin")
        if all(text.states is not None for text in texts):
            with open(part / "states.bin", "wb") as file:
                for text in texts:
                    text.states.astype(np.float16).tofile(file)
        rows = [{"length": len(text.tokens), "answers": text.answers, "category": text.category, "source": text.source,
                 "temperature": text.temperature} for text in texts]
        (part / "index.json").write_text(json.dumps(rows), encoding="utf-8")
        os.replace(part, self._path(number))

    def read(self, number: int) -> list[Text]:
        """The texts of one shard; states are mapped, not loaded."""
        folder = self._path(number)
        rows = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        tokens = np.fromfile(folder / "tokens.bin", np.uint16 if self.facts["vocab_size"] <= 1 << 16 else np.uint32)
        states = None
        if (folder / "states.bin").exists():
            states = np.memmap(folder / "states.bin", np.float16, "r").reshape(len(tokens), -1)
        texts, start = [], 0
        for row in rows:
            end = start + row["length"]
            texts.append(Text(tokens[start:end], tuple(map(tuple, row["answers"])), row["category"], row["source"], row["temperature"],
                              None if states is None else states[start:end]))
            start = end
        return texts

    def texts(self, numbers: Iterable[int] | None = None) -> list[Text]:
        return [text for number in (self.numbers() if numbers is None else numbers) for text in self.read(number)]

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05}"
