"""The values of the page's controls, and the request that they make. It knows nothing of Gradio or of how a request is answered."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .messages import Message

if TYPE_CHECKING:                # the service imports torch; the page opens without waiting for it
    from ..service import ChatRequest

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The controls of the page, in the order in which layout.py hands their values over; options are read apart (`method_options.py`)."""
    system: str
    method: str | None
    k: int
    greedy: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    max_new_tokens: int
    stop: str
    measure_plain: bool
    keep_probs: bool
    verification: str = "rejection"
    auto_k: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def num_controls(cls) -> int:
        return len(fields(cls)) - 1

    def request(self, messages: Sequence[Message], conversation: str) -> ChatRequest:
        """messages: the turns so far. conversation: whose they are. Raises InputError where a field is empty or out of range."""
        from ..engine.sampling import SamplingParams
        from ..service import ChatRequest
        assert self.method, "the handlers fill an empty menu with the service's default"
        for name in ("k", "seed", "max_new_tokens", "top_k"):
            value = getattr(self, name)
            if value is None or value != int(value):
                raise InputError(f"{name} is {value!r}; expected a whole number.")
        sampling = SamplingParams(
            temperature=0.0 if self.greedy else self.temperature, top_k=0 if self.greedy else int(self.top_k),
            top_p=1.0 if self.greedy else self.top_p, min_p=0.0 if self.greedy else self.min_p, repetition_penalty=self.repetition_penalty,
            seed=int(self.seed), max_new_tokens=int(self.max_new_tokens), stop=_stop_strings(self.stop))
        system = [{"role": "system", "content": self.system.strip()}] if self.system and self.system.strip() else []
        return ChatRequest((*system, *messages), sampling, self.method, int(self.k), self.keep_probs, conversation,
                           verification=self.verification, options=self.options, auto_k=self.auto_k)


def _stop_strings(text: str | None) -> tuple[str, ...]:
    r"""One per line; \n and \t stand for a line break and a tab."""
    lines = (line.replace("\\n", "\n").replace("\\t", "\t") for line in (text or "").splitlines())
    return tuple(line for line in lines if line)
