"""What one decoding step did: plain frozen data, and the trace file that holds it.

It knows nothing of engines, models or screens, and needs no package besides Python itself: a recorded trace opens on a
machine that has no torch. Everything else (screen, metrics, benchmarks, servers) learns of the engine through these records only.
"""
from __future__ import annotations

import json
import math
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from .errors import TraceError

__all__ = ["CacheTrace", "ChoiceTrace", "EmittedToken", "FORMAT", "MAX_BYTES", "NodeTrace", "PlainToken", "ResidualTrace", "StepTrace",
           "TopTrace", "Trace", "VERSION", "dumps", "load", "loads", "save", "step_from", "to_dict"]

FORMAT = "specviz-trace"
VERSION = 1
MAX_BYTES = 20_000_000

NODE_STATES = ("accepted", "rejected", "unjudged", "window")
ORIGINS = ("draft", "correction", "bonus", "plain")
KINDS = ("prefill", "spec", "plain", "unknown")
SOURCES = ("exact", "inferred", "aggregate")
REASONS = ("start", "pays", "probe", "off", "bound")


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """One drafted token.

    `parent` is an index into the step's nodes, -1 for the text so far. `state` is one of `NODE_STATES`; a "window" node was fed but
    never meant to be judged and counts in no metric. For judged nodes `p` is the *remaining* target probability that the verdict used
    (after earlier siblings were rejected), `q` the draft probability it was drawn with (None: chosen, a point mass), `accept_prob`
    min(1, p/q) (or what another rule has in its place, None where it has none), and `u` the uniform number it was compared with (None where no number was needed, as in greedy decoding).
    `p_t1` and `q_t1` are the raw probabilities at temperature 1, whatever the run's temperature was: in a greedy run p is 0 or 1.
    """
    id: int | None
    text: str
    parent: int
    state: str
    q: float | None = None
    p: float | None = None
    accept_prob: float | None = None
    u: float | None = None
    p_t1: float | None = None
    q_t1: float | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """A token that entered the answer. `origin` is one of `ORIGINS`.

    `text` is what this token added to the decoded answer; a token that ends inside a UTF-8 character adds nothing, the one that
    completes it adds the whole character. `num_tokens` is above 1 only for remote engines that merge tokens (then `id` is None).
    """
    id: int | None
    text: str
    origin: str
    num_tokens: int = 1


@dataclass(frozen=True, slots=True)
class CacheTrace:
    """Entries of one KV cache row: `before` the step, `fed` by it (all forwards), and `after` rollback."""
    before: int
    fed: int
    after: int


@dataclass(frozen=True, slots=True)
class TopTrace:
    """The most probable tokens at one judged parent (`at`: node index, -1 for the text so far).

    `rows` are (id, text, p, q) by falling p; q is None where the drafter gave no distribution. `temperature_one` is True where the
    values are those at temperature 1 because the run itself was greedy.
    """
    at: int
    rows: tuple[tuple[int, str, float, float | None], ...]
    temperature_one: bool = False


@dataclass(frozen=True, slots=True)
class ResidualTrace:
    """The residual distribution at one judged parent after a rejection: (id, text, mass) by falling mass, normalised."""
    at: int
    rows: tuple[tuple[int, str, float], ...]


