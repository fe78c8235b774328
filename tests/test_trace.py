"""The trace file: what is written is read back, and nothing broken or hostile gets past the reader."""
import json
import math

import pytest

from specviz import trace as module
from specviz.errors import TraceError
from specviz.metrics import compare, summarize
from specviz.trace import (CacheTrace, EmittedToken, NodeTrace, PlainToken, ResidualTrace, StepTrace, TopTrace, Trace, dumps, load,
                           loads, save, to_dict)

HOSTILE = "${alert(1)} </script><img src=x onerror=1>\n\u2028\u0000 🦊"


def example() -> Trace:
    prefill = StepTrace("prefill", -120.5, 0.0, 118.25, 2.25, emitted=(EmittedToken(11, "It", "plain"),), num_prompt_tokens=40,
                        num_reused=12)
    nodes = (NodeTrace(5, " is", -1, "rejected", q=0.75, p=0.25, accept_prob=0.3333, u=0.9, p_t1=0.25, q_t1=0.75),
             NodeTrace(6, " was", -1, "accepted", q=0.25, p=0.5, accept_prob=1.0, score=-1.25),
             NodeTrace(7, HOSTILE, 1, "rejected", q=0.5, p=0.0, accept_prob=0.0),
             NodeTrace(8, "x", 0, "unjudged"), NodeTrace(9, "y", 3, "unjudged"), NodeTrace(10, "w", -1, "window"))
    spec = StepTrace("spec", 0.0, 1.5, 4.125, 0.25, nodes=nodes,
                     emitted=(EmittedToken(6, " was", "draft"), EmittedToken(3, "a", "correction")), draft_stop="length",
                     kv={"target": CacheTrace(41, 7, 43), "drafter": CacheTrace(41, 3, 42)}, num_rows=2,
                     record_ms=0.5,
                     top=(TopTrace(-1, ((6, " was", 0.5, 0.25), (5, " is", 0.25, None)), True), TopTrace(1, ((3, "a", 1.0, None),))),
                     residual=(ResidualTrace(1, ((3, "a", 1.0),)),))
    remote = StepTrace("unknown", 6.5, 0.0, 9.0, 0.0, emitted=(EmittedToken(None, " big one", "draft", 3),), source="inferred",
                       num_drafted=4, num_accepted=2, server_ms=8.5)
    plain = (PlainToken(11, "It", 0.0, 4.0, 0.5), PlainToken(None, " was", 4.0, 4.0))
    return Trace({"method": "draft_model", "prompt": HOSTILE, "config": {"k": 3}}, (prefill, spec, remote), plain,
                 {"num_spec_steps": 2, "speed_up": None}, {"mode": "greedy", "identical": True})


def damaged(change) -> str:
    data = json.loads(dumps(example()))
    change(data)
    return json.dumps(data)


def test_round_trip_keeps_everything(tmp_path):
    """Every field of every record survives writing and reading, as text, as bytes and as a file."""
    trace = example()
    assert loads(dumps(trace)) == trace
    assert loads(dumps(trace).encode()) == trace
    save(trace, tmp_path / "a.json")
    assert load(tmp_path / "a.json") == trace


def test_defaults_are_left_out():
    """A field at its default is not written, whatever its type, and required ones always are."""
    step = to_dict(StepTrace("plain", 0.0, 0.0, 1.0, 0.0))
    assert step == {"kind": "plain", "t0_ms": 0.0, "draft_ms": 0.0, "verify_ms": 1.0, "other_ms": 0.0}
    assert to_dict(CacheTrace(1, 2, 3)) == {"before": 1, "fed": 2, "after": 3}
    assert to_dict(TopTrace(-1, ((1, "a", 0.5, None),))) == {"at": -1, "rows": [[1, "a", 0.5, None]]}
    assert "u" not in to_dict(NodeTrace(1, "a", -1, "accepted", p=1.0)) and "u" in to_dict(NodeTrace(1, "a", -1, "accepted", u=0.0))


