"""Lessons, links, projector, export and the static site, by double click: pages of their own from the disk, with every request watched."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import make_trace

from specviz.ui.static import run_page, write_site

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
HOSTILE = '</script><img src=x onerror="window.pwned=1">${window.pwned=1}{{scripts}}<!--\u2028<script>window.pwned=1</script>'


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    write_site(out)
    return (out / "index.html").as_uri()


@pytest.fixture
def tab(chromium):
    """Opens pages from the disk. Afterwards: no console error, no page error, and no request but for files."""
    problems, asked, contexts, expected = [], [], [], []

    def open_page(address, width=1400, height=1000, **more):
        context = chromium.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce", accept_downloads=True, **more)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)        # a busy machine is no fault of the page
        page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address, timeout=60_000)            # with charts inside, 5 MB of script are read first
        page.wait_for_selector("#viewer[data-ready='1']")
        return page
    open_page.asked, open_page.expected = asked, expected
    yield open_page
    for context in contexts:
        context.close()
    assert [problem for problem in problems if problem not in expected] == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


SEEN = """() => {
  const seen = selector => [...document.querySelectorAll(selector)].some(node => node.checkVisibility({visibilityProperty: true}));
  return {...viewer.host.lesson.now(), view: viewer.state().tab, at: viewer.state().at, trace: viewer.host.message().name,
    pointed: seen('.sv-pointed'),
    verdicts: seen('.sv-why .sv-verdict, .sv-tree .is-mark, .sv-main .sv-verdict'), figures: seen('.sv-head-value, .sv-race'),
    said: document.querySelector('.sv-sr').textContent, next: !document.querySelector('.sv-next').disabled,
    problem: document.querySelector('.sv-problem').textContent};
}"""

ARRIVED = """([id, stop, at]) => {
  const now = viewer.host.lesson.now(), dot = document.querySelector('.sv-lesson-head [aria-current]');
  return now && now.id === id && now.stop === stop && viewer.state().at === at && dot && [...dot.parentNode.children].indexOf(dot) === stop - 1;
}"""


def test_every_lesson_plays_to_its_end(tab, site):
    """By keyboard alone: each stop shows its recording, step, view and focus; what a question asks for is hidden until it is answered."""
    page = tab(site)
    page.click("#site-learn")
    lessons = page.evaluate("viewer.host.course()")["lessons"]
    page.click(f"[data-lesson={lessons[0]['id']}]")
    for lesson in lessons:
        for number, stop in enumerate(lesson["stops"], 1):
            page.wait_for_function(ARRIVED, arg=[lesson["id"], number, stop["step"]])
            where = f"{lesson['id']}, stop {number}"
            if question := stop.get("question"):
                page.keyboard.press("n")
                before = page.evaluate(SEEN)
                assert before["stop"] == number and not before["next"], f"{where}: went on without an answer"
                if question["hides"] == "step":
                    assert not before["verdicts"] and "accepted" not in before["said"], f"{where}: the verdict is in sight"
                if question["hides"] == "figures":
                    assert not before["figures"], f"{where}: the figures are in sight"
                page.keyboard.press(str(question["answer"] + 1))
                page.wait_for_selector(".sv-choice.is-right")
                assert page.inner_text(".sv-answer").startswith("Right.")
            now = page.evaluate(SEEN)
            assert (now["view"], now["trace"], now["problem"], now["next"]) == (stop["view"], stop["trace"], "", True), where
            assert now["pointed"] or not stop["focus"], f"{where}: {stop['focus']} was not found"
            page.keyboard.press("n")
    page.wait_for_selector(".sv-lessons .is-done")
    assert page.locator(".sv-lessons .is-done").count() == len(lessons)
    page.wait_for_function("() => location.hash === '#view=learn'")
    page.reload()
    page.wait_for_selector(".sv-lessons .is-done")                  # the address still says Learn, and the progress was kept


def test_a_phone_by_double_click(tab, site):
    """The site's first view is a coloured answer without the chart library; a wrong prediction is answered; nothing scrolls sideways."""
    page = tab(site, 390, 844, color_scheme="dark")
    assert page.evaluate("document.body.classList.contains('dark')") and page.locator(".sv-strip .sv-tok").count() > 20
    assert not any("plotly" in url for url in tab.asked), "4.8 MB before anything is asked for"
    page.goto(site + "#lesson=acceptance&stop=4")
    page.wait_for_selector(".sv-choice")
    answer = page.evaluate("viewer.host.course()")
    right = next(lesson for lesson in answer["lessons"] if lesson["id"] == "acceptance")["stops"][3]["question"]["answer"]
    page.locator(".sv-choice").nth(1 - right).click()
    page.wait_for_selector(".sv-choice.is-wrong")
    assert "Not quite" in page.inner_text(".sv-answer")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.goto(site + "#view=learn&page=teacher")
    page.wait_for_selector(".sv-prose h1")
    tab_at = page.locator(".sv-views [aria-selected=true]").bounding_box()
    assert 0 <= tab_at["x"] and tab_at["x"] + tab_at["width"] <= 390, "the chosen tab is out of sight"
    assert page.locator(".sv-prose table").count() >= 2 and page.evaluate("document.documentElement.scrollWidth") <= 390


