"""What the target is asked when training texts are made: given prompts, documents to work on, prompts that it invents, second turns.

It knows nothing of models. Every prompt belongs to one part of the data for good, by the hash of its text, so no text that was trained on is
ever measured. Documents come from Python's own documentation and source (PSF licence), which every Python brings along.
"""
from __future__ import annotations

import ast
import importlib.util
import json
import random
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from ..errors import InputError

__all__ = ["CATEGORIES", "PARTS", "Job", "Prompts", "document_prompts", "part_of", "read_prompts"]

CATEGORIES = ("chat", "code", "math", "qa", "summarise", "rewrite")
PARTS = ("train", "validation", "test")
_HELD_OUT = {"chat": 0.12, "code": 0.15, "math": 0.02, "qa": 0.02, "summarise": 0.12, "rewrite": 0.12}     # of the prompts, two thirds for test
# Shares of one batch. "magpie": the target writes the question itself (Magpie, Xu et al. 2024, arXiv 2406.08464).
_MIX = {"magpie": 0.34, "math": 0.17, "code": 0.15, "qa": 0.13, "rewrite": 0.09, "summarise": 0.07, "chat": 0.05}
_TEMPERATURES = (0.0, 0.0, 0.0, 0.8, 0.9, 1.0)
_TWO_TURNS = 0.2
_BEGINNINGS = {"": "chat", "Write a Python function": "code", "How do I": "chat", "Explain": "qa", "What is": "qa", "Rewrite": "rewrite",
               "Write a": "chat", "Give me": "chat"}
_FOLLOW_UPS = (
    ("chat", "Can you explain that in simpler words?"), ("chat", "Tell me more about the last point."), ("chat", "Why is that?"),
    ("chat", "Thanks! Can you give me an example?"), ("chat", "Are you sure? Please check your answer."), ("chat", "What else should I know?"),
    ("summarise", "Summarize your answer in one sentence."), ("summarise", "Give me the main points of your answer as a list."),
    ("rewrite", "Rewrite your answer as a bullet list."), ("rewrite", "Repeat your answer, but make it shorter."),
    ("rewrite", "Repeat your answer word for word."), ("rewrite", "Rewrite your answer in a more formal tone."),
    ("rewrite", "Write that again with a short title above it."))
_CODE_FOLLOW_UPS = (("code", "Add comments to the code."), ("code", "Now add a docstring and type hints."), ("code", "Explain the code line by line."),
                    ("rewrite", "Show the complete code again."), ("code", "Write a test for it."))
_TASKS = {
    "summarise": ("Summarize the following text:\n\n{}", "Summarize this in two sentences.\n\n{}", "{}\n\nWhat are the main points of this text?",
                  "Read the text and list its key facts.\n\n{}", "Explain the following text to a beginner:\n\n{}"),
    "rewrite": ("Rewrite the following text in your own words:\n\n{}", "Correct the spelling of this text:\n\n{}", "Repeat this text exactly:\n\n{}",
                "Rewrite the text as a bullet list:\n\n{}", "{}\n\nMake this text shorter, keeping its words where you can.",
                "Extract all technical terms from the text:\n\n{}"),
    "code": ("Add comments to this Python code:\n\n```python\n{}\n```", "Explain what this function does:\n\n```python\n{}\n```",
             "Add type hints to this function:\n\n```python\n{}\n```", "Rewrite this function with clearer variable names:\n\n```python\n{}\n```")}
_MODULES = ("argparse", "ast", "asyncio.events", "base64", "bisect", "calendar", "cgitb", "cmd", "codecs", "collections", "colorsys", "configparser",
            "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "email.message", "enum", "filecmp", "fileinput", "fnmatch",
            "fractions", "ftplib", "functools", "getopt", "gettext", "glob", "graphlib", "gzip", "heapq", "html.parser", "http.client", "imaplib",
            "inspect", "ipaddress", "json.decoder", "json.encoder", "keyword", "linecache", "locale", "logging", "mailbox", "mimetypes", "numbers",
            "operator", "optparse", "os", "pathlib", "pdb", "pickle", "pickletools", "platform", "plistlib", "poplib", "pprint", "profile", "pstats",
            "queue", "quopri", "random", "reprlib", "sched", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver",
            "statistics", "string", "subprocess", "symtable", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "traceback",
            "turtle", "types", "typing", "unittest.case", "unittest.mock", "urllib.parse", "urllib.request", "uuid", "warnings", "wave", "weakref",
            "webbrowser", "xml.dom.minidom", "xml.etree.ElementTree", "zipfile")


@dataclass(frozen=True, slots=True)
class Job:
    """One conversation to be written. prompt: the user's message, or the beginning of one that the target goes on with (`invents`).

    follow_up: the second message, "" for none. source: where the prompt is from, for the card.
    """
    category: str
    prompt: str
    source: str
    temperature: float
    follow_up: str = ""
    follow_up_category: str = ""
    invents: bool = False


def part_of(prompt: str, category: str) -> str:
    """The part of the data that a prompt belongs to."""
    place = int(sha256(prompt.encode()).hexdigest()[:8], 16) / 2**32
    held_out = _HELD_OUT[category]
    return "train" if place >= held_out else "test" if place < held_out * 2 / 3 else "validation"


