"""Every figure on traces small enough to work out by hand, and the formulas against sums."""
import json
from dataclasses import fields, replace

import pytest

from specviz.metrics import FORMULAS, TIE_MARGIN, Summary, compare, expected_tokens, predicted_speed_up, summarize
from specviz.trace import EmittedToken, NodeTrace, PlainToken, StepTrace, Trace, dumps, loads

GREEDY = {"sampling": {"temperature": 0.0}}


def emitted(*ids: int, origin: str = "draft") -> tuple[EmittedToken, ...]:
    return tuple(EmittedToken(i, f" {i}", origin) for i in ids)


def chain(states: str) -> tuple[NodeTrace, ...]:
    """"aru" is one accepted, one rejected and one unjudged node in a row; w is a window node."""
    names = {"a": "accepted", "r": "rejected", "u": "unjudged", "w": "window"}
    return tuple(NodeTrace(100 + i, "x", i - 1, names[letter]) for i, letter in enumerate(states))


def run() -> Trace:
    """Prefill in two chunks, then 3 + 1 + 2 tokens in steps of 6, 4 and 6 ms; the last step has a tree and a window node."""
    tree = (NodeTrace(1, "a", -1, "rejected"), NodeTrace(2, "b", -1, "accepted"), NodeTrace(3, "c", 1, "rejected"),
            NodeTrace(4, "d", 1, "rejected"), NodeTrace(5, "e", 0, "unjudged"), NodeTrace(6, "f", -1, "window"))
    steps = (StepTrace("prefill", -30.0, 0.0, 20.0, 0.0, num_prompt_tokens=9),
             StepTrace("prefill", -10.0, 0.0, 9.0, 1.0, emitted=emitted(10, origin="plain"), num_prompt_tokens=4),
             StepTrace("spec", 0.0, 1.0, 4.0, 1.0, nodes=chain("aaru"), emitted=emitted(11, 12, 13)),
             StepTrace("plain", 6.0, 0.0, 4.0, 0.0, emitted=emitted(14, origin="plain")),
             StepTrace("spec", 10.0, 1.0, 5.0, 0.0, nodes=tree, emitted=emitted(15, 16)))
    plain = tuple(PlainToken(10 + i, f" {10 + i}", 4.0 * i, 50.0 if i == 0 else 4.0, 1.5) for i in range(7))
    return Trace(GREEDY, steps, plain)


def test_figures_by_hand():
    """Counts, rates and times of a mixed run are the ones worked out on paper."""
    s = summarize(run())
    assert (s.num_tokens, s.num_steps, s.num_spec_steps, s.num_draft_tokens, s.num_accepted_draft_tokens) == (7, 3, 2, 9, 3)
    assert s.draft_acceptance_rate == 3 / 9
    assert s.acceptance_rate_alpha == 3 / 5 and s.acceptance_rate_alpha_by_depth == (1.0, 0.5, 0.0)
    assert s.mean_acceptance_length == 2.5 and s.tokens_per_step == 2.0
    assert s.acceptance_histogram == (0, 1, 1) and s.per_step_accepted == (2, 1) and s.per_step_drafted == (4, 5)
    assert s.ttft_s == pytest.approx(0.030) and s.tpot_s == pytest.approx(0.016 / 6) and s.itl_s == pytest.approx(0.006)
    assert s.tokens_per_s == pytest.approx(6 / 0.016) and s.plain_tokens_per_s == pytest.approx(250)
    assert s.speed_up == pytest.approx(24 / 16) and s.num_compared_tokens == 6
    assert not s.shared and not s.repeating


def test_figures_survive_the_file():
    """A trace read back has the same summary, and its stats are JSON."""
    trace = run()
    trace = replace(trace, stats=summarize(trace).to_dict(), compare=compare(trace))
    again = loads(dumps(trace))
    assert summarize(again) == summarize(trace) and again.stats == json.loads(json.dumps(trace.stats)) and again.compare == trace.compare


