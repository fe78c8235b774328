"""The museum: honest decoding leaves the meter green, every fault turns it red, and both hold on the engine's own verifier."""
from __future__ import annotations

import json
import math
import time

import pytest

from specviz.errors import InputError
from specviz.museum.__main__ import CASES
from specviz.museum.desk import RECORDED, Desk
from specviz.museum.faults import LAW_FAULTS, TEXT_FAULTS
from specviz.museum.meter import LIMIT, chi_square, p_value, read
from specviz.museum.tables import SHAPES
from specviz.museum.trial import Trial, exact_law, run
from specviz.museum.writing import NUM_TOKENS, write

NUM = 3000


def drawn(trial):
    """The state after all texts, before the fractions are worked out."""
    return next(state for state in run(trial) if sum(state["counts"]) == trial.num_texts)


@pytest.mark.parametrize("fault", LAW_FAULTS)
def test_every_fault_of_the_law_turns_the_meter_red(fault):
    """No fault stays green."""
    assert not drawn(Trial(fault=fault, num_texts=NUM))["reading"]["fits"]


@pytest.mark.parametrize("shape", sorted({fault.shape for fault in LAW_FAULTS.values()}))
def test_the_same_drafts_judged_honestly_stay_green(shape):
    """It is the fault that turns the meter, on the same seeds: not the way of drafting. False alarm below 1e-6."""
    state = drawn(Trial(shape=shape, num_texts=NUM))
    assert state["reading"]["fits"] and sum(state["counts"]) == NUM


@pytest.mark.parametrize("fault", ["", *TEXT_FAULTS])
def test_every_fault_of_the_text_is_found_where_it_begins(fault):
    """Without a fault the drafted text is the plain one to its end; with one they differ, behind drafts that were accepted and rejected."""
    *_, state = write(fault)
    assert (state["index"] is not None) == bool(fault)
    assert state["tokens"][:state["index"]] == state["plain"][:state["index"]] and "" in state["plain"]
    assert any(num > 1 for num, _ in state["steps"]) and any(rejected for _, rejected in state["steps"])
    if fault == "run_on":
        assert state["index"] == len(state["plain"]) and len(state["tokens"]) == NUM_TOKENS


def test_fractions_say_the_same():
    """The exact law has no gap without a fault, and one that the draws can show with it."""
    for shape in ("chosen", "tree"):
        assert exact_law("rejection", shape)["equal"]
    for fault in ("softmax_q", "shared_u", "p_for_residual", "bonus_after_rejection"):
        exact = exact_law("rejection", "chain", fault)
        assert not exact["equal"] and exact["texts"] > 0 and exact["distance"] > 0.03


@pytest.mark.parametrize("rule", ["block", "shared-noise"])
def test_the_other_rules_are_green_too(rule):
    """Under shared noise each text is moreover plain sampling's own."""
    state = drawn(Trial(rule=rule, num_texts=1000))
    assert state["reading"]["fits"] and state["num_same"] == (1000 if rule == "shared-noise" else None)


def test_the_meter_itself():
    """Known values: two degrees of freedom are an exponential law; 3.841 with one and 33 with three are in every table."""
    assert p_value(5.0, 2) == pytest.approx(math.exp(-2.5), rel=1e-12)
    assert p_value(3.8414588, 1) == pytest.approx(0.05, rel=1e-6) and p_value(33, 3) == pytest.approx(3.22067e-7, rel=1e-4)
    assert chi_square([12, 8], [0.5, 0.5]) == pytest.approx(0.8)
    reading = read([30, 70, 0], [0.5, 0.5, 0.0])
    assert (reading.freedom, reading.distance, reading.fits) == (1, pytest.approx(0.2), True)
    assert read([1, 99, 1], [0.5, 0.5, 0.0]).p_value == 0 < LIMIT


@pytest.mark.parametrize("wrong", [dict(rule="none"), dict(shape=["chain"]), dict(fault="no_rollback"), dict(num_texts=10**9), dict(num_texts=True),
                                   dict(seed=-1), dict(seed="0")])
def test_what_a_browser_sends_is_checked(wrong):
    """A refusal names the field and what was expected."""
    with pytest.raises(InputError, match=f"^{next(iter(wrong))} is "):
        Trial(**wrong)


def test_the_recorded_results_are_complete():
    """Pages without a server have every case, each with the verdict it must have."""
    results = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert list(results) == list(CASES)
    for name, state in results.items():
        green = state["index"] is None if state["kind"] == "text" else state["reading"]["fits"]
        assert green == (name not in (*LAW_FAULTS, *TEXT_FAULTS)), name
        if state["kind"] == "law":
            assert sum(state["counts"]) == state["of"] and abs(sum(state["expected"]) - 1) < 1e-12 and (state["exact"] or {"equal": green})["equal"] == green
    assert {trial["trial"]["shape"] for trial in results.values() if trial["kind"] == "law"} == set(SHAPES)


def test_the_desk_runs_experiments_in_a_process_of_their_own():
    """Start and look as a browser does; equal requests share a job; refusals are sentences; closing ends the process."""
    desk = Desk()

    def ask(**message):
        return json.loads(desk.answer(message))
    try:
        started = ask(do="start", request={"rule": "rejection", "shape": "tree", "num_texts": 500})
        assert ask(do="start", request={"shape": "tree", "rule": "rejection", "num_texts": 500}) == started
        refused = ask(do="start", request={"rule": "nonsense"})
        seen, ends = None, time.monotonic() + 600
        while not (seen := ask(do="look", job=started["job"]))["done"] and time.monotonic() < ends:
            time.sleep(0.05)
        assert seen["error"] == "" and sum(seen["state"]["counts"]) == 500 and seen["state"]["exact"]["equal"]
        while not (seen := ask(do="look", job=refused["job"]))["done"] and time.monotonic() < ends:
            time.sleep(0.05)
        assert seen["error"].startswith("rule is 'nonsense'; expected one of")
        for bad in ({}, {"do": "look", "job": "x"}, {"do": "start", "request": {"rule": [1]}}, {"do": "start", "request": {"fault": "x" * 2000}}):
            assert ask(**bad)["error"]
        assert "error" in json.loads(desk.answer("recorded")) and "results" in ask(do="recorded")
        process = desk._process
    finally:
        desk.close()
    assert process.poll() is not None