@dataclass(frozen=True, slots=True)
class ChoiceTrace:
    """What the autopilot chose for a step: at most `k` draft tokens, and why.

    `why` is one of "start" (little seen so far), "pays", "probe" (a look whether it pays again), "off" (it does not pay) and "bound" (it
    might pay, but the run has used up what it may lose). `tokens` and `cost` are what it expected: tokens, and plain steps' worth of time.
    `method` is given where it may choose that too.
    """
    k: int
    why: str
    tokens: float = 1.0
    cost: float = 1.0
    method: str = ""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One decoding step of one sequence.

    Times are milliseconds. `t0_ms` is the step's start since the first decode step of its sequence (negative for prefill), on a clock
    that stands still while the record itself is written (`record_ms`: probabilities are looked up only for the eye).
    `num_rows` is how many sequences shared the forward. `num_drafted` and `num_accepted` are given where `nodes` are unknown
    (remote engines) or not all kept (a file near its size limit), and None otherwise. `draft_by` names the part that drafted where a
    method has several; `num_pooled` counts the n-grams in Lookahead's pool. `num_prompt_tokens` counts the prompt tokens read
    in a prefill step, `num_reused` those taken over from an earlier conversation. `rule` is the verification rule that judged this step,
    where it is not the run's own (a rule for chains leaves trees to another one). `margin` is given for sampled tokens of plain steps
    whose run is compared token by token: how far the token was ahead of the next best in the draw, in log-probability. `disturbed` says
    what else this machine was busy with, such as "a model was loading"; the step's times are then good for no comparison. `choice` is the autopilot's,
    where one is on. `draft_device_ms` and `verify_device_ms` are what a GPU took by its own events, where it works behind the host: the rest of
    `draft_ms` and `verify_ms` is handing work over and waiting.
    """
    kind: str
    t0_ms: float
    draft_ms: float
    verify_ms: float
    other_ms: float
    nodes: tuple[NodeTrace, ...] = ()
    emitted: tuple[EmittedToken, ...] = ()
    draft_stop: str = ""
    kv: dict[str, CacheTrace] = field(default_factory=dict)      # "target", and "drafter" where it has a cache of its own
    num_rows: int = 1
    record_ms: float = 0.0
    top: tuple[TopTrace, ...] = ()
    residual: tuple[ResidualTrace, ...] = ()
    source: str = "exact"
    num_drafted: int | None = None
    num_accepted: int | None = None
    server_ms: float | None = None
    num_prompt_tokens: int = 0
    num_reused: int = 0
    draft_by: str = ""
    num_pooled: int | None = None
    rule: str = ""
    margin: float | None = None
    disturbed: str = ""
    choice: ChoiceTrace | None = None
    draft_device_ms: float | None = None
    verify_device_ms: float | None = None


@dataclass(frozen=True, slots=True)
class PlainToken:
    """One token of the plain run measured on the same engine: `t_ms` at its end since the first decode step, `ms` it took itself,
    `margin` the gap between the target's two largest log-probabilities where it was chosen, or between the two best draws where the run
    samples (see `StepTrace`), `disturbed` as there."""
    id: int | None
    text: str
    t_ms: float
    ms: float
    margin: float | None = None
    disturbed: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole run. `meta` describes it (target, drafter, method, config, requested, sampling, prompt, versions, created, ...),
    `plain` is the measured plain run, `stats` and `compare` are what `metrics` made of them when the trace was written."""
    meta: dict[str, Any]
    steps: tuple[StepTrace, ...] = ()
    plain: tuple[PlainToken, ...] = ()
    stats: dict[str, Any] | None = None
    compare: dict[str, Any] | None = None


# The codec. On the wire and in the file every record has the shape of its dataclass: full names, tuples as lists, fields at their default
# left out. Times keep 3 decimals; probabilities keep 4 significant digits of p and of 1 - p, so that nothing possible is written as 0 or 1.

_OPAQUE = ("meta", "stats", "compare")


def to_dict(record: Any) -> dict[str, Any]:
    """Any record of this module as data for JSON; fields equal to their default are left out.

    >>> to_dict(NodeTrace(5, " on", -1, "accepted", p=0.123456))
    {'id': 5, 'text': ' on', 'parent': -1, 'state': 'accepted', 'p': 0.1235}

    Raises TraceError for a number that is not finite.
    """
    data = {}
    for name, default in _plan(type(record)):
        value = getattr(record, name)
        if default is MISSING or value != default:
            data[name] = value if name in _OPAQUE else _encoded(value, name)
    return data


def step_from(data: Any) -> StepTrace:
    """A step from what `to_dict` made of it, by way of JSON. Raises TraceError."""
    step = _record(StepTrace, data, "step")
    _check_step(step, "step")
    return step


def dumps(trace: Trace) -> str:
    """The text of a trace file.

    If it would exceed `MAX_BYTES`, nodes that were never judged are left out, their number is written to `meta["dropped_nodes"]` and
    the steps keep the true `num_drafted` and `num_accepted`. Raises TraceError if it is too large even so, or holds what JSON cannot.
    """
    text = _text(trace)
    if _num_bytes(text) > MAX_BYTES:
        text = _text(_without_unjudged(trace))
    if (size := _num_bytes(text)) > MAX_BYTES:
        raise TraceError(f"The trace has {size:,} bytes; at most {MAX_BYTES:,} can be saved. Record a shorter answer, or do not keep "
                         "probabilities.")
    return text


