"""Why and Tree: one step as a decision and as a tree, phase by phase; selection, keyboard and phones, in a real browser."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import make_trace
from test_viewer import HOSTILE, count, show, state

from specviz import metrics
from specviz import trace as records
from specviz.trace import CacheTrace, EmittedToken, NodeTrace, StepTrace

pytestmark = pytest.mark.browser


def rejected_step(trace):
    return next((i, s) for i, s in enumerate(trace.steps) if any(n.state == "rejected" for n in s.nodes) and len(s.emitted) > 1)


def open_step(page, trace, view, i):
    show(page, trace)
    page.evaluate("([view, i]) => { viewer.visit(i); viewer.openView(view); }", [view, i])


def seen(page, selector):
    """Whether the first match is visible, and its place: what belongs to a later phase keeps its place unseen."""
    return page.evaluate("s => { const n = document.querySelector(s); return getComputedStyle(n).visibility === 'visible'; }", selector)


def test_why_walks_through_the_phases(page):
    """Draft, verify, judge, emit with the down key: q, then p, then verdict, then outcome come into sight, and no box moves."""
    trace = make_trace(30, seed=1)
    i, step = rejected_step(trace)
    open_step(page, trace, "why", i)
    boxes = """[...document.querySelectorAll('.sv-why :is(.sv-why-card, .sv-row, .sv-ribbon, .sv-phases)')]
      .map(n => Object.values(n.getBoundingClientRect().toJSON()))"""
    full = page.evaluate(boxes)
    page.click("[data-phase=draft]")
    row = ".sv-why button.sv-row "
    parts = (row + ".sv-fill.is-q", row + ".sv-fill.is-p", row + ".sv-verdict", ".is-outcome .sv-result")
    for phase, name in enumerate(("draft", "verify", "judge", "emit")):
        assert state(page)["phase"] == name and [seen(page, part) for part in parts] == [True, phase > 0, phase > 1, phase > 2]
        assert page.get_attribute(f".sv-phase-step[data-phase={name}]", "aria-current") == "step"
        assert page.evaluate(boxes) == full
        if phase == 0:
            page.focus(".sv-why .sv-row[data-node='0']")
        if phase < 3:
            page.keyboard.press("ArrowDown")
    assert page.inner_text(".sv-ribbon-new").replace("⏎", "\n").strip() == "".join(t.text for t in step.emitted).strip()
    page.keyboard.press("ArrowDown")
    assert state(page)["at"] == i + 1 and state(page)["phase"] == "draft"
    page.keyboard.press("ArrowUp")
    assert state(page)["at"] == i and state(page)["phase"] == "emit"


def test_why_shows_every_decision_with_its_sum(page):
    """A row per draft, the sum in numbers of the record, residual and correction, mask and caches of this step, the formula's source."""
    trace = make_trace(30, seed=1)
    i, step = rejected_step(trace)
    open_step(page, trace, "why", i)
    assert count(page, ".sv-why button.sv-row") == len(step.nodes)
    k, node = next((k, n) for k, n in enumerate(step.nodes) if n.state == "rejected")
    number = lambda x: f"{x:.3f}"[1:]
    assert f"min(1, {number(node.p)} / {number(node.q)}) = {number(node.accept_prob)}" in page.inner_text(".sv-worked")
    assert "rejected" in page.inner_text(".sv-worked") and step.emitted[-1].text.strip() in page.inner_text(".sv-residual-part")
    page.click(".sv-why .sv-row[data-node='0']")
    assert state(page)["node"] == 0 and "accepted" in page.inner_text(".sv-worked")
    fed = len(step.nodes) + 1
    assert count(page, ".sv-mask .is-seen") == fed * (fed + 1) // 2                      # a chain: a full triangle
    kept = step.kv["target"].after - step.kv["target"].before
    assert count(page, ".is-cache .sv-cache:nth-of-type(2) .is-kept") == kept
    page.click(".sv-why .sv-info")
    text = page.inner_text(".sv-why .sv-about")
    assert metrics.FORMULAS["rejection"].formula in text and metrics.FORMULAS["residual"].source in text
    page.keyboard.press("Escape")
    assert not page.is_visible(".sv-why .sv-about")


