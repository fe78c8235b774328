"""Messages for the viewer: paced, bounded, numbered, complete, and kept for those who missed some."""
from __future__ import annotations

import json
import random

import pytest

from specviz import trace as records
from specviz.trace import EmittedToken, NodeTrace, PlainToken, StepTrace, Trace
from specviz.ui.slicer import MAX_MESSAGE_BYTES, Archive, Slicer, encode

HOSTILE = '</script><img src=x onerror=alert(1)>${x}{{y}}"\\\n\u2028 \U0001f600'


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(i: int = 0, num_nodes: int = 5, text: str = " word") -> StepTrace:
    nodes = tuple(NodeTrace(i, text, k - 1, "accepted", .5, .25, .5, .1) for k in range(num_nodes))
    return StepTrace("spec", float(i), 1.0, 2.0, .5, nodes, (EmittedToken(i, text, "bonus"),), "length")


def run_through(slicer: Slicer, clock: Clock, steps: list[StepTrace], gap_s: float) -> list[dict]:
    out = slicer.start({"meta": {}})
    for record in steps:
        clock.now += gap_s
        out += slicer.step(record)
    return [json.loads(message) for message in out + slicer.end({"stats": {}})]


def test_slow_steps_travel_at_once():
    """A step that comes later than one slice after the last message is not held back."""
    clock = Clock()
    slicer = Slicer(clock=clock)
    slicer.start({"meta": {}})
    clock.now += .06
    assert len(slicer.step(step())) == 1


def test_at_most_one_message_per_slice():
    """Whatever the rate of steps, messages come no faster than one per 50 ms (small records, so size forces none out)."""
    clock = Clock()
    messages = run_through(Slicer(clock=clock), clock, [step(i, 1) for i in range(500)], .004)
    assert len([m for m in messages if m["type"] == "steps"]) <= 1 + 500 * .004 / .05 + 1


@pytest.mark.parametrize("seed", range(3))
def test_everything_arrives_once_and_in_order(seed):
    """Steps and plain tokens of all messages together are the records, in order, and seq counts without a gap."""
    rng, clock = random.Random(seed), Clock()
    steps = [step(i, rng.randrange(0, 30), rng.choice([" a", HOSTILE, "語" * 9])) for i in range(80)]
    tokens = [PlainToken(i, HOSTILE, float(i), 1.0, .5) for i in range(50)]
    slicer = Slicer(clock=clock)
    out = slicer.start({"meta": {}})
    for record in steps:
        clock.now += rng.choice([0, .01, .2])
        out += slicer.step(record)
    for token in tokens:
        clock.now += rng.choice([0, .03])
        out += slicer.plain(token)
    messages = [json.loads(message) for message in out + slicer.end({"reason": "eos"})]
    assert [m["seq"] for m in messages] == list(range(len(messages)))
    assert len({m["run"] for m in messages}) == 1
    assert [s for m in messages for s in m.get("steps", [])] == [records.to_dict(s) for s in steps]
    assert [t for m in messages for t in m.get("tokens", [])] == [records.to_dict(t) for t in tokens]
    assert messages[0]["type"] == "start" and messages[-1]["type"] == "end" and messages[-1]["reason"] == "eos"


def test_no_message_is_larger_than_allowed():
    """A burst is split by size in bytes of UTF-8, not characters; only a single step that is larger by itself goes above, alone."""
    clock = Clock()
    huge = step(7, 200, "語" * 10)
    slicer = Slicer(clock=clock)
    out = slicer.start({"meta": {}})
    for record in [step(i, 20, "語" * 10) for i in range(60)] + [huge] + [step(i, 20) for i in range(60)]:
        out += slicer.step(record)
    out += slicer.end({})
    large = [json.loads(message) for message in out if len(message.encode()) > MAX_MESSAGE_BYTES]
    assert [m["steps"] for m in large] == [[records.to_dict(huge)]]
    assert len(out) > 5


def test_a_status_line_travels_with_the_next_records():
    """A status is sent once, with the message that follows it."""
    clock = Clock()
    slicer = Slicer(clock=clock, slice_s=0)
    slicer.start({"meta": {}})
    slicer.status("active · step 1")
    first, second = (json.loads(slicer.step(step(i))[0]) for i in range(2))
    assert first["status"] == "active · step 1" and "status" not in second


def test_flush_of_nothing_is_nothing():
    """No empty messages."""
    slicer = Slicer()
    assert slicer.flush() == [] and len(slicer.end({})) == 1


