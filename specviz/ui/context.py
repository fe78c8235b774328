"""Which turns of a conversation fit into the model's context. It knows nothing of tokenizers, models or how a prompt looks.

The rule: part of the context stays free for the answer (the new tokens asked for, at most a quarter of the context). Where the
conversation is longer than the rest, its oldest turns, each a question with its answer, leave the prompt; the system prompt and the
last message stay. If those two alone do not fit, the message is refused.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PromptTooLong

__all__ = ["Fitted", "fit", "free_for_answer", "without_oldest"]

Turns = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Fitted:
    """messages: what the model is given. num_tokens: their length as a prompt. num_dropped: turns left out."""
    messages: tuple[dict[str, Any], ...]
    num_tokens: int
    num_dropped: int = 0


def free_for_answer(num_new: int, context: int) -> int:
    """Tokens of the context that the prompt leaves free."""
    return max(1, min(num_new, context // 4))


def without_oldest(turns: Turns, num_dropped: int) -> Turns:
    """The turns from the one with that number on, each beginning with a message from the user; the last one always stays."""
    starts = [i for i, message in enumerate(turns) if message["role"] == "user"]
    return turns[starts[min(num_dropped, len(starts) - 1)]:] if starts and num_dropped else turns


def fit(messages: Turns, count: Callable[[Turns], int], context: int | None, num_new: int, most: int | None = None) -> Fitted:
    """The longest end of a conversation that fits, with its system prompt.

    messages: OpenAI style, the last one from the user. count: tokens of a prompt. context: tokens in all; None or 0 if unknown, then
    nothing is left out. num_new: new tokens asked for. most: tokens that a prompt may have whatever the context is, None for no such limit.
    Raises PromptTooLong if system prompt and last message alone are too long.
    """
    system = [message for message in messages if message["role"] == "system"]
    turns = [message for message in messages if message["role"] != "system"]
    num_turns = max(1, sum(message["role"] == "user" for message in turns))

    def without(num_dropped: int) -> Fitted:
        kept = (*system, *without_oldest(turns, num_dropped))
        return Fitted(kept, count(kept), num_dropped)

    whole = without(0)
    if not context and most is None:
        return whole
    room = context - free_for_answer(num_new, context) if context else most
    is_ours = most is not None and most < room
    room = most if is_ours else room
    if whole.num_tokens <= room:
        return whole
    last = without(num_turns - 1)
    if last.num_tokens > room:
        beside = " with the system prompt" if system else ""
        if is_ours or not context:
            raise PromptTooLong(f"This message has {last.num_tokens:,} tokens{beside}; the operator of this page allows {room:,}. "
                                "Shorten it.")
        raise PromptTooLong(f"This message has {last.num_tokens:,} tokens{beside}; there is room for {room:,}: the model's context has "
                            f"{context:,}, and {context - room:,} stay free for the answer. Shorten it, or ask for fewer new tokens.")
    low, high, best = 1, num_turns - 1, last            # the fewest turns to leave out: prompts only get shorter
    while low < high:
        middle = (low + high) // 2
        tried = without(middle)
        if tried.num_tokens <= room:
            high, best = middle, tried
        else:
            low = middle + 1
    return best
