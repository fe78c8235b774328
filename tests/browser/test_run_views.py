"""The views that work on recorded runs in headless Chromium: Charts, What if, Race, Compare. No server besides the page's own."""
from __future__ import annotations

import csv
import json
import re
from dataclasses import replace

import pytest
from synthetic import make_trace

from specviz import trace as records
from specviz.ui import charts
from specviz.ui.recordings import bundled
from specviz.ui.bodies import formulas
from specviz.what_if import Recorded, guesses

pytestmark = pytest.mark.browser

COST = {"num_tokens": [1, 2, 4, 8, 16], "context_lengths": [0, 128, 1024], "draft_ms": 1.1, "measured": "2026-11-29T10:00:00",
        "verify_ms": [[10, 10.4, 11, 13, 20], [11, 11.5, 12.1, 14.2, 22], [14, 14.6, 15, 18, 30]]}
MEMORY = {"target_bytes": 168_000_000, "drafter_bytes": 20_000_000, "cache_bytes_per_token": 46_080, "drafter_cache_bytes_per_token": 5_000}


def show(page, trace, run="r", **more):
    file = {"format": "specviz-trace", "version": 1, "steps": [], "plain": []} | records.to_dict(trace)
    page.evaluate("message => viewer.take(message)", {"type": "trace", "run": run, "seq": 0, "trace": file, "status": "recorded",
                                                      "figures": charts.figures(), "plotly": "/plotly.min.js", "formulas": formulas()} | more)
    page.wait_for_function("viewer.state().run === run && !viewer.state().pending".replace("run &&", f"'{run}' &&"))


def told(trace, **meta):
    return replace(trace, meta=trace.meta | meta)


def test_browser_and_python_count_alike(page):
    """Every outcome of every draft length and factor is the same number in the browser as in `what_if.py`, on the recorded runs that come
    with the program and on chains and trees, sampled and greedy, with and without a table of costs, a plain run, and guesses that tell."""
    traces = [records.load(path) for path in bundled()]
    chain, tree = make_trace(40, seed=3, greedy=True), make_trace(25, seed=4, tree=True)
    mixed = replace(chain, steps=tuple(replace(step, draft_stop="confidence" if i % 3 else "length") for i, step in enumerate(chain.steps)))
    shared = replace(chain, steps=tuple(replace(step, num_rows=2) for step in chain.steps))
    traces += [told(chain, guesses_by_text=True), told(mixed, guesses_by_text=True, cost=COST), told(tree, cost=COST), make_trace(30, seed=5), shared,
               replace(chain, plain=()), told(chain, cost=COST | {"verify_ms": [[1]]}), make_trace(6, k=0)]
    kinds = set()
    for trace in traces:
        trace = records.loads(records.dumps(trace))         # rounded as in a file
        show(page, trace)
        ours = page.evaluate("""() => {
          const known = new SpecViz.Recorded(viewer.host.run), all = [];
          for (const depth of [0, 1, 2, 3, 5, 9, 14]) for (const [draft, verify] of [[1, 1], [.5, 1], [2, 0]]) {
            const {tokensPerStep, least, most, exact, speedUp} = known.outcome(depth, draft, verify);
            all.push([tokensPerStep, least, most, exact, speedUp]);
          }
          const best = known.best(10, 1, 1);
          return {all, costs: known.costs, depth: known.depth, isTree: known.isTree, best: best && best.depth, v: [1, 2, 3, 7, 20].map(n => known.v(n))};
        }""")
        known = Recorded(trace)
        theirs = [known.outcome(depth, *factors) for depth in (0, 1, 2, 3, 5, 9, 14) for factors in ((1, 1), (0.5, 1), (2, 0))]
        for mine, outcome in zip(ours["all"], theirs, strict=True):
            assert mine == pytest.approx([outcome.tokens_per_step, outcome.least, outcome.most, outcome.exact, outcome.speed_up], abs=1e-9)
        best = known.best(10)
        assert (ours["costs"], ours["depth"], ours["isTree"], ours["best"]) == (known.costs, known.depth, known.is_tree, best and best.depth)
        assert ours["v"] == pytest.approx([known.v(n) for n in (1, 2, 3, 7, 20)], abs=1e-9)
        kinds.add((known.costs, known.is_tree, guesses(trace) is not None))
    assert len(kinds) >= 5, "the traces must differ in what they tell"