def save(trace: Trace, path: str | Path) -> None:
    """Write a trace file. Raises TraceError if the trace cannot be written as one or the place is not writable."""
    text = dumps(trace)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"The trace could not be saved to {path}: {error.strerror}. Choose another place.") from error


def load(path: str | Path) -> Trace:
    """Read a trace file. Raises TraceError; see `loads`."""
    try:
        with open(path, "rb") as file:
            return loads(file.read(MAX_BYTES + 1))
    except OSError as error:
        raise TraceError(f"The trace file {path} cannot be opened: {error.strerror}. Check its name.") from error


def loads(text: str | bytes) -> Trace:
    """The trace that a file's text holds; fields of later programs are ignored. The text is not trusted.

    Raises TraceError naming the place, such as `steps[3].nodes[1].p`, what stands there and what was expected.
    """
    data = _parsed(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise TraceError(f'This is not a trace of specviz: "format" must be "{FORMAT}". Choose a file that "Save trace" wrote.')
    version = data.get("version")
    if not _is_int(version) or version < 1:
        raise _broken("version", version, f"a whole number from 1 to {VERSION}")
    if version > VERSION:
        raise TraceError(f"This trace has version {version}; this program reads versions up to {VERSION}. Update specviz to open it.")
    trace = _record(Trace, {"steps": None} | data, "")
    for i, step in enumerate(trace.steps):
        _check_step(step, f"steps[{i}]")
    return trace


@lru_cache(maxsize=None)
def _plan(cls: type) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of a record's fields; MISSING where a field must be given."""
    return tuple((f.name, f.default if f.default_factory is MISSING else f.default_factory()) for f in fields(cls))


@lru_cache(maxsize=None)
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _encoded(value: Any, name: str) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple):
        return [_encoded(item, name) for item in value]
    if isinstance(value, dict):
        return {key: _encoded(item, key) for key, item in value.items()}
    return _rounded(value, name) if isinstance(value, float) else value