def test_why_in_a_greedy_run_and_without_a_draft(page):
    """Greedy asks for the argmax and names it; prompt, plain and remote steps are explained."""
    trace = make_trace(20, greedy=True, seed=2)
    remote = StepTrace("unknown", 90.0, 0.0, 30.0, 0.0, emitted=(EmittedToken(None, " and so on", "draft", 3),), num_drafted=4,
                       num_accepted=3)
    trace = replace(trace, steps=(*trace.steps, remote), stats=None, compare=None)
    i = next(i for i, s in enumerate(trace.steps) if any(n.state == "rejected" for n in s.nodes))
    open_step(page, trace, "why", i)
    top = next(t for t in trace.steps[i].top if t.at == next(n.parent for n in trace.steps[i].nodes if n.state == "rejected"))
    assert f"argmax equal? No: the target’s most probable token is “{top.rows[0][1].strip()}”" in page.inner_text(".sv-worked")
    for at, words in ((0, "40 prompt tokens"), (21, "neither the rejected tokens")):
        page.evaluate("i => viewer.visit(i)", at)
        assert words in page.inner_text(".sv-why")


def test_the_mask_of_a_tree_is_ancestors_only(page):
    """A node of a tree sees itself, its ancestors and the last token; siblings do not see each other."""
    trace = make_trace(6, tree=True)
    open_step(page, trace, "why", 2)
    nodes, pairs = trace.steps[2].nodes, 1
    for node in nodes:
        pairs, parent = pairs + 2, node.parent
        while parent >= 0:
            pairs, parent = pairs + 1, nodes[parent].parent
    assert count(page, ".sv-mask .is-seen") == pairs


def test_tree_is_drawn_once_per_node_and_linked(page):
    """Every node, the text so far and the token behind the drafts; bold path; arrows walk; the choice is the same in Tokens and Why."""
    trace = make_trace(6, tree=True)
    step = trace.steps[2]
    open_step(page, trace, "tree", 2)
    assert count(page, "[role=tree] [role=treeitem]") == len(step.nodes) + 2
    path = sum(node.state == "accepted" for node in step.nodes)
    assert count(page, "[role=tree] g.is-accepted") == count(page, "[role=tree] path.is-accepted") == path
    overlaps = page.evaluate("""() => {
      const all = [...document.querySelectorAll('[role=treeitem] rect')].map(r => r.getBoundingClientRect());
      const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
      return all.some((a, i) => all.some((b, j) => i < j && meet(a, b)));
    }""")
    assert not overlaps
    page.check(".sv-tree-probs input")
    assert count(page, "[role=tree] .is-p") == len(step.nodes)
    page.focus("[role=treeitem][tabindex='0']")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    chosen = state(page)["node"]
    assert chosen == "end" or step.nodes[chosen].parent == -1
    assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    assert count(page, "[aria-selected=true][role=treeitem]") == 1
    page.click("[role=treeitem][data-n='0']")
    page.click("[data-view=why]")
    assert page.get_attribute(".sv-why .sv-row.is-chosen", "data-node") == "0"
    page.click(".sv-views [data-view=tokens]")
    page.evaluate("() => viewer.choose('end')")
    assert page.text_content(".sv-strip .chosen") == step.emitted[-1].text
    page.click("[data-view=tree]")
    page.evaluate("viewer.choose(null)")
    page.fill(".sv-tree-threshold input", "0.5")
    judged = sum(node.state != "unjudged" for node in step.nodes)
    assert judged + 2 <= count(page, "[role=tree] [role=treeitem]") <= len(step.nodes) + 2