def test_charts_view_draws_the_run(page):
    """Five charts with the run's own numbers, each with a formula and a source one click away; a run without costs, memory or drafts says
    what is missing; nothing is wider than a phone."""
    trace = told(make_trace(40, seed=3, greedy=True), cost=COST, memory=MEMORY, guesses_by_text=True)
    show(page, trace)
    page.click(".sv-views >> text=Charts")
    charts_of = "[...document.querySelectorAll('.sv-charts-view .sv-plot')]"
    page.wait_for_function(f"{charts_of}.length === 5 && {charts_of}.every(plot => plot.data)")
    data = page.evaluate(f"Object.fromEntries({charts_of}.map(plot => [plot.parentNode.dataset.chart, plot.data.map(one => [one.x, one.y])]))")
    stats, known = trace.stats, Recorded(trace)
    assert data["by_depth"][0][1] == pytest.approx(stats["acceptance_rate_alpha_by_depth"])
    assert dict(zip(*data["histogram"][0])) == {n: sum(len(s.emitted) == n for s in trace.steps[1:]) for n in data["histogram"][0][0]}
    assert data["verify_cost"][3] == [[6], [pytest.approx(stats["tokens_per_step"])]] and data["verify_cost"][1][1][5] == pytest.approx(known.v(6))
    assert data["prediction"][0][0] == pytest.approx([stats["speed_up"], known.outcome(5).speed_up, known.outcome(5, 1, 0).speed_up])
    entries = [trace.steps[-1].kv[name].after for name in ("target", "drafter")]
    assert data["memory"][0][0] == pytest.approx([168, 20, entries[0] * 0.04608, entries[1] * 0.005])
    page.click("[data-chart=verify_cost] .sv-info")
    assert "v(M) = T(M) / T(1)" in page.inner_text("[data-chart=verify_cost] .sv-about") and "measured on that machine" in page.inner_text(".sv-charts-view")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    show(page, make_trace(6, k=0), run="plain")
    for chart, why in (("by_depth", "Nothing was drafted in this run."), ("memory", "The recording does not say how much memory was held.")):
        page.evaluate(f"document.querySelector('[data-chart={chart}]').scrollIntoView()")
        page.wait_for_function(f"document.querySelector('[data-chart={chart}] .sv-chart-note').textContent === '{why}'")
    assert page.evaluate("document.querySelector('[data-chart=memory] .sv-plot').hidden")


def test_what_if_answers_with_its_degree_of_certainty(page):
    """K = 2 in a greedy run whose guesses tell is exact; verification for free moves the curve; the same run without that knowledge is an
    estimate; the best K is named and marked; a run without drafts has nothing to ask. The keyboard moves the slider."""
    trace = told(make_trace(40, seed=3, greedy=True), cost=COST, guesses_by_text=True)
    known = Recorded(trace)
    show(page, trace)
    page.click(".sv-views >> text=What if")
    page.click("text=K were 2?")
    tokens, speed = "[data-name=what_if_tokens]", "[data-name=what_if_speedUp]"
    assert page.inner_text(f"{tokens} .sv-tag") == "exact" and page.inner_text(f"{tokens} .sv-head-value") == f"{known.outcome(2).tokens_per_step:.2f}"
    assert page.inner_text(f"{speed} .sv-tag") == "estimate" and page.inner_text(f"{speed} .sv-head-value") == f"{known.outcome(2).speed_up:.2f}×"
    assert f"measured in this run: {trace.stats['speed_up']:.2f}" in page.inner_text(speed)
    page.click("text=verification were free?")
    assert page.inner_text(f"{speed} .sv-head-value") == f"{known.outcome(5, 1, 0).speed_up:.2f}×"
    plot = "document.querySelector('.sv-what-if .sv-plot')"
    page.wait_for_function(f"{plot} && {plot}.data")
    page.click("text=as recorded")
    best = known.best(10)
    assert f"Best for this run: K = {best.depth}" in page.inner_text(".sv-best")
    page.wait_for_function(f"{plot}.layout.annotations[0].text === 'best: K = {best.depth}'")
    assert page.evaluate(f"{plot}.data[0].y") == pytest.approx([known.outcome(k).speed_up for k in range(11)])
    page.focus(".sv-slide input >> nth=0")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".sv-slide-head b >> nth=0") == "6" and page.inner_text(f"{tokens} .sv-tag") in ("bounds", "exact")
    show(page, told(trace, guesses_by_text=False), run="b")
    page.wait_for_function(f"document.querySelector('{tokens} .sv-tag').textContent === 'estimate'")
    show(page, make_trace(6, k=0), run="c")
    page.wait_for_selector("text=Nothing was drafted in this run, so there is nothing to change.")


