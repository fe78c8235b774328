"""The viewer alone in a real browser: what is on the screen follows from the messages, and nothing else does."""
from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from synthetic import make_trace

from specviz import metrics, trace as records
from specviz.trace import EmittedToken, NodeTrace, StepTrace
from specviz.ui import charts
from specviz.ui.slicer import Slicer

HOSTILE = ' </script><img src=x onerror="window.pwned=1">${window.pwned=1}{{value}}<b>'
FORMULAS = {name: asdict(formula) for name, formula in metrics.FORMULAS.items()}


def body_of(trace, **more):
    return {"trace": {"steps": [], "plain": []} | json.loads(records.dumps(trace)), "formulas": FORMULAS, "status": "recorded"} | more


def show(page, trace, **more):
    message = {"type": "trace", "run": "r", "seq": 0} | body_of(trace, **more)
    page.evaluate("text => viewer.take(JSON.parse(text))", json.dumps(message))       # as one string: objects cross to the browser slowly
    settle(page)


def settle(page):
    page.wait_for_function("!viewer.state().pending")


def state(page):
    return page.evaluate("viewer.state()")


def send(page, messages):
    page.evaluate("messages => messages.forEach(message => viewer.take(JSON.parse(message)))", messages)
    settle(page)


def live_messages(trace, *, plain=True, slice_s=0.0):
    """The messages of a live run; with slice_s=0 every record travels alone."""
    slicer = Slicer("live", slice_s=slice_s)
    out = slicer.start({"meta": trace.meta, "status": "active · draft model", "formulas": FORMULAS})
    for step in trace.steps:
        out += slicer.step(step)
    for token in trace.plain if plain else ():
        out += slicer.plain(token)
    return out, slicer


def head(page, name):
    return page.inner_text(f".sv-head[data-name={name}] .sv-head-value")


def open_text(page, text, name="t.json"):
    page.set_input_files("#viewer input[type=file]", {"name": name, "mimeType": "application/json", "buffer": text.encode()})


def count(page, selector):
    return page.locator(selector).count()


def text_of(trace):
    return "".join(token.text for step in trace.steps for token in step.emitted)


def test_empty_page_says_so_and_controls_do_nothing(page):
    """Before any message there are four dashes and a sentence; no control raises."""
    assert [head(page, name) for name in ("speed_up", "tokens_per_step", "draft_acceptance_rate", "tokens_per_s")] == ["–"] * 4
    for key in ("ArrowLeft", "ArrowRight", "Home", "End", " ", "Escape"):
        page.press(".sv-strip", key)
    assert state(page)["numSteps"] == 0 and "No run yet" in page.inner_text(".sv-status-text")


def test_counts_and_colours_follow_the_records(page):
    """Every emitted token is one span of its origin, and the text on the screen is the answer."""
    trace = make_trace(30)
    show(page, trace)
    for origin in ("draft", "correction", "bonus", "plain"):
        expected = sum(token.origin == origin for step in trace.steps for token in step.emitted)
        assert count(page, f".sv-strip .sv-tok.is-{origin}") == expected
    num_rejected = sum(any(node.state == "rejected" for node in step.nodes) for step in trace.steps)
    assert count(page, ".sv-strip .sv-rejected") == num_rejected > 0
    now = state(page)
    assert now["text"] == text_of(trace)
    assert (now["numDrafted"], now["numAccepted"]) == (trace.stats["num_draft_tokens"], trace.stats["num_accepted_draft_tokens"])


def test_head_figures_are_those_of_the_summary(page):
    """The four large figures are metrics.summarize's, and live running sums agree with them."""
    trace = make_trace(40, seed=5)
    show(page, trace)
    shown = {name: head(page, name) for name in ("speed_up", "tokens_per_step", "draft_acceptance_rate", "tokens_per_s")}
    assert shown["speed_up"] == f"{trace.stats['speed_up']:.2f}×"
    assert shown["tokens_per_step"] == f"{trace.stats['tokens_per_step']:.2f}"
    assert shown["draft_acceptance_rate"] == f"{100 * trace.stats['draft_acceptance_rate']:.0f}%"
    messages, _ = live_messages(trace)
    send(page, messages)
    assert {name: head(page, name) for name in shown} == shown


