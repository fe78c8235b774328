"""What a recorded run would have come to with another draft length, cheaper drafts or cheaper verification, worked out from its trace.

It needs no model and no engine: it reads `trace` records and the measured costs in their `meta`. The viewer computes the same in the
browser; a test compares both.

Tokens per step. Where every guess depends on the text before it alone (`meta["guesses_by_text"]`, a chain, and a rule that keeps the text
the target's own: greedy, or shared noise), the run tells of nearly every position whether the drafter guesses it: a drafted token that
entered the text was guessed, a correction was not. Steps of any other length are cuts of this one row of positions. Only the token after a
draft that was accepted whole stays unknown, since nobody was asked for it; the count of steps then lies between two bounds, reached if all
of those are guessed and if none is. If both agree the count is exact.

Otherwise, and for every time, the result is an estimate.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from .cost import CostTable
from .errors import InputError
from .metrics import summarize
from .trace import StepTrace, Trace

__all__ = ["Outcome", "Recorded", "expected_steps", "guesses"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario. tokens_per_step lies between `least` and `most`; exact: they agree and follow from the recorded steps alone.

    speed_up: over plain decoding, an estimate; None where the trace lacks the times. least and most are None for plain estimates.
    """
    depth: int
    tokens_per_step: float
    least: float | None = None
    most: float | None = None
    exact: bool = False
    speed_up: float | None = None


def guesses(trace: Trace) -> tuple[bool | None, ...] | None:
    """For each decoded token, whether the drafter guesses it from the text before: None where it was not asked.

    The whole is None where guesses depend on more than the text, or the text may not be the target's own.
    """
    meta, decode = trace.meta, _decode(trace)
    sampling = meta.get("sampling") if isinstance(meta.get("sampling"), dict) else meta
    promise = meta.get("promise", "distribution")
    if meta.get("guesses_by_text") is not True or not (promise == "text" or promise == "distribution" and sampling.get("temperature") == 0):
        return None
    if any(node.parent != i - 1 for step in decode for i, node in enumerate(step.nodes)):
        return None
    known: list[bool | None] = []
    for step in decode:
        for token in step.emitted:
            declined = step.draft_stop == "confidence"         # it looked at its distribution and made no guess, as it would again
            known.append({"draft": True, "correction": False}.get(token.origin, False if declined else None))
    return tuple(known)


def expected_steps(known: Sequence[bool | None], depth: int, chance: float) -> float:
    """Steps that cover all positions with drafts of at most `depth` tokens, on average if each unknown guess is right with this chance.

    chance 0 gives the most steps and 1 the fewest: whoever is further ahead is never overtaken, so more right guesses never cost a step.
    """
    ahead = [0.0] * (len(known) + 1)                           # ahead[i]: steps from position i on
    for start in range(len(known) - 1, -1, -1):
        total, reached = 1.0, 1.0                              # reached: chance that the draft is right up to here
        for length in range(depth + 1):
            end = start + length
            if end + 1 >= len(known):                          # the text ends within this step
                break
            right = 0.0 if length == depth else chance if known[end] is None else float(known[end])
            total += reached * (1 - right) * ahead[end + 1]
            reached *= right
            if not reached:
                break
        ahead[start] = total
    return ahead[0]


