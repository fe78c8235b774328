"""A scripted Service for tests of the page: it speaks prepared answers in drafted steps, at any pace, and fails when told to.

It knows nothing of models. Its records satisfy what the engine's do: emitted text adds up to the answer, a chain's accepted nodes come
first, one rejected node ends the judging, a correction or bonus token closes the step, and times are those that really passed.
"""
from __future__ import annotations

import re
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from specviz import metrics
from specviz.engine.option import Option, settled
from specviz.engine.rules import RULES
from specviz.errors import Busy, NotEnoughMemory, PromptTooLong
from specviz.service import ChatRequest, Choice, Inspection, Line, MethodInfo, Offer, Status
from specviz.trace import CacheTrace, EmittedToken, NodeTrace, PlainToken, ResidualTrace, StepTrace, TopTrace, Trace

__all__ = ["ANSWER", "EOS", "FakeRun", "FakeService", "METHODS", "OFFERS", "pieces"]

EOS = 2
ANSWER = ("Speculative decoding lets a small model guess the next few tokens. The large model then checks all of them in one pass, keeps "
          "the ones it agrees with and corrects the first one it does not. The text is the same as before, it only arrives sooner.")
METHODS = [
    MethodInfo("plain", "Plain decoding", "One token per step, no drafts: the baseline."),
    MethodInfo("prompt_lookup", "Prompt lookup", "Copies drafts from the text so far.", options=(
        Option("min_match", "Shortest match", "whole", 2, "Tokens that must have appeared before.", 1, 16),
        Option("share", "Smallest share", "number", 0.25, "Of the places that match.", 0, 1),
        Option("branches", "Branches", "flag", True, "Draft a tree; off is a chain."),
        Option("first", "Looks text up by", "choice", "suffix", "What is asked first.", choices=(("suffix", "suffix decoding"), ("words", "words"))))),
    MethodInfo("draft_model", "Draft model", "A small model guesses.", reason="no draft model is loaded; start with --draft"),
    MethodInfo("medusa", "Medusa", "Extra heads guess several tokens.", note="untrained: expect few accepted", options=(
        Option("tree", "Tree", "text", "best", "best, chain, or paths."), Option("depth", "Heads used", "whole", 4, "How far ahead.", 1, 4))),
]
OFFERS = [
    Offer("tiny/one", "Tiny-1B", "Small and quick.", "Apache-2.0", 2048, 1_000_000_000, 0, 1_200_000_000, "", ("tiny/draft",), ("int8", "none")),
    Offer("big/<b>eight</b>", "Big-<i>8B</i>", "For a card.\nSecond line <img src=x onerror=window.pwned=1>", "MIT", 32768, 8_000_000_000,
          5_100_000_000, 6_400_000_000, "", ("tiny/draft", "other/draft"), ("nf4", "none"), gated=True),
    Offer("huge/model", "Huge-70B", "Too large here.", "Llama", 131072, 70_000_000_000, 40_000_000_000, 45_000_000_000,
          "does not fit: needs 45.0 GB, 7.9 GB free"),
]
ACCEPTED = (4, 2, 0, 5, 1, 3)          # accepted drafts per step, in turn, cut to k


def pieces(text: str) -> list[str]:
    """The fake tokenizer: words with the space before them."""
    return re.findall(r"\s?\S+|\s", text)


def _id(piece: str) -> int:
    return 3 + zlib.crc32(piece.encode()) % 30000


