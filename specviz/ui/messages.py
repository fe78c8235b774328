r"""Chat messages as the page holds them, and back to what the model is given. It knows nothing of Gradio's components or of models.

A shown text is Markdown from a model, hence untrusted: tags outside code get a backslash (`\<b>`), so that they stay visible as typed,
and so do pictures, which would make the browser fetch an address of the model's choice. Formulas get delimiters of our own, so that
`$$` or `\[` in code is never taken for one. `raw` is the exact inverse of `shown`. In the plain look a text is escaped HTML instead.
"""
from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LATEX_DELIMITERS", "Look", "Message", "answered", "conversation", "dressed", "failed", "is_failed", "is_thinking",
           "last_question", "parts_of", "question", "raw", "reply", "shown", "split_thinking", "text_of", "thought"]

Message = dict[str, Any]
FAILED, THINKING, PLAIN = "failed", "thinking", "plain"      # words in a message's metadata id
THINK_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))

# Noncharacters (Unicode 23.7: for internal use) in place of a formula's own delimiters. Where the text itself holds one, the seventh and
# a character of a second row stand for it.
_MATH = {"$$": ("\ufdd0", "\ufdd1"), "\\[": ("\ufdd2", "\ufdd3"), "\\(": ("\ufdd4", "\ufdd5")}
_CLOSING = {"$$": "$$", "\\[": "\\]", "\\(": "\\)"}
_PLAIN_MATH = {mark: text for opening, marks in _MATH.items() for mark, text in zip(marks, (opening, _CLOSING[opening]))}
LATEX_DELIMITERS = [{"left": left, "right": right, "display": opening != "\\("} for opening, (left, right) in _MATH.items()]

_RESERVED = {0xfdd0 + i: f"\ufdd6{chr(0xfde0 + i)}" for i in range(7)}
_SHOWN_RESERVED = re.compile("\ufdd6([\ufde0-\ufde6])")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_CODE = r"(?<![`\\])(?P<ticks>`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)(?P=ticks)(?!`)"
_FORMULA = "|".join(rf"(?<!\\){re.escape(left)}(?:(?!\n\s*\n|{re.escape(left)}|{re.escape(right)}).)+{re.escape(right)}"
                    for left, right in _CLOSING.items())
_MARKED = "|".join(f"{left}[^{left}{right}]+{right}" for left, right in _MATH.values())
_SPANS = re.compile(f"{_CODE}|(?P<math>{_FORMULA})", re.DOTALL)
_SHOWN_SPANS = re.compile(f"{_CODE}|(?P<math>{_MARKED})", re.DOTALL)
# A tag's or a picture's beginning, with the backslashes before it.
_SPECIAL = re.compile(r"(?P<a>\\*)(?=<[A-Za-z/!?])<|(?<=!)(?P<b>\\*)\[")
# A diagram's beginning: the chat would draw it from unescaped text. An invisible character (word joiner) makes it ordinary code.
_DIAGRAM = re.compile("(```\u2060*)(mermaid)")
_SHOWN_DIAGRAM = re.compile("(```\u2060*)\u2060(mermaid)")


@dataclass(frozen=True, slots=True)
class Look:
    """How texts are shown. plain: literally, without Markdown. thinking: with the thinking blocks unfolded."""
    plain: bool = False
    thinking: bool = False


def question(text: str) -> Message:
    return _message("user", [text])


def answered(text: str, footer: str = "") -> Message:
    """footer: a line of figures under the text; never part of what the model is given."""
    return _message("assistant", [text, footer] if footer else [text])


def failed(sentence: str, text: str = "") -> Message:
    """A turn that ended with an error, after `text`."""
    return _message("assistant", [part for part in (text, f"⚠ {sentence}") if part], {FAILED})


def thought(text: str, ended: bool = True) -> Message:
    """What a model wrote before its answer, as a block that can be unfolded."""
    num_words = len(text.split())
    title = f"Thought, {num_words} word{'s' * (num_words != 1)}" if ended else "Thinking …"
    return _message("assistant", [text], {THINKING}, title=title)


def reply(text: str, footer: str = "", *, opened: bool = False, error: str = "", ended: bool = True) -> list[Message]:
    """The messages of one answer: its thinking folded, where there is any, then what it says.

    opened: the prompt ended inside a thinking block. ended: False while the answer is being written. error: why it broke off.
    """
    thinking, closed, answer = split_thinking(text, opened)
    folded = [] if thinking is None else [thought(thinking, closed or ended)]
    if error:
        return [*folded, failed(error, answer)]
    return [*folded, answered(answer if ended else answer or "…", footer)]


def split_thinking(text: str, opened: bool = False) -> tuple[str | None, bool, str]:
    """(thinking, whether it is closed, the answer after it); thinking is None where there is none.

    Only a block that the text begins with counts, so that an answer may speak of such tags. Line breaks around the parts are layout and
    left out, as chat templates leave them out.

    >>> split_thinking("<think>\\nhm\\n</think>\\n\\nYes.")
    ('hm', True, 'Yes.')
    """
    for opening, closing in THINK_TAGS:
        begins = text.lstrip().startswith(opening)
        if begins or opened and opening == THINK_TAGS[0][0]:
            inside, found, after = (text.lstrip()[len(opening):] if begins else text).partition(closing)
            return inside.strip("\n"), bool(found), after.lstrip("\n")
    return None, True, text


