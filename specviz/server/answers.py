"""One answer as OpenAI's objects: a chunk per decoding step, or the whole at once. It knows no HTTP.

The extra fields are vLLM's: `token_ids` on request, and `metrics.speculative_decoding` with one entry
per step that drafted. Ours are `token_texts` beside the ids and `all_steps_*`, which also count the steps without a draft.
"""
from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from .. import metrics
from ..trace import StepTrace, Trace

if TYPE_CHECKING:
    from .requests import ApiRequest

__all__ = ["Answer"]

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}


class Answer:
    """The wire form of one run."""

    def __init__(self, asked: ApiRequest) -> None:
        self._asked = asked
        self._id = ("chatcmpl-" if asked.chat else "cmpl-") + uuid.uuid4().hex[:24]
        self._created = int(time.time())
        self._prompt_tokens = self._cached = self._completion = 0
        self._shown = 0                     # characters of the text that are out

    def opening(self, num_prompt_tokens: int) -> dict[str, Any] | None:
        """The first chunk of a chat: the role."""
        self._prompt_tokens = num_prompt_tokens
        return self._chunk([self._choice({"role": "assistant", "content": ""}, None)]) if self._asked.chat else None

    def chunk(self, step: StepTrace, text: str) -> dict[str, Any] | None:
        """What a step added; text: the whole answer so far, with what may begin a stop string held back. None where it added nothing."""
        if step.kind == "prefill":
            self._cached += step.num_reused
        if not step.emitted:
            return None
        self._completion += sum(token.num_tokens for token in step.emitted)
        new, self._shown = text[self._shown:], len(text)
        choice = self._choice({"content": new} if self._asked.chat else new, None)
        if self._asked.token_ids:
            choice |= {"token_ids": [token.id for token in step.emitted], "token_texts": [token.text for token in step.emitted]}
        return self._chunk([choice])

    def closing(self, trace: Trace, text: str, reason: str) -> list[dict[str, Any]]:
        """The chunk with the finish reason and what was held back, and, if asked for, the one with the counts."""
        new, self._shown = text[self._shown:], len(text)
        last = [self._chunk([self._choice({"content": new} if new else {}, FINISH[reason]) if self._asked.chat
                             else self._choice(new, FINISH[reason])])]
        if self._asked.usage_last:
            last.append(self._chunk([], usage=self._usage()) | {"metrics": self._metrics(trace)})
        return last

    def whole(self, trace: Trace, text: str, reason: str, num_prompt_tokens: int) -> dict[str, Any]:
        """The answer as one object."""
        self._prompt_tokens = num_prompt_tokens
        self._completion = sum(token.num_tokens for step in trace.steps for token in step.emitted)
        self._cached = sum(step.num_reused for step in trace.steps)
        choice = {"index": 0, "logprobs": None, "finish_reason": FINISH[reason]}
        choice |= {"message": {"role": "assistant", "content": text}} if self._asked.chat else {"text": text}
        if self._asked.token_ids:
            choice["token_ids"] = [token.id for step in trace.steps for token in step.emitted]
        kind = "chat.completion" if self._asked.chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._asked.model, "choices": [choice],
                "usage": self._usage(), "metrics": self._metrics(trace)}

    def _choice(self, content: Any, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "delta" if self._asked.chat else "text": content, "logprobs": None, "finish_reason": finish}

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._asked.chat else "text_completion"
        data = {"id": self._id, "object": kind, "created": self._created, "model": self._asked.model, "choices": choices}
        if usage or self._asked.usage_always:
            data["usage"] = usage or self._usage()
        elif self._asked.usage_last:
            data["usage"] = None
        return data

    def _usage(self) -> dict[str, Any]:
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._completion,
                "total_tokens": self._prompt_tokens + self._completion, "prompt_tokens_details": {"cached_tokens": self._cached}}

    @staticmethod
    def _metrics(trace: Trace) -> dict[str, Any]:
        stats = metrics.summarize(trace)
        prefill_ms = sum(step.draft_ms + step.verify_ms + step.other_ms for step in trace.steps if step.kind == "prefill")
        decode_ms = sum(step.draft_ms + step.verify_ms + step.other_ms for step in trace.steps if step.kind != "prefill")
        counts = [metrics.draft_counts(step) for step in trace.steps if step.kind != "prefill" and step.emitted]
        return {"time_to_first_token_ms": prefill_ms, "generation_time_ms": decode_ms, "tokens_per_second": stats.tokens_per_s,
                "speculative_decoding": {
                    "mean_acceptance_length": stats.mean_acceptance_length, "draft_acceptance_rate": stats.draft_acceptance_rate,
                    "acceptance_histogram": list(stats.acceptance_histogram), "num_spec_steps": stats.num_spec_steps,
                    "num_accepted_draft_tokens": stats.num_accepted_draft_tokens, "num_draft_tokens": stats.num_draft_tokens,
                    "num_spec_tokens": max(stats.per_step_drafted, default=0), "per_step_accepted": list(stats.per_step_accepted),
                    "per_step_drafted": list(stats.per_step_drafted),
                    "all_steps_accepted": [accepted for _, accepted in counts], "all_steps_drafted": [drafted for drafted, _ in counts]}}
