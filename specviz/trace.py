"""What one decoding step did: plain frozen data, and the trace file that holds it.

It knows nothing of engines, models or screens, and needs no package besides Python itself: a recorded trace opens on a
machine that has no torch. Everything else (screen, metrics, benchmarks, servers) learns of the engine through these records only.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CacheTrace", "EmittedToken", "FORMAT", "MAX_BYTES", "NodeTrace", "PlainToken", "ResidualTrace", "StepTrace", "TopTrace", "Trace",
           "VERSION"]

FORMAT = "specviz-trace"
VERSION = 1
MAX_BYTES = 20_000_000

NODE_STATES = ("accepted", "rejected", "unjudged", "window")
ORIGINS = ("draft", "correction", "bonus", "plain")
KINDS = ("prefill", "spec", "plain", "unknown")
SOURCES = ("exact", "inferred", "aggregate")


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """One drafted token.

    `parent` is an index into the step's nodes, -1 for the text so far. `state` is one of `NODE_STATES`; a "window" node was fed but
    never meant to be judged and counts in no metric. For judged nodes `p` is the *remaining* target probability that the verdict used
    (after earlier siblings were rejected), `q` the draft probability it was drawn with (None: chosen, a point mass), `accept_prob`
    min(1, p/q), and `u` the uniform number it was compared with (None where no number was needed, as in greedy decoding).
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
class StepTrace:
    """One decoding step of one sequence.

    Times are milliseconds. `t0_ms` is the step's start since the first decode step of its sequence (negative for prefill), on a clock
    that stands still while the record itself is written (`record_ms`: probabilities are looked up only for the eye).
    `num_rows` is how many sequences shared the forward. `num_drafted` and `num_accepted` are given where `nodes` are unknown
    (remote engines) and None otherwise. `num_prompt_tokens` counts the prompt tokens read in a prefill step, `num_reused` those
    taken over from an earlier conversation.
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


@dataclass(frozen=True, slots=True)
class PlainToken:
    """One token of the plain run measured on the same engine: `t_ms` at its end since the first decode step, `ms` it took itself,
    `margin` the gap between the target's two largest log-probabilities where it was chosen."""
    id: int | None
    text: str
    t_ms: float
    ms: float
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole run. `meta` describes it (target, drafter, method, config, requested, sampling, prompt, versions, created, ...),
    `plain` is the measured plain run, `stats` and `compare` are what `metrics` made of them when the trace was written."""
    meta: dict[str, Any]
    steps: tuple[StepTrace, ...] = ()
    plain: tuple[PlainToken, ...] = ()
    stats: dict[str, Any] | None = None
    compare: dict[str, Any] | None = None
