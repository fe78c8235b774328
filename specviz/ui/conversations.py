"""The bar under the chat: context meter, display switches, and the conversations that the browser keeps for itself.

It knows nothing of models. The server remembers no conversation: it sends rows, `assets/conversations.js` stores them, and rows that come
back are not trusted. Model text travels as JSON strings and is never markup.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from ..errors import InputError
from ..trace import Trace
from . import strings
from .messages import Message, answered, failed, is_failed, is_thinking, parts_of, question, text_of, thought
from .slicer import encode

__all__ = ["ChatBar", "record", "reopened", "rows", "runs"]

ASSETS = Path(__file__).resolve().parents[2] / "assets"
MAX_ROWS, MAX_CHARACTERS = 4000, 4_000_000
WARNING = "⚠ "                   # what `failed` puts before its sentence

# As in viewer.py: `watch` does not fire for the value that is there at mount. The words in quotes are events that Python can listen to:
# bar.look(fn) gets `event.plain` and `event.thinking`, bar.recall(fn) gets `event.rows`, bar.fresh(fn) nothing.
_MOUNT = """
const bar = SpecChat.mount(element.querySelector('.chat-bar'), {
  onLook: look => trigger('look', look), onRecall: rows => trigger('recall', {rows}), onFresh: () => trigger('fresh', {}),
});
element.bar = bar;
const take = () => { if (props.value) bar.take(JSON.parse(props.value)); };
take();
watch('value', take);
element.dataset.ready = '1';
//# sourceURL=specviz-conversations.js
"""


class ChatBar(gr.HTML):
    """One always-mounted bar; its value is one JSON message as `record` makes it.

    off: the sentence that says why no conversations are kept; empty if they are.
    """

    def __init__(self, value: str | None = None, *, off: str = "", **kwargs: Any) -> None:
        for fixed in ("html_template", "css_template", "js_on_load", "apply_default_css"):
            kwargs.pop(fixed, None)          # Gradio passes them back when it copies a component; they are constants here
        value = value or encode({"off": off, "seq": 0})
        script = "".join((ASSETS / name).read_text(encoding="utf-8") + "\n" for name in ("colours.js", "conversations.js"))
        super().__init__(value=value, html_template="<div class='chat-bar'></div>", css_template="", js_on_load=script + _MOUNT,
                         apply_default_css=False, **kwargs)

    def api_info(self) -> dict[str, Any]:
        return {"type": "string"}

    def postprocess(self, value: str | None) -> str | None:
        """The message as it is: it is data, never markup, so Gradio's warning about script tags would be a false alarm."""
        return value


def record(history: Sequence[Message], *, seq: int, meter: dict[str, Any] | None = None, run: str = "",
           colours: list[list[str]] | None = None) -> str:
    """A message for the bar. seq: different in every message, or an equal one would not arrive. meter: see `strings.meter`.

    run: the viewer's run that made the last answer. colours: its `runs`.
    """
    return encode({"seq": seq, "rows": rows(history), "meter": meter, "run": run, "runs": colours})


def rows(history: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation as the chat groups it: what one side said in a row.

    Each row is {"role", "parts": [{"kind", "text", "shown"}]}: kind is "text", "thinking", "footer" or "failed", `text` is exact, `shown`
    what the chat's own Copy button would copy.
    """
    out: list[dict[str, Any]] = []
    for message in history:
        texts, content = parts_of(message), message.get("content")
        shown = [part.get("text", "") for part in content] if isinstance(content, (list, tuple)) else [content]
        parts = [{"kind": _kind(message, i, len(texts)), "text": text, "shown": _copied(message, shown[i])} for i, text in enumerate(texts)]
        if out and out[-1]["role"] == message["role"]:
            out[-1]["parts"] += parts
        else:
            out.append({"role": message["role"], "parts": parts})
    return out


def reopened(data: Any) -> list[Message]:
    """Messages from rows that a browser kept. Raises InputError where they are not what `rows` makes; the texts are anyone's."""
    if not isinstance(data, list) or len(data) > MAX_ROWS or len(json.dumps(data)) > MAX_CHARACTERS:
        raise InputError("This conversation is no list of turns, or too long; expected what this page has saved. Delete it from the list.")
    history: list[Message] = []
    for row in data:
        parts = row.get("parts") if isinstance(row, dict) else None
        if not isinstance(parts, list) or row.get("role") not in ("user", "assistant") or not all(map(_is_part, parts)):
            raise InputError("This conversation has a broken turn; expected what this page has saved. Delete it from the list.")
        if row["role"] == "user":
            history += [question(part["text"]) for part in parts]
        else:
            history += _answers(parts)
    return history


def runs(trace: Trace, answer: str, text: str) -> list[list[str]] | None:
    """[text, origin] for each stretch of tokens of one origin; the texts add up to `answer`.

    text: all that the run said; `answer` is its end, without the thinking. None where the tokens do not spell it.
    """
    tokens = [(token.text, token.origin) for step in trace.steps for token in step.emitted]
    start = len(text) - len(answer)
    if not answer or "".join(piece for piece, _ in tokens)[start:start + len(answer)] != answer:
        return None
    out: list[list[str]] = []
    at = 0
    for piece, origin in tokens:
        part = piece[max(0, start - at):max(0, start + len(answer) - at)]
        at += len(piece)
        if part and out and out[-1][1] == origin:
            out[-1][0] += part
        elif part:
            out.append([part, origin])
    return out


def _kind(message: Message, index: int, num_parts: int) -> str:
    if is_thinking(message):
        return "thinking"
    if is_failed(message):
        return "failed" if index == num_parts - 1 else "text"
    return "footer" if index and message["role"] == "assistant" else "text"


def _copied(message: Message, shown: str) -> str:
    """What Gradio's Copy button makes of a part: a folded block gets its title and an indent."""
    title = (message.get("metadata") or {}).get("title")
    return f"{title}\n  {shown}\n" if title else shown


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("kind") in ("text", "thinking", "footer", "failed")


def _answers(parts: Sequence[dict[str, Any]]) -> list[Message]:
    """A row of an assistant as messages: thinking, then a text with its footer or its error; possibly several times."""
    out: list[Message] = []
    for part in parts:
        kind, text = part["kind"], part["text"]
        after = out[-1] if out and not is_thinking(out[-1]) and not is_failed(out[-1]) and len(out[-1]["content"]) == 1 else None
        if kind == "thinking":
            out.append(thought(text))
        elif kind == "text":
            out.append(answered(text))
        elif kind == "footer" and after:
            words = [word for word in text.split(" · ") if word != strings.STILL_MEASURING]       # that run ended with its page
            out[-1] = answered(text_of(after), " · ".join(words))
        elif kind == "failed":
            out[-1:] = [failed(text.removeprefix(WARNING), text_of(after))] if after else [*out[-1:], failed(text.removeprefix(WARNING))]
    return out
