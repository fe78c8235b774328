"""Writes down what a step did. Looks probabilities up for the eye only: nothing here decides anything."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..trace import CacheTrace, EmittedToken, NodeTrace, ResidualTrace, StepTrace, TopTrace
from .draft import EMPTY, ROOT, Draft
from .model import Output
from .reading import Reading, Top
from .scheduler import Scheduled
from .verify import Judgement, PointMass, Verdict

if TYPE_CHECKING:
    from .sequence import Sequence

__all__ = ["Recorder", "Times", "Work"]


@dataclass(frozen=True, slots=True)
class Times:
    """When a step began, on a clock that stands still while records are written, and where its time went, all in seconds; and what the
    device took for drafting and verifying, where it works behind the host, in milliseconds."""
    begun_s: float
    draft_s: float
    verify_s: float
    other_s: float
    draft_device_ms: float | None = None
    verify_device_ms: float | None = None


@dataclass(slots=True)
class Work:
    """One sequence's way through one step, filled in from top to bottom."""
    item: Scheduled
    draft: Draft = EMPTY
    output: Output | None = None
    logits: Tensor | None = None                # [1 + n, V], after penalties
    probs: Tensor | list[PointMass] | None = None           # [1 + n, V], what verification used
    reading: Reading | None = None              # what came from the device in one transfer, where the step was judged there
    verdict: Verdict | None = None              # None while the prompt is being read
    emitted: list[EmittedToken] = field(default_factory=list)
    kept: CacheTrace | None = None

    @property
    def sequence(self) -> Sequence:
        return self.item.sequence