def test_a_chain_and_a_lookahead_window_are_drawn_as_such(page):
    """A chain is one row with its correction beside the rejected draft; window entries stand in rows under the place they guess."""
    trace = make_trace(20, seed=1)
    i, step = rejected_step(trace)
    open_step(page, trace, "tree", i)
    assert count(page, "[role=tree] [role=treeitem]") == len(step.nodes) + 2
    parents = [-1, 0, 1, 0, 1, 2]                 # W 3, N 3: a chain, and a second row that hangs off it
    window = tuple(NodeTrace(k, f" w{k}", parent, "window") for k, parent in enumerate(parents))
    ahead = StepTrace("plain", 0.0, 1.0, 9.0, 0.0, window, (EmittedToken(9, " yes", "plain"),), "no guess",
                      {"target": CacheTrace(40, 7, 41)}, num_pooled=3)
    open_step(page, replace(trace, steps=(trace.steps[0], ahead), stats=None, compare=None), "tree", 1)
    place = page.evaluate("""[...document.querySelectorAll('g.is-window')].sort((a, b) => a.dataset.n - b.dataset.n).map(g => {
      const box = g.getBoundingClientRect(); return [Math.round(box.left), Math.round(box.top)]; })""")
    left, top = [x for x, _ in place], [y for _, y in place]
    assert top[:3] == [top[0]] * 3 and top[3:] == [top[3]] * 3 and top[3] > top[0]
    assert left[0] < left[1] < left[2] and left[3:5] == left[1:3]
    assert "window of 6" in page.inner_text(".sv-tree-bar")


def test_a_large_tree_is_folded_until_asked_for(page):
    """Of many nodes that were never judged only a count is shown; the whole tree is one click away; a monstrous one is cut and says so."""
    first = [NodeTrace(k, f" a{k}", -1, "accepted" if k == 1 else "rejected", p=float(k == 1)) for k in range(3)]
    below = [NodeTrace(k, f" b{k}", k % 3 if k < 6 else k - 6, "unjudged", q_t1=.1) for k in range(3, 43)]
    step = StepTrace("spec", 0.0, 1.0, 9.0, 0.0, (*first, *below), (EmittedToken(1, " a1", "draft"), EmittedToken(9, " end", "correction")))
    start = make_trace(1).steps[0]
    open_step(page, replace(make_trace(1), steps=(start, step), stats=None, compare=None), "tree", 1)
    items = "[role=tree] [role=treeitem]"
    parents = [node.parent for node in (*first, *below)]
    assert count(page, items) == 2 + 3 + parents.count(1)
    shown_behind = page.evaluate("[...document.querySelectorAll('.is-behind')].reduce((sum, node) => sum + Number(node.textContent), 0)")
    assert shown_behind == 43 - 3 - parents.count(1) and count(page, "[aria-expanded=false][role=treeitem]") == count(page, ".is-behind")
    page.check(".sv-tree-whole input")
    assert count(page, items) == 2 + 43 and count(page, ".is-behind") == 0
    monster = tuple(NodeTrace(k, f" c{k}", k - 1 if k % 2 else max(-1, k - 2), "unjudged") for k in range(4000))
    large = replace(step, nodes=monster, emitted=(EmittedToken(9, " end", "correction"),))
    open_step(page, replace(make_trace(1), steps=(start, large), stats=None, compare=None), "tree", 1)
    page.evaluate("viewer.openView('why')")
    assert count(page, items) <= 502 and "not shown" in page.text_content(".sv-tree-bar")
    assert "too many for a picture" in page.inner_text(".is-mask")


def test_the_text_catches_up_when_it_is_shown_again(page):
    """Steps taken in another view are found selected and in sight in Tokens; the window of spans follows after a moment."""
    show(page, make_trace(600, plain=False))
    few = page.evaluate("() => { viewer.openView('why'); viewer.visit(300); viewer.openView('tokens'); return viewer.state().numSpans; }")
    inside = """() => {
      const [box, at] = ['.sv-strip', '.sv-step.current'].map(name => document.querySelector(name).getBoundingClientRect());
      return at.top >= box.top && at.bottom <= box.bottom;
    }"""
    assert page.get_attribute(".sv-step.current", "data-i") == "300" and page.evaluate(inside)
    page.wait_for_function("n => viewer.state().numSpans > n", arg=few)
    assert page.evaluate(inside) and count(page, ".sv-step.current") == 1
    page.evaluate("document.querySelector('.sv-strip').scrollTop = 0")       # the selected step becomes bare text ...
    page.wait_for_function("!document.querySelector('.sv-step.current')")
    page.evaluate("viewer.visit(300)")                                       # ... and comes back when it is visited again
    assert page.evaluate(inside)


