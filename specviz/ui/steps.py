"""Finds steps of a recording by what happened in them, and says what happened as words: what lessons choose and quote.

It knows nothing of lessons' files, of screens or of models; it reads `trace` records only.
"""
from __future__ import annotations

from collections.abc import Callable
from statistics import median_low

from ..errors import InputError
from ..trace import NodeTrace, StepTrace, Trace

__all__ = ["KINDS", "NODES", "find_node", "find_step", "values"]

JUDGED = ("accepted", "rejected")


def _judged(step: StepTrace) -> list[NodeTrace]:
    return [node for node in step.nodes if node.state in JUDGED]


def _num_accepted(step: StepTrace) -> int:
    return sum(node.state == "accepted" for node in step.nodes)


def _branches(step: StepTrace) -> bool:
    return any(node.parent != i - 1 for i, node in enumerate(step.nodes))


def _ended_by(step: StepTrace, origin: str) -> bool:
    return bool(step.emitted) and step.emitted[-1].origin == origin


# What a stop may ask for, after "first", "second", "third", "last" or "longest" (the one with most accepted drafts).
KINDS: dict[str, Callable[[StepTrace], bool]] = {
    "prompt": lambda step: step.kind == "prefill",
    "step": lambda step: step.kind != "prefill",
    "draft": lambda step: bool(_judged(step)),
    "step without draft": lambda step: step.kind != "prefill" and not step.nodes,
    "full acceptance": lambda step: _num_accepted(step) >= 2 and _ended_by(step, "bonus"),
    "rejection": lambda step: _num_accepted(step) < len(_judged(step)) and _ended_by(step, "correction"),
    "rejection at once": lambda step: _num_accepted(step) == 0 and bool(_judged(step)) and _ended_by(step, "correction"),
    "partial acceptance": lambda step: _num_accepted(step) >= 1 and _ended_by(step, "correction"),
    "residual": lambda step: bool(step.residual) and _ended_by(step, "correction"),
    "spread residual": lambda step: any(left.rows[0][2] < 0.9 for left in step.residual if left.rows) and _ended_by(step, "correction"),
    "tree": _branches,
    "tree with a path": lambda step: _branches(step) and _num_accepted(step) >= 2,
    "second choice": lambda step: any(_is_second(step, node) for node in step.nodes),
    "sure": lambda step: any(NODES["sure"](node) for node in step.nodes),
    "close call": lambda step: any(NODES["close call"](node) for node in step.nodes),
    "window": lambda step: any(node.state == "window" for node in step.nodes),
}

NODES: dict[str, Callable[[NodeTrace], bool]] = {
    "accepted": lambda node: node.state == "accepted",
    "rejected": lambda node: node.state == "rejected",
    "sure": lambda node: node.state == "accepted" and node.accept_prob == 1 and node.q is not None,
    "close call": lambda node: (node.state == "accepted" and node.u is not None and node.accept_prob is not None and node.accept_prob < 1
                                and node.q is not None and node.q >= 0.05),       # not so small that nothing can be seen
}

_ORDINALS = {"first": 0, "second": 1, "third": 2, "last": -1}


def _is_second(step: StepTrace, node: NodeTrace) -> bool:
    """Whether this accepted node was tried after a sibling that was rejected."""
    return node.state == "accepted" and any(other.parent == node.parent and other.state == "rejected" for other in step.nodes)


def find_step(trace: Trace, condition: str) -> int:
    """The index in `trace.steps` of, say, the "first rejection". Raises InputError if there is none or the words are not known."""
    order, _, kind = condition.partition(" ")
    if kind not in KINDS or order not in (*_ORDINALS, "longest"):
        raise InputError(f"There is no step {condition!r}; expected first, second, third, last or longest and one of: {', '.join(KINDS)}.")
    found = [i for i, step in enumerate(trace.steps) if KINDS[kind](step)]
    place = 0 if order == "longest" else _ORDINALS[order]
    if len(found) <= place or not found:
        raise InputError(f"The recording has no {condition!r}; record it again with another prompt or seed, or change the condition.")
    return max(found, key=lambda i: _num_accepted(trace.steps[i])) if order == "longest" else found[place]


def find_node(step: StepTrace, name: str) -> int:
    """The index of the first node of that kind in the step. Raises InputError if there is none."""
    if name not in NODES:
        raise InputError(f"There is no node {name!r}; expected one of: {', '.join(NODES)}.")
    for i, node in enumerate(step.nodes):
        if NODES[name](node):
            return i
    raise InputError(f"The step has no node {name!r}; choose another condition for the step.")


