"""What the runs of a benchmark amount to: medians with intervals, speed-ups of paired runs, and the three factors of a headline.

It knows nothing of how runs are made or shown. Every comparison is of two runs of the same prompt in the same round, which stood close to
each other in time, so that a slow hour of the machine cancels out.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .sample import Sample

__all__ = ["Figure", "Run", "factors", "figure", "rows", "speed_ups", "tokens_agree"]

_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Run:
    """One sample and where it belongs: prompts by their place in the list, systems and arms by name."""
    round: int
    prompt: int
    category: str
    system: str
    arm: str
    sample: Sample

    @property
    def tokens_per_s(self) -> float:
        return self.sample.num_decoded / self.sample.decode_s

    @property
    def key(self) -> tuple[str, str]:
        return self.system, self.arm


@dataclass(frozen=True, slots=True)
class Figure:
    """A median and the 95 % interval of medians of resampled values; count: how many values."""
    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def figure(values: Iterable[float]) -> Figure | None:
    """None for no values. The interval is a percentile bootstrap with a fixed seed (Efron 1979)."""
    values = sorted(values)
    if not values:
        return None
    source = random.Random(0)
    medians = sorted(median(source.choices(values, k=len(values))) for _ in range(_DRAWS))
    return Figure(median(values), medians[int(0.025 * _DRAWS)], medians[int(0.975 * _DRAWS) - 1], len(values))


def speed_ups(runs: Sequence[Run], arm: tuple[str, str], over: tuple[str, str]) -> dict[tuple[int, int], float]:
    """(round, prompt) -> tokens/s of one arm over another's, where both ran."""
    base = {(run.round, run.prompt): run.tokens_per_s for run in runs if run.key == over}
    return {at: run.tokens_per_s / base[at] for run in runs if run.key == arm and (at := (run.round, run.prompt)) in base}


def tokens_agree(runs: Sequence[Run], arm: tuple[str, str], with_: tuple[str, str]) -> float | None:
    """Share of runs whose tokens equal the other arm's for the same prompt and round; None where tokens are not known."""
    base = {(run.round, run.prompt): run.sample.tokens for run in runs if run.key == with_}
    pairs = [(run.sample.tokens, base[at]) for run in runs if run.key == arm and (at := (run.round, run.prompt)) in base]
    if not pairs or any(a is None or b is None for a, b in pairs):
        return None
    return sum(a == b for a, b in pairs) / len(pairs)


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per system and arm, in the order they first ran. Speed-ups are over the same system's "plain"."""
    keys = list(dict.fromkeys(run.key for run in runs))
    found = []
    for key in keys:
        mine = [run for run in runs if run.key == key]
        samples = [run.sample for run in mine]
        steps = [sample for sample in samples if sample.num_steps]
        parts = [sample for sample in samples if sample.draft_s is not None]
        ratios = speed_ups(runs, key, (key[0], "plain"))
        category = {(run.round, run.prompt): run.category for run in mine}
        found.append({
            "system": key[0], "arm": key[1], "tokens_per_s": figure(run.tokens_per_s for run in mine),
            "prefill_s": figure(sample.prefill_s for sample in samples), "speed_up": figure(ratios.values()) if key[1] != "plain" else None,
            "by_category": {name: figure(ratio for at, ratio in ratios.items() if category[at] == name)
                            for name in dict.fromkeys(run.category for run in mine)} if key[1] != "plain" else {},
            "tokens_per_step": sum(s.num_decoded for s in steps) / sum(s.num_steps for s in steps) if steps else None,
            "per_prompt": [(run.sample.num_decoded / run.sample.num_steps, ratios[run.round, run.prompt], run.category) for run in mine
                           if run.sample.num_steps and (run.round, run.prompt) in ratios] if key[1] != "plain" else [],
            "acceptance": _share(samples, lambda s: s.num_accepted, lambda s: s.num_drafted),
            "ms_per_token": {name: 1e3 * sum(getattr(s, f"{name}_s") for s in parts) / sum(s.num_decoded for s in parts)
                             for name in ("draft", "verify", "other")} if parts else None,
            "same_tokens": tokens_agree(runs, key, (key[0], "plain")) if key[1] != "plain" else None})
    return found


def factors(runs: Sequence[Run], reference: str, unquantized: str, quantized: str) -> dict[str, Any]:
    """The headline as a product: engine (same precision) x quantization x speculation, and the same ratio measured at once.

    reference, unquantized, quantized: names of systems. Factors whose systems did not run are None. The arm is the quantized system's best.
    """
    present = {run.key for run in runs}
    home = quantized if (quantized, "plain") in present else unquantized

    def ratio(arm: tuple[str, str], over: tuple[str, str]) -> Figure | None:
        return figure(speed_ups(runs, arm, over).values()) if arm in present and over in present and arm != over else None
    arms = [key for key in dict.fromkeys(run.key for run in runs) if key[0] == home and key[1] != "plain"]
    best = max(arms, key=lambda key: figure(speed_ups(runs, key, (home, "plain")).values()).median, default=None)
    return {"engine": ratio((unquantized, "plain"), (reference, "plain")),
            "quantization": ratio((quantized, "plain"), (unquantized, "plain")),
            "speculation": ratio(best, (home, "plain")) if best else None, "best_arm": best,
            "measured": ratio(best, (reference, "plain")) if best else None}


def _share(samples: Sequence[Sample], part: Callable[[Sample], int | None], whole: Callable[[Sample], int | None]) -> float | None:
    known = [(part(sample), whole(sample)) for sample in samples if part(sample) is not None and whole(sample)]
    return sum(a for a, _ in known) / sum(b for _, b in known) if known else None


def from_json(data: Mapping[str, Any]) -> list[Run]:
    """The runs of a saved benchmark."""
    return [Run(item["round"], item["prompt"], item["category"], item["system"], item["arm"], Sample.from_dict(item["sample"])) for item in data["runs"]]