def test_race_replays_both_timelines_and_tells_who_won(page, tmp_path):
    """Each lane shows its own measured times; the winner, the factor and the overtaking follow from them, a loss as plainly as a gain; the
    clock runs at its speed, pauses and can be set; a second run of another text can race and the page says that texts differ."""
    slow, quick = make_trace(30, seed=7, greedy=True, hit=.3, plain_ms=6), make_trace(30, seed=2, greedy=True)
    show(page, slow, run="slow")
    show(page, quick, run="quick")
    page.click(".sv-views >> text=Race")
    times = [sum(step.draft_ms + step.verify_ms + step.other_ms for step in quick.steps[1:]), sum(token.ms for token in quick.plain[1:])]
    to_end = "(() => { const bar = document.querySelector('.sv-race-track input'); bar.value = 1000; bar.dispatchEvent(new Event('input')); })()"
    assert page.inner_text(".sv-verdict-line") == f"Ready: {len(quick.plain) - 1} tokens each." and "same machine" in page.inner_text(".sv-race-notes")
    page.evaluate(to_end)
    assert page.inner_text(".sv-watch >> nth=0") == f"{times[1] / 1000:.2f} s" and page.inner_text(".sv-watch >> nth=1") == f"{times[0] / 1000:.2f} s"
    assert f"against {times[1] / 1000:.2f} s, {quick.stats['speed_up']:.2f}× as fast" in page.inner_text(".sv-verdict-line")
    written = page.inner_text(".sv-race-text >> nth=0").replace("⏎", "")
    assert written.split() == "".join(token.text for token in quick.plain).split()
    page.select_option("[aria-label='Playback speed']:visible", "0.25")
    page.click(".sv-race-bar .sv-primary")
    page.wait_for_function("document.querySelector('.sv-verdict-line').textContent.includes('ahead')")      # one lane leads
    page.click(".sv-race-bar .sv-primary")
    stopped = page.inner_text(".sv-race-now")
    assert 0 < float(stopped.split()[0]) < times[1] / 1000 and page.inner_text(".sv-race-now") == stopped and re.search(r"\bone token\b|\btokens\b", page.inner_text(".sv-verdict-line"))
    page.select_option(".sv-pick >> nth=0", "run:slow|plain")
    page.wait_for_function("document.querySelector('.sv-verdict-line').textContent.startsWith('Ready')")
    page.select_option(".sv-pick >> nth=1", "run:slow|")
    page.wait_for_function("document.querySelector('.sv-verdict-line').textContent.startsWith('Ready')")
    page.evaluate(to_end)
    assert "Drafting lost time here." in page.inner_text(".sv-verdict-line") and page.inner_text(".sv-verdict-line").startswith("Plain decoding finished first")
    assert slow.stats["speed_up"] < 1 and f"{1 / slow.stats['speed_up']:.2f}× as fast" in page.inner_text(".sv-verdict-line")
    path = tmp_path / "other.json"
    other = make_trace(20, seed=11)
    records.save(told(replace(other, steps=other.steps[:1] + other.steps[2:]), prompt="Another question"), path)
    with page.expect_file_chooser() as chooser:
        page.select_option(".sv-pick >> nth=0", "file")
    chooser.value.set_files(path)
    page.wait_for_function("document.querySelector('.sv-pick').selectedOptions[0].textContent.includes('other')")
    page.wait_for_function("document.querySelector('.sv-race-notes').textContent.includes('prompts differ')")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_compare_runs_methods_and_exports_its_table(page, tmp_path):
    """One button asks for the ticked methods; progress is told, each finished trace becomes a row with its own figures on top of one plain
    row; a stopped or foreign comparison adds nothing; hostile names stay text; the table leaves as JSON, CSV and Markdown, each run as a
    trace; a run shows again in the viewer."""
    page.evaluate("""() => {
      const all = [['prompt_lookup', 'Prompt lookup', ''], ['suffix', '=cmd|<img src=x onerror=window.pwned=1>', ''], ['draft_model', 'Draft model', 'no draft model is loaded']];
      window.asked = [];
      window.viewer = SpecViz.mount(document.getElementById('viewer'), {compare: {methods: async () => all.map(([name, label, reason]) => ({name, label, summary: '', reason, note: ''})),
        start: wanted => asked.push(wanted), stop: ticket => asked.push(ticket)}});
    }""")
    labels = ["Prompt lookup", "=cmd|<img src=x onerror=window.pwned=1>"]
    traces = [told(make_trace(25, seed=seed, greedy=True, hit=hit), method_label=label, prompt="Explain") for seed, hit, label in ((3, .8, labels[0]), (4, .2, labels[1]))]
    show(page, traces[0])
    page.click(".sv-views >> text=Compare")
    page.wait_for_selector(".sv-box >> nth=2")
    assert page.input_value(".sv-text") == "Explain" and page.is_disabled(".sv-box input >> nth=2") and "no draft model is loaded" in page.inner_text(".sv-boxes")
    page.click(".sv-compare-go .sv-primary")
    wanted = page.evaluate("asked[0]")
    assert (wanted["prompt"], wanted["methods"], wanted["num_tokens"]) == ("Explain", ["prompt_lookup", "suffix"], 96)

    def tell(ticket, **body):
        page.evaluate("message => viewer.take(message)", {"type": "compare", "ticket": ticket} | body)

    def file(trace):
        return {"format": "specviz-trace", "version": 1, "steps": [], "plain": []} | records.to_dict(trace)
    tell(wanted["ticket"] + 5, at=0, trace=file(traces[0]))
    tell(wanted["ticket"], at=0, phase="answer", num_tokens=12)
    assert "1 of 2: Prompt lookup, 12 tokens" in page.inner_text(".sv-compare-go") and not page.query_selector(".sv-table")
    for at, trace in enumerate(traces):
        tell(wanted["ticket"], at=at, trace=file(trace))
    tell(wanted["ticket"], state="done")
    assert "Done: 2 compared." in page.inner_text(".sv-compare-go")
    cells = page.evaluate("[...document.querySelectorAll('.sv-table tbody tr')].map(row => [...row.children].map(cell => cell.firstChild && cell.firstChild.textContent))")
    assert [row[0] for row in cells] == ["plain decoding", *(f"{label}, K\xa05" for label in labels)]
    for row, trace in zip(cells[1:], traces, strict=True):
        stats = trace.stats
        assert row[2:5] == [f"{stats['speed_up']:.2f}×", f"{stats['tokens_per_step']:.2f}", f"{100 * stats['draft_acceptance_rate']:.0f} %"] and row[7] == "identical"
    assert page.locator(".sv-table .is-loss").count() == 1 and page.locator(".sv-spark").count() == 4

    texts = {}
    for kind in ("JSON", "CSV", "Markdown"):
        with page.expect_download() as download:
            page.click(f".sv-exports >> text={kind}")
        download.value.save_as(tmp_path / kind)
        texts[kind] = (tmp_path / kind).read_text(encoding="utf-8")
    rows = json.loads(texts["JSON"])["rows"]
    assert rows[2]["speed_up"] == pytest.approx(traces[1].stats["speed_up"]) and rows[0]["name"] == "plain decoding"
    [head, *lines] = csv.reader(texts["CSV"].splitlines())
    assert head[:3] == ["name", "tokens_per_s", "speed_up"] and float(lines[2][2]) == pytest.approx(traces[1].stats["speed_up"]) and lines[2][0].startswith("'=cmd")
    assert texts["Markdown"].count("\n| ") == 4 and "\\<img" in texts["Markdown"]
    with page.expect_download() as download:
        page.click("[aria-label^='Save the trace of this run: Prompt lookup']")
    download.value.save_as(tmp_path / "trace.json")
    assert records.load(tmp_path / "trace.json").steps == records.loads(records.dumps(traces[0])).steps

    page.click(".sv-compare-go .sv-primary")
    page.click(".sv-compare-go .sv-primary")
    assert page.evaluate("asked.at(-1) === asked.at(-2).ticket") and "Stopped" in page.inner_text(".sv-compare-go")
    tell(page.evaluate("asked.at(-1)"), at=0, trace=file(traces[0]))
    assert page.locator(".sv-table tbody tr").count() == 3
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390 and page.evaluate("window.pwned === undefined")
    page.click("[aria-label^='Show this run: =cmd']")
    assert page.evaluate("[viewer.state().tab, viewer.state().numSteps]") == ["tokens", len(traces[1].steps)]


def test_views_say_so_where_charts_or_the_plain_run_are_missing(page):
    """A page saved without its charts says that in both views, and the sliders work; a race of a run whose plain run was not measured says
    so and can still be run against another."""
    trace = told(replace(make_trace(12, seed=3, greedy=True), plain=(), stats=None), guesses_by_text=True)
    show(page, trace, figures=None, plotly=None)
    page.click(".sv-views >> text=Charts")
    assert "saved without its charts" in page.inner_text(".sv-charts-view")
    page.click(".sv-views >> text=What if")
    page.click("text=K were 2?")
    assert "saved without its charts" in page.inner_text(".sv-what-if") and "Times are missing" in page.inner_text(".sv-best")
    assert page.inner_text("[data-name=what_if_tokens] .sv-head-value") == f"{Recorded(trace).outcome(2).tokens_per_step:.2f}"
    page.click(".sv-views >> text=Race")
    page.wait_for_selector("text=Plain decoding was not measured in this run.")