def values(trace: Trace, at: int | None = None, node: int | None = None) -> dict[str, float | int | str]:
    """Everything a text may quote: figures of the run, of the step at index `at`, and of one of its nodes, by name.

    `fed` is the usual number of tokens in a pass, `verify_ms` and `draft_ms` are those of the quickest such step, `plain_ms` those of the
    quickest plain step.
    """
    out = _run(trace)
    if at is not None:
        out |= _step(trace, at)
        if node is not None:
            out |= _node(trace.steps[at], node)
    return {name: value for name, value in out.items() if value is not None}


def _run(trace: Trace) -> dict[str, float | int | str | None]:
    stats, compare, config = trace.stats or {}, trace.compare or {}, trace.meta.get("config") or {}
    sampling = trace.meta.get("sampling") or {}
    decode = [step for step in trace.steps if step.kind != "prefill"]
    spec = [step for step in decode if step.nodes]
    fed = median_low([len(step.nodes) + 1 for step in spec]) if spec else None
    usual = [step for step in spec if len(step.nodes) + 1 == fed]
    # The quickest ones: whatever else a machine does makes a step longer, never shorter.
    plain_ms = min((token.ms for token in trace.plain[1:]), default=None)
    verify_ms, draft_ms = (min((getattr(step, name) for step in usual), default=None) for name in ("verify_ms", "draft_ms"))
    rate, alpha = stats.get("draft_acceptance_rate"), stats.get("acceptance_rate_alpha")
    return {
        **{name: stats.get(name) for name in ("speed_up", "tokens_per_step", "tokens_per_s", "plain_tokens_per_s")},
        "steps": stats.get("num_steps"), "tokens": stats.get("num_tokens"), "decoded": sum(len(step.emitted) for step in decode),
        "accepted": stats.get("num_accepted_draft_tokens"), "drafted": stats.get("num_draft_tokens"),
        "acceptance_percent": None if rate is None else 100 * rate, "alpha": alpha,
        "k": config.get("k"), "temperature": sampling.get("temperature"), "seed": sampling.get("seed"), "target": config.get("target"),
        "quantization": {"none": "fp32", "int8": "INT8"}.get(str(config.get("quantization")), config.get("quantization")),
        "plain_ms": plain_ms, "verify_ms": verify_ms, "draft_ms": draft_ms,
        "verify_ratio": verify_ms / plain_ms if verify_ms is not None and plain_ms else None,
        "draft_ratio": draft_ms / plain_ms if draft_ms is not None and plain_ms else None,
        "fed": fed,
        "same": compare.get("tokens"), "compared": compare.get("of")}


def _step(trace: Trace, at: int) -> dict[str, float | int | str | None]:
    step = trace.steps[at]
    judged, end = _judged(step), step.emitted[-1] if step.emitted else None
    before = sum(len(earlier.emitted) for earlier in trace.steps[:at])
    plain = trace.plain[before:before + len(step.emitted)]
    residual = step.residual[0].rows[0] if step.residual else None
    return {
        "step": sum(earlier.kind != "prefill" for earlier in trace.steps[:at + 1]), "step_tokens": len(step.emitted),
        "step_accepted": _num_accepted(step), "step_judged": len(judged),
        "step_drafted": sum(node.state != "window" for node in step.nodes),
        "step_fed": len(step.nodes) + 1, "step_windows": sum(node.state == "window" for node in step.nodes),
        "first_wrong": next((i for i, node in enumerate(step.nodes, 1) if node.state == "rejected"), None),
        "step_end": end.text.strip() or "␣" if end else None,
        "step_ms": step.draft_ms + step.verify_ms + step.other_ms, "step_draft_ms": step.draft_ms, "step_verify_ms": step.verify_ms,
        "step_plain_ms": sum(token.ms for token in plain) if len(plain) == len(step.emitted) else None,
        "prompt_tokens": step.num_prompt_tokens or None,
        "step_ms_per_token": step.verify_ms / step.num_prompt_tokens if step.num_prompt_tokens else None,
        "residual_token": residual[1].strip() or "␣" if residual else None, "residual_mass": residual[2] if residual else None}


def _node(step: StepTrace, index: int) -> dict[str, float | int | str | None]:
    node = step.nodes[index]
    return {"node": node.text.strip() or "␣", "p": node.p, "q": node.q, "u": node.u, "accept": node.accept_prob,
            "p_t1": node.p_t1, "q_t1": node.q_t1}
