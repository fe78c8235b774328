"""The operator's system prompt: before everybody's conversation, read once and shared. It knows nothing of threads, queues or screens.

Nothing but this text crosses from one visitor to another: only it is run under the engine's scope `SHARED`.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .engine.drafting import DraftSettings
from .engine.sampling import SamplingParams
from .engine.scheduler import SHARED
from .engine.sequence import NoText
from .errors import InputError

if TYPE_CHECKING:
    from .opening import Opened
    from .text import TextCodec

__all__ = ["SharedPrompt", "common_start", "under"]


def under(system_prompt: str, messages: Sequence[Mapping[str, str]]) -> tuple[Mapping[str, str], ...]:
    """The messages behind the operator's text; a system prompt of their own follows it in the same message, as templates want one."""
    if not system_prompt:
        return tuple(messages)
    if messages and messages[0]["role"] == "system":
        return ({**messages[0], "content": f"{system_prompt}\n\n{messages[0]['content']}"}, *messages[1:])
    return ({"role": "system", "content": system_prompt}, *messages)


def common_start(codec: TextCodec, system_prompt: str, capacity: int) -> tuple[int, ...]:
    """The tokens that all prompts under this text begin with, whether or not they bring a system prompt. Raises InputError if they fill
    more than half of the model's context, `capacity`."""
    if not system_prompt:
        return ()
    user, other, own = {"role": "user", "content": "1"}, {"role": "user", "content": "A"}, {"role": "system", "content": "1"}
    prompts = [codec.render(under(system_prompt, messages)) for messages in ((user,), (other,), (own, user))]
    num = 0
    for tokens in zip(*prompts):
        if len(set(tokens)) > 1:
            break
        num += 1
    if num > capacity // 2:
        raise InputError(f"--system-prompt has {num} tokens; this model has room for {capacity} in all, so expected at most "
                         f"{capacity // 2}. Shorten it.")
    return tuple(prompts[0][:num])


class SharedPrompt:
    """Which drafters have read it. A drafter that keeps a state of its own reads it once itself, after the first answer that had to.

    tokens: see `common_start`; without any there is nothing to do.
    """

    def __init__(self, tokens: Sequence[int], first_methods: Sequence[str]) -> None:
        self._tokens = list(tokens)
        self._due = list(dict.fromkeys(first_methods)) if tokens else []
        self._read: set[str] = set()

    @property
    def is_due(self) -> bool:
        """Whether a method has still to read it; to be done when nobody is answered."""
        return bool(self._due)

    def begin(self, opened: Opened) -> None:
        """Let the next method read it: a request of one token, which nobody sees."""
        method = self._due.pop(0)
        self._read.add(method)
        opened.engine.add(self._tokens, SamplingParams(max_new_tokens=1), opened.drafter(method), DraftSettings(1), NoText(), scope=SHARED,
                          keep_probs=False)

    def heard(self, method: str, num_reused: int) -> None:
        """An answer's prompt was read, so many tokens of it taken over."""
        if num_reused < len(self._tokens) and method not in self._read and method not in self._due:
            self._due.append(method)

    def lost(self) -> None:
        """The engine has started afresh."""
        self._read.clear()