def test_speed_up_is_a_dash_until_measured(page):
    """No plain run, no speed-up; a slowdown is shown as plainly as a gain."""
    messages, slicer = live_messages(make_trace(20, plain=False))
    send(page, messages)
    assert head(page, "speed_up") == "–" and head(page, "tokens_per_step") != "–"
    show(page, make_trace(20, plain_ms=3.0))
    assert float(head(page, "speed_up")[:-1]) < 1 and "slower" in page.inner_text(".sv-head[data-name=speed_up] .sv-head-sub")


def test_shared_steps_withhold_the_speed_up(page):
    """Steps that served other answers too are labelled, and no speed-up is shown, live or recorded."""
    trace = make_trace(12, num_rows=3)
    for load in (lambda: show(page, trace), lambda: send(page, live_messages(trace)[0])):
        load()
        assert head(page, "speed_up") == "–"
        assert "shared" in page.inner_text(".sv-notes")
    page.evaluate("viewer.visit(4)")
    assert "shared with 2 other answers" in page.inner_text(".sv-inspect-head")


def test_formula_and_source_one_click_away(page):
    """The (i) of a figure shows label, formula and source from metrics.FORMULAS; Escape closes it."""
    show(page, make_trace(5))
    page.click(".sv-head[data-name=tokens_per_step] .sv-info")
    about = page.inner_text(".sv-head[data-name=tokens_per_step] .sv-about")
    assert metrics.FORMULAS["tokens_per_step"].formula in about and metrics.FORMULAS["tokens_per_step"].source in about
    page.keyboard.press("Escape")
    page.click(".sv-head[data-name=speed_up] .sv-info")
    assert count(page, ".sv-about:visible") == 1


def test_scrubber_keyboard_and_buttons_move_alike(page):
    """Range input, arrow keys, Home, End, buttons and clicks select the step that the inspector then shows."""
    show(page, make_trace(20))
    page.evaluate("viewer.visit(0)")
    page.focus(".sv-strip")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert state(page)["at"] == 2 and page.inner_text(".sv-label") == "step 2 of 20"
    page.keyboard.press("Home")
    assert state(page)["at"] == 0 and page.inner_text(".sv-label") == "prompt"
    page.keyboard.press("End")
    assert state(page)["at"] == 20
    page.click("button[aria-label='Previous step']")
    assert state(page)["at"] == 19
    page.click("button[aria-label='First step']")
    assert state(page)["at"] == 0 and page.is_disabled("button[aria-label='Previous step']")
    page.fill(".sv-scrub", "7")
    assert state(page)["at"] == 7 and page.inner_text(".sv-inspect-head h3") == "Step 7"
    page.click(".sv-step[data-i='11']")
    assert state(page)["at"] == 11 and count(page, ".sv-step.current") == 1
    assert count(page, ".sv-step.future") == 9
    page.focus(".sv-strip")
    page.keyboard.press("Escape")
    assert state(page)["live"] and state(page)["at"] == 20 and count(page, ".future") == 0


def test_status_line_for_screen_readers(page):
    """One polite status says what the selected step did."""
    trace = make_trace(10)
    show(page, trace)
    page.evaluate("viewer.visit(3)")
    step = trace.steps[3]
    said = page.inner_text("#viewer [role=status]")
    assert said.startswith(f"Step 3: {sum(n.state == 'accepted' for n in step.nodes)} of {len(step.nodes)} draft tokens accepted, then ")


def test_play_runs_to_the_end_on_the_recorded_clock(page):
    """Play goes on step by step from the first one, can be paused, takes a new speed while it runs, and stops at the last step."""
    show(page, make_trace(60))
    page.select_option(".sv-speed", "0.25")
    page.click(".sv-play")
    page.wait_for_function("viewer.state().playing && viewer.state().at >= 2")
    page.click(".sv-play")
    assert not state(page)["playing"] and 2 <= state(page)["at"] < 60
    page.select_option(".sv-speed", "4")
    page.click(".sv-play")
    page.wait_for_function("!viewer.state().playing")
    assert state(page)["at"] == 60


