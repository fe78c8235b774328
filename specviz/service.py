"""The one door to the engine for screens, servers and benchmarks. It knows nothing of how a page looks."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .engine.sampling import SamplingParams
from .trace import PlainToken, StepTrace, Trace

if TYPE_CHECKING:
    from .options import Options

__all__ = ["ChatRequest", "MethodInfo", "Run", "Service", "Status", "open_service"]


@dataclass(frozen=True, slots=True)
class Status:
    """Where loading stands. state: "loading", "ready" or "failed". message: one sentence for people. fraction: 0 to 1, None if unknown."""
    state: str
    message: str
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """One drafting method as the menu shows it. reason: why it cannot run now ("" if it can). note: a caption, such as "untrained:
    expect few accepted"."""
    name: str
    label: str
    summary: str
    reason: str = ""
    note: str = ""

    @property
    def available(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a chat turn asks for. messages: OpenAI style dicts with "role" and "content" (text), the last one from the user.

    conversation: whose text this is. What the engine has read already is reused within one conversation, never across.
    """
    messages: tuple[dict[str, str], ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    method: str = "plain"
    k: int = 5
    keep_probs: bool = True
    conversation: str = ""


class Run(Protocol):
    """One answer being made. Iterate it once for its steps; it ends when the answer ends or after `cancel`."""
    meta: dict[str, Any]         # complete before the first step: target, drafter, method, config, requested?, sampling, prompt_tokens, ...
    text: str                    # the answer so far; text that may begin a stop string is held back
    reason: str                  # "" while running, then "eos", "stop", "length", "cancelled" or "error"

    def __iter__(self) -> Iterator[StepTrace]: ...

    def cancel(self) -> None:
        """End after the step in progress; what came so far is kept."""

    def measure_plain(self, num_tokens: int = 128) -> Iterator[PlainToken]:
        """Decode the same prompt without a drafter, alone on the same engine, starting from the same cached prompt; continues where the
        last call stopped. Ends early when a chat turn is submitted, on `cancel`, and at the length of the answer."""

    def trace(self) -> Trace:
        """Everything so far, with stats and comparison filled in."""


class Service(Protocol):
    def status(self) -> Status: ...
    def config(self) -> dict[str, Any]:
        """The effective configuration, read back from the engine: target, drafter, device, dtype, quantization, threads, context,
        exactness; empty until ready."""
    def methods(self) -> list[MethodInfo]: ...
    def default_method(self) -> str: ...
    def submit(self, request: ChatRequest) -> Run:
        """Raises Busy, PromptTooLong, InputError. Ends any plain measurement in progress."""
    def close(self) -> None: ...


def open_service(options: Options) -> Service:
    """The service for this machine's own engine; returns at once and loads in the background, see `Service.status`."""
    from .local_service import LocalService
    return LocalService(options)