class FakeRun:
    """See `specviz.service.Run`."""

    def __init__(self, service: FakeService, request: ChatRequest, answer: str, number: int) -> None:
        self._service, self._request, self._answer = service, request, answer
        limit = request.sampling.max_new_tokens
        info = next(info for info in METHODS if info.name == request.method)
        options = settled(info.options, dict(request.options), info.label)
        for stop in request.sampling.stop:
            answer, found, _ = answer.partition(stop)
            if found:
                break
        else:
            found = ""
        tokens = [(_id(piece), piece) for piece in pieces(answer)] + ([] if found else [(EOS, "")])
        self._tokens = tokens[:limit]
        self._end = "stop" if found else "eos"
        if len(tokens) > limit:
            self._end = "length"
        self.reason, self.text = "", ""
        self._steps: list[StepTrace] = []
        self._plain: list[PlainToken] = []
        self._cancelled, self._closed = threading.Event(), False
        prompt = " ".join(m["content"] for m in request.messages)
        self.num_prompt_tokens = len(pieces(prompt))
        self.meta: dict[str, Any] = {
            "target": service.config_now["target"], "drafter": None, "method": request.method, "run": number,
            "method_label": next(info.label for info in METHODS if info.name == request.method),
            "config": {**service.config_now, "method": request.method, "k": request.k if request.method != "plain" else 0,
                       "options": dict(options), "changed_options": [name for name, _ in request.options]},
            "sampling": {"temperature": request.sampling.temperature, "seed": request.sampling.seed,
                         "max_new_tokens": request.sampling.max_new_tokens},
            "prompt": prompt, "prompt_tokens": self.num_prompt_tokens, "clock": "perf_counter",
            "verification": request.verification, "promise": RULES[request.verification].promise}

    @property
    def place(self) -> int:
        ahead = [run for run in self._service.runs[:self.meta["run"] - 1] if not (run.reason or run._cancelled.is_set())]
        return 0 if self.reason or self._cancelled.is_set() else max(0, len(ahead) - self._service.num_rows + 1)

    def wait(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while self.place and time.monotonic() < end_s:
            time.sleep(0.01)
        return not self.place

    def __iter__(self) -> Iterator[StepTrace]:
        begin = time.perf_counter()
        self._pause()
        first = self._tokens[0]
        self._append(StepTrace(kind="prefill", t0_ms=-1000 * (time.perf_counter() - begin), draft_ms=0.0,
                               verify_ms=1000 * (time.perf_counter() - begin), other_ms=0.0, num_prompt_tokens=self.num_prompt_tokens,
                               emitted=(EmittedToken(*first, "plain"),)))
        yield self._steps[-1]
        at, turn, origin_s = 1, 0, time.perf_counter()
        while at < len(self._tokens) and not self._cancelled.is_set():
            if self._service.fail_after is not None and turn >= self._service.fail_after:
                self.reason = "error"
                raise NotEnoughMemory("The cache for this answer does not fit: 9 GiB asked for, 2 GiB free. Choose a shorter answer.")
            begin = time.perf_counter()
            self._pause()
            middle = time.perf_counter()
            step, at = self._step(at, turn, 1000 * (begin - origin_s), 1000 * (middle - begin) / 4)
            self._append(step)
            turn += 1
            yield step
        self.reason = "cancelled" if at < len(self._tokens) else self._end

    def _step(self, at: int, turn: int, t0_ms: float, quarter_ms: float) -> tuple[StepTrace, int]:
        k = 0 if self._request.method == "plain" else min(self._request.k, len(self._tokens) - at)
        accepted = min(ACCEPTED[turn % len(ACCEPTED)], k)
        nodes = []
        for index in range(k):
            true_id, true_text = self._tokens[at + index]
            if index < accepted:
                nodes.append(NodeTrace(true_id, true_text, index - 1, "accepted", q=0.7, p=0.9, accept_prob=1.0, q_t1=0.7, p_t1=0.9))
            elif index == accepted:
                nodes.append(NodeTrace(_id("wrong"), " wrong", index - 1, "rejected", q=0.6, p=0.12, accept_prob=0.2, u=0.5, q_t1=0.6,
                                       p_t1=0.12))
            else:
                nodes.append(NodeTrace(_id("then"), " then", index - 1, "unjudged", q=0.5))
        emitted = [EmittedToken(*self._tokens[at + i], "draft") for i in range(accepted)]
        at += accepted
        if at < len(self._tokens):
            emitted.append(EmittedToken(*self._tokens[at], "plain" if not k else "bonus" if accepted == k else "correction"))
            at += 1
        before = self.num_prompt_tokens + at - len(emitted)
        wrong = [(node.id, node.text) for node in nodes if node.state == "rejected"]
        right = emitted[-1]
        top = tuple(TopTrace(accepted - 1, ((right.id, right.text, 0.8, 0.3), (*wrong[0], 0.12, 0.6))) for _ in wrong)
        residual = tuple(ResidualTrace(accepted - 1, ((right.id, right.text, 0.95),)) for _ in wrong)
        keep = self._request.keep_probs
        return StepTrace(kind="spec" if k else "plain", t0_ms=t0_ms, draft_ms=quarter_ms if k else 0.0,
                         verify_ms=(3 if k else 4) * quarter_ms, other_ms=0.0, nodes=tuple(nodes), emitted=tuple(emitted),
                         draft_stop="length" if k else "", kv={"target": CacheTrace(before, 1 + k, before + len(emitted))},
                         top=top if keep else (), residual=residual if keep else ()), at

    def _append(self, step: StepTrace) -> None:
        self._steps.append(step)
        self.text += "".join(token.text for token in step.emitted)

    def _pause(self) -> None:
        if self._service.pause_s:
            time.sleep(self._service.pause_s)

    def cancel(self) -> None:
        if self.place:                                       # it never began
            self.reason = "cancelled"
        self._cancelled.set()

    def measure_plain(self, num_tokens: int = 128) -> Iterator[PlainToken]:
        length = sum(len(step.emitted) for step in self._steps)
        stop = min(length, len(self._plain) + num_tokens)
        serial = self._service.num_submitted
        while len(self._plain) < stop and serial == self._service.num_submitted and not self._cancelled.is_set():
            begin = time.perf_counter()
            self._pause()
            ms = 1000 * (time.perf_counter() - begin)
            past = self._plain[-1].t_ms if self._plain else 0.0
            number, text = self._tokens[len(self._plain)]
            self._plain.append(PlainToken(number, text, past + ms, ms, margin=1.5))
            yield self._plain[-1]

    def trace(self) -> Trace:
        trace = Trace(meta=dict(self.meta), steps=tuple(self._steps), plain=tuple(self._plain))
        return replace(trace, stats=metrics.summarize(trace).to_dict(), compare=metrics.compare(trace))


class FakeService:
    """See `specviz.service.Service`.

    answer: what it says; a dict maps the last user message to an answer. pause_s: how long a step takes. state: "loading", "ready" or
    "failed". busy: refuse every turn. fail_after: raise in the middle of an answer, after so many steps. max_prompt_tokens: the context.
    """

    def __init__(self, answer: str | dict[str, str] = ANSWER, *, pause_s: float = 0.0, state: str = "ready", message: str = "Ready.",
                 busy: bool = False, fail_after: int | None = None, max_prompt_tokens: int = 400) -> None:
        self.answer, self.pause_s, self.busy, self.fail_after = answer, pause_s, busy, fail_after
        self.max_prompt_tokens = max_prompt_tokens
        self.status_now = Status(state, message, 0.4 if state == "loading" else None, is_loading=state == "loading")
        self.config_now = {"target": "Tiny-1B", "drafter": None, "device": "cpu", "dtype": "float32", "quantization": "int8", "threads": 2,
                           "context": 2048, "exactness": "bitwise"}
        self.requests: list[ChatRequest] = []
        self.runs: list[FakeRun] = []
        self.closed = False
        self.num_rows = 1_000                                # answers at a time; whoever comes later waits
        self.forgotten: list[str] = []
        self.choice_now: Choice | None = Choice("tiny/one") if state == "ready" else None
        self.inspections: dict[str, Inspection] = {}         # by target; others are possible, with the download of their offer
        self.load_problems: dict[str, str] = {}              # target -> why loading fails
        self.loads: list[tuple[Choice, bool]] = []
        self.may_end = threading.Event()                     # loading stands at 50 % until it is set
        self.may_end.set()
        self.suggested: Offer | None = None
        self.notices: list[Line] = []

    @property
    def num_submitted(self) -> int:
        return len(self.requests)

    def status(self) -> Status:
        return self.status_now

    def config(self) -> dict[str, Any]:
        return dict(self.config_now) if self.status_now.state == "ready" else {}

    def methods(self) -> list[MethodInfo]:
        return list(METHODS) if self.status_now.state == "ready" else []

    def default_method(self) -> str:
        return "prompt_lookup" if self.status_now.state == "ready" else ""

    def count_tokens(self, messages: Any) -> int:
        return sum(len(pieces(message["content"])) for message in messages)

    def submit(self, request: ChatRequest) -> FakeRun:
        if self.status_now.state != "ready":
            raise Busy(f"The model is not ready: {self.status_now.message}")
        if self.busy:
            raise Busy("Three people are waiting already. Try again in a minute.")
        last = request.messages[-1]["content"]
        if self.count_tokens(request.messages) > self.max_prompt_tokens:
            raise PromptTooLong(f"The conversation is longer than {self.max_prompt_tokens} tokens. Clear it or undo a turn.")
        self.requests.append(request)
        answer = self.answer.get(last, ANSWER) if isinstance(self.answer, dict) else self.answer
        self.runs.append(FakeRun(self, request, answer, len(self.requests)))
        return self.runs[-1]

    def forget(self, conversation: str) -> None:
        self.forgotten.append(conversation)

    def choice(self) -> Choice | None:
        return self.choice_now

    def offers(self) -> list[Offer]:
        return list(OFFERS)

    def advice(self) -> list[Line]:
        return self.notices

    def suggestion(self) -> Offer | None:
        return self.suggested

    def inspect(self, choice: Choice) -> Inspection:
        if choice.target in self.inspections:
            return self.inspections[choice.target]
        download = next((offer.download_bytes for offer in OFFERS if offer.source == choice.target), 0)
        return Inspection((Line("good", f"{choice.target} and {choice.draft} share one tokenizer."),
                           Line("note", f"Quantization {choice.quantization}.")), download)

    def load(self, choice: Choice, *, unload_first: bool = False) -> None:
        if self.status_now.is_loading:
            raise Busy("Another model is being loaded already.")
        self.loads.append((choice, unload_first))
        self.status_now = replace(self.status_now, is_loading=True, message=f"Reading {choice.target}", fraction=0.5, last_error="")
        threading.Thread(target=self._load, args=(choice,), daemon=True).start()

    def _load(self, choice: Choice) -> None:
        self.may_end.wait(30)
        if not self.status_now.is_loading:                   # cancelled
            return
        if error := self.load_problems.get(choice.target):
            self.status_now = replace(self.status_now, is_loading=False, last_error=error)
            return
        name = next((offer.name for offer in OFFERS if offer.source == choice.target), choice.target)
        self.choice_now, self.config_now = choice, self.config_now | {"target": name, "drafter": choice.draft}
        self.status_now = Status("ready", "Ready.", 1.0, number=self.status_now.number + 1)

    def cancel_load(self) -> None:
        self.status_now = replace(self.status_now, is_loading=False)

    def unload(self) -> None:
        self.choice_now, self.status_now = None, Status("unloaded", "No model is loaded. Choose one under Models.")

    def close(self) -> None:
        self.closed = True