def test_hostile_text_in_why_and_tree(page):
    """Markup in tokens stays text in every view."""
    node = NodeTrace(1, HOSTILE, -1, "rejected", .5, .1, .2, .9)
    step = StepTrace("spec", 0, 1, 2, 0, (node,), (EmittedToken(2, HOSTILE, "correction"),), HOSTILE, {HOSTILE: CacheTrace(1, 2, 2)},
                     top=make_trace(1).steps[1].top[:1])
    trace = replace(make_trace(1), meta={"sampling": {"temperature": 1}, "verification": HOSTILE}, steps=(step,), stats=None, compare=None)
    for view in ("why", "tree"):
        open_step(page, trace, view, 0)
        for phase in range(4):
            page.evaluate("phase => viewer.setPhase(phase)", phase)
        assert HOSTILE in page.text_content(f".sv-{view}")
    assert count(page, "#viewer img, #viewer script") == 0 and page.evaluate("window.pwned === undefined")


@pytest.mark.parametrize("view", ["why", "tree"])
def test_phone_and_keys(page, view):
    """At 390 px nothing is wider than the page and everything to press is 44 px high; "?" lists the keys, Escape closes the list."""
    page.set_viewport_size({"width": 390, "height": 844})
    open_step(page, make_trace(12, tree=True), view, 4)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    heights = f"""[...document.querySelectorAll('.sv-{view} :is(.sv-btn, .sv-phase-step, button.sv-row, label), .sv-tab')]
      .filter(n => n.offsetParent).map(n => n.offsetHeight)"""
    assert min(page.evaluate(heights)) >= 44
    page.focus(".sv-phase-step[data-phase=emit]")
    page.keyboard.press("?")
    assert page.is_visible(".sv-help") and "accept or reject" in page.inner_text(".sv-help")
    page.keyboard.press("Escape")
    assert not page.is_visible(".sv-help") and not state(page)["live"]
    page.focus(f".sv-views [data-view={view}]")
    page.keyboard.press("ArrowLeft")
    assert state(page)["tab"] == {"why": "tokens", "tree": "why"}[view]


def test_white_space_on_demand(page):
    """Marks of white space are unseen until asked for, and asking moves no word."""
    show(page, make_trace(40))
    boxes = "[...document.querySelectorAll('.sv-strip .sv-tok')].map(n => Math.round(n.getBoundingClientRect().right))"
    before = page.evaluate(boxes)
    assert not seen(page, ".sv-strip .sv-ws")
    page.check(".sv-key-space input")
    assert seen(page, ".sv-strip .sv-ws") and page.evaluate(boxes) == before
    assert page.evaluate("getComputedStyle(document.querySelector('.sv-strip .has-space'), '::before').content") == '"·"'


def test_a_real_trace_has_every_view(page):
    """A recorded run of the real model goes through all views and phases without an error."""
    path = sorted((Path(__file__).resolve().parents[2] / "assets" / "traces").glob("*.json"))[0]
    trace = records.load(path)
    show(page, trace)
    text = page.evaluate("""n => ['why', 'tree'].flatMap(view => {
      viewer.openView(view);
      return Array.from({length: n}, (_, i) => {
        viewer.visit(i);
        for (let phase = 0; phase < 4; phase++) viewer.setPhase(phase);
        return document.querySelector('.sv-' + view).textContent.length;
      });
    })""", len(trace.steps))
    assert min(text) > 40