def test_figures_survive_dropped_nodes(monkeypatch):
    """A file that had to leave unjudged nodes out still gives the same figures."""
    trace = run()
    monkeypatch.setattr("specviz.trace.MAX_BYTES", len(dumps(trace)) - 1)
    small = loads(dumps(trace))
    assert small.meta["dropped_nodes"] == 3 and summarize(small) == summarize(trace)


def test_window_nodes_count_nowhere():
    """A step that fed only a window drafted nothing; a window beside guesses changes no figure."""
    step = StepTrace("spec", 0.0, 0.0, 4.0, 0.0, nodes=chain("www"), emitted=emitted(1))
    s = summarize(Trace(GREEDY, (step,)))
    assert (s.num_spec_steps, s.num_draft_tokens, s.mean_acceptance_length, s.acceptance_rate_alpha) == (0, 0, None, None)
    assert s.tokens_per_step == 1.0
    guesses = StepTrace("spec", 4.0, 0.0, 4.0, 0.0, nodes=chain("ar"), emitted=emitted(1, 2))
    both = replace(guesses, nodes=guesses.nodes + (NodeTrace(9, "w", -1, "window"), NodeTrace(9, "w", 2, "window")))
    assert summarize(Trace(GREEDY, (step, guesses))) == summarize(Trace(GREEDY, (step, both)))


def test_nothing_measured_is_none():
    """An empty run, or one without a plain run, has no rates instead of zeros, and nothing divides by zero."""
    s = summarize(Trace({}))
    for name in ("draft_acceptance_rate", "acceptance_rate_alpha", "mean_acceptance_length", "tokens_per_step", "ttft_s", "tpot_s", "itl_s",
                 "tokens_per_s", "plain_tokens_per_s", "speed_up"):
        assert getattr(s, name) is None
    assert s.acceptance_histogram == () and s.num_tokens == 0
    only_prefill = summarize(Trace(GREEDY, run().steps[:2]))
    assert only_prefill.ttft_s == pytest.approx(0.030) and only_prefill.tokens_per_step is None and only_prefill.tokens_per_s is None
    assert summarize(replace(run(), plain=run().plain[:1])).speed_up is None
    still = StepTrace("plain", 0.0, 0.0, 0.0, 0.0, emitted=emitted(1))
    assert summarize(Trace({}, (still,), run().plain)).speed_up is None


def test_speed_up_compares_the_same_tokens():
    """A shorter plain run is compared with the steps it has reached; a longer one only with its first tokens."""
    trace = run()
    short = summarize(replace(trace, plain=trace.plain[:6]))
    assert short.num_compared_tokens == 4 and short.speed_up == pytest.approx(16 / 10)
    slow_end = trace.plain + (PlainToken(17, " 17", 1000.0, 900.0),)
    assert summarize(replace(trace, plain=slow_end)).speed_up == pytest.approx(24 / 16)
    assert summarize(replace(trace, plain=trace.plain[:3])).speed_up is None


@pytest.mark.parametrize("place", ["answer", "plain run"])
def test_disturbed_steps_have_no_speed_up(place):
    """Measured while a model was loading: said, kept in the file, and no comparison of times; a disturbed prompt disturbs no decoding."""
    trace = run()
    assert summarize(trace).speed_up and summarize(trace).disturbed == ""
    word = "a model was loading"
    if place == "answer":
        steps = (*trace.steps[:-1], replace(trace.steps[-1], disturbed=word))
        trace = replace(trace, steps=steps)
    else:
        trace = replace(trace, plain=(*trace.plain[:-1], replace(trace.plain[-1], disturbed=word)))
    found = summarize(loads(dumps(trace)))
    assert found.disturbed == word and found.speed_up is None and found.num_compared_tokens == 0 and found.tokens_per_step
    prefill = replace(run().steps[0], disturbed=word)
    assert prefill.kind == "prefill" and summarize(replace(run(), steps=(prefill, *run().steps[1:]))).disturbed == ""


