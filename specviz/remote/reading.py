"""From the decoded events of one answer to step records, whatever engine sent them. It knows no network and no engine's flags.

Every reader takes events in order with the time of their arrival and yields `StepTrace`s with what is known; a figure that the server
does not tell stays None. Times are the client's own clock (the network is in them) unless a step carries `server_ms`.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..errors import SpecvizError
from ..trace import EmittedToken, StepTrace

__all__ = ["Ending", "Reader", "RemoteError", "Tokens", "aggregated", "emitted", "error_text", "text_of"]


class RemoteError(SpecvizError):
    """The other server refused, failed or cannot be reached. kind: one word that tells the cases apart, such as "auth" or "cut"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known once a stream has ended. steps: all of them, with what the last event told of the earlier ones. reason: as in
    `service.Run`. server: the server's own figures in its own words, for showing beside ours. notes: sentences on what is not known.
    counted: (drafted, accepted) of every step that had a draft, in order, as the server counted them, where it tells that; then it is known
    of all steps together what may be unknown of some."""
    steps: tuple[StepTrace, ...]
    reason: str = "eos"
    num_prompt_tokens: int | None = None
    server: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    counted: tuple[tuple[int, int], ...] = ()


class Reader(Protocol):
    """Reads one answer. text: the answer so far, as the server spelt it; steps may name special tokens that are no part of it."""
    text: str

    def feed(self, event: Mapping[str, Any], arrival_s: float) -> list[StepTrace]:
        """Steps that this event completed. arrival_s: seconds since the request was sent. Raises RemoteError for an error event."""

    def finish(self) -> Ending: ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one event added. pieces: one text per token where the server tells them apart, else the whole text in one. count: tokens."""
    count: int
    pieces: tuple[str, ...]
    ids: tuple[int, ...] = ()


def text_of(choice: Mapping[str, Any]) -> str:
    """What a choice of a stream adds to the answer, reasoning included; a chat delta, a completion's text or nothing."""
    delta = choice.get("delta")
    if not isinstance(delta, Mapping):
        return _text(choice.get("text"))
    return _text(delta.get("reasoning_content")) or _text(delta.get("reasoning")) or _text(delta.get("content"))


def error_text(event: Mapping[str, Any]) -> str | None:
    """The message of an error event or body, None where it is none. OpenAI sends an object, some servers a bare string."""
    error = event.get("error")
    if isinstance(error, Mapping):
        return _text(error.get("message")) or str(dict(error))
    if isinstance(error, str):
        return error
    if event.get("object") == "error":
        return _text(event.get("message")) or "no message"
    return None


def emitted(tokens: Tokens, num_accepted: int | None, num_drafted: int | None) -> tuple[EmittedToken, ...]:
    """The tokens as they entered the text. Where each has its own text the drafts come first and the target's own token last.

    num_accepted, num_drafted: of these tokens' step, None if unknown; then the target's own token is called plain. A block whose tokens cannot be told apart is one record with `num_tokens`.
    """
    if not tokens.count:
        return ()
    accepted = tokens.count - 1 if num_accepted is None else min(num_accepted, tokens.count)
    own = "plain" if not num_drafted else "bonus" if num_accepted == num_drafted else "correction"
    if len(tokens.pieces) == tokens.count:
        ids = tokens.ids if len(tokens.ids) == tokens.count else (None,) * tokens.count
        return tuple(EmittedToken(number, piece, "draft" if i < accepted else own)
                     for i, (number, piece) in enumerate(zip(ids, tokens.pieces)))
    only = tokens.ids[0] if tokens.count == len(tokens.ids) == 1 else None
    return (EmittedToken(only, "".join(tokens.pieces), "draft" if accepted else own, tokens.count),)


def aggregated(steps: Sequence[StepTrace], num_drafted: int | None, num_accepted: int | None) -> tuple[StepTrace, ...]:
    """The prefill steps, then one record that stands for all others: their order or their borders are not known."""
    prefill = tuple(step for step in steps if step.kind == "prefill")
    others = [step for step in steps if step.kind != "prefill"]
    if not others:
        return prefill
    whole = StepTrace("unknown", others[0].t0_ms, 0.0, sum(step.verify_ms for step in others), 0.0, source="aggregate",
                      emitted=tuple(replace(token, origin="plain") for step in others for token in step.emitted),
                      num_drafted=num_drafted, num_accepted=num_accepted)
    return (*prefill, whole)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