def test_links_and_projector(tab, site):
    """The address follows what is shown and brings it back; projector mode shows one view, large, and Escape leaves it."""
    page = tab(site + "#trace=story-draft_tree&step=5&view=tree&phase=judge")
    page.wait_for_function("() => viewer.state().at === 5 && viewer.state().tab === 'tree' && viewer.state().phase === 'judge'")
    page.keyboard.press("Tab")
    page.evaluate("viewer.visit(3)")
    page.wait_for_function("() => location.hash.includes('step=3') && location.hash.includes('trace=story-draft_tree')")
    page.evaluate("location.hash = 'trace=1-add_commas-prompt_lookup&step=2'")
    page.wait_for_function("() => viewer.host.message().name === '1-add_commas-prompt_lookup' && viewer.state().at === 2"
                           " && viewer.state().tab === 'tokens'")
    size = "getComputedStyle(document.querySelector('.sv-strip')).fontSize"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("p")
    page.wait_for_function("() => document.querySelector('.sv.projector') && location.hash.includes('projector=1')")
    assert not page.is_visible(".sv-heads") and not page.is_visible(".sv-charts") and page.is_visible(".sv-strip") and page.evaluate(size)
    assert page.evaluate("document.querySelector('.sv-strip .sv-tok').getBoundingClientRect().height") > 25
    page.keyboard.press("Escape")
    page.wait_for_function("() => !document.querySelector('.sv.projector') && !location.hash.includes('projector')")
    tab.expected.append("Failed to load resource: net::ERR_FILE_NOT_FOUND")
    page.evaluate("location.hash = 'trace=not_there'")
    page.wait_for_function("() => document.querySelector('.sv-problem').textContent.includes('not_there')")
    assert page.evaluate("viewer.host.message().name") == "1-add_commas-prompt_lookup"
    page.evaluate("location.hash = 'lesson=bonus&stop=2'")
    page.wait_for_selector(".sv-pointed")
    page.evaluate("viewer.take({type: 'start', run: 'live', seq: 0, meta: {}, status: 'active'})")      # a live run is no place to link to
    page.wait_for_function("() => !viewer.host.lesson.now() && location.hash === ''")
    assert not page.is_visible(".sv-lesson-card")


def hostile_trace():
    trace = make_trace(12, seed=4)
    steps = list(trace.steps)
    steps[3] = replace(steps[3], emitted=tuple(replace(token, text=HOSTILE) for token in steps[3].emitted),
                       nodes=tuple(replace(node, text=HOSTILE) for node in steps[3].nodes))
    return replace(trace, steps=tuple(steps), meta=trace.meta | {"title": HOSTILE, "target": HOSTILE})


INERT = """() => [window.pwned === undefined, document.querySelectorAll('img').length, document.scripts.length,
                  document.querySelectorAll('.sv').length]"""


def test_an_exported_run_is_alone_and_inert(page, tab, tmp_path):
    """Exported in the browser and by the command: one file, no request, hostile text stays text, links reach a step; it exports itself."""
    from specviz.ui.bodies import look, trace_file
    trace = hostile_trace()
    message = {"v": 1, "type": "trace", "run": "a", "seq": 0, "status": "recorded", "trace": trace_file(trace)} | look("/plotly.min.js")
    page.evaluate("message => viewer.take(message)", message)
    page.wait_for_function("() => viewer.state().numSteps === 13")
    files = {}
    for name, charts in (("small", False), ("large", True)):
        page.set_checked(".sv-export-charts input", charts)
        with page.expect_download() as got:
            page.click(".sv-export")
        files[name] = tmp_path / f"{name}.html"
        got.value.save_as(files[name])
    files["command"] = tmp_path / "command.html"
    files["command"].write_text(run_page(trace, charts=False), encoding="utf-8")
    assert files["small"].stat().st_size < 500_000 < 4_000_000 < files["large"].stat().st_size
    for name, file in files.items():
        alone = tab(file.as_uri() + "#step=3&view=why")
        alone.wait_for_function("() => document.querySelector('.sv').dataset.view === 'why'")
        alone.wait_for_function("() => document.querySelector('.sv-label').textContent.includes('step 3 of')")
        assert HOSTILE.split("\u2028")[0] in alone.inner_text(".sv-why"), name
        assert alone.evaluate(INERT) == [True, 0, 3 if name == "large" else 2, 1], name
        if name == "large":
            alone.click("[data-view=tokens]")
            alone.wait_for_selector(".sv-charts .js-plotly-plot")
        if name == "command":
            with alone.expect_download() as got:
                alone.click(".sv-export")
            assert "SpecViz.open(" in Path(got.value.path()).read_text(encoding="utf-8")
    assert [url for url in tab.asked if not url.startswith(("data:", "blob:")) and Path(url.split("#")[0]).suffix != ".html"] == []
