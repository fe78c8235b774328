"""One request on its way: its tokens, what it still has to read, and when it ends. It knows nothing of models, caches or threads."""
from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from ..trace import CacheTrace, EmittedToken
from .autopilot import Autopilot
from .drafting import Drafter, DraftSettings
from .rules import REJECTION, Rule
from .sampling import SamplingParams

__all__ = ["NoText", "Sequence", "Status", "TextSink"]


class TextSink(Protocol):
    """Turns one sequence's tokens into text as they come (`text.TextCodec` makes them)."""

    def push(self, token: int) -> tuple[str, bool]:
        """The text that this token added, and whether a stop string is now complete (the text ends before it)."""

    @property
    def text(self) -> str:
        """All text so far that cannot turn out to be part of a stop string."""

    def finish(self) -> None:
        """The sequence ended: release what was held back, unless a stop string did it."""


class NoText:
    """The `TextSink` where nobody reads the text."""
    text = ""

    def push(self, token: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> None:
        pass


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """A request and its answer so far.

    pilot: chooses how much to draft, None where the request's own k stands. tokens: prompt and answer. row: its row in the target's cache once admitted; what the target has not read yet is
    `tokens[cache.length(row):]`. drafting: whatever the drafter keeps for this request. reason: why it ended ("eos", "stop", "length",
    "context", "cancelled", "error").
    """

    def __init__(self, request_id: int, prompt: Seq[int], params: SamplingParams, drafter: Drafter, settings: DraftSettings, sink: TextSink,
                 eos_ids: frozenset[int], scope: str = "", keep_probs: bool = True, rule: Rule = REJECTION) -> None:
        self.id = request_id
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.params = params
        self.drafter = drafter
        self.settings = settings
        self.sink = sink
        self.rule = rule                        # how its drafts are judged
        self.noise = rule.noise(params.seed)
        self.scope = scope                      # whose text this is: prefixes are reused within a scope only
        self.drafting: Any = None
        self.pilot: Autopilot | None = None
        self.row: int | None = None
        self.status = Status.WAITING
        self.reason = ""
        self.num_steps = 0                      # steps that emitted something
        self.num_reused = 0                     # prompt tokens taken over from an earlier request
        self.keep_probs = keep_probs            # whether its trace stores probabilities
        self.draft_kv: CacheTrace | None = None  # what the last step did to its row in the drafter's own cache, if that has one
        self.prefill_times: list[Any] = []      # of the chunks so far
        self.decode_start_s: float | None = None
        self._eos_ids = eos_ids if not params.ignore_eos else frozenset()

    @property
    def num_new_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def tokens_left(self) -> int:
        return self.params.max_new_tokens - self.num_new_tokens

    def extend(self, tokens: Seq[int], origins: Seq[str], room: int) -> list[EmittedToken]:
        """Append a step's tokens; the block is cut behind EOS, a stop string, the length limit or the end of the context.

        room: how many more tokens the context has place for.
        """
        emitted = []
        for token, origin in zip(tokens, origins):
            self.tokens.append(token)
            text, stopped = self.sink.push(token)
            emitted.append(EmittedToken(token, text, origin))
            if token in self._eos_ids:
                self.finish("eos")
            elif stopped:
                self.finish("stop")
            elif self.tokens_left <= 0:
                self.finish("length")
            elif len(emitted) >= room:
                self.finish("context")
            if self.status is Status.FINISHED:
                break
        self.num_steps += 1
        return emitted

    def finish(self, reason: str) -> None:
        """End here, once; the first reason stays."""
        if self.status is not Status.FINISHED:
            self.status = Status.FINISHED
            self.reason = reason
            self.sink.finish()
