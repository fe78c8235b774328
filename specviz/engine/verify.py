"""Accepts or rejects draft tokens, one by one; `rules` has other ways. It knows nothing of models or how the draft was made."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .draft import ROOT, Draft

__all__ = ["Judgement", "Noise", "PointMass", "Verdict", "number", "residual", "verify"]


@dataclass(frozen=True, slots=True)
class PointMass:
    """A greedy target's distribution, all of it on one token, without a vocabulary's worth of zeros."""
    token: int

    def __getitem__(self, token: int) -> float:
        return float(token == self.token)


class Noise(Protocol):
    """All randomness of a verification. A test double enumerates every outcome with its weight instead of drawing one."""

    def accepts(self, prob: Any, position: int, sibling: int) -> tuple[bool, float | None]:
        """True with probability `prob`, and the number u in [0, 1) that decided (None if none was needed).

        position: absolute index of the token that is judged; sibling: 0 for the first child tried there, 1 for the next. No two calls of
        a run may have the same pair: block verification, which may judge a position in several steps, gives minus the depth in its chain.
        """

    def draw(self, probs: Any, position: int) -> int:
        """A token id drawn from `probs`, [V], for the absolute index `position`."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One drafted token held against the target. `target_prob` is the remaining p it was judged with. `accept_prob` is None where the rule
    has none for this token."""
    node: int
    target_prob: Any
    draft_prob: Any          # None: chosen, a point mass
    accept_prob: Any
    u: float | None
    accepted: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided.

    path: accepted nodes, root's child first. token: the one more token that every step emits. origin: "correction" (a draft token was
    rejected there), "bonus" (all drafts on the path were accepted) or "plain" (nothing was judged). residuals: for each judged parent
    with a rejection, the distribution [V] that was left after its last rejection. rule: the rule that judged, where it is not the one
    that was asked for.
    """
    path: tuple[int, ...]
    token: int
    origin: str
    judgements: tuple[Judgement, ...] = ()
    residuals: tuple[tuple[int, Any], ...] = ()
    rule: str = ""


def residual(target_probs: Any, draft_probs: Any) -> Any:
    """What is left of the target's distribution once a drawn token has been rejected, [V].

    norm(max(p - q, 0)): Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1. Sums to 1. If rounding leaves nothing (p equal to q),
    returns p, as it does for a point mass, which can lose all or nothing.
    """
    if isinstance(target_probs, PointMass):
        return target_probs
    left = (target_probs - draft_probs).clamp(min=0)
    total = left.sum()
    return left / total if total > 0 else target_probs


def without(target_probs: Any, token: int) -> Any:
    """The residual for a chosen token, whose q is a point mass: zero it and renormalise, [V]. If it held all mass, returns p."""
    if isinstance(target_probs, PointMass):
        return target_probs
    left = target_probs.clone()
    left[token] = 0
    total = left.sum()
    return left / total if total > 0 else target_probs


def verify(draft: Draft, target_probs: Sequence[Any], noise: Noise, position: int) -> Verdict:
    """Walk the draft from the root, accept or reject child by child, and emit one more token.

    At each parent with remaining target distribution p, child x drawn from q is accepted with probability min(1, p(x)/q(x)); a chosen
    child with p(x). On rejection p becomes the residual and the next sibling is tried. If all fail the correction is drawn from what is
    left; at a leaf the bonus token is drawn from its untouched p. The emitted tokens follow the target's distribution exactly.
    Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318); trees: SpecInfer (arXiv 2305.09781); siblings
    without replacement: Jeon et al. 2024 (arXiv 2402.14160).

    target_probs: [1 + n, V], row 0 judges the root's children, row 1 + i those of node i; greedy decoding passes one-hot rows,
    or a `PointMass` each.
    position: absolute index of the first drafted token (how many tokens are committed).
    """
    path: list[int] = []
    judgements: list[Judgement] = []
    residuals: list[tuple[int, Any]] = []
    parent, origin = ROOT, "plain"
    while children := draft.children(parent):
        left = target_probs[1 + parent]
        here = position + len(path)
        accepted = None
        for sibling, node in enumerate(children):
            token = draft.tokens[node]
            p = number(left[token])
            q = None if draft.probs is None else number(draft.probs[node][token])
            ratio = p if q is None else p / q
            accept_prob = ratio if ratio < 1 else 1
            ok, u = noise.accepts(accept_prob, here, sibling)
            judgements.append(Judgement(node, p, q, accept_prob, u, ok))
            if ok:
                accepted = node
                break
            left = without(left, token) if q is None else residual(left, draft.probs[node])
        if accepted is None or accepted != children[0]:
            residuals.append((parent, left))
        if accepted is None:
            return Verdict(tuple(path), noise.draw(left, here), "correction", tuple(judgements), tuple(residuals))
        path.append(accepted)
        parent, origin = accepted, "bonus"
    return Verdict(tuple(path), noise.draw(target_probs[1 + parent], position + len(path)), origin, tuple(judgements), tuple(residuals))


def number(value: Any) -> Any:
    """A tensor's element as a Python number; exact fractions pass through."""
    return value.item() if hasattr(value, "item") else value
