"""Thousands of short texts written by the engine's own verifier on the table model, and the law they should follow.

It knows nothing of screens. What a visitor asks for is checked here; the texts are two words long, so there are 64 of them.
"""
from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from ..engine.rules import RULES
from ..errors import InputError
from .exact import one_step, speculative_law, target_law
from .faults import LAW_FAULTS, LawFault, under
from .meter import read
from .tables import DRAFTER, SHAPES, TARGET, WORDS, Table

__all__ = ["LENGTH", "MAX_TEXTS", "Trial", "exact_law", "run"]

LENGTH = 2                       # words per text
MAX_TEXTS = 50_000
_REPORT_S = 0.15
_SEEDS = 10_000_000              # seeds of one trial's texts lie apart from another's


@dataclass(frozen=True, slots=True)
class Trial:
    """What is drawn. rule: a lossless one of `engine.rules`. shape: see `tables.SHAPES`. fault: "" or a name in `LAW_FAULTS`, which
    brings its own shape and rule. Raises InputError."""
    rule: str = "rejection"
    shape: str = "chain"
    fault: str = ""
    num_texts: int = 6000
    seed: int = 0

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise InputError(f"{name} is {getattr(self, name)!r}; expected {expected}.")
        check(isinstance(self.rule, str) and self.rule in RULES, "rule", f"one of {', '.join(RULES)}")
        check(isinstance(self.shape, str) and self.shape in SHAPES, "shape", f"one of {', '.join(SHAPES)}")
        check(isinstance(self.fault, str) and (not self.fault or self.fault in LAW_FAULTS), "fault", f"one of {', '.join(LAW_FAULTS)}")
        check(type(self.num_texts) is int and 500 <= self.num_texts <= MAX_TEXTS, "num_texts", f"a whole number from 500 to {MAX_TEXTS}")
        check(type(self.seed) is int and 0 <= self.seed < 1 << 31, "seed", "a whole number from 0 to 2147483647")

    @property
    def parts(self) -> LawFault:
        """Drafter, verifier and noise of this trial."""
        if self.fault:
            return LAW_FAULTS[self.fault]
        rule = RULES[self.rule]
        return LawFault("", self.shape, verifier=under(rule.judge), noise=rule.noise, is_exact=rule.promise == "distribution")

    @property
    def promises_text(self) -> bool:
        """Each text is plain sampling's own with the same seed, so that they can be compared one by one."""
        return not self.fault and RULES[self.rule].promise == "text"


def run(trial: Trial) -> Iterator[dict[str, Any]]:
    """Draw the texts; yields JSON-ready states, the last one with "exact": what the fractions say.

    words; expected: the law of the 64 texts, first word first; counts: texts so far; of: all texts; num_steps, num_tokens: of the steps
    that wrote them; num_same: texts that are plain sampling's own with their seed, None where the rule does not promise that; reading:
    the meter's, see `meter.Reading`.
    """
    parts, target, drafter = trial.parts, Table(TARGET), Table(DRAFTER)
    propose = SHAPES[parts.shape](drafter)
    if parts.propose:
        propose = parts.propose(propose, drafter)
    law = target_law(Table(TARGET, exact=True), LENGTH)
    size = len(WORDS)
    probs = [law[first, second] for first in range(size) for second in range(size)]
    expected = [float(p) for p in probs]
    counts, num_steps, num_tokens, num_same, told_s = [0] * len(probs), 0, 0, 0, time.monotonic()

    def state(**more: Any) -> dict[str, Any]:
        reading = read(counts, expected) if sum(counts) else None
        return {"kind": "law", "trial": asdict(trial), "words": list(WORDS), "expected": expected, "counts": list(counts),
                "of": trial.num_texts,
                "num_steps": num_steps, "num_tokens": num_tokens, "num_same": num_same if trial.promises_text else None,
                "reading": asdict(reading) | {"fits": reading.fits} if reading else None} | more

    for number in range(trial.num_texts):
        noise = parts.noise(trial.seed * _SEEDS + number)
        tokens: list[int] = []
        step = 0
        while len(tokens) < LENGTH:
            emitted = one_step(tokens, step, target, propose, noise, parts.verifier)
            tokens += emitted
            num_tokens += len(emitted)
            step += 1
        num_steps += step
        counts[tokens[0] * size + tokens[1]] += 1
        if trial.promises_text:
            first = noise.draw(target([]), 0)
            num_same += tokens[:LENGTH] == [first, noise.draw(target([first]), 1)]
        if time.monotonic() - told_s > _REPORT_S:
            told_s = time.monotonic()
            yield state()
    yield state()
    yield state(exact=exact_law(trial.rule, trial.shape, trial.fault))


@lru_cache
def exact_law(rule: str, shape: str, fault: str = "") -> dict[str, Any] | None:
    """Every way that the dice can fall, in fractions; None where the rule has no law of its own in fractions. Arguments as of `Trial`.

    texts: how many of the 64 have another probability than plain decoding gives them. distance: total variation, a fraction. words: for
    the first word [plain decoding's, this decoding's] as fractions.
    """
    parts = Trial(rule, shape, fault).parts
    if not parts.is_exact:
        return None
    target, drafter = Table(TARGET, exact=True), Table(DRAFTER, exact=True)
    propose = SHAPES[parts.shape](drafter)
    if parts.propose:
        propose = parts.propose(propose, drafter)
    due = target_law(target, LENGTH)
    got = speculative_law(target, propose, LENGTH, parts.verifier, parts.exact_noise)
    first = [[sum((law.get((word, second), Fraction(0)) for second in range(len(WORDS))), Fraction(0)) for law in (due, got)]
             for word in range(len(WORDS))]
    apart = [abs(p - got.get(text, Fraction(0))) for text, p in due.items()]
    return {"texts": sum(gap != 0 for gap in apart), "of": len(due), "distance": float(sum(apart) / 2), "equal": not any(apart),
            "words": [[_short(pair[0]), _short(pair[1])] for pair in first]}


def _short(value: Fraction) -> str:
    """The fraction itself where it can be read, else its value."""
    return str(value) if value.denominator < 100_000 else f"{float(value):.5f}"
