"""The one door to the engine for screens, servers and benchmarks. It knows nothing of how a page looks."""
from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .engine.option import Option
from .engine.sampling import SamplingParams
from .trace import PlainToken, StepTrace, Trace

if TYPE_CHECKING:
    from .options import Options

__all__ = ["ChatRequest", "Choice", "Inspection", "Line", "MethodInfo", "Offer", "Run", "Service", "Status", "Waiting", "open_service"]


@dataclass(frozen=True, slots=True)
class Status:
    """Where loading stands. state: "loading", "ready", "failed" or "unloaded". message: one sentence for people. fraction: 0 to 1, None if
    unknown.

    is_loading: a pair is on its way and message and fraction speak of it; in the state "ready" another one goes on answering meanwhile.
    last_error: why the last load failed, until the next one begins. number: how many pairs were in use so far; whenever it rises, methods,
    default method and configuration are others.
    """
    state: str
    message: str
    fraction: float | None = None
    is_loading: bool = False
    last_error: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """What is to be loaded. target: a card's source, a hub repository, a folder or a GGUF file; draft likewise, None for no draft model."""
    target: str = "default"
    draft: str | None = None
    quantization: str = "auto"
    device: str = "auto"
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Offer:
    """A target that the program knows, as the list of models shows it. Texts come from files and are shown as text, never as markup.

    source: for `Choice.target`. drafts: sources of draft models with its tokenizer. quantizations: what can be chosen here, the advised
    one first. download_bytes: still to be fetched, 0 if it lies here. memory_bytes: target and cache in the advised form, None if unknown. fit:
    "" if it fits this machine, else why not. gated: its owner asks for an account and a licence.
    """
    source: str
    name: str
    summary: str
    licence: str
    context_length: int
    num_parameters: int
    download_bytes: int
    memory_bytes: int | None
    fit: str
    drafts: tuple[str, ...] = ()
    quantizations: tuple[str, ...] = ("auto",)
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a report. level: "good", "note" or "bad"."""
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of a choice before it is loaded.

    lines: the report. download_bytes: to be fetched, None if unknown. fits_beside: whether it fits while the pair in use stays.
    """
    lines: tuple[Line, ...]
    download_bytes: int | None = 0
    fits_beside: bool = True

    @property
    def is_possible(self) -> bool:
        return not any(line.level == "bad" for line in self.lines)


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """One drafting method as the menu shows it. reason: why it cannot run now ("" if it can). note: a caption, such as "untrained:
    expect few accepted". options: what can be set for each request, with its defaults for the pair in use. fixed: how it drafts and
    verifies is decided elsewhere, so a request's k, auto_k, options, verification and keep_probs mean nothing to it. comparable: whether plain
    decoding can be measured beside it."""
    name: str
    label: str
    summary: str
    reason: str = ""
    note: str = ""
    options: tuple[Option, ...] = ()
    fixed: bool = False
    comparable: bool = True

    @property
    def available(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a chat turn asks for. messages: OpenAI style dicts with "role" and "content" (text), the last one from the user.
    An answer's "reasoning_content" is what the model thought before it; it enters the prompt only where the chat template asks for it.

    conversation: whose text this is. What the engine has read already is reused within one conversation, never across. verification: a
    name in `engine.rules.RULES`. prompt: a raw text to go on with, in place of messages. options: the method's own, (name, value) as
    `MethodInfo.options` declares them; what is not named has its default. auto_k: the engine chooses how much to draft, step by step;
    k is used while what steps cost here is not known yet.
    """
    messages: tuple[dict[str, str], ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    method: str = "plain"
    k: int = 5
    keep_probs: bool = True
    conversation: str = ""
    verification: str = "rejection"
    prompt: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    auto_k: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """A plain measurement that has no token yet, or no further one, because others are answered. num_answers: how many of them."""
    num_answers: int


class Run(Protocol):
    """One answer being made. Iterate it once for its steps; it ends when the answer ends or after `cancel`.

    place: 0 once the engine works on it or it has ended; before, its number in the queue, 1 for the next one.
    """
    meta: dict[str, Any]         # complete before the first step: target, drafter, method, config, requested?, sampling, prompt_tokens, ...
    text: str                    # the answer so far; text that may begin a stop string is held back
    reason: str                  # "" while running, then "eos", "stop", "length", "cancelled" or "error"
    place: int

    def __iter__(self) -> Iterator[StepTrace]: ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for its turn, at most so long. Returns whether it has come; also True when the answer has ended meanwhile."""

    def cancel(self) -> None:
        """End after the step in progress; what came so far is kept."""

    def measure_plain(self, num_tokens: int = 128) -> Iterator[PlainToken | Waiting]:
        """Decode the same prompt without a drafter, alone on the same engine, starting from the same cached prompt; continues where the
        last call stopped. While others are answered it waits, and yields `Waiting` about twice a second, so that the reader can say so or
        close it. Ends on `cancel`, at the length of the answer, and when its pair goes."""

    def trace(self) -> Trace:
        """Everything so far, with stats and comparison filled in."""


class Service(Protocol):
    def status(self) -> Status: ...
    def config(self) -> dict[str, Any]:
        """The effective configuration, read back from the engine: target, drafter, device, dtype, quantization, threads, context,
        exactness; empty until ready."""
    def methods(self) -> list[MethodInfo]: ...
    def default_method(self) -> str: ...
    def count_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        """Length of a conversation as a prompt, ready for the next answer; 0 until ready. Raises InputError as `submit` would."""
    def submit(self, request: ChatRequest) -> Run:
        """Raises Busy, TooManyRequests, PromptTooLong, InputError. Any plain measurement in progress makes way until nobody is answered."""
    def forget(self, conversation: str) -> None:
        """Drop what the engine keeps of an ended conversation."""
    def choice(self) -> Choice | None:
        """What the pair in use was loaded from; None while there is none."""
    def offers(self) -> list[Offer]:
        """The targets that can be chosen by name, with their fit on this machine now."""
    def advice(self) -> list[Line]:
        """What the list of models should say of this machine, such as a PyTorch without CUDA beside an NVIDIA card."""
    def suggestion(self) -> Offer | None:
        """The best target that fits the CUDA device and needs no account; None without one, or once somebody has chosen."""
    def inspect(self, choice: Choice) -> Inspection:
        """Whether target and drafter work together and fit, from files and configurations alone. May ask the hub for small files."""
    def load(self, choice: Choice, *, unload_first: bool = False) -> None:
        """Begin to load; returns at once, see `status`. The pair in use goes on answering until the new one works, and stays if it fails.

        unload_first: let the pair in use end first, for want of memory; it is loaded again should the new one fail. Raises Busy while
        another load is in progress."""
    def cancel_load(self) -> None:
        """Give up the load in progress, if any; the pair in use stays."""
    def unload(self) -> None:
        """Free the pair in use, once its running answers have ended."""
    def close(self) -> None: ...


def open_service(options: Options) -> Service:
    """The service for this machine's own engine, or for another server; returns at once and loads in the background, see `Service.status`.

    While the program runs it can be turned to another server and back (`attached.Attachable`); one that was named with --remote stays.
    """
    if options.remote:
        from .remote_service import RemoteService
        return RemoteService(options)
    from .attached import Attachable
    from .default_model import default_cache_dir
    from .local_service import LocalService
    from .remembered import Remembered
    gc.freeze()                  # what the libraries made at import: later collections would look at it again, which stops the page
    local = LocalService(options, remembered=None if options.public else Remembered(options.cache_dir or default_cache_dir()))
    return Attachable(local, options)
