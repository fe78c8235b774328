"""What the chat and its bar show of a visitor's conversation: the look, footers, what was left out of the prompt, the record to keep.

It knows nothing of events or components; `handlers.py` says when, this says what.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import SpecvizError
from . import strings
from .context import fit, without_oldest
from .conversations import record, runs
from .messages import Message, conversation, dressed, is_failed, reply, text_of
from .visits import Screen, Visit

if TYPE_CHECKING:                # the service imports torch; the page opens without waiting for it
    from ..service import ChatRequest, Run, Service

__all__ = ["Transcript"]


class Transcript:
    """One for the page; what belongs to a visitor is in the `Visit`."""

    def __init__(self, service: Service, most_prompt: int | None = None) -> None:
        """most_prompt: tokens that a prompt may have, None for what the context holds."""
        self.service, self._most_prompt = service, most_prompt
        self._seq = 0

    def fitted(self, visit: Visit, asked: ChatRequest) -> ChatRequest:
        """The request with as many of its turns as the model's context holds. Raises PromptTooLong, see `context.fit`."""
        visit.system = "".join(message["content"] for message in asked.messages if message["role"] == "system")
        fitted = fit(asked.messages, self.service.count_tokens, self.service.config().get("context"), asked.sampling.max_new_tokens,
                     self._most_prompt)
        visit.num_dropped = fitted.num_dropped
        return replace(asked, messages=fitted.messages)

    def reply(self, visit: Visit, run: Run, *, still_measuring: bool = False) -> list[Message]:
        """The messages of a finished answer."""
        footer = strings.footer(run.trace().stats, run.reason, still_measuring=still_measuring, num_dropped=visit.num_dropped)
        return reply(run.text, footer, opened=bool(run.meta.get("opens_thinking")))

    def dressed(self, visit: Visit, screen: Screen) -> Screen:
        """The screen in the visitor's look, and its message for the bar where it asks for one: True means of the chat, a list of that."""
        changes = dict(zip(Screen.FIELDS, screen))
        if isinstance(changes["chat"], list):
            changes["chat"] = visit.chat = dressed(changes["chat"], visit.look)
        if changes["bar"] is True or isinstance(changes["bar"], list):
            changes["bar"] = self.record(visit, changes["chat"] if changes["bar"] is True else changes["bar"])
        return Screen(**changes)

    def record(self, visit: Visit, history: list[Message]) -> str:
        """The message for the bar; a finished answer at the end of the chat comes with its colours."""
        self._seq += 1
        run, name, colours = visit.run, "", None
        if run is not None and run.reason and history and history[-1]["role"] == "assistant" and not is_failed(history[-1]):
            name, colours = visit.slicer.run, runs(run.trace(), text_of(history[-1]), run.text)
        return record(history, seq=self._seq, meter=self._meter(visit, history), run=name, colours=colours)

    def _meter(self, visit: Visit, history: list[Message]) -> dict[str, Any]:
        """How much of the context the conversation fills, without the turns that its last prompt had to leave out."""
        turns, config = without_oldest(conversation(history), visit.num_dropped), self.service.config()
        context = config.get("context")
        if config.get("engine"):                 # the tokenizer is a server's, and so is the count
            return strings.meter_told(told, context) if turns and (told := self._told(visit, config)) else {}
        if not turns or not context:
            return {}
        system = [{"role": "system", "content": visit.system}] if visit.system else []
        try:
            return strings.meter(self.service.count_tokens([*system, *turns]), context, visit.num_dropped)
        except SpecvizError:                     # a template that refuses it: the next question will tell
            return {}

    @staticmethod
    def _told(visit: Visit, config: Mapping[str, Any]) -> int | None:
        """Tokens of the last prompt as the server in use has counted them; None where it does not tell, or another one answered."""
        meta = visit.run.meta if visit.run is not None else {}
        mine = (meta.get("remote") or {}).get("address") == config.get("device") and meta.get("target") == config.get("target")
        return meta.get("prompt_tokens") if mine else None
