"""Counterfactuals: exactness against real runs with other draft lengths, bounds, and the estimates' formulas by hand."""
from __future__ import annotations

from dataclasses import replace

import pytest
from engine_helpers import Lab, repeating_prompt

from specviz.cost import CostTable
from specviz.drafters import DRAFTERS
from specviz.trace import CacheTrace, EmittedToken, NodeTrace, PlainToken, StepTrace, Trace
from specviz.what_if import Recorded, expected_steps, guesses

GREEDY = {"sampling": {"temperature": 0.0}, "promise": "distribution", "guesses_by_text": True}


def trace_of(result, **meta):
    return Trace(GREEDY | meta, tuple(result.steps))


def shapes(result):
    return [len(step.emitted) for step in result.steps if step.kind != "prefill"]


@pytest.mark.parametrize("method, rule, temperature", [*((name, "rejection", 0.0) for name, row in DRAFTERS.items() if row.by_text),
                                                        ("draft_model", "shared-noise", 0.9)])
def test_other_draft_lengths_are_those_of_real_runs(method, rule, temperature):
    """Bounds hold the number of steps that the engine really takes with every other K, smaller and larger, and where both agree they are
    that number. The drafts must be good enough to say something: some lengths exact, some not, and K matters."""
    lab, prompt = Lab(likeness=0.97), repeating_prompt(24)
    params = dict(rule=rule, temperature=temperature, seed=3, max_new_tokens=36)
    recorded = lab.run(prompt, method, 3, **params)
    known = guesses(trace_of(recorded, promise="text" if rule == "shared-noise" else "distribution", sampling={"temperature": temperature}))
    counts, are_exact = {len(shapes(recorded))}, []
    for k in (1, 2, 5):
        real = lab.run(prompt, method, k, **params)
        assert real.tokens == recorded.tokens
        most, least = expected_steps(known, k, 0.0), expected_steps(known, k, 1.0)
        assert least <= len(shapes(real)) <= most
        counts.add(len(shapes(real)))
        are_exact.append(least == most)
    assert are_exact[0], "pairs cut a whole draft of three and its bonus without asking for anything new"
    if method == "draft_model":
        assert not all(are_exact) and len(counts) > 2


def test_the_recorded_length_is_always_exact():
    """With its own K a run is what it was, whatever was never asked."""
    lab = Lab(likeness=0.93)
    for k in (1, 2, 4):
        run = lab.run(repeating_prompt(20), "draft_model", k, max_new_tokens=40)
        known = guesses(trace_of(run))
        assert {expected_steps(known, k, chance) for chance in (0.0, 0.4, 1.0)} == {len(shapes(run))}


@pytest.mark.parametrize("change", [{"guesses_by_text": None}, {"promise": "nothing"}, {"sampling": {"temperature": 0.7}}])
def test_no_exact_answer_where_the_text_or_the_guess_may_change(change):
    """Lookups, lossy rules and sampling by rejection give estimates only."""
    run = Lab().run(repeating_prompt(20), "draft_model", 3)
    assert guesses(trace_of(run)) and guesses(trace_of(run, **change)) is None
    outcome = Recorded(trace_of(run, **change)).outcome(2)
    assert outcome.least is None and not outcome.exact


def test_expected_steps_by_hand():
    """Right, right, wrong, unknown, right: with K = 1 pairs, with K = 2 the unknown guess decides."""
    known = (True, True, False, None, True)
    assert expected_steps(known, 0, 0.5) == 5
    assert expected_steps(known, 1, 0.0) == 4 and expected_steps(known, 1, 1.0) == 3      # [0 1] [2] [3 4] or [3] [4]
    assert expected_steps(known, 2, 0.25) == pytest.approx(1 + 0.25 * 1 + 0.75 * 2)       # [0 1 2] [3 4] or [3] [4]
    assert expected_steps((), 3, 0.5) == 0


def step(accepted, drafted, t0, *, draft=2.0, verify=12.0, other=1.0, before=50):
    nodes = tuple(NodeTrace(i, "x", i - 1, "accepted" if i < accepted else "rejected" if i == accepted else "unjudged") for i in range(drafted))
    last = "plain" if not drafted else "bonus" if accepted == drafted else "correction"
    emitted = tuple(EmittedToken(i, "x", "draft" if i < accepted else last) for i in range(accepted + 1))
    return StepTrace("spec" if drafted else "plain", t0, draft, verify, other, nodes, emitted, "length",
                     {"target": CacheTrace(before, 1 + drafted, before + accepted + 1)})


def by_hand(cost=None):
    """Two steps of four drafts, of which 4 and 1 are accepted; a plain token takes 11 ms."""
    steps = (step(4, 4, 0.0), step(1, 4, 15.0))
    plain = tuple(PlainToken(i, "x", 11.0 * i, 11.0) for i in range(8))
    return Trace({"cost": cost} if cost else {}, steps, plain)


def test_estimates_by_hand():
    """E, costs from the run's own steps, and the speed-up: U E / (K c + T(K+1) + o)."""
    run = Recorded(by_hand())
    assert (run.costs, run.depth, run.unit_ms, run.overhead_ms, run.level_ms) == ("steps", 4, 11.0, 1.0, 0.5)
    assert run.v(1) == 1 and run.v(5) == pytest.approx(1.2) and run.v(3) == pytest.approx(1.1) and run.v(9) == pytest.approx(1.4)
    assert run.outcome(2).tokens_per_step == 1 + (2 + 1) / 2
    assert run.outcome(2).speed_up == pytest.approx(11 * 2.5 / (2 * 0.5 + 11 + 1))
    assert run.outcome(2, 0.5, 0.0).speed_up == pytest.approx(11 * 2.5 / (2 * 0.25 + 10 + 1))
    assert run.outcome(4).speed_up == pytest.approx(11 * 3.5 / 15) == run.measured
    assert run.outcome(0).speed_up == 1
    alpha = 5 / 6
    assert run.outcome(6).tokens_per_step == pytest.approx(3.5 + (alpha + alpha ** 2) / 2)
    assert run.best(8).depth == max(range(9), key=lambda k: run.outcome(k).speed_up)


def test_a_measured_table_goes_before_the_runs_own_steps():
    """v comes from the table, at the run's context; T(1) stays the plain run's own, so that both are in the same unit."""
    table = CostTable((1, 2, 6), (0, 100), ((10.0, 11.0, 15.0), (20.0, 22.0, 40.0)))
    run = Recorded(by_hand(table.to_json()))
    assert run.costs == "measured" and run.v(6) == pytest.approx(27.5 / 15) and run.v(4) == pytest.approx((1.1 + 27.5 / 15) / 2)
    assert run.outcome(3).speed_up == pytest.approx(11 * 3 / (1.5 + 10 * run.v(4) + 1))
    broken = Recorded(by_hand({"num_tokens": "x"}))
    assert broken.costs == "steps"


def test_without_times_there_is_no_speed_up():
    """No plain run, or steps shared with others: tokens per step may be said, a speed-up may not."""
    trace = by_hand()
    for poor in (replace(trace, plain=()), replace(trace, steps=tuple(replace(s, num_rows=2) for s in trace.steps))):
        run = Recorded(poor)
        assert run.outcome(2).speed_up is None and run.best(4) is None and run.outcome(2).tokens_per_step == 2.5
    assert Recorded(Trace({})).outcome(3).tokens_per_step == 1
