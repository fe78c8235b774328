"""Laws in exact fractions: every random choice of a decoding step is taken in turn, each with its weight.

It knows nothing of torch or of any method. A drafter here is `propose(tokens, step, noise) -> Draft`, a verifier `(draft, rows, noise,
position) -> emitted tokens`, a model a function from a prefix to a distribution.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from ..engine.draft import Draft
from ..engine.verify import verify

__all__ = ["Choices", "EnumeratingNoise", "FractionVector", "Law", "Model", "Propose", "Verifier", "honest", "law", "one_hot", "one_step",
           "speculative_law", "target_law", "vector"]

Law = dict[Any, Fraction]


class FractionVector:
    """A distribution in exact fractions, with as much of a tensor's behaviour as `verify` uses."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = [value if isinstance(value, Fraction) else Fraction(value) for value in values]

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Fraction:
        return self._values[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self._values[index] = Fraction(value)

    def __sub__(self, other: FractionVector) -> FractionVector:
        return FractionVector(a - b for a, b in zip(self._values, other._values, strict=True))

    def __mul__(self, number: Fraction) -> FractionVector:
        return FractionVector(value * number for value in self._values)

    def __truediv__(self, number: Fraction) -> FractionVector:
        return FractionVector(value / number for value in self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FractionVector) and self._values == other._values

    def __hash__(self) -> int:
        return hash(tuple(self._values))

    def __repr__(self) -> str:
        return f"FractionVector([{', '.join(map(str, self._values))}])"

    def clamp(self, min: int) -> FractionVector:
        return FractionVector(value if value > min else min for value in self._values)

    def sum(self) -> Fraction:
        return sum(self._values, Fraction(0))

    def count_nonzero(self) -> int:
        return sum(value != 0 for value in self._values)

    def clone(self) -> FractionVector:
        return FractionVector(self._values)


def vector(*weights: Any) -> FractionVector:
    """The distribution in proportion to some weights."""
    left = FractionVector(weights)
    return left / left.sum()


def one_hot(token: int, size: int) -> FractionVector:
    return FractionVector(int(i == token) for i in range(size))


class Choices:
    """One run through a tree of random decisions: the first ones follow a script, the others take the first possible way."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = script
        self.taken: list[int] = []
        self.possible: list[list[int]] = []
        self.weight = Fraction(1)

    def choose(self, weights: Sequence[Fraction]) -> int:
        """An index whose weight is not zero. The weights sum to 1."""
        assert sum(weights) == 1 and all(weight >= 0 for weight in weights), f"{weights} is no distribution"
        possible = [i for i, weight in enumerate(weights) if weight]
        at = len(self.taken)
        index = self._script[at] if at < len(self._script) else possible[0]
        self.taken.append(index)
        self.possible.append(possible)
        self.weight *= weights[index]
        return index


def law(run: Callable[[Choices], Any]) -> Law:
    """The exact distribution of what `run` returns, by replaying it once for every sequence of choices, depth first."""
    result: Law = defaultdict(Fraction)
    script: list[int] | None = []
    while script is not None:
        choices = Choices(script)
        result[run(choices)] += choices.weight
        script = None
        for at in reversed(range(len(choices.taken))):
            later = [i for i in choices.possible[at] if i > choices.taken[at]]
            if later:
                script = choices.taken[:at] + later[:1]
                break
    assert sum(result.values()) == 1
    return dict(result)


class EnumeratingNoise:
    """Randomness as `KeyedNoise` offers it, all of it independent, with every outcome explored."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def accepts(self, prob: Any, position: int, sibling: int) -> tuple[bool, float | None]:
        if prob <= 0 or prob >= 1:
            return prob >= 1, None
        return self._choices.choose([prob, 1 - prob]) == 0, None

    def draw(self, probs: FractionVector, position: int) -> int:
        return self._choices.choose(list(probs))

    def draw_draft(self, probs: FractionVector, position: int, step: int, sibling: int = 0) -> int:
        return self._choices.choose(list(probs))


Model = Callable[[Sequence[int]], Any]
Propose = Callable[[Sequence[int], int, Any], Draft]
Verifier = Callable[[Draft, Sequence[Any], Any, int], list[int]]


def honest(draft: Draft, rows: Sequence[Any], noise: Any, position: int) -> list[int]:
    """The tokens that one step emits under the engine's own `verify`."""
    verdict = verify(draft, rows, noise, position)
    return [draft.tokens[node] for node in verdict.path] + [verdict.token]


def one_step(tokens: Sequence[int], step: int, target: Model, propose: Propose, noise: Any, verifier: Verifier = honest) -> list[int]:
    """Draft, judge, emit."""
    draft = propose(tokens, step, noise)
    rows = [target(tokens)]
    rows += [target([*tokens, *(draft.tokens[i] for i in draft.path(node))]) for node in range(len(draft))]
    return verifier(draft, rows, noise, len(tokens))


def target_law(target: Model, length: int) -> Law:
    """The distribution of the first `length` tokens of plain decoding."""
    laws: Law = {(): Fraction(1)}
    for _ in range(length):
        laws = {(*tokens, token): weight * p for tokens, weight in laws.items() for token, p in enumerate(target(tokens)) if p}
    return laws


def speculative_law(target: Model, propose: Propose, length: int, verifier: Verifier = honest,
                    noise: Callable[[Choices], Any] = EnumeratingNoise) -> Law:
    """The distribution of the first `length` tokens over as many steps as it takes.

    Each prefix is enumerated once, which supposes that a step knows of earlier ones only the tokens.
    """
    @lru_cache(maxsize=None)
    def after(tokens: tuple[int, ...]) -> Law:
        if len(tokens) >= length:
            return {tokens[:length]: Fraction(1)}
        result: Law = defaultdict(Fraction)
        for emitted, weight in law(lambda choices: tuple(one_step(tokens, 0, target, propose, noise(choices), verifier))).items():
            for end, share in after(tokens + emitted).items():
                result[end] += weight * share
        return dict(result)
    return after(())
