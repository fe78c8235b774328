r"""Chat messages as the page holds them, and back to what the model is given. It knows nothing of Gradio's components or of models.

A shown text is Markdown from a model, hence untrusted: tags outside code get a backslash (`\<b>`), so that they stay visible as typed,
and so do pictures, which would make the browser fetch an address of the model's choice. `raw` is the exact inverse of `shown`.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["Message", "answered", "conversation", "failed", "is_failed", "last_question", "question", "raw", "shown", "text_of"]

Message = dict[str, Any]
FAILED = "failed"            # metadata id of a turn that got no answer

_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_CODE = re.compile(r"(?<![`\\])(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\1(?!`)", re.DOTALL)
# A tag's or a picture's beginning, with the backslashes before it.
_SPECIAL = re.compile(r"(?P<a>\\*)(?=<[A-Za-z/!?])<|(?<=!)(?P<b>\\*)\[")


def question(text: str) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": shown(text)}]}


def answered(text: str, footer: str = "") -> Message:
    """footer: a line of figures under the text; never part of what the model is given."""
    parts = [text, footer] if footer else [text]
    return {"role": "assistant", "content": [{"type": "text", "text": shown(part)} for part in parts]}


def failed(sentence: str, text: str = "") -> Message:
    """A turn that ended with an error, after `text`."""
    parts = [part for part in (text, f"⚠ {sentence}") if part]
    return {"role": "assistant", "metadata": {"id": FAILED}, "content": [{"type": "text", "text": shown(part)} for part in parts]}


def is_failed(message: Message) -> bool:
    return (message.get("metadata") or {}).get("id") == FAILED


def text_of(message: Message) -> str:
    """What was said, without footers, as it was typed or generated. Content may be a string or a list of parts (Gradio gives lists)."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = next((part.get("text") if isinstance(part, dict) else part for part in content), "")
    return raw(str(content or ""))


def conversation(history: Sequence[Message]) -> list[dict[str, str]]:
    """The turns for the model: failed ones are left out together with their question, as if they had never been."""
    turns: list[dict[str, str]] = []
    for message in history:
        if is_failed(message):
            if turns and turns[-1]["role"] == "user":
                turns.pop()
        elif message["role"] in ("user", "assistant"):
            if turns and turns[-1]["role"] == "user" == message["role"]:
                turns.pop()                      # a question that was stopped before its answer began
            turns.append({"role": message["role"], "content": text_of(message)})
    return turns


def last_question(history: Sequence[Message]) -> int:
    """Index of the last user message; 0 if there is none."""
    return max((i for i, message in enumerate(history) if message["role"] == "user"), default=0)


def shown(text: str) -> str:
    r"""Markdown in which tags and pictures outside code are literal.

    >>> print(shown("a <b> and `<i>`"))
    a \<b> and `<i>`
    """
    return _outside_code(text, lambda slashes, mark: 2 * slashes + "\\" + mark)


def raw(text: str) -> str:
    """The text that `shown` was given. Where a user's own text has no odd number of backslashes before a tag, it is left as it is."""
    return _outside_code(text, lambda slashes, mark: (slashes[:len(slashes) // 2] if len(slashes) % 2 else slashes) + mark)


def _outside_code(text: str, change: Callable[[str, str], str]) -> str:
    """`text` with `change(backslashes, mark)` in place of every special beginning that is not inside a code block or code span."""
    def edit(match: re.Match[str]) -> str:
        return change(match["a"] or match["b"] or "", match[0][-1])

    out = []
    for part, is_code in _blocks(text):
        if is_code:
            out.append(part)
            continue
        at = 0
        for span in _CODE.finditer(part):
            out += [_SPECIAL.sub(edit, part[at:span.start()]), span[0]]
            at = span.end()
        out.append(_SPECIAL.sub(edit, part[at:]))
    return "".join(out)


def _blocks(text: str) -> Iterator[tuple[str, bool]]:
    """(part, whether it is a fenced code block); the parts add up to the text. A block that is not closed yet lasts to the end."""
    part: list[str] = []
    fence = ""
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if not fence and mark:
            yield "".join(part), False
            part, fence = [line], mark[1]
        elif fence and mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            yield "".join([*part, line]), True
            part, fence = [], ""
        else:
            part.append(line)
    yield "".join(part), bool(fence)