def test_inspector_shows_the_decision(page):
    """For each judged draft: p over q, min(1, p/q), u and the engine's verdict; then residual and correction, or the bonus."""
    trace = make_trace(30, seed=1)
    show(page, trace)
    i, step = next((i, s) for i, s in enumerate(trace.steps) if any(n.state == "rejected" for n in s.nodes) and len(s.emitted) > 1)
    page.evaluate("i => viewer.visit(i)", i)
    rows = page.locator(".sv-inspector button.sv-row")
    assert rows.count() == len(step.nodes)
    for k, node in enumerate(step.nodes):
        row = rows.nth(k)
        assert f"is-{node.state}" in row.get_attribute("class")
        if node.state == "unjudged":
            assert row.locator(".sv-tick").count() == 0
            continue
        style = row.locator(".sv-tick").get_attribute("style")
        assert abs(float(style.split("left:")[1].strip(" %;")) - 100 * node.u) < .06
        fill = row.locator(".is-accept").get_attribute("style")
        assert abs(float(fill.split("width:")[1].strip(" %;")) - 100 * node.accept_prob) < .06
    panel = page.inner_text(".sv-panel")
    assert "max(0, p − q)" in panel and step.emitted[-1].text.strip() in panel
    page.click("[data-tab=top]")
    assert count(page, ".sv-panel .sv-rank") == len(step.top[-1].rows)
    page.click("[data-tab=cache]")
    cache = step.kv["target"]
    assert f"{cache.before} entries before, {cache.fed} fed, {cache.after} kept" in page.inner_text(".sv-panel")
    assert "Drafting stopped" in page.inner_text(".sv-panel")
    full = next(i for i, s in enumerate(trace.steps) if s.nodes and all(n.state == "accepted" for n in s.nodes))
    page.evaluate("i => viewer.visit(i)", full)
    page.click("[data-tab=outcome]")
    assert "bonus" in page.inner_text(".sv-panel")


def test_greedy_asks_for_the_argmax(page):
    """A greedy step asks whether the draft is the argmax and labels its probabilities as those at temperature 1."""
    trace = make_trace(20, greedy=True, seed=2)
    show(page, trace)
    i = next(i for i, s in enumerate(trace.steps) if any(n.state == "rejected" for n in s.nodes))
    page.evaluate("i => viewer.visit(i)", i)
    text = page.inner_text(".sv-inspector")
    assert "is it the argmax?" in text and "T = 1" in text and "not the argmax" in text
    assert count(page, ".sv-tick") == 0


def test_prefill_plain_and_unknown_steps(page):
    """Steps without a draft, and remote ones that tell counts only, are explained instead of drawn empty."""
    trace = make_trace(3)
    plain = StepTrace("plain", 70.0, 0.0, 18.0, .3, emitted=(EmittedToken(7, " yes", "plain"),), draft_stop="no match")
    remote = StepTrace("unknown", 90.0, 0.0, 30.0, 0.0, emitted=(EmittedToken(None, " and so on", "draft", 3),), num_drafted=4,
                       num_accepted=3, source="inferred")
    show(page, replace(trace, steps=trace.steps + (plain, remote), stats=None, compare=None))
    assert state(page)["numAccepted"] == trace.stats["num_accepted_draft_tokens"] + 3
    page.evaluate("viewer.visit(0)")
    assert "40 prompt tokens read" in page.inner_text(".sv-rows")
    page.evaluate("viewer.visit(4)")
    assert "no draft" in page.inner_text(".sv-inspect-head") and "Nothing was drafted" in page.inner_text(".sv-rows")
    page.evaluate("viewer.visit(5)")
    assert "neither the rejected tokens" in page.inner_text(".sv-rows") and "inferred" in page.inner_text(".sv-inspect-head")


def test_nothing_jumps_while_stepping(page):
    """Inspector, strip and charts keep place and height over steps of every kind."""
    show(page, make_trace(25))
    boxes = """['.sv-inspector', '.sv-strip', '.sv-foot', '.sv-panel'].map(name => {
      const box = document.querySelector(name).getBoundingClientRect();
      return [box.top, box.height];
    })"""
    page.evaluate("viewer.visit(0)")
    first = page.evaluate(boxes)
    for i in (1, 5, 9, 14, 25):
        page.evaluate("i => viewer.visit(i)", i)
        assert page.evaluate(boxes) == first


SAME = {"mode": "greedy", "identical": True, "tokens": 180, "of": 180, "partial": False}
SPLIT = {"mode": "greedy", "identical": False, "tokens": 61, "of": 90, "index": 61, "speculative": {"id": 1, "text": " a"},
         "plain": {"id": 2, "text": " b"}}


