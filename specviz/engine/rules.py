"""The rules of verification that a request can choose from: how each judges a draft, and what it promises of the text.

They know nothing of models, methods or how the draft was made.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch

from .draft import ROOT, Draft
from .sampling import KeyedNoise, SharedNoise
from .verify import Judgement, Noise, Verdict, number, verify

__all__ = ["REJECTION", "RULES", "Rule", "block", "shared", "typical"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the menu; a sequence carries it.

    promise: "text" (token for token that of plain sampling with the same seed), "distribution" (the target's own) or "nothing" (lossy).
    judge: arguments and result as of `verify.verify`. noise: a request's randomness from its seed, for drafts and verification. on_device:
    whether `reading.look` can judge by it where the logits are. takes_points: whether `judge` takes a `PointMass` for a distribution.
    """
    name: str
    promise: str
    source: str
    judge: Callable[[Draft, Seq[Any], Noise, int], Verdict]
    noise: Callable[[int], KeyedNoise] = KeyedNoise
    on_device: bool = False
    takes_points: bool = False

    @property
    def lossless(self) -> bool:
        return self.promise != "nothing"


def shared(draft: Draft, target_probs: Seq[Any], noise: Noise, position: int) -> Verdict:
    """Draw the target's own token at every parent; a child is accepted if it is that token. Arguments and result as of `verify`.

    The emitted tokens are those that plain sampling draws with this noise, whatever the draft was. Drafts that were drawn with the same
    noise (`SharedNoise`) are accepted often: both sides take the argmax of probability over the same e (the Gumbel-max coupling). Daliri et
    al. 2024, arXiv 2408.07978.
    """
    path: list[int] = []
    judgements: list[Judgement] = []
    parent, origin = ROOT, "plain"
    while True:
        own = noise.draw(target_probs[1 + parent], position + len(path))
        children = draft.children(parent)
        for node in children:
            token = draft.tokens[node]
            q = None if draft.probs is None else number(draft.probs[node][token])
            judgements.append(Judgement(node, number(target_probs[1 + parent][token]), q, None, None, token == own))
            if token == own:
                break
        else:
            return Verdict(tuple(path), own, "correction" if children else origin, tuple(judgements))
        path.append(node)
        parent, origin = node, "bonus"


def block(draft: Draft, target_probs: Seq[Any], noise: Noise, position: int) -> Verdict:
    """Judge a chain as a whole: the longest block that passes is accepted. Arguments and result as of `verify`.

    With r_0 = 1 and r_i = min(r_{i-1} p(x_i)/q(x_i), 1), the block of the first i of n tokens passes with probability h_n = r_n, or
    h_i = s / (s + 1 - r_i) where s is the sum of max(r_i p - q, 0) behind it; the correction is drawn from that, normalised. The law is
    the target's, and on average no fewer tokens are accepted than token by token. Sun et al. 2024, arXiv 2403.10444, Algorithm 2; the
    blocks are tried longest first here, which gives the same law with fewer random numbers. The rule is one for chains: a draft that
    branches is judged by `verify`, and the verdict says so.
    """
    chain: list[int] = []
    while children := draft.children(chain[-1] if chain else ROOT):
        if len(children) > 1:
            return replace(verify(draft, target_probs, noise, position), rule="rejection")
        chain.append(children[0])
    parents, joint, pairs = [ROOT, *chain], [1], []
    for parent, node in zip(parents, chain):
        token = draft.tokens[node]
        p, q = number(target_probs[1 + parent][token]), None if draft.probs is None else number(draft.probs[node][token])
        pairs.append((p, q))
        joint.append(joint_ratio(joint[-1], p, 1 if q is None else q))
    tests: dict[int, tuple[Any, float | None]] = {}
    length = len(chain)
    while length:
        if length == len(chain):
            pass_prob = joint[length]
        else:
            left = block_residual(target_probs[1 + parents[length]], joint[length], draft, chain[length])
            pass_prob = block_prob(number(left.sum()), joint[length])
        # A position is tried again by the next step if its block fails, so the depth, which then differs, must be part of the key.
        ok, u = noise.accepts(pass_prob, position + length - 1, -length)
        tests[length] = pass_prob, u
        if ok:
            break
        length -= 1
    path = tuple(chain[:length])
    judgements = tuple(Judgement(node, *pairs[i], *tests.get(i + 1, (None, None)), i < length) for i, node in enumerate(chain[:length + 1]))
    here = target_probs[1 + parents[length]]
    if length == len(chain):
        return Verdict(path, noise.draw(here, position + length), "bonus" if chain else "plain", judgements)
    left = block_residual(here, joint[length], draft, chain[length])
    total = left.sum()
    left = left / total if total > 0 else here
    return Verdict(path, noise.draw(left, position + length), "correction", judgements, ((parents[length], left),))