def test_shared_steps_have_no_speed_up():
    """Times of steps that served other sequences too are not this sequence's: no speed-up is claimed."""
    trace = run()
    s = summarize(replace(trace, steps=trace.steps[:4] + (replace(trace.steps[4], num_rows=2),)))
    assert s.shared and s.speed_up is None and s.num_compared_tokens == 0 and s.tokens_per_step == 2.0


def test_remote_steps_without_nodes():
    """Counts of another engine stand in for nodes; unknown counts are left out of the draft metrics, and merged tokens count."""
    def step(t0_ms, n, drafted, accepted, kind="spec"):
        return StepTrace(kind, t0_ms, 0.0, 10.0, 0.0, emitted=(EmittedToken(None, "text", "draft", n),), source="exact",
                         num_drafted=drafted, num_accepted=accepted)
    s = summarize(Trace({}, (step(0.0, 4, 4, 3), step(10.0, 1, 0, 0, "plain"), step(20.0, 1, 4, 0), step(30.0, 2, None, None, "unknown"),
                             step(40.0, 2, 4, None, "unknown"))))
    assert (s.num_tokens, s.num_steps, s.num_spec_steps, s.num_draft_tokens, s.num_accepted_draft_tokens) == (10, 5, 2, 8, 3)
    assert s.acceptance_histogram == (1, 0, 0, 1) and s.acceptance_rate_alpha is None and s.tokens_per_step == 2.0
    assert s.mean_acceptance_length == 2.5


def test_aggregates_have_no_figures_per_step():
    """Totals of a whole answer in one record give rates, but no histogram, series or tokens per step."""
    whole = StepTrace("unknown", 0.0, 0.0, 100.0, 0.0, emitted=(EmittedToken(None, "text", "draft", 20),), source="aggregate",
                      num_drafted=30, num_accepted=12)
    s = summarize(Trace({}, (whole,)))
    assert s.draft_acceptance_rate == 0.4 and s.tokens_per_s == pytest.approx(200)
    assert (s.mean_acceptance_length, s.tokens_per_step, s.acceptance_histogram, s.per_step_accepted) == (None, None, (), ())


@pytest.mark.parametrize("ids, repeating", [
    (list(range(100)), False), ([1, 2, 3] * 8, False), ([1, 2, 3] * 9, True), ([7] * 23, False), ([7] * 24, True),
    ([*range(8), 50, *range(8), 51, *range(8)], True), ([*range(7), 50, *range(7), 51, *range(7), 52], False)])
def test_loops_are_noticed(ids, repeating):
    """A run of 8 tokens that occurs three times without overlap marks the figures; anything less does not."""
    assert summarize(Trace({}, (StepTrace("plain", 0.0, 0.0, 1.0, 0.0, emitted=emitted(*ids)),))).repeating is repeating


def test_greedy_texts_are_compared_token_by_token():
    """Equal texts are identical; a shorter baseline is identical so far; one differing id is found with both tokens and the margin."""
    trace = run()
    assert compare(trace) == {"mode": "greedy", "identical": True, "tokens": 7, "of": 7, "partial": False}
    assert compare(replace(trace, plain=trace.plain[:5])) == {"mode": "greedy", "identical": True, "tokens": 5, "of": 5, "partial": True}
    for margin, tie in ((TIE_MARGIN / 2, True), (TIE_MARGIN, False), (2.0, False), (None, False)):
        plain = trace.plain[:4] + (PlainToken(99, " z", 16.0, 4.0, margin),) + trace.plain[5:]
        assert compare(replace(trace, plain=plain)) == {
            "mode": "greedy", "identical": False, "tokens": 4, "of": 7, "partial": False, "index": 4,
            "speculative": {"id": 14, "text": " 14"}, "plain": {"id": 99, "text": " z"}, "margin": margin, "tie": tie}


