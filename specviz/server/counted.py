"""A service whose answers are counted for Prometheus, whoever asked for them: page, API or benchmark. It changes no answer.

Names and labels are vLLM's with the prefix `specviz:`, so that dashboards made for it need only another prefix.
"""
from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..metrics import draft_counts
from ..trace import PlainToken, StepTrace, Trace

if TYPE_CHECKING:                # the service imports torch; the page opens without waiting for it
    from ..service import ChatRequest, Run, Service

__all__ = ["Counted"]

WAIT_S = 60.0
ENDED = {"eos": "stop", "context": "length", "cancelled": "abort"}              # vLLM's words for how a request ended, where they are other ones
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60)


class Counted:
    """Wraps a service; everything that is not counted goes through as it is."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.registry = CollectorRegistry()
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"specviz:{name}", what, labels, registry=self.registry)
        self.num_drafts = counter("spec_decode_num_drafts", "Verification steps that had a draft")
        self.num_draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens")
        self.num_accepted_tokens = counter("spec_decode_num_accepted_tokens", "Drafted tokens that the target accepted")
        self.accepted_at = counter("spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by their place in the draft", "position")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens read")
        self.reused_tokens = counter("prefix_cache_hits", "Prompt tokens taken over from an earlier request")
        self.generation_tokens = counter("generation_tokens", "Tokens written")
        self.ended = counter("request_success", "Requests by how they ended", "finished_reason")
        self.waiting = Gauge("specviz:num_requests_waiting", "Requests that wait for their turn", registry=self.registry)
        self.running = Gauge("specviz:num_requests_running", "Answers being written", registry=self.registry)
        def seconds(name: str, what: str) -> Histogram:
            return Histogram(f"specviz:{name}_seconds", what, buckets=SECONDS, registry=self.registry)
        self.first_token_s = seconds("time_to_first_token", "From the request to its first token")
        self.between_tokens_s = seconds("inter_token_latency", "Time of a step over the tokens that it emitted")
        self.whole_s = seconds("e2e_request_latency", "From the request to its end")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def submit(self, request: ChatRequest) -> CountedRun:
        begin_s = time.perf_counter()
        return CountedRun(self._service.submit(request), self, begin_s)

    def exposition(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)


class CountedRun:
    """See `service.Run`."""

    def __init__(self, run: Run, counts: Counted, begin_s: float) -> None:
        self._run, self._counts, self._begin_s = run, counts, begin_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def __iter__(self) -> Iterator[StepTrace]:
        counts, first = self._counts, True
        while not self.wait(WAIT_S):
            pass
        counts.running.inc()
        try:
            for step in self._run:
                if first and step.emitted:
                    counts.first_token_s.observe(time.perf_counter() - self._begin_s)
                    first = False
                self._count(step)
                yield step
        finally:                                          # also when the reader went away
            counts.running.dec()
            reason = self._run.reason or "cancelled"
            counts.ended.labels(ENDED.get(reason, reason)).inc()
            counts.whole_s.observe(time.perf_counter() - self._begin_s)

    def _count(self, step: StepTrace) -> None:
        counts, num_tokens = self._counts, sum(token.num_tokens for token in step.emitted)
        counts.generation_tokens.inc(num_tokens)
        if step.kind == "prefill":
            counts.prompt_tokens.inc(step.num_prompt_tokens)
            counts.reused_tokens.inc(step.num_reused)
            return
        if num_tokens:
            counts.between_tokens_s.observe((step.draft_ms + step.verify_ms + step.other_ms) / 1000 / num_tokens)
        num_drafted, num_accepted = draft_counts(step)
        if not num_drafted:
            return
        counts.num_drafts.inc()
        counts.num_draft_tokens.inc(num_drafted)
        counts.num_accepted_tokens.inc(num_accepted)
        for position in range(num_accepted):
            counts.accepted_at.labels(str(position)).inc()

    def wait(self, timeout_s: float) -> bool:
        with self._counts.waiting.track_inprogress():
            return self._run.wait(timeout_s)

    def cancel(self) -> None:
        self._run.cancel()

    def measure_plain(self, num_tokens: int = 128) -> Iterator[PlainToken]:
        return self._run.measure_plain(num_tokens)

    def trace(self) -> Trace:
        return self._run.trace()
