"""The classic faults, each as a wrapper or subclass of what the engine is given. The engine's own code is never changed.

They know nothing of how they are found out. A fault that distorts the law of sampled text wraps the drafter, the verifier or the noise of
a step; one that spoils greedy text is a subclass of the cache or of the sequence that an engine uses.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ..engine.draft import ROOT, Draft
from ..engine.rules import RULES
from ..engine.sampling import KeyedNoise
from ..engine.verify import Verdict, number, verify
from .exact import Choices, EnumeratingNoise, Model, Propose, Verifier, honest

__all__ = ["LAW_FAULTS", "LawFault", "SharedU", "TEXT_FAULTS", "bonus_after_rejection", "corrects_from_p", "drops_unlikely", "softmax_q",
           "under"]


def under(judge: Callable[..., Verdict]) -> Verifier:
    """The tokens that a step emits when another rule judges."""
    def verifier(draft: Draft, rows: Sequence[Any], noise: Any, position: int) -> list[int]:
        verdict = judge(draft, rows, noise, position)
        return [draft.tokens[node] for node in verdict.path] + [verdict.token]
    return verifier


# ---- faults of the drafter -------------------------------------------------------------------------------------------
def softmax_q(propose: Propose, model: Model) -> Propose:
    """Reports the drafter's softmax for tokens that it chose by rank, as if it had drawn them."""
    def faulty(tokens: Sequence[int], step: int, noise: Any) -> Draft:
        draft = propose(tokens, step, noise)
        return replace(draft, probs=[model([*tokens, *(draft.tokens[i] for i in draft.path(node)[:-1])]) for node in range(len(draft))])
    return faulty


def drops_unlikely(propose: Propose, model: Model, least: Fraction = Fraction(1, 5)) -> Propose:
    """Draws a token, finds that its own probability is low, and leaves it and the rest out."""
    def faulty(tokens: Sequence[int], step: int, noise: Any) -> Draft:
        draft = propose(tokens, step, noise)
        low = (i for i, row in enumerate(draft.probs) if number(row[draft.tokens[i]]) < least)
        return draft.truncate(next(low, len(draft)))
    return faulty


# ---- faults of the verifier ------------------------------------------------------------------------------------------
class _DrawsLater:
    """The noise without its last draw, which the fault makes itself."""

    def __init__(self, noise: Any) -> None:
        self.accepts = noise.accepts

    def draw(self, probs: Any, position: int) -> int:
        return 0


def corrects_from_p(draft: Draft, rows: Sequence[Any], noise: Any, position: int) -> list[int]:
    """After a rejection, draws from p where the residual is due."""
    path = verify(draft, rows, _DrawsLater(noise), position).path
    return [draft.tokens[node] for node in path] + [noise.draw(rows[1 + (path[-1] if path else ROOT)], position + len(path))]


def bonus_after_rejection(draft: Draft, rows: Sequence[Any], noise: Any, position: int) -> list[int]:
    """Always ends a step with a token from the row behind the last judged node, rejected or not."""
    verdict = verify(draft, rows, noise, position)
    emitted = [draft.tokens[node] for node in verdict.path] + [verdict.token]
    if verdict.origin == "correction":
        emitted.append(noise.draw(rows[1 + verdict.judgements[-1].node], position + len(emitted)))
    return emitted


# ---- faults of the noise ---------------------------------------------------------------------------------------------
class SharedU(EnumeratingNoise):
    """All siblings at a position are compared with one u. What is known of u is an interval that each answer narrows."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self._known: dict[Any, tuple[Fraction, Fraction]] = {}

    def accepts(self, prob: Any, position: Any, sibling: int) -> tuple[bool, float | None]:
        low, high = self._known.get(position, (Fraction(0), Fraction(1)))
        edge = min(max(Fraction(prob), low), high)
        below = self._choices.choose([(edge - low) / (high - low), (high - edge) / (high - low)]) == 0
        self._known[position] = (low, edge) if below else (edge, high)
        return below, None


class KeyedSharedU(KeyedNoise):
    """The same with real numbers: the key of a random number forgets which sibling it is for."""

    def accepts(self, prob: float, position: int, sibling: int) -> tuple[bool, float | None]:
        return super().accepts(prob, position, 0)


@dataclass(frozen=True, slots=True)
class LawFault:
    """A fault that changes the law of sampled text.

    shape: the way of drafting that shows it, a name in `tables.SHAPES`. propose, verifier, noise, exact_noise: what stands in for the
    honest part; None leaves it. is_exact: its law can be worked out in fractions.
    """
    name: str
    shape: str
    propose: Callable[[Propose, Model], Propose] | None = None
    verifier: Verifier = honest
    noise: Callable[[int], KeyedNoise] = KeyedNoise
    exact_noise: Callable[[Choices], EnumeratingNoise] = EnumeratingNoise
    is_exact: bool = True


LAW_FAULTS = {fault.name: fault for fault in (
    LawFault("softmax_q", "chosen", propose=softmax_q),
    LawFault("p_for_residual", "chain", verifier=corrects_from_p),
    LawFault("shared_u", "tree", noise=KeyedSharedU, exact_noise=SharedU),
    LawFault("bonus_after_rejection", "chain", verifier=bonus_after_rejection),
    LawFault("drops_unlikely", "chain", propose=drops_unlikely),
    LawFault("typical", "chain", verifier=under(RULES["typical"].judge), is_exact=False),    # its threshold has a logarithm in it
)}
TEXT_FAULTS = ("no_rollback", "run_on")