def test_a_tie_is_as_wide_as_the_numbers_are_coarse():
    """On a GPU, whose logits come in 16 bits, a larger gap is explained by rounding than on a CPU, where texts are bitwise equal."""
    trace = run()
    plain = trace.plain[:4] + (PlainToken(99, " z", 16.0, 4.0, 0.01),) + trace.plain[5:]
    for device, dtype, tie in (("cuda", "bfloat16", True), ("cuda:1", "float16", True), ("cuda", "float32", False), ("cpu", "bfloat16", False)):
        config = {"config": {"device": device, "dtype": dtype}}
        assert compare(replace(trace, meta=trace.meta | config, plain=plain))["tie"] is tie
    assert compare(replace(trace, meta=trace.meta | {"config": 7}, plain=plain))["tie"] is False


def test_the_very_text_of_plain_sampling_is_compared_where_the_rule_promises_it():
    """A rule that promises plain sampling's tokens is compared at any temperature; without that promise sampling is not, and a lossy rule
    never claims identity, not even for equal greedy texts."""
    trace = run()
    hot = {"sampling": {"temperature": 0.7}}
    same = {"mode": "shared-noise", "identical": True, "tokens": 7, "of": 7, "partial": False}
    assert compare(replace(trace, meta=hot | {"promise": "text"})) == same
    assert compare(replace(trace, meta=hot | {"promise": "distribution"})) == {"mode": "sampling"}
    other = replace(trace, meta=hot | {"promise": "text"}, plain=trace.plain[:4] + (PlainToken(99, " z", 16.0, 4.0),) + trace.plain[5:])
    assert compare(other)["identical"] is False and compare(other)["index"] == 4 and compare(other)["tie"] is False
    assert compare(replace(trace, meta=trace.meta | {"promise": "text"}))["mode"] == "greedy"
    for meta in (hot, {"sampling": {"temperature": 0}}):
        assert compare(replace(trace, meta=meta | {"promise": "nothing"})) == {"mode": "lossy"}


def test_what_cannot_be_compared_is_not():
    """Sampling compares nothing; without a plain run or without ids there is no claim either way."""
    trace = run()
    assert compare(replace(trace, meta={"sampling": {"temperature": 0.7}})) == {"mode": "sampling"}
    assert compare(replace(trace, meta={})) == {"mode": "unknown"}
    nothing = {"mode": "greedy", "identical": None, "tokens": 0, "of": 0, "partial": True}
    assert compare(replace(trace, plain=())) == nothing
    assert compare(replace(trace, plain=(PlainToken(None, "a", 0.0, 1.0),) * 7)) == nothing


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.8, 1.0])
def test_expected_tokens_is_the_sum_over_outcomes(alpha):
    """The closed form equals the mean over how many guesses are accepted, the edges included."""
    for k in range(6):
        mean = sum((i + 1) * alpha**i * (1 - alpha) for i in range(k)) + (k + 1) * alpha**k
        assert expected_tokens(alpha, k) == pytest.approx(mean)


def test_predicted_speed_up():
    """With free verification it is Leviathan's formula; without a draft and overhead it is 1; dearer verification lowers it."""
    e = expected_tokens(0.8, 4)
    assert predicted_speed_up(e, 4, 0.1, 1.0) == pytest.approx(e / 1.4)
    assert predicted_speed_up(expected_tokens(0.5, 0), 0, 0.1, 1.0) == 1
    assert predicted_speed_up(e, 4, 0.1, 2.0, 0.1) == pytest.approx(e / 2.5)


def test_every_number_has_a_formula():
    """Whatever the summary holds can be explained, and so can the numbers of one decision and the predictions."""
    assert {f.name for f in fields(Summary)} <= set(FORMULAS)
    assert {"accept_prob", "residual", "margin", "expected_tokens", "predicted_speed_up"} <= set(FORMULAS)
    assert all(f.label and f.formula and f.source for f in FORMULAS.values())