def joint_ratio(before: Any, target_prob: Any, draft_prob: Any) -> Any:
    """r_i of `block` from r_{i-1}: at most 1."""
    ratio = before * target_prob / draft_prob
    return ratio if ratio < 1 else 1


def block_residual(target_probs: Any, joint: Any, draft: Draft, node: int) -> Any:
    """max(r p - q, 0) before `node` was drawn from q, [V], not normalised. A chosen node's q is a point mass."""
    if draft.probs is not None:
        return (target_probs * joint - draft.probs[node]).clamp(min=0)
    left = target_probs * joint
    left[draft.tokens[node]] = 0
    return left


def block_prob(mass: Any, joint: Any) -> Any:
    """h_i of `block` from the sum of its residual. 0/0 (p equal to q, all accepted so far) only follows a longer block that passes."""
    total = mass + 1 - joint
    return mass / total if total > 0 else 1


def typical(draft: Draft, target_probs: Seq[Any], noise: Noise, position: int, *, epsilon: float = 0.09, delta: float = 0.3) -> Verdict:
    """Accept the longest path of tokens that are likely enough for the target. LOSSY. Arguments and result as of `verify`.

    x passes if p(x) > min(epsilon, delta exp(-H(p))), H the entropy in nats; the next token is drawn from p. No q is asked for, so the
    text follows neither model's distribution at a temperature above 0; at 0 it is the greedy text. Cai et al. 2024 (Medusa), arXiv
    2401.10774, section 2.3.1; the defaults are those of its code.
    """
    depths: dict[int, int] = {ROOT: 0}                       # of the nodes that pass together with all nodes above them
    tried: dict[int, bool] = {}
    for parent in range(ROOT, len(draft)):
        if parent not in depths or not (children := draft.children(parent)):
            continue
        probs = target_probs[1 + parent]
        threshold = min(epsilon, delta * math.exp(-number(torch.special.entr(probs).sum())))
        for node in children:
            tried[node] = number(probs[draft.tokens[node]]) > threshold
            if tried[node]:
                depths[node] = depths[parent] + 1
    leaf = max(depths, key=lambda node: (depths[node], -node))
    path = draft.path(leaf)
    judgements = []
    for parent in (ROOT, *path):
        for node in draft.children(parent):
            if node in path or not tried[node]:              # what passes beside the path is not judged: a longer path was there
                token = draft.tokens[node]
                q = None if draft.probs is None else number(draft.probs[node][token])
                judgements.append(Judgement(node, number(target_probs[1 + parent][token]), q, None, None, node in path))
    origin = "correction" if draft.children(leaf) else "bonus" if path else "plain"
    return Verdict(tuple(path), noise.draw(target_probs[1 + leaf], position + len(path)), origin, tuple(judgements))


REJECTION = Rule("rejection", "distribution", "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318", verify, on_device=True,
                 takes_points=True)

RULES: dict[str, Rule] = {rule.name: rule for rule in (
    REJECTION,
    Rule("shared-noise", "text", "Daliri et al. 2024, arXiv 2408.07978", shared, SharedNoise, takes_points=True),
    Rule("block", "distribution", "Sun et al. 2024, arXiv 2403.10444", block),
    Rule("typical", "nothing", "Cai et al. 2024, arXiv 2401.10774", typical),
)}