def _rounded(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise TraceError(f"{name} is {value}; a trace holds finite numbers only. Leave the field out where a value is unknown.")
    if name.endswith("ms"):
        return round(value, 3)
    if 0.5 < value < 1:
        return round(value, min(12, 3 - math.floor(math.log10(1 - value))))
    return float(f"{value:.4g}")


def _text(trace: Trace) -> str:
    data = {"format": FORMAT, "version": VERSION, "meta": trace.meta, "steps": [], "plain": [], "stats": None, "compare": None}
    try:
        return json.dumps(data | to_dict(trace), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise TraceError(f"The trace cannot be written as JSON: {error}. It holds text, finite numbers, lists and objects only.") from error


def _num_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise TraceError("The trace holds half a character (a lone surrogate), which cannot be saved as UTF-8.") from error


def _without_unjudged(trace: Trace) -> Trace:
    """Only judged nodes: they are closed under parents, since a node is judged only after its parent was accepted."""
    num_dropped, steps = 0, []
    for step in trace.steps:
        kept = [i for i, node in enumerate(step.nodes) if node.state in ("accepted", "rejected")]
        if len(kept) < len(step.nodes):
            num_dropped += len(step.nodes) - len(kept)
            new = {-1: -1} | {old: i for i, old in enumerate(kept)}
            drafted = [node for node in step.nodes if node.state != "window"]
            step = replace(
                step, nodes=tuple(replace(step.nodes[i], parent=new[step.nodes[i].parent]) for i in kept),
                top=tuple(replace(top, at=new[top.at]) for top in step.top if top.at in new),
                residual=tuple(replace(left, at=new[left.at]) for left in step.residual if left.at in new),
                num_drafted=len(drafted) if step.num_drafted is None else step.num_drafted,
                num_accepted=sum(node.state == "accepted" for node in drafted) if step.num_accepted is None else step.num_accepted)
        steps.append(step)
    return replace(trace, steps=tuple(steps), meta=trace.meta | {"dropped_nodes": num_dropped})


def _parsed(text: str | bytes) -> Any:
    if len(text) > MAX_BYTES or (isinstance(text, str) and not text.isascii() and _num_bytes(text) > MAX_BYTES):
        raise TraceError(f"The trace file is larger than {MAX_BYTES:,} bytes. Choose a smaller one.")
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        data = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if "\\ud" in text.lower():                          # an escape may hide half a character, which nothing can show or save
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:             # also bad UTF-8, and numbers of absurd length
        raise TraceError(f'The trace file is not valid JSON: {_shown(str(error))}. Choose a file that "Save trace" wrote.') from error
    return data


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a number that JSON allows")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _record(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _broken(where, data, "an object")
    values = {}
    for name, default in _plan(cls):
        place = f"{where}.{name}" if where else name
        if name in data:
            values[name] = _value(_hints(cls)[name], data[name], place, name)
        elif default is MISSING:
            raise TraceError(f"This trace is broken: {place} is missing. Record it again, or choose another file.")
    return cls(**values)


def _value(hint: Any, data: Any, where: str, name: str) -> Any:
    if isinstance(hint, UnionType):
        if data is None:
            return None
        hint = get_args(hint)[0]
    args = get_args(hint)
    if get_origin(hint) is tuple:
        if not isinstance(data, list):
            raise _broken(where, data, "a list")
        if args[-1] is Ellipsis:
            return tuple(_value(args[0], item, f"{where}[{i}]", name) for i, item in enumerate(data))
        if len(data) != len(args):
            raise _broken(where, data, f"a list of {len(args)}")
        return tuple(_value(arg, item, f"{where}[{i}]", name) for i, (arg, item) in enumerate(zip(args, data)))
    if get_origin(hint) is dict:
        if not isinstance(data, dict):
            raise _broken(where, data, "an object")
        return data if args[1] is Any else {key: _value(args[1], item, f"{where}.{key}", key) for key, item in data.items()}
    if is_dataclass(hint):
        return _record(hint, data, where)
    return _scalar(hint, data, where, name)


_PROBS = ("q", "p", "accept_prob", "u", "p_t1", "q_t1", "rows")
_WORDS = {"state": NODE_STATES, "origin": ORIGINS, "kind": KINDS, "source": SOURCES, "why": REASONS}


def _scalar(hint: type, data: Any, where: str, name: str) -> Any:
    if hint is str:
        allowed = _WORDS.get(name)
        if not isinstance(data, str) or allowed and data not in allowed:
            raise _broken(where, data, f"one of {', '.join(allowed)}" if allowed else "text")
    elif hint is bool:
        if not isinstance(data, bool):
            raise _broken(where, data, "true or false")
    elif hint is int:
        lowest = -1 if name in ("parent", "at") else 0
        if not _is_int(data) or not lowest <= data < 2**53:
            raise _broken(where, data, f"a whole number, at least {lowest}")
    elif not _is_int(data) and not isinstance(data, float):
        raise _broken(where, data, "a number")
    elif name in _PROBS and not 0 <= data <= 1:
        raise _broken(where, data, "a number from 0 to 1")
    elif name.endswith("ms") and (abs(data) > 1e12 or data < 0 and name not in ("t0_ms", "t_ms")):
        raise _broken(where, data, "a time in milliseconds")
    return float(data) if hint is float else data


def _is_int(data: Any) -> bool:
    return isinstance(data, int) and not isinstance(data, bool)


def _check_step(step: StepTrace, where: str) -> None:
    """What one field alone cannot show: parents come first, and the accepted nodes are one path."""
    taken: set[int] = set()
    for i, node in enumerate(step.nodes):
        place = f"{where}.nodes[{i}]"
        if node.parent >= i:
            raise _broken(f"{place}.parent", node.parent, f"a number from -1 to {i - 1}")
        if node.state in ("accepted", "rejected") and node.parent >= 0 and step.nodes[node.parent].state != "accepted":
            raise _broken(f"{place}.state", node.state, "a node that is judged to have an accepted parent")
        if node.state == "accepted" and node.parent in taken:
            raise _broken(f"{place}.state", node.state, "at most one accepted child of each node")
        if node.state == "accepted":
            taken.add(node.parent)
    for name in ("top", "residual"):
        for i, record in enumerate(getattr(step, name)):
            if record.at >= len(step.nodes):
                raise _broken(f"{where}.{name}[{i}].at", record.at, f"a number from -1 to {len(step.nodes) - 1}")
    if step.num_accepted is not None and step.num_drafted is not None and step.num_accepted > step.num_drafted:
        raise _broken(f"{where}.num_accepted", step.num_accepted, f"at most num_drafted, {step.num_drafted}")


def _broken(where: str, data: Any, expected: str) -> TraceError:
    return TraceError(f"This trace is broken: {where or 'the file'} is {_shown(repr(data))}; expected {expected}. Record it again, or "
                      "choose another file.")


def _shown(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