def read_prompts(path: Path) -> list[tuple[str, str, str]]:
    """(category, prompt, source) of every line of a file of JSON objects {"category", "prompt", "source"}. Raises InputError."""
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The prompts {path} cannot be read ({error}); expected a file of JSON lines with category and prompt.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            category, prompt = row["category"], row["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"Line {number} of {path.name} is no object with category and prompt ({error}).") from error
        category = "chat" if category == "instruction" else category
        if category not in CATEGORIES:
            raise InputError(f"Line {number} of {path.name} has the category {category!r}; expected one of {', '.join(CATEGORIES)}, instruction.")
        rows.append((category, prompt, str(row.get("source", path.name))))
    return rows


@cache
def document_prompts() -> tuple[tuple[str, str, str], ...]:
    """(category, prompt, source) made from Python's documentation and source, in an order that is always the same for one Python."""
    texts, functions = set(), set()
    for name in _MODULES:
        try:
            found = importlib.util.find_spec(name)
            tree = ast.parse(source := Path(found.origin).read_text(encoding="utf-8"))
        except (ImportError, AttributeError, OSError, TypeError, SyntaxError, ValueError):
            continue                             # not in this Python
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                texts.update(_passages(text))
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno < 40:
                code = textwrap.dedent("\n".join(lines[node.lineno - 1:node.end_lineno]))
                if 120 <= len(code) <= 900:
                    functions.add(code)
    found = importlib.util.find_spec("pydoc_data.topics")
    if found is not None:
        from pydoc_data.topics import topics
        for text in topics.values():
            texts.update(_passages(re.sub(r"\n[*=~-]{4,}\n", "\n", text)))
    rows = []
    for i, text in enumerate(sorted(texts, key=_hash)):
        category = ("summarise", "rewrite")[i % 2]
        task = _TASKS[category][i // 2 % len(_TASKS[category])]
        rows.append((category, task.format(_misspelt(text) if "spelling" in task else text), "Python documentation"))
    rows += [("code", _TASKS["code"][i % len(_TASKS["code"])].format(code), "Python source") for i, code in enumerate(sorted(functions, key=_hash))]
    return tuple(rows)


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _passages(text: str) -> list[str]:
    """Whole paragraphs of 250 to 1,100 characters together."""
    passages, current = [], ""
    for paragraph in re.split(r"\n\s*\n", text):
        current = f"{current}\n\n{paragraph.strip()}".strip()
        if len(current) >= 250:
            if len(current) <= 1100:
                passages.append(current)
            current = ""
    return passages


def _misspelt(text: str) -> str:
    """Some longer words with two letters exchanged."""
    chance = random.Random(_hash(text))

    def spoil(match: re.Match[str]) -> str:
        word = match[0]
        if chance.random() > 0.15:
            return word
        at = chance.randrange(1, len(word) - 2)
        return word[:at] + word[at + 1] + word[at] + word[at + 2:]
    return re.sub(r"[a-z]{5,}", spoil, text)


class Prompts:
    """All prompts of one part of the data, dealt out in batches that depend on the seed and the batch's number alone."""

    def __init__(self, given: Sequence[tuple[str, str, str]], part: str, seed: int, mix: Mapping[str, float] | None = None) -> None:
        self._part, self._seed, self._mix = part, seed, dict(mix or _MIX)
        self._pools: dict[str, list[tuple[str, str]]] = {category: [] for category in CATEGORIES}
        for category, prompt, source in [*given, *document_prompts()]:
            if part_of(prompt, category) == part:
                self._pools[category].append((prompt, source))
        for category, pool in self._pools.items():
            pool.sort(key=lambda row: _hash(row[0]))
            if category == "code":                # few were given and many made: take them in turns
                made = [row for row in pool if row[1] == "Python source"]
                others = [row for row in pool if row[1] != "Python source"]
                self._pools[category] = [row for pair in zip(_cycled(others, len(made)), made) for row in pair] if others else made

    def batch(self, number: int, size: int) -> list[Job]:
        """The conversations of one training batch."""
        chance = random.Random(f"{self._seed} {number}")
        jobs = []
        for kind, share in self._mix.items():
            count = round(share * size)
            pool = self._pools.get(kind, [])
            for i in range(count):
                temperature = chance.choice(_TEMPERATURES)
                if kind == "magpie":
                    beginning = chance.choice(tuple(_BEGINNINGS))
                    category, prompt, source = _BEGINNINGS[beginning], beginning, "invented by the target"
                elif pool:
                    prompt, source = pool[(number * count + i) % len(pool)]
                    category = kind
                else:
                    continue
                follow_up = ("", "")
                if chance.random() < _TWO_TURNS:
                    follow_up = chance.choice(_CODE_FOLLOW_UPS if category == "code" else _FOLLOW_UPS)
                jobs.append(Job(category, prompt, source, temperature, follow_up[1], follow_up[0], kind == "magpie"))
        return jobs

    def measured(self, per_category: int, temperature: float) -> list[Job]:
        """The first prompts of each category, one turn each, to measure drafters with."""
        return [Job(category, prompt, source, temperature) for category in CATEGORIES
                for prompt, source in self._pools[category][:per_category]]


def _cycled(rows: Sequence[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    return [rows[i % len(rows)] for i in range(count)]