@pytest.mark.parametrize("compare, kind, words", [
    (SAME, "same", ["Identical to plain decoding: 180/180 tokens"]),
    (SAME | {"tokens": 95, "of": 95, "partial": True}, "same", ["Identical so far: 95/95"]),
    (SPLIT | {"margin": 3e-5, "tie": True}, "neutral", ["Rounding tie at token 62", "“a”", "“b”", "0.000030"]),
    (SPLIT | {"margin": 0.4, "tie": False}, "differs", ["Differs from plain decoding at token 62", "0.40"]),
    ({"mode": "sampling"}, "neutral", ["Sampling", "texts may differ"]),
    (SAME | {"mode": "shared-noise"}, "same", ["Identical to plain sampling with this seed: 180/180 tokens"]),
    (SPLIT | {"mode": "shared-noise", "margin": 0.4, "tie": False}, "differs", ["Differs from plain sampling with this seed at token 62", "“b”", "0.40"]),
    (SPLIT | {"mode": "shared-noise", "margin": 3e-5, "tie": True}, "neutral", ["Rounding tie at token 62", "“a”", "within rounding"]),
    ({"mode": "lossy"}, "lossy", ["Lossy", "does not follow"]),
])
def test_badge(page, compare, kind, words):
    """The badge says what `compare` says: identical, so far, tie in a neutral colour, real difference, or sampling."""
    show(page, replace(make_trace(4), compare=compare))
    text = page.inner_text(".sv-badge")
    assert all(word in text for word in words) and f"is-{kind}" in page.get_attribute(".sv-badge", "class")


@pytest.mark.parametrize("rule, own, words", [
    ("rejection", "", ["min(1, p/q)"]), ("shared-noise", "", ["own draw"]), ("typical", "", ["threshold"]), ("constructor", "", ["min(1, p/q)"]),
    ("block", "rejection", ["judged by rejection", "min(1, p/q)"]), ("block", "", ["the block it ends"])])
def test_the_verdict_is_headed_by_its_rule(page, rule, own, words):
    """A sampled step says what its tokens were held against; a step that another rule judged names it. Verdicts without numbers are shown."""
    node = NodeTrace(7, " guess", -1, "accepted", q=0.5, p=0.25)
    step = StepTrace("spec", 0.0, 1.0, 1.0, 0.0, nodes=(node,), emitted=(EmittedToken(7, " guess", "draft"), EmittedToken(8, " on", "bonus")), rule=own)
    trace = make_trace(1)
    show(page, replace(trace, meta={"sampling": {"temperature": 1.0}, "verification": rule}, steps=(trace.steps[0], step), stats=None))
    text = page.inner_text(".sv-inspector")
    assert all(word in text for word in words) and "accepted" in text


def test_no_badge_where_nothing_was_compared(page):
    """`identical: null` claims nothing."""
    show(page, replace(make_trace(4), compare={"mode": "greedy", "identical": None, "tokens": 0, "of": 0, "partial": True}))
    assert not page.is_visible(".sv-badge")


def test_repeating_text_is_marked(page):
    """The same eight tokens three times raise the note while the run is still going; ordinary text does not."""
    send(page, live_messages(make_trace(20), plain=False)[0])
    assert "not representative" not in page.inner_text(".sv-notes")
    loop = tuple(StepTrace("plain", 20.0 * i, 0, 19.0, 0, emitted=(EmittedToken(i % 8, f" w{i % 8}", "plain"),)) for i in range(24))
    send(page, live_messages(replace(make_trace(1), steps=loop), plain=False)[0])
    assert "not representative" in page.inner_text(".sv-notes")


def test_hostile_text_stays_text(page):
    """Markup, template and script text in tokens, status, names and messages is shown, never run."""
    node, token = NodeTrace(1, HOSTILE, -1, "rejected", .5, .1, .2, .9), EmittedToken(2, HOSTILE, "correction")
    step = StepTrace("spec", 0, 1, 2, 0, (node,), (token,), HOSTILE, top=make_trace(1).steps[1].top[:1])
    trace = replace(make_trace(1), meta={"target": HOSTILE, "config": {"device": HOSTILE}, "sampling": {"temperature": 1}}, steps=(step,),
                    compare=SPLIT | {"margin": 1.0, "plain": {"id": 1, "text": HOSTILE}})
    show(page, trace, status=HOSTILE, note=HOSTILE)
    for tab in ("top", "cache", "outcome"):
        page.click(f"[data-tab={tab}]")
    page.evaluate("message => viewer.take(message)", {"type": "error", "run": "r", "seq": 1, "error": {"kind": "x", "message": HOSTILE}})
    assert HOSTILE in page.text_content(".sv-problem") and HOSTILE in page.text_content(".sv-strip")
    assert count(page, "#viewer img, #viewer script, #viewer b:not(.sv-num)") == 0 and page.evaluate("window.pwned === undefined")