@pytest.mark.parametrize("value", [1.23456789e-7, 3.3e-5, 0.123456, 0.5, 0.98765432, 0.99998, 0.9999999, 1e-30])
def test_rounding_keeps_the_possible_possible(value):
    """Rounded probabilities are within 0.1 % of p and of 1 - p: none becomes 0, none becomes 1."""
    p = to_dict(NodeTrace(1, "a", -1, "accepted", p=value))["p"]
    assert 0 < p < 1 or value == 1e-30 and p == value
    assert math.isclose(p, value, rel_tol=1e-3) and math.isclose(1 - p, 1 - value, rel_tol=1e-3)
    assert len(repr(p)) <= 12


def test_times_have_three_decimals():
    """Milliseconds are written to the microsecond."""
    assert to_dict(PlainToken(1, "a", 1.23456, 0.00049)) == {"id": 1, "text": "a", "t_ms": 1.235, "ms": 0.0}


@pytest.mark.parametrize("change, place", [
    (lambda d: d["steps"][1]["nodes"][1].update(p="high"), "steps[1].nodes[1].p is 'high'; expected a number"),
    (lambda d: d["steps"][1]["nodes"][1].update(p=1.5), "steps[1].nodes[1].p"),
    (lambda d: d["steps"][1]["nodes"][1].update(p=True), "steps[1].nodes[1].p"),
    (lambda d: d["steps"][1]["nodes"][1].update(parent=1), "steps[1].nodes[1].parent"),
    (lambda d: d["steps"][1]["nodes"][1].update(parent=-2), "steps[1].nodes[1].parent"),
    (lambda d: d["steps"][1]["nodes"][1].update(state="maybe"), "steps[1].nodes[1].state"),
    (lambda d: d["steps"][1]["nodes"][0].update(state="accepted"), "steps[1].nodes[1].state"),
    (lambda d: d["steps"][1]["nodes"][3].update(state="rejected"), "steps[1].nodes[3].state"),
    (lambda d: d["steps"][1]["nodes"][1].update(id=2**60), "steps[1].nodes[1].id"),
    (lambda d: d["steps"][1]["nodes"][1].update(text=None), "steps[1].nodes[1].text"),
    (lambda d: d["steps"][1]["nodes"][1].pop("text"), "steps[1].nodes[1].text is missing"),
    (lambda d: d["steps"][1]["nodes"].insert(0, []), "steps[1].nodes[0]"),
    (lambda d: d["steps"][1].update(nodes={}), "steps[1].nodes"),
    (lambda d: d["steps"][1].update(kind="guess"), "steps[1].kind"),
    (lambda d: d["steps"][1].update(verify_ms=-1), "steps[1].verify_ms"),
    (lambda d: d["steps"][1].update(num_rows=1.5), "steps[1].num_rows"),
    (lambda d: d["steps"][1]["kv"].update(target=[1, 2, 3]), "steps[1].kv.target"),
    (lambda d: d["steps"][1]["top"][0]["rows"][0].pop(), "steps[1].top[0].rows[0]"),
    (lambda d: d["steps"][1]["top"][0]["rows"][0].__setitem__(2, 7), "steps[1].top[0].rows[0][2]"),
    (lambda d: d["steps"][1]["top"][0].update(temperature_one=1), "steps[1].top[0].temperature_one"),
    (lambda d: d["steps"][1]["residual"][0].update(at=6), "steps[1].residual[0].at"),
    (lambda d: d["steps"][2].update(source="guess"), "steps[2].source"),
    (lambda d: d["steps"][2].update(num_accepted=5), "steps[2].num_accepted"),
    (lambda d: d["steps"][0]["emitted"][0].update(origin="magic"), "steps[0].emitted[0].origin"),
    (lambda d: d["plain"][1].update(t_ms="soon"), "plain[1].t_ms"),
    (lambda d: d.update(meta=[]), "meta"), (lambda d: d.update(steps=3), "steps"), (lambda d: d.pop("steps"), "steps"),
    (lambda d: d.pop("meta"), "meta"), (lambda d: d.update(stats=3), "stats"), (lambda d: d.update(version="1"), "version"),
    (lambda d: d.update(version=True), "version"),
])
def test_damage_is_named(change, place):
    """Whatever is wrong, the error is a TraceError that names the place."""
    with pytest.raises(TraceError) as caught:
        loads(damaged(change))
    assert place in str(caught.value)