def test_error_comes_after_what_was_collected():
    """An error does not swallow steps that were waiting for their slice."""
    clock = Clock()
    slicer = Slicer(clock=clock)
    slicer.start({"meta": {}})
    assert slicer.step(step()) == []
    kinds = [json.loads(m)["type"] for m in slicer.error("Busy", "The queue is full.")]
    assert kinds == ["steps", "error"]


def test_resync_returns_exactly_the_missing_messages():
    """From any number on, the archive returns the very messages that were sent."""
    clock = Clock()
    slicer = Slicer(clock=clock, slice_s=0)
    sent = run_through(slicer, clock, [step(i) for i in range(9)], .01)
    for start in (0, 4, len(sent), len(sent) + 5):
        answer = json.loads(slicer.resync(slicer.run, start))
        assert answer["type"] == "resync" and answer["messages"] == sent[start:]


@pytest.mark.parametrize("run, from_seq", [("nobody", 0), (None, 0), ("x", -1), ("x", True), ("x", "1"), (["x"], 0), ('"},{"', 0)])
def test_resync_answers_nonsense_with_nothing(run, from_seq):
    """Arguments come from a browser: unknown runs and wrong types give an empty, valid answer."""
    archive = Archive()
    Slicer("x", archive=archive).start({"meta": {}})
    assert json.loads(archive.resync(run, from_seq))["messages"] == []


def test_archive_forgets_the_oldest_run_but_never_the_present_one():
    """Bounded by runs and by bytes."""
    archive = Archive(max_runs=2, max_bytes=4000)
    for name in "abc":
        Slicer(name, archive=archive).start({"meta": {}})
    assert [bool(json.loads(archive.resync(name, 0))["messages"]) for name in "abc"] == [False, True, True]
    Slicer("d", archive=archive).start({"meta": "x" * 9000})
    assert [bool(json.loads(archive.resync(name, 0))["messages"]) for name in "cd"] == [False, True]


def test_runs_have_names_that_cannot_be_guessed():
    """Whoever knows a run's name may read it, so names are random."""
    assert Slicer().run != Slicer().run and len(Slicer().run) == 32


def test_lone_surrogates_become_replacement_characters():
    """Half a character cannot be sent as UTF-8; the message is sent without it rather than not at all."""
    assert json.loads(encode({"text": "a\ud83d"}))["text"].startswith("a") and encode({"text": "a\ud83d"}).encode()


def test_viewer_messages_are_single_json_strings():
    """`start` and `trace` messages carry formulas, figures and a relative Plotly address; a trace travels in the shape of its file."""
    pytest.importorskip("gradio")
    from specviz.ui import viewer
    trace = Trace({"target": HOSTILE}, (step(1, 3, HOSTILE),), (PlainToken(1, HOSTILE, 1.0, 1.0),))
    start, whole = json.loads(viewer.start_message(trace.meta, "active")), json.loads(viewer.trace_message(trace))
    for message in (start, whole):
        assert message["v"] == 1 and message["seq"] == 0 and message["run"]
        assert message["plotly"].startswith("gradio_api/file=") and set(message["figures"]) == {"light", "dark"}
        assert message["formulas"]["speed_up"]["formula"] and message["formulas"]["tokens_per_step"]["source"]
    assert start["meta"] == trace.meta and start["status"] == "active"
    assert records.loads(json.dumps(whole["trace"])) == trace


def test_viewer_component_keeps_text_out_of_templates():
    """The HTML template is constant and mentions no value; values pass through unchanged, even with script tags, without a warning."""
    pytest.importorskip("gradio")
    import warnings

    from specviz.ui.viewer import Viewer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        component = Viewer(encode({"text": HOSTILE}), resync=Archive().resync, elem_id="viewer", html_template="${value}")
    assert "$" not in component.html_template and "{" not in component.html_template and component.css_template == ""
    assert component.postprocess(HOSTILE) == HOSTILE and component.api_info() == {"type": "string"}
    assert component.get_config()["server_fns"] == ["resync"]
    assert json.loads(component.resync(["nobody", 0]))["messages"] == [] and json.loads(component.resync("x"))["messages"] == []


def test_viewer_script_is_within_its_budget():
    """Script and style stay within 96 KiB as a browser receives them, compressed; Plotly comes on top, later, and from a file of its own."""
    import gzip

    from specviz.ui.script import viewer_script
    script = viewer_script()
    assert len(gzip.compress(script.encode())) <= 96 * 1024
    assert "// " not in script.replace("//# sourceURL", "") and "/*" not in script and "WORDS" in script