def test_white_space_and_special_tokens_are_visible(page):
    """Newlines, lone spaces and tabs carry a mark, special tokens a chip, a final end of text its own chip."""
    tokens = tuple(EmittedToken(i, text, "plain") for i, text in enumerate((" a", "\n", " ", "\t", "<|im_end|>", "")))
    trace = replace(make_trace(1), steps=(StepTrace("plain", 0, 0, 5, 0, emitted=tokens),), stats=None, compare=None)
    show(page, replace(trace, meta=trace.meta | {"reason": "eos"}))
    assert page.text_content(".sv-strip").replace("\n", "|") == " a⏎|␣⇥\t<|im_end|>end of text"
    assert count(page, ".sv-strip .sv-chip") == 2 and count(page, ".sv-strip .sv-ws") == 3


def test_three_thousand_steps_stay_windowed(page):
    """Of about 10,000 tokens at most 2,000 are spans at any time, wherever one looks; the text is complete."""
    trace = make_trace(3000, plain=False)
    show(page, trace)
    for at in (0, 1500, 3000):
        page.evaluate("i => viewer.visit(i)", at)
        assert 100 < state(page)["numSpans"] <= 2000
        assert count(page, ".sv-step.current") == 1
    assert len(state(page)["text"]) == len(text_of(trace))
    for share in (.5, .25, 0):
        page.evaluate("share => { const s = document.querySelector('.sv-strip'); s.scrollTop = share * s.scrollHeight; }", share)
        page.wait_for_function("""() => {
          const box = document.querySelector('.sv-strip').getBoundingClientRect();
          const under = [.3, .5, .7].map(y => document.elementFromPoint(box.left + 80, box.top + y * box.height));
          return under.some(node => node.closest('.sv-step'));
        }""")
        assert state(page)["numSpans"] <= 2000


def test_rejected_drafts_can_be_hidden(page):
    """The toggle hides the small rejected drafts and leaves the text alone."""
    show(page, make_trace(20))
    assert page.is_visible(".sv-rejected")
    page.uncheck(".sv-legend input")
    assert not page.is_visible(".sv-rejected")


def test_rejected_drafts_stand_above_their_correction(page):
    """Each small rejected draft begins where the word that replaced it begins, on the same line, also after a line break."""
    page.set_viewport_size({"width": 390, "height": 844})
    show(page, make_trace(60, hit=.4))
    off = page.evaluate("""() => [...document.querySelectorAll('.sv-strip .sv-over')].map(word => {
      const above = word.querySelector('.sv-rejected').getBoundingClientRect(), range = document.createRange();
      range.selectNodeContents(word.firstChild);
      const own = range.getClientRects()[0];
      return [Math.abs(above.left - own.left), own.top - above.bottom];
    })""")
    assert len(off) > 20 and max(left for left, _ in off) < 2 and all(-12 < up < 12 for _, up in off)


def test_long_rejected_drafts_give_way_to_each_other(page):
    """However long the words that a short correction replaces, none covers the next one; recorded and live."""
    step = next(step for step in make_trace(20, greedy=True).steps if step.nodes)
    long = NodeTrace(1, " incomprehensibly", -1, "rejected", .5, .1, .2, .9)
    trace = make_trace(14, greedy=True)
    steps = tuple(replace(one, nodes=(long,), emitted=(EmittedToken(2, word, "correction"),), top=(), residual=())
                  for one, word in zip([step] * 12, " a| so|,| we| I| it| is|;| in| no| to| be".split("|")))
    steps = (trace.steps[0], *steps)
    for load in (lambda: show(page, replace(trace, steps=steps, plain=(), stats=None, compare=None)),
                 lambda: send(page, live_messages(replace(trace, steps=steps), plain=False)[0])):
        load()
        page.wait_for_function("() => document.querySelectorAll('.sv-strip .sv-rejected').length === 12")
        boxes = page.evaluate("[...document.querySelectorAll('.sv-strip .sv-rejected')].map(one => one.getBoundingClientRect().toJSON())")
        assert all(a["right"] <= b["left"] + 1 for a, b in zip(boxes, boxes[1:]) if abs(a["top"] - b["top"]) < 4)
        assert boxes[-1]["width"] > 60