@pytest.mark.parametrize("text, word", [
    ("", "not valid JSON"), ("[1, 2", "not valid JSON"), ("[]", "not a trace"), ("{}", "not a trace"), (b"\xff\xfe\x00", "not valid JSON"),
    ('{"format": "other", "version": 1}', "not a trace"), ("[" * 100_000, "not valid JSON"),
    ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
    ('{"format": "specviz-trace", "version": 2, "new": 1}', "Update"),
    ('{"format": "specviz-trace", "version": 1, "meta": {"a": NaN}, "steps": []}', "NaN"),
    ('{"format": "specviz-trace", "version": 1, "meta": {"a": -Infinity}, "steps": []}', "Infinity"),
    ('{"format": "specviz-trace", "version": 1, "meta": {"a": 1e999}, "steps": []}', "1e999"),
    ('{"format": "specviz-trace", "version": 1, "meta": {"a": "\\ud83e"}, "steps": []}', "surrogate"),
])
def test_what_is_no_trace_is_refused(text, word):
    """Text that is not JSON, not a trace, too new, or holds numbers and characters that nothing can show, is refused in words."""
    with pytest.raises(TraceError, match=word):
        loads(text)


def test_unknown_fields_are_ignored():
    """A file of a later program with more fields opens."""
    def change(data):
        data["figures"] = {}
        data["steps"][1]["mood"] = data["steps"][1]["nodes"][0]["mood"] = [1]
    assert loads(damaged(change)) == example()


def test_files_that_are_too_large_or_missing(tmp_path, monkeypatch):
    """The size limit holds for characters and bytes alike, before anything is parsed."""
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    (tmp_path / "big.json").write_text("é" * 600, encoding="utf-8")
    for read in (lambda: loads("x" * 1001), lambda: loads("é" * 600), lambda: load(tmp_path / "big.json")):
        with pytest.raises(TraceError, match="larger than"):
            read()
    with pytest.raises(TraceError, match="cannot be opened"):
        load(tmp_path / "none.json")


def test_near_the_limit_unjudged_nodes_go_first(monkeypatch):
    """A large trace loses only nodes without a verdict, says how many, and keeps its counts and a readable structure."""
    trace = example()
    monkeypatch.setattr(module, "MAX_BYTES", len(dumps(trace).encode()) - 1)
    small = loads(dumps(trace))
    step = small.steps[1]
    assert small.meta["dropped_nodes"] == 3 and "dropped_nodes" not in trace.meta
    assert [node.state for node in step.nodes] == ["rejected", "accepted", "rejected"] and step.nodes[2].parent == 1
    assert (step.num_drafted, step.num_accepted) == (5, 1) and step.top == trace.steps[1].top
    assert small.steps[2] == trace.steps[2]
    monkeypatch.setattr(module, "MAX_BYTES", 500)
    with pytest.raises(TraceError, match="at most 500"):
        dumps(trace)


@pytest.mark.parametrize("meta", [{"a": float("nan")}, {"a": {1, 2}}, {"a": "\ud83e"}])
def test_what_json_cannot_hold_is_not_written(meta):
    """The writer never makes a file that the reader would refuse."""
    with pytest.raises(TraceError):
        dumps(Trace(meta))


def test_numbers_that_are_not_finite_are_not_written():
    """NaN and infinity in a record are the writer's mistake and are reported, not rounded."""
    with pytest.raises(TraceError, match="finite"):
        to_dict(PlainToken(1, "a", 0.0, 1.0, margin=math.inf))


def places(data, where=()):
    """Every place in a JSON tree."""
    yield where
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places(value, (*where, key))


@pytest.mark.parametrize("odd", [None, True, -7, 2**70, 1.5, "x", [], {}, [[]], {"a": 1}])
def test_an_odd_value_anywhere_is_an_answer_or_a_trace_error(odd):
    """Whatever stands wherever, reading either gives a trace that can be measured and written again, or a TraceError; never a crash."""
    text = dumps(example())
    num_refused = 0
    for *above, last in filter(None, places(json.loads(text))):
        data = holder = json.loads(text)
        for key in above:
            holder = holder[key]
        holder[last] = odd
        try:
            trace = loads(json.dumps(data))
        except TraceError:
            num_refused += 1
        else:
            summarize(trace)
            compare(trace)
            assert dumps(loads(dumps(trace))) == dumps(trace)
    assert num_refused > 50
