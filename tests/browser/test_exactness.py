"""The Exactness and Break it views: what was recorded, a run that streams from a server, both texts of a run, at every width."""
from __future__ import annotations

import copy
import json

import pytest
from synthetic import make_trace

from specviz.museum.desk import RECORDED
from specviz.museum.faults import LAW_FAULTS, TEXT_FAULTS
from specviz.trace import dumps

pytestmark = pytest.mark.browser
RESULTS = json.loads(RECORDED.read_text(encoding="utf-8"))

MOUNT = """([results, states]) => {
  window.asked = [];
  let looks = 0;
  const museum = states && (async message => {
    asked.push(message);
    if (message.do === 'start') { looks = 0; return {job: 'one'}; }
    const at = Math.min(looks++, states.length - 1);
    return typeof states[at] === 'string' ? {state: null, error: states[at], done: true, waiting: 0}
      : {state: states[at], error: '', done: at === states.length - 1, waiting: states[at] ? 0 : 2};
  });
  window.viewer = SpecViz.mount(document.getElementById('viewer'),
    {library: async name => name === 'museum' ? {results} : {error: 'nothing else is here'}, ...(museum ? {museum} : {})});
}"""


def open_viewer(page, view, states=None, results=None):
    page.evaluate(MOUNT, [results or RESULTS, states])
    page.evaluate("name => viewer.openView(name)", view)
    page.wait_for_selector(".sv-meter-facts")


def fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_every_fault_turns_the_meter_red_and_says_why(page):
    """Without a server: the recorded results of all switches, by keyboard; each has its lines, its reason and a meter that tells. 390 px too."""
    open_viewer(page, "break")
    names = page.eval_on_selector_all(".sv-switch", "list => list.map(one => one.dataset.fault)")
    assert names == ["", *LAW_FAULTS, *TEXT_FAULTS] and page.inner_text(".sv-run-note").startswith("Recorded results")
    page.wait_for_function("document.querySelectorAll('.sv-light.is-red').length === 8")
    assert page.locator(".sv-meter.is-green").count() == 1 and not page.locator(".sv-fault-head .sv-btn").is_visible()
    page.focus(".sv-switch[aria-checked=true]")
    why = set()
    for name in names[1:]:
        page.keyboard.press("ArrowDown")
        page.wait_for_selector(".sv-meter.is-red")
        assert page.evaluate("document.activeElement.dataset.fault") == name == page.get_attribute(".sv-switch[aria-checked=true]", "data-fault")
        assert page.locator(".sv-line.is-wrong code").inner_text() != page.locator(".sv-line.is-right code").inner_text()
        why.add(page.inner_text(".sv-because > p"))
        if name in TEXT_FAULTS:
            assert page.locator(".sv-both.is-first").count() == 1
            assert page.get_attribute(".sv-both.is-first", "data-at") == str(RESULTS[name]["index"])
        else:
            assert page.locator(".sv-pairs > i").count() == 64 and page.locator(".sv-words tbody tr").count() == 8
            assert page.inner_text(".sv-meter-facts dd >> nth=0") == f"{RESULTS[name]['reading']['chi_square']:.1f}"
    assert len(why) == 8
    for width in (1400, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert fits(page)


def test_a_proof_streams_in(page):
    """With a server: one click asks for the draws; the queue, the growing counts and the fractions are shown in turn; errors are sentences."""
    whole = RESULTS["rejection chain"]
    part = copy.deepcopy(whole)
    del part["exact"]
    part["counts"] = [count // 3 for count in whole["counts"]]
    hostile = copy.deepcopy(whole)
    hostile["words"][2] = " <img src=x onerror=window.pwned=1>"
    open_viewer(page, "exact", [None, part, hostile])
    page.select_option(".sv-field select >> nth=0", "block")
    assert page.eval_on_selector_all(".sv-field >> nth=1 >> option", "list => list.filter(one => one.disabled).length") == 2
    page.select_option(".sv-field select >> nth=0", "rejection")
    page.evaluate("""() => { window.notes = []; new MutationObserver(() => notes.push(document.querySelector('.sv-run-note').textContent))
        .observe(document.querySelector('.sv-run-note'), {childList: true, characterData: true, subtree: true}); }""")
    page.click(".sv-prove .sv-primary")
    page.wait_for_function("document.querySelector('.sv-run-note').textContent === SpecViz.WORDS.museum.live")
    notes = page.evaluate("notes")
    assert any("2 before" in note for note in notes) and any(f"{sum(part['counts'])} of 6000" in note for note in notes)
    asked = page.evaluate("asked")
    assert asked[0]["do"] == "start" and asked[0]["request"]["rule"] == "rejection" and asked[0]["request"]["num_texts"] == 6000
    assert "all 64 texts" in page.inner_text(".sv-exact-note") and page.evaluate("window.pwned") is None
    assert page.locator(".sv-prove .sv-primary").is_enabled() and "<img" in page.inner_text(".sv-words")
    open_viewer(page, "break", ["The worker is gone. Try again."])
    page.click(".sv-switch >> nth=1")
    page.wait_for_function("document.querySelector('.sv-run-note').textContent.includes('The worker is gone')")


def test_both_texts_of_a_run(page):
    """Greedy runs are compared token by token: the same, a first difference with its margin, a tie; sampling says why it is not compared."""
    page.evaluate("name => viewer.openView(name)", "exact")
    assert page.locator(".sv-same-head.is-wait").count() == 1 and page.locator(".sv-prove").count() == 0      # no server and no recorded results

    def head(data):
        page.evaluate("trace => viewer.take({type: 'trace', run: Math.random().toString(), seq: 0, trace, status: 'recorded'})", data)
        page.wait_for_function("n => viewer.state().numSteps === n && !viewer.state().pending", arg=len(data["steps"]))
        return page.inner_text(".sv-same-head strong")
    same = json.loads(dumps(make_trace(30, greedy=True)))
    assert head(same).startswith("Yes, token for token") and page.locator(".sv-both.is-first").count() == 0
    assert page.locator(".sv-both").count() == len(same["plain"]) and "closest call" in page.inner_text(".sv-same")
    for margin, tie, words in ((0.3, False, "No: it differs from token 21 on"), (1e-5, True, "A rounding tie at token 21")):
        other = copy.deepcopy(same)
        other["plain"][20] |= {"id": 1, "text": " <b>other</b>", "margin": margin}
        other["compare"] |= {"identical": False, "index": 20, "tokens": 20, "margin": margin, "tie": tie, "plain": {"id": 1, "text": " other"},
                             "speculative": {"id": 2, "text": " ours"}}
        assert head(other) == words and page.get_attribute(".sv-both.is-first", "data-at") == "20" and "<b>other</b>" in page.inner_text(".sv-both.is-first")
    page.click(".sv-both.is-first")
    assert page.evaluate("viewer.state().tab") == "tokens" and page.evaluate("viewer.state().at") > 0
    page.evaluate("name => viewer.openView(name)", "exact")
    assert head(json.loads(dumps(make_trace(10)))).startswith("The same law") and page.locator(".sv-both").count() == 0
    page.set_viewport_size({"width": 390, "height": 800})
    assert fits(page)