def test_gap_is_filled_by_a_resync(page):
    """A lost message is asked for by run and number, and the run is complete afterwards; late duplicates change nothing."""
    trace = make_trace(20)
    messages, slicer = live_messages(trace, plain=False)
    page.evaluate("kept => { window.answer = (run, from) => Promise.resolve(JSON.parse(kept)) }", slicer.resync("live", 5))
    send(page, messages[:5] + messages[6:])
    page.wait_for_function("n => viewer.state().numSteps === n && viewer.state().numHeld === 0", arg=len(trace.steps))
    assert page.evaluate("asked") == [["live", 5]]
    send(page, messages[3:9])
    assert state(page)["text"] == text_of(trace) and state(page)["numLost"] == 0


def test_unanswered_gap_is_told(page):
    """Where nothing can be resent, the run goes on and the page says how many messages are missing."""
    messages, _ = live_messages(make_trace(10), plain=False)
    send(page, messages[:4] + messages[6:])
    page.wait_for_function("viewer.state().numLost === 2")
    settle(page)
    assert "2 messages did not arrive" in page.inner_text(".sv-notes")
    assert state(page)["numSteps"] == 9


def test_a_page_that_missed_the_start_asks_from_zero(page):
    """Messages of a run whose start never came lead to a resync from 0."""
    trace = make_trace(6)
    messages, slicer = live_messages(trace, plain=False)
    page.evaluate("kept => { window.answer = () => JSON.parse(kept) }", slicer.resync("live", 0))
    send(page, messages[3:])
    page.wait_for_function("n => viewer.state().numSteps === n", arg=len(trace.steps))
    assert page.evaluate("asked[0]") == ["live", 0]


def test_end_message_brings_the_truth(page):
    """`end.stats` replaces the running sums, and `compare` brings the badge."""
    trace = make_trace(10, greedy=True)
    messages, slicer = live_messages(trace)
    send(page, messages + slicer.end({"stats": trace.stats | {"tokens_per_step": 9.99}, "compare": trace.compare, "reason": "length",
                                      "status": "active · done"}))
    assert head(page, "tokens_per_step") == "9.99" and "Identical to plain decoding" in page.inner_text(".sv-badge")


def test_save_and_open_round_trip(page, tmp_path):
    """A saved file is a trace that Python reads, equal to what was shown; opened again it shows the same."""
    trace = make_trace(15, seed=4)
    show(page, trace)
    with page.expect_download() as download:
        page.click("text=Save trace")
    path = tmp_path / "saved.json"
    download.value.save_as(path)
    assert records.load(path) == records.loads(records.dumps(trace))
    before = {key: value for key, value in state(page).items() if key in ("text", "numSteps", "numPlain", "speedUp")}
    show(page, make_trace(2))
    open_text(page, path.read_text(), "saved.json")
    page.wait_for_function("viewer.state().run.startsWith('file:')")
    assert {key: state(page)[key] for key in before} == before
    assert "saved.json" in page.inner_text(".sv-status-text")
    send(page, live_messages(trace, plain=False)[0][:1])
    assert state(page)["run"] == "live"


def _broken(change):
    data = json.loads(records.dumps(make_trace(3)))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize("text, words", [
    ("{", "not valid JSON"),
    ("[1, 2]", "not a trace of specviz"),
    (_broken(lambda d: d.update(format="other")), "not a trace of specviz"),
    (_broken(lambda d: d.update(version=2)), "version 2"),
    (_broken(lambda d: d.pop("steps")), "steps is missing"),
    (_broken(lambda d: d["steps"][1]["nodes"][1].update(state="maybe")), "steps[1].nodes[1].state"),
    (_broken(lambda d: d["steps"][2].pop("kind")), "steps[2].kind is missing"),
    (_broken(lambda d: d["steps"][1]["nodes"][0].update(p="<img src=x onerror=window.pwned=1>")), "steps[1].nodes[0].p"),
    (_broken(lambda d: d["steps"][1]["nodes"][2].update(parent=4)), "steps[1].nodes[2].parent"),
    (_broken(lambda d: d["steps"][1]["kv"]["target"].update(fed=-1)), "steps[1].kv.target.fed"),
    (_broken(lambda d: d["steps"][1]["top"][0]["rows"][0].pop()), "steps[1].top[0].rows[0]"),
    (_broken(lambda d: d["plain"][0].update(ms=None)), "plain[0].ms"),
    (_broken(lambda d: d.update(compare=[])), "compare"),
], ids=lambda value: value if len(value) < 40 else "")
def test_a_broken_file_is_explained_and_changes_nothing(page, text, words):
    """Every defect is named with its place, and the present view stays."""
    show(page, make_trace(8))
    before = page.inner_html(".sv-strip"), state(page)["run"], head(page, "speed_up")
    open_text(page, text)
    page.wait_for_selector(".sv-problem:visible")
    assert words in page.inner_text(".sv-problem") and "present view was kept" in page.inner_text(".sv-problem")
    assert (page.inner_html(".sv-strip"), state(page)["run"], head(page, "speed_up")) == before
    assert page.evaluate("window.pwned === undefined")