class Recorded:
    """A recorded run, ready for scenarios. depth: the deepest draft of the run; is_tree: some draft branched.

    unit_ms: one plain step, as the plain run measured it. costs: "measured" where the trace holds a table of verification costs, "steps"
    where T(M) is taken from the run's own steps, "" where it is not known.
    """

    def __init__(self, trace: Trace) -> None:
        self.decode = _decode(trace)
        self.guesses = guesses(trace)
        stats = summarize(trace)
        self.alpha = stats.acceptance_rate_alpha or 0.0
        self.measured = stats.speed_up
        self.is_tree = any(node.parent != i - 1 for step in self.decode for i, node in enumerate(step.nodes))
        self._levels = [_levels(step) for step in self.decode]
        self._accepted = [_accepted(step) for step in self.decode]
        self.depth = max((len(levels) for levels in self._levels), default=0)
        timed = [step for step in self.decode if step.num_rows == 1 and step.source != "aggregate"]
        self.unit_ms = fmean(token.ms for token in trace.plain[1:]) if len(trace.plain) > 1 else None
        num_levels = sum(map(len, self._levels))
        self.level_ms = sum(step.draft_ms for step in self.decode) / num_levels if num_levels else 0.0
        self.overhead_ms = fmean(step.other_ms for step in self.decode) if self.decode else 0.0
        self.costs, self._points = "", []
        if self.unit_ms and len(timed) == len(self.decode) > 0:
            self.costs, self._points = self._verification(trace.meta.get("cost"))

    def v(self, num_tokens: float) -> float | None:
        """T(M) / T(1): what one pass over M tokens costs, in passes over one. None where it is not known."""
        if not self._points:
            return None
        after = next((i for i, (size, _) in enumerate(self._points) if size >= num_tokens), len(self._points) - 1)
        (left, low), (right, high) = self._points[max(0, after - 1)], self._points[max(1, after)]
        return low + (num_tokens - left) / (right - left) * (high - low)

    def outcome(self, depth: int, draft_factor: float = 1.0, verify_factor: float = 1.0) -> Outcome:
        """The run with drafts of at most `depth` levels, drafting `draft_factor` times as dear, and T(M) as far above T(1) as measured
        times `verify_factor` (0: checking more tokens costs nothing more). depth 0 is plain decoding."""
        num_tokens = sum(len(step.emitted) for step in self.decode)
        if depth == 0 or not self.decode:
            return Outcome(0, 1.0, 1.0, 1.0, True, 1.0 if self.unit_ms else None)
        least = most = None
        if self.guesses is None:
            per_step = self._estimated(depth)
        else:
            per_step, least, most = (num_tokens / expected_steps(self.guesses, depth, chance) for chance in (self.alpha, 0.0, 1.0))
        exact = least is not None and least == most
        return Outcome(depth, per_step, least, most, exact, self._speed_up(depth, per_step, draft_factor, verify_factor))

    def best(self, deepest: int, draft_factor: float = 1.0, verify_factor: float = 1.0) -> Outcome | None:
        """The fastest of the depths from 0 to `deepest`; None where the trace lacks the times."""
        outcomes = [self.outcome(depth, draft_factor, verify_factor) for depth in range(deepest + 1)]
        return max(outcomes, key=lambda o: o.speed_up) if all(o.speed_up is not None for o in outcomes) else None

    def _estimated(self, depth: int) -> float:
        """1 + the mean of min(accepted, depth); beyond the recorded depth each further guess is right with chance alpha."""
        longer = sum(self.alpha ** i for i in range(1, depth - self.depth + 1))
        whole = sum(accepted == self.depth for accepted in self._accepted) / len(self.decode)
        return 1 + fmean(min(accepted, depth) for accepted in self._accepted) + whole * longer

    def _speed_up(self, depth: int, per_step: float, draft_factor: float, verify_factor: float) -> float | None:
        if not self._points:
            return None
        single_ms = self.unit_ms - self.overhead_ms
        took_ms = 0.0
        for step, levels in zip(self.decode, self._levels):
            grows = len(levels) == self.depth < depth           # a draft that its length alone has ended goes on, one token a level
            num_levels = depth if grows else min(len(levels), depth)
            num_nodes = sum(levels[:depth]) + (depth - len(levels) if grows else 0)
            num_fed = _fed(step) - sum(levels) + num_nodes
            took_ms += draft_factor * self.level_ms * num_levels
            took_ms += single_ms * (1 + verify_factor * (self.v(num_fed) - 1)) + self.overhead_ms
        return self.unit_ms * per_step * len(self.decode) / took_ms

    def _verification(self, cost: Any) -> tuple[str, list[tuple[float, float]]]:
        """Where v comes from, and its points (M, v), M rising, at least two; between them and beyond v is linear."""
        try:
            table = CostTable.from_json(cost)
            context = _context(self.decode)
            points = [(float(size), table.v(size, context)) for size in table.num_tokens]
            if len(points) > 1:
                return "measured", points
        except InputError:
            pass
        single_ms = self.unit_ms - self.overhead_ms
        sizes: dict[int, list[float]] = {}
        for step in self.decode:
            sizes.setdefault(_fed(step), []).append(step.verify_ms)
        points = [(1.0, 1.0), *((float(size), median(times) / single_ms) for size, times in sorted(sizes.items()) if size > 1)]
        return ("steps", points) if len(points) > 1 and single_ms > 0 else ("", [])


def _decode(trace: Trace) -> tuple[StepTrace, ...]:
    return tuple(step for step in trace.steps if step.kind != "prefill")


def _levels(step: StepTrace) -> list[int]:
    """Drafted tokens by depth; where nodes are unknown a chain is supposed. Window nodes are no guesses."""
    depths, counts = [], []
    for node in step.nodes:
        depth = 0 if node.parent < 0 else depths[node.parent] + 1
        depths.append(depth)
        if node.state != "window":
            counts.extend([0] * (depth + 1 - len(counts)))
            counts[depth] += 1
    return counts if step.nodes else [1] * (step.num_drafted or 0)


def _accepted(step: StepTrace) -> int:
    return sum(node.state == "accepted" for node in step.nodes) if step.num_accepted is None else step.num_accepted


def _fed(step: StepTrace) -> int:
    """Tokens that the target read in this step."""
    return step.kv["target"].fed if "target" in step.kv else 1 + (len(step.nodes) or step.num_drafted or 0)


def _context(steps: Sequence[StepTrace]) -> int:
    known = [step.kv["target"].before for step in steps if "target" in step.kv]
    return int(fmean(known) + 0.5) if known else 0