def is_failed(message: Message) -> bool:
    return FAILED in _marks(message)


def is_thinking(message: Message) -> bool:
    return THINKING in _marks(message)


def parts_of(message: Message) -> list[str]:
    """The texts of a message as they were typed or generated. Content may be a string or a list of parts (Gradio gives lists)."""
    content = message.get("content")
    parts = content if isinstance(content, (list, tuple)) else [content]
    texts = [str((part.get("text") if isinstance(part, dict) else part) or "") for part in parts]
    return [html.unescape(text) if PLAIN in _marks(message) else raw(text) for text in texts]


def text_of(message: Message) -> str:
    """What was said, without footers."""
    return (parts_of(message) or [""])[0]


def conversation(history: Sequence[Message]) -> list[dict[str, str]]:
    """The turns for the model: failed ones are left out together with their question, as if they had never been.

    Thinking stands apart from "content", under "reasoning_content"; it enters the prompt only where the model's template asks for it.
    """
    turns: list[dict[str, str]] = []
    thinking = ""
    for message in history:
        if is_thinking(message):
            thinking = text_of(message)
            continue
        if is_failed(message):
            if turns and turns[-1]["role"] == "user":
                turns.pop()
        elif message["role"] in ("user", "assistant"):
            if turns and turns[-1]["role"] == "user" == message["role"]:
                turns.pop()                      # a question that was stopped before its answer began
            turn = {"role": message["role"], "content": text_of(message)}
            turns.append(turn | ({"reasoning_content": thinking} if thinking and message["role"] == "assistant" else {}))
        thinking = ""
    return turns


def last_question(history: Sequence[Message]) -> int:
    """Index of the last user message; 0 if there is none."""
    return max((i for i, message in enumerate(history) if message["role"] == "user"), default=0)


def dressed(history: Sequence[Message], look: Look) -> list[Message]:
    """The same messages in the wanted look; those that have it already are handed back as they are."""
    return [message if _has(message, look) else _message(message["role"], parts_of(message), _marks(message), look, _title(message))
            for message in history]


def shown(text: str) -> str:
    r"""Markdown in which tags and pictures outside code are literal.

    >>> print(shown("a <b> and `<i>`"))
    a \<b> and `<i>`
    """
    def mark(formula: str) -> str:
        opening = next(opening for opening in _MATH if formula.startswith(opening))
        left, right = _MATH[opening]
        return left + formula[len(opening):-len(_CLOSING[opening])] + right

    text = _DIAGRAM.sub("\\1\u2060\\2", text.translate(_RESERVED))
    return _outside_code(text, _SPANS, mark, lambda slashes, special: 2 * slashes + "\\" + special)


def raw(text: str) -> str:
    """The text that `shown` was given. Where a user's own text has no odd number of backslashes before a tag, it is left as it is."""
    def unmark(formula: str) -> str:
        return _PLAIN_MATH[formula[0]] + formula[1:-1] + _PLAIN_MATH[formula[-1]]

    text = _outside_code(text, _SHOWN_SPANS, unmark,
                         lambda slashes, special: (slashes[:len(slashes) // 2] if len(slashes) % 2 else slashes) + special)
    return _SHOWN_DIAGRAM.sub(r"\1\2", _SHOWN_RESERVED.sub(lambda match: chr(ord(match[1]) - 0x10), text))


def _message(role: str, parts: Sequence[str], marks: set[str] | frozenset[str] = frozenset(), look: Look = Look(),
             title: str = "") -> Message:
    marks = marks - {PLAIN} | ({PLAIN} if look.plain else set())
    metadata = {"id": " ".join(sorted(marks))} if marks else {}
    if title:                                    # the chat folds what has a title, and opens it unless its status is "done"
        metadata |= {"title": title} | ({} if look.thinking else {"status": "done"})
    write = (lambda text: html.escape(text, quote=False)) if look.plain else shown
    message = {"role": role, "content": [{"type": "text", "text": write(part)} for part in parts]}
    return message | ({"metadata": metadata} if metadata else {})


def _marks(message: Message) -> set[str]:
    return set(str((message.get("metadata") or {}).get("id") or "").split())


def _title(message: Message) -> str:
    return str((message.get("metadata") or {}).get("title") or "")


def _has(message: Message, look: Look) -> bool:
    is_open = not (message.get("metadata") or {}).get("status")
    return (PLAIN in _marks(message)) == look.plain and (not is_thinking(message) or is_open == look.thinking)


def _outside_code(text: str, spans: re.Pattern[str], formula: Callable[[str], str], change: Callable[[str, str], str]) -> str:
    """`text` with `change(backslashes, mark)` in place of every special beginning that is not inside a code block, code span or formula,
    and with every formula changed."""
    def edit(match: re.Match[str]) -> str:
        return change(match["a"] or match["b"] or "", match[0][-1])

    out = []
    for part, is_code in _blocks(text):
        if is_code:
            out.append(part)
            continue
        at = 0
        for span in spans.finditer(part):
            out += [_SPECIAL.sub(edit, part[at:span.start()]), formula(span[0]) if span["math"] else span[0]]
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