def test_a_file_over_20_mb_is_refused_unread(page, tmp_path):
    """The size limit is checked before the file is read."""
    path = tmp_path / "large.json"
    path.write_text(" " * 20_000_001)
    page.set_input_files("#viewer input[type=file]", path)
    page.wait_for_selector(".sv-problem:visible")
    assert "at most 20 MB" in page.inner_text(".sv-problem")


def test_charts_are_drawn_and_follow(page):
    """Three charts with data of the run, the speed-up written on the third, a mark at the selected step; dark redraws them."""
    trace = make_trace(30, seed=3)
    show(page, trace, figures=charts.figures(), plotly="/plotly.min.js")
    page.wait_for_function("viewer.state().charts === 'ready' && document.querySelectorAll('.sv-plot .main-svg').length >= 3")
    page.evaluate("viewer.visit(9)")
    page.evaluate("document.querySelector('.sv-charts').scrollIntoView()")
    plot = "document.querySelector('[data-chart={}] .sv-plot')"
    page.wait_for_function(f"({plot.format('acceptance')}.layout.shapes || [{{}}])[0].x0 === 9")
    accepted = page.evaluate(plot.format("acceptance") + ".data.find(t => t.meta === 'accepted').y")
    assert accepted == [sum(node.state == "accepted" for node in step.nodes) for step in trace.steps[1:]]
    page.wait_for_function(f"{plot.format('progress')}.data")
    progress = page.evaluate(plot.format("progress") + ".layout.annotations.map(a => a.text)")
    assert f"<b>{trace.stats['speed_up']:.2f}×</b> measured" in progress
    assert len(set(page.evaluate("[...document.querySelectorAll('.sv-plot')].map(p => p.offsetHeight)"))) == 1
    highest = page.evaluate(f"[{plot.format('acceptance')}.layout.yaxis.range[1], Math.max(...{plot.format('acceptance')}.data.at(-1).y)]")
    assert highest[0] >= highest[1], "the running mean must lie inside the chart"
    page.evaluate("document.body.classList.add('dark')")
    page.wait_for_function(f"{plot.format('acceptance')}.layout.font.color === '{charts.PALETTES['dark']['text']}'")
    page.click("text=Charts as table")
    assert count(page, ".sv-data tr") == 31


def test_a_lossy_run_is_called_so_everywhere(page):
    """Badge, note and every chart say that the rule is lossy; the next run's charts no longer do."""
    trace = make_trace(8)
    lossy = replace(trace, meta=trace.meta | {"verification": "typical", "promise": "nothing", "config": {"lossless": False}},
                    compare={"mode": "lossy"})
    heads = "[...document.querySelectorAll('.sv-chart h3')].map(head => head.textContent)"
    show(page, lossy, figures=charts.figures(lossy=True), plotly="/plotly.min.js")
    page.wait_for_function(f"({heads}).length === 3 && ({heads}).every(head => head.endsWith('lossy verification'))")
    assert "Lossy" in page.inner_text(".sv-badge") and "Lossy" in page.inner_text(".sv-notes")
    show(page, trace, figures=charts.figures(), plotly="/plotly.min.js", run="s")
    page.wait_for_function(f"!({heads}).some(head => head.includes('lossy'))")


def test_charts_missing_is_said_and_all_else_works(page):
    """Without Plotly the page says so; strip, scrubber and inspector go on."""
    page.expected_failures.append("/nowhere.js")
    show(page, make_trace(10), figures=charts.figures(), plotly="/nowhere.js")
    page.wait_for_function("viewer.state().charts === 'missing'")
    assert "Charts are unavailable" in page.inner_text(".sv-charts")
    page.evaluate("viewer.visit(4)")
    assert page.inner_text(".sv-inspect-head h3") == "Step 4" and head(page, "speed_up") != "–"


