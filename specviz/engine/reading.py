"""Judges drafts where the logits are and brings what the host must know of a step over in one transfer. For devices that are slow to ask.

It knows nothing of models. What it computes is `verify.verify`, its oracle in tests: whether a child would be accepted depends on its own
parent only, so all parents are worked out side by side, and the host walks from the root once it has the numbers. What a record shows
(most probable tokens, probabilities at temperature 1) comes along.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .draft import ROOT, Draft
from .sampling import KeyedNoise, SamplingParams
from .verify import Judgement, Verdict

__all__ = ["Reading", "Top", "fetch", "look"]


@dataclass(frozen=True, slots=True)
class Top:
    """The most probable tokens of one distribution, most probable first, and what the drafter gave them, if it was drawn from."""
    probs: list[float]
    ids: list[int]
    draft_probs: list[float] | None = None


@dataclass(slots=True)
class Reading:
    """One sequence's step: first tensors on the device, after `fetch` numbers on the host.

    finite: whether the logits are numbers. drawn: for each row the token that follows if the path ends there. target_probs: for each node
    the remaining p that it is judged with. draft_probs: each node's q, None where nodes were chosen. Only where the record wants them: tops
    (of each row), left (of each judged node: what its rejection leaves), first_target_probs and first_draft_probs (of each node, at
    temperature 1). residual: after `verdict`, (parent, what was left there) for each parent with a rejection.
    """
    parts: list[tuple[str, Tensor]]
    judged: list[int] = field(default_factory=list)           # in the order in which their numbers come
    num_nodes: int = 0
    finite: bool = True
    drawn: list[int] = field(default_factory=list)
    target_probs: list[float] = field(default_factory=list)
    draft_probs: list[float] | None = None
    tops: list[Top] = field(default_factory=list)
    left: dict[int, Top] = field(default_factory=dict)
    first_target_probs: list[float] | None = None
    first_draft_probs: list[float] | None = None
    residual: list[tuple[int, Top]] = field(default_factory=list)

    def take(self, values: dict[str, list]) -> None:
        """Numbers of the parts by name, each nested as its tensor was."""
        self.parts = []
        self.finite = bool(values["finite"][0])
        self.drawn = [int(token) for token in values["drawn"]]
        self.target_probs, self.draft_probs = [0.0] * self.num_nodes, values.get("draft_probs")
        for node, prob in zip(self.judged, values["target_probs"]):
            self.target_probs[node] = prob
        self.first_target_probs, self.first_draft_probs = values.get("first_target_probs"), values.get("first_draft_probs")
        if "top_probs" in values:
            from_draft = values.get("top_draft_probs", [None] * len(self.drawn))
            self.tops = [Top(probs, list(map(int, ids)), q) for probs, ids, q in zip(values["top_probs"], values["top_ids"], from_draft)]
            self.left = {node: Top(probs, list(map(int, ids)))
                         for node, probs, ids in zip(self.judged, values.get("left_probs", []), values.get("left_ids", []))}

    def verdict(self, draft: Draft, noise: KeyedNoise, position: int) -> Verdict:
        """Walk from the root; the result is that of `verify`, without `residuals`, whose tops are in `residual`."""
        path: list[int] = []
        judgements: list[Judgement] = []
        parent, origin = ROOT, "plain"
        while children := draft.children(parent):
            accepted = rejected = None
            for sibling, node in enumerate(children):
                p, q = self.target_probs[node], None if self.draft_probs is None else self.draft_probs[node]
                ratio = p if q is None else p / q
                accept_prob = ratio if ratio < 1 else 1
                ok, u = noise.accepts(accept_prob, position + len(path), sibling)
                judgements.append(Judgement(node, p, q, accept_prob, u, ok))
                if ok:
                    accepted = node
                    break
                rejected = node
            if rejected is not None and rejected in self.left:
                self.residual.append((parent, self.left[rejected]))
            if accepted is None:
                return Verdict(tuple(path), self.drawn[1 + parent], "correction", tuple(judgements))
            path.append(accepted)
            parent, origin = accepted, "bonus"
        return Verdict(tuple(path), self.drawn[1 + parent], origin, tuple(judgements))


@torch.inference_mode()
def look(draft: Draft, logits: Tensor, probs: Tensor, params: SamplingParams, noise: KeyedNoise, position: int, num_top: int) -> Reading:
    """Queue everything on the device of the logits; nothing waits.

    logits: [1 + n, V], after penalties. probs: [1 + n, V], see `sampling.shaped`. position: absolute index of the first drafted token.
    num_top: how many tokens of each distribution the record shows; 0 for none.
    """
    device, num_nodes = probs.device, len(draft)
    ranks = _by_rank(draft)
    reading = Reading([("finite", logits.sum().isfinite().view(1))], [node for nodes in ranks for node in nodes], num_nodes)
    parts = reading.parts
    drawn_from = None if draft.probs is None else draft.probs.to(device, non_blocking=True)
    left, found, rests = probs, [], []
    for nodes in ranks:
        at, rows, tokens = _numbers([nodes, [1 + draft.parents[i] for i in nodes], [draft.tokens[i] for i in nodes]], device)
        here = left[rows]
        found.append(here.gather(1, tokens[:, None])[:, 0])
        rest = here.scatter(1, tokens[:, None], 0) if drawn_from is None else (here - drawn_from[at]).clamp(min=0)
        total = rest.sum(-1, keepdim=True)
        rest = torch.where(total > 0, rest / total, here)
        left = left.index_copy(0, rows, rest)
        rests.append(rest)
    parts.append(("target_probs", torch.cat(found) if found else probs.new_empty(0)))
    places = [position + depth for depth in (0, *draft.depths)]
    parts.append(("drawn", left.argmax(-1) if params.greedy else noise.draws(left, places)))
    own = _numbers([range(num_nodes), [1 + parent for parent in draft.parents], draft.tokens], device) if num_nodes else None
    if drawn_from is not None and own is not None:
        parts.append(("draft_probs", drawn_from[own[0], own[2]]))
    if num_top:
        parts += _shown(draft, logits, probs, params.greedy, drawn_from, own, rests, min(num_top, probs.shape[-1]))
    return reading


def fetch(readings: Sequence[Reading]) -> None:
    """Wait for the device once and bring the numbers of all these steps to the host."""
    if not readings:
        return
    values = torch.cat([tensor.double().flatten() for reading in readings for _, tensor in reading.parts]).tolist()
    start = 0
    for reading in readings:
        named = {}
        for name, tensor in reading.parts:
            piece, start = values[start:start + tensor.numel()], start + tensor.numel()
            width = tensor.shape[-1] if tensor.dim() == 2 else 0
            named[name] = [piece[i:i + width] for i in range(0, len(piece), width)] if width else piece
        reading.take(named)


def _shown(draft: Draft, logits: Tensor, probs: Tensor, greedy: bool, drawn_from: Tensor | None, own: Tensor | None, rests: list[Tensor],
           num_top: int) -> list[tuple[str, Tensor]]:
    """What is looked up for the eye only."""
    first = logits.softmax(-1)                               # at temperature 1: a point mass teaches nothing
    top = (first if greedy else probs).topk(num_top, -1)
    parts = [("top_probs", top.values), ("top_ids", top.indices)]
    if own is not None:
        nodes, rows, tokens = own
        parts.append(("first_target_probs", (logits[rows, tokens] - logits.logsumexp(-1)[rows]).exp()))
        shown = None if draft.shown_probs is None else draft.shown_probs.to(logits.device, non_blocking=True)
        if shown is not None:
            parts.append(("first_draft_probs", shown[nodes, tokens]))
        source = shown if greedy else drawn_from
        if source is not None:
            children = _numbers([[(draft.children(parent) or [0])[0] for parent in range(ROOT, len(draft))]], logits.device)[0]
            parts.append(("top_draft_probs", source[children].gather(1, top.indices)))
    if rests:
        tops = torch.cat(rests).topk(num_top, -1)
        parts += [("left_probs", tops.values), ("left_ids", tops.indices)]
    return parts


def _by_rank(draft: Draft) -> list[list[int]]:
    """Judged nodes that are the first child of their parent, then those that are the second, and so on."""
    ranks: list[list[int]] = []
    for parent in range(ROOT, len(draft)):
        for rank, node in enumerate(draft.children(parent)):
            if rank == len(ranks):
                ranks.append([])
            ranks[rank].append(node)
    return ranks


def _numbers(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 [rows, n] on the device, sent without waiting for it."""
    return torch.tensor([list(row) for row in rows], dtype=torch.long).to(device, non_blocking=True)
