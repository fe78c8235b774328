"""Whole steps of the engine on a device, for `gpu_check`: what one costs, how often the host waits, and whether drafted text is plain text.

It knows nothing of shapes or precisions, and nothing of what a good result is. Drafts come from someone who knows the answer, so that
models with random weights, which nothing can guess, are checked with drafts that are accepted and drafts that are not.
"""
from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from ..cost_trial import behind
from ..engine.draft import Draft
from ..engine.drafting import Budget, DraftSettings, Outcome
from ..engine.engine import Engine
from ..engine.graphs import WARM_UPS
from ..engine.model import LanguageModel
from ..engine.record import Recorder
from ..engine.sampling import SamplingParams
from ..engine.sequence import NoText, Sequence
from ..trace import StepTrace

__all__ = ["Told", "answers", "compared_texts", "judged", "step_ms"]

_DRAFTED = 6                     # tokens: with the one before, fewer than `gpu_model.SAME_SHAPE`
_SIZES = (1, 6)


class Told:
    """A drafter that was told the plain answer: drafts go along it, and the last token of every third one is another.

    answer: the tokens behind the prompt; empty drafts nothing, which is plain decoding.
    """
    name = "told"
    needs: tuple[int, ...] = ()

    def __init__(self, answer: Seq[int] = ()) -> None:
        self._answer, self._num_drafts = list(answer), 0

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets)]

    def _draft(self, sequence: Sequence, budget: Budget) -> Draft:
        known = len(sequence.tokens) - sequence.num_prompt_tokens
        tokens = self._answer[known:known + min(budget.nodes, budget.depth)]
        self._num_drafts += bool(tokens)
        if tokens and self._num_drafts % 3 == 0:
            tokens[-1] = 3 if tokens[-1] != 3 else 4
        return Draft.chain(tokens)

    def observe(self, outcomes: Seq[Outcome]) -> None:
        pass

    def fork(self, source: Sequence, target: Sequence, length: int) -> int:
        return length

    def release(self, sequence: Sequence) -> None:
        pass


def step_ms(model: LanguageModel, context: int, sizes: Seq[int] = _SIZES, repeats: int = 9) -> dict[str, float]:
    """Median milliseconds of a forward of T tokens behind a text, once its shape is in use, until the result is on the host."""
    run, found = behind(model, model.new_cache(), context), {}
    for size in sizes:
        times = []
        for number in range(WARM_UPS + 1 + repeats):
            begun = time.perf_counter()
            run(size)
            if number > WARM_UPS:
                times.append(1e3 * (time.perf_counter() - begun))
        found[str(size)] = round(median(times), 4)
    return found


def answers(target: LanguageModel, prompt: Seq[int], num_tokens: int) -> dict[str, Any]:
    """A greedy answer decoded plainly and once more with drafts: `compared_texts`, tokens per step, host and device time of a step, and how
    often the host waited for the device in a step ("waits_per_step", None where no CUDA device counts it)."""
    plain, _ = _run(target, prompt, num_tokens, Told())
    told = Told([token.id for step in plain for token in step.emitted])
    drafted, num_waits = _run(target, prompt, num_tokens, told)
    steps = [step for step in drafted if step.kind == "spec"]
    facts = compared_texts(plain, drafted)
    facts |= {"tokens_per_step": round(sum(len(step.emitted) for step in steps) / max(1, len(steps)), 3),
              "verify_ms": round(median([step.verify_ms for step in steps] or [0.0]), 4),
              "verify_device_ms": _median([step.verify_device_ms for step in steps]),
              "waits_per_step": None if num_waits is None else round(num_waits / max(1, len(drafted)), 3)}
    return facts


def compared_texts(plain: Seq[StepTrace], drafted: Seq[StepTrace], noise: float | None = None) -> dict[str, Any]:
    """Token by token. {"tokens", "equal"}, and after a difference {"first_difference", "gap"}: gap is how far, in log-probability, the
    plain token was ahead of the next one there. noise: logits differ by so much between a step of one token and one of several; with it the
    "verdict" is "same text", "rounding tie" (a gap that this explains) or "another text"."""
    ours, theirs = ([token.id for step in steps for token in step.emitted] for steps in (drafted, plain))
    at = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
    facts: dict[str, Any] = {"tokens": min(len(ours), len(theirs)), "equal": min(len(ours), len(theirs)) if at is None else at}
    if at is not None:
        facts |= {"first_difference": at, "gap": _gaps(plain)[at]}
    return facts if noise is None else judged(facts, noise)


def judged(facts: dict[str, Any], noise: float) -> dict[str, Any]:
    """The verdict of `compared_texts`: two logits that each move by `noise` can change places where they are less than twice that apart."""
    if "gap" not in facts:
        return facts | {"verdict": "same text"}
    return facts | {"verdict": "rounding tie" if facts["gap"] is not None and facts["gap"] <= 2 * noise else "another text"}


def _run(target: LanguageModel, prompt: Seq[int], num_tokens: int, drafter: Told) -> tuple[list[StepTrace], int | None]:
    engine = Engine(target, target.new_cache(len(prompt) + num_tokens + 64), Recorder(str, num_top=2))
    engine.add(prompt, SamplingParams(max_new_tokens=num_tokens), drafter, DraftSettings(_DRAFTED), NoText())
    steps: list[StepTrace] = []
    with _waits(target.device) as waits:
        while not engine.idle:
            steps += [stepped.trace for stepped in engine.step()]
    return steps, waits and len(waits[0])


@contextmanager
def _waits(device: torch.device) -> Any:
    """A list of the times at which the host waited for the CUDA device, as torch itself notices them; None elsewhere."""
    if device.type != "cuda":
        yield None
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield [seen]
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _gaps(steps: Seq[StepTrace]) -> list[float | None]:
    """For each token of a plain run, the log of the ratio of the two largest probabilities it was chosen from."""
    gaps: list[float | None] = []
    for step in steps:
        probs = [row[2] for row in step.top[0].rows[:2]] if step.top else []
        gaps += [math.log(probs[0] / probs[1]) if len(probs) == 2 else None] * len(step.emitted)
    return gaps


def _median(values: Seq[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 4) if known else None