@pytest.mark.parametrize("dark", [False, True])
def test_text_contrast(page, dark):
    """Token text, dimmed or not, reaches 4.5:1 on its ground in both themes."""
    page.evaluate("dark => document.body.classList.toggle('dark', dark)", dark)
    show(page, make_trace(20))
    page.evaluate("viewer.visit(8)")
    worst = page.evaluate("""() => {
      const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
      const rgb = colour => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
      };
      const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
      const light = colour => colour.map(v => linear(v / 255)).reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
      const ground = light(rgb(getComputedStyle(document.querySelector('.sv-strip')).backgroundColor));
      return Math.min(...[...document.querySelectorAll('.sv-strip .sv-tok, .sv-strip .sv-rejected')].map(node => {
        const own = light(rgb(getComputedStyle(node).color));
        return (Math.max(own, ground) + .05) / (Math.min(own, ground) + .05);
      }));
    }""")
    assert worst >= 4.5


def test_phone_has_no_horizontal_scroll(page):
    """At 390 px nothing is wider than the page, the scrubber is sticky, and buttons are at least 44 px high."""
    page.set_viewport_size({"width": 390, "height": 844})
    show(page, make_trace(40, tree=True), status="active · " + "a very long explanation " * 6, note="x" * 200)
    page.evaluate("viewer.visit(7)")
    assert not page.is_visible(".sv-inspector") and page.evaluate("document.documentElement.scrollWidth") <= 390
    page.click(".sv-step[data-i='7'] .sv-tok")
    sheet = page.locator(".sv-inspector").bounding_box()
    assert sheet["y"] + sheet["height"] == 844 and sheet["width"] == 390
    for tab in ("outcome", "top", "cache"):
        page.click(f"[data-tab={tab}]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("getComputedStyle(document.querySelector('.sv-bar')).position") == "sticky"
    controls = "[...document.querySelectorAll('.sv-btn, .sv-tab, .sv-scrub')].filter(node => node.offsetParent)"
    assert min(page.evaluate(controls + ".map(node => node.offsetHeight)")) >= 44


def test_plain_tokens_do_not_disturb_the_reader(page):
    """While the plain run is measured, the inspector of the step in view is not rebuilt: focus and scroll position stay."""
    messages, _ = live_messages(make_trace(8))
    first_plain = next(i for i, text in enumerate(messages) if json.loads(text)["type"] == "plain")
    send(page, messages[:first_plain])
    page.click("[data-tab=cache]")
    page.evaluate("window.kept = document.activeElement")
    send(page, messages[first_plain:])
    assert state(page)["numPlain"] > 8 and page.evaluate("document.activeElement === kept && kept.isConnected")


def test_seeking_three_thousand_steps_touches_few_nodes(page):
    """A far jump rebuilds only the window around it: fewer than 6,000 nodes change, whatever the length of the run."""
    show(page, make_trace(3000, plain=False))
    page.evaluate("""() => {
      window.touched = 0;
      new MutationObserver(list => list.forEach(m => { touched += m.addedNodes.length + m.removedNodes.length; }))
        .observe(document.querySelector('.sv-strip'), {childList: true, subtree: true});
      viewer.visit(1500);
    }""")
    page.wait_for_function("touched > 0")
    assert page.evaluate("touched") < 6000


def test_zoom_survives_live_redraws_and_double_click_ends_it(page):
    """A range chosen by dragging stays while steps arrive, and the chart is fed for it; a double click goes back to 40 steps."""
    messages, _ = live_messages(make_trace(90), plain=False)
    start = json.loads(messages[0]) | {"figures": charts.figures(), "plotly": "/plotly.min.js"}
    send(page, [json.dumps(start), *messages[1:80]])
    plot = "document.querySelector('[data-chart=acceptance] .sv-plot')"
    page.evaluate("document.querySelector('.sv-charts').scrollIntoView()")
    page.wait_for_function(f"{plot} && {plot}.layout && {plot}.layout.xaxis.range[1] > 78")
    box = page.locator("[data-chart=acceptance] .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + .2 * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + .6 * box["width"], box["y"] + 62, steps=4)
    page.mouse.up()
    page.wait_for_function(f"{plot}.layout.xaxis.range[1] < 70")
    chosen = page.evaluate(f"{plot}.layout.xaxis.range")
    send(page, messages[80:])
    page.wait_for_function(f"{plot}.layout.datarevision.includes(',91,')")
    assert page.evaluate(f"{plot}.layout.xaxis.range") == chosen
    steps = page.evaluate(f"{plot}.data[0].x")
    assert steps[0] <= chosen[0] and steps[-1] >= chosen[1] - 1
    page.mouse.dblclick(box["x"] + .5 * box["width"], box["y"] + 60)
    page.wait_for_function(f"{plot}.layout.xaxis.range[1] - {plot}.layout.xaxis.range[0] === 40")