class Recorder:
    """Makes one `StepTrace` per step and sequence.

    piece: the text of one token alone. num_top: how many of the most probable tokens are stored per judged parent where the request
    wants probabilities.
    """

    def __init__(self, piece: Callable[[int], str], num_top: int = 8) -> None:
        self._piece = piece
        self.num_top = num_top

    @torch.inference_mode()
    def record(self, work: Work, times: Times, num_rows: int) -> StepTrace | None:
        """None while a prompt is still being read: all its chunks become one record, written with the first token."""
        sequence, draft = work.sequence, work.draft
        if not work.item.decoding:
            sequence.prefill_times.append(times)
            if work.verdict is None:
                return None
            return self._prefill(work, times, num_rows)
        if sequence.decode_start_s is None:
            sequence.decode_start_s = times.begun_s
        kv = {"target": work.kept}
        if sequence.draft_kv is not None:
            kv["drafter"] = sequence.draft_kv
        return StepTrace(
            kind="spec" if draft.num_judged else "plain", t0_ms=1e3 * (times.begun_s - sequence.decode_start_s), draft_ms=1e3 * times.draft_s,
            verify_ms=1e3 * times.verify_s, other_ms=1e3 * times.other_s, nodes=self._nodes(work), emitted=tuple(work.emitted),
            draft_stop=draft.stop, kv=kv, num_rows=num_rows, top=self._top(work), residual=self._residuals(work), draft_by=draft.by,
            num_pooled=draft.num_pooled, rule=work.verdict.rule, margin=self._margin(work),
            choice=None if sequence.pilot is None else sequence.pilot.choice, draft_device_ms=times.draft_device_ms,
            verify_device_ms=times.verify_device_ms)

    def _prefill(self, work: Work, times: Times, num_rows: int) -> StepTrace:
        sequence = work.sequence
        chunks = sequence.prefill_times
        end_s = times.begun_s + times.draft_s + times.verify_s + times.other_s
        read = sequence.num_prompt_tokens - sequence.num_reused
        return StepTrace(
            kind="prefill", t0_ms=1e3 * (chunks[0].begun_s - end_s), draft_ms=1e3 * sum(t.draft_s for t in chunks),
            verify_ms=1e3 * sum(t.verify_s for t in chunks), other_ms=1e3 * sum(t.other_s for t in chunks), emitted=tuple(work.emitted),
            kv={"target": CacheTrace(sequence.num_reused, read, work.kept.after)}, num_rows=num_rows, top=self._top(work),
            num_prompt_tokens=sequence.num_prompt_tokens, num_reused=sequence.num_reused, margin=self._margin(work))

    def _margin(self, work: Work) -> float | None:
        """Of a plain sampled token, where the rule lets runs be compared token by token."""
        sequence = work.sequence
        if sequence.params.greedy or not sequence.keep_probs or work.draft.num_judged or sequence.rule.promise != "text":
            return None
        return sequence.noise.margin(work.probs[0], len(sequence.tokens) - len(work.emitted))

    def _nodes(self, work: Work) -> tuple[NodeTrace, ...]:
        draft = work.draft
        if not len(draft):
            return ()
        judged = {judgement.node: judgement for judgement in work.verdict.judgements}
        if reading := work.reading:
            unknown = [None] * len(draft)
            looks = (values or unknown for values in (reading.draft_probs, reading.first_target_probs, reading.first_draft_probs))
            return tuple(self._node(work, i, judged.get(i), q, p_t1, q_t1) for i, (q, p_t1, q_t1) in enumerate(zip(*looks)))
        parents = torch.tensor(draft.parents) + 1
        tokens = torch.tensor(draft.tokens)
        p_t1 = q_t1 = [None] * len(draft)
        if work.sequence.keep_probs:
            logits = work.logits
            p_t1 = (logits[parents, tokens] - logits.logsumexp(-1)[parents]).exp().tolist()
            if draft.shown_probs is not None:
                q_t1 = draft.shown_probs[torch.arange(len(draft)), tokens].tolist()
        drawn = [None] * len(draft) if draft.probs is None else draft.probs[torch.arange(len(draft)), tokens].tolist()
        return tuple(self._node(work, i, judged.get(i), drawn[i], p_t1[i], q_t1[i]) for i in range(len(draft)))

    def _node(self, work: Work, i: int, judgement: Judgement | None, q: float | None, p_t1: float | None, q_t1: float | None) -> NodeTrace:
        draft = work.draft
        if judgement is not None:
            state = "accepted" if judgement.accepted else "rejected"
        else:
            state = "window" if draft.judged is not None and not draft.judged[i] else "unjudged"
        return NodeTrace(
            draft.tokens[i], self._piece(draft.tokens[i]), draft.parents[i], state, q, None if judgement is None else judgement.target_prob,
            None if judgement is None or judgement.accept_prob is None else float(judgement.accept_prob), None if judgement is None else judgement.u, p_t1, q_t1,
            None if draft.scores is None else draft.scores[i])

    def _top(self, work: Work) -> tuple[TopTrace, ...]:
        """The judged path only: the root and every accepted node."""
        if not work.sequence.keep_probs:
            return ()
        draft, greedy = work.draft, work.sequence.params.greedy
        path = [ROOT, *work.verdict.path]
        if reading := work.reading:
            return tuple(self._top_trace(at, reading.tops[1 + at] if draft.children(at) else replace(reading.tops[1 + at], draft_probs=None), greedy)
                         for at in path)
        rows = [1 + node for node in path]
        probs = work.logits[rows].softmax(-1) if greedy else work.probs[rows]
        top = probs.topk(min(self.num_top, probs.shape[-1]), -1)
        drawn_from = draft.shown_probs if greedy else draft.probs
        found = []
        for at, values, ids in zip(path, top.values.tolist(), top.indices.tolist()):
            children = draft.children(at)
            q = None if drawn_from is None or not children else drawn_from[children[0]][ids].tolist()
            found.append(self._top_trace(at, Top(values, ids, q), greedy))
        return tuple(found)

    def _top_trace(self, at: int, top: Top, greedy: bool) -> TopTrace:
        q = top.draft_probs or [None] * len(top.ids)
        return TopTrace(at, tuple((t, self._piece(t), p, x) for t, p, x in zip(top.ids, top.probs, q) if p > 0), greedy)

    def _residuals(self, work: Work) -> tuple[ResidualTrace, ...]:
        if not work.sequence.keep_probs:
            return ()
        found = []
        if work.reading:
            found = work.reading.residual
        else:
            for at, left in work.verdict.residuals:
                if isinstance(left, PointMass):
                    found.append((at, Top([1.0], [left.token])))
                    continue
                top = left.topk(min(self.num_top, left.shape[-1]))
                found.append((at, Top(top.values.tolist(), top.indices.tolist())))
        return tuple(ResidualTrace(at, tuple((t, self._piece(t), mass) for mass, t in zip(top.probs, top.ids) if mass > 0)) for at, top in found)
