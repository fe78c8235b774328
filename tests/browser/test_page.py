"""The whole page in headless Chromium over a scripted service: chat, stop, settings, themes, a phone's width, hostile text."""
from __future__ import annotations

import re
from urllib.parse import urlparse

import pytest
from fake_service import ANSWER, FakeService, Status

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=20_000)      # a busy machine is no fault of the page

SLOW_S, FAST_S = 0.12, 0.004
BOT = "#chat [data-testid=bot]"


def recorded():
    from specviz.engine.sampling import SamplingParams
    from specviz.service import ChatRequest
    run = FakeService(pause_s=0.002).submit(ChatRequest(({"role": "user", "content": "Hi"},), SamplingParams(), "prompt_lookup"))
    assert list(run) and list(run.measure_plain())
    return run.trace()


def serve(service, problem=""):
    import app
    from specviz.options import Options
    from specviz.ui.layout import build, launch
    from specviz.ui.recordings import Recording
    page = build(service, Recording(trace=recorded(), problem=problem))
    address, _ = launch(page, Options(browser=False), app.free_port("127.0.0.1", 0))
    return page, address


@pytest.fixture(scope="module")
def site():
    service = FakeService()
    page, address = serve(service)
    yield service, address
    page.close(verbose=False)


class Tab:
    """A page with what must never happen on it: console errors, page errors, requests that leave the machine."""

    def __init__(self, chromium, address, *, width=1400, height=900, query="?__theme=light"):
        self.problems, self.outside, self.mounts = [], [], []
        self.context = chromium.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.problems.append(str(e)))
        self.page.on("request", self._request)
        self.page.on("requestfailed", self._refused)
        self.page.goto(address + query)
        self.page.wait_for_selector("#viewer [data-ready='1']", state="attached")
        self.page.wait_for_selector("#header [data-ready='1']", state="attached")
        self.page.evaluate("window.__viewer = document.querySelector('#viewer [data-ready]')")

    def _request(self, request):
        url = urlparse(request.url)
        if url.scheme in ("http", "https", "ws", "wss") and url.hostname not in ("127.0.0.1", "localhost"):
            self.outside.append(request.url)

    def _refused(self, request):
        """A request that the page's own policy stopped has not left the machine."""
        if "csp" in (request.failure or "").lower() and request.url in self.outside:
            self.outside.remove(request.url)

    def send(self, text="Hello"):
        """Send, and wait until the question stands in the chat and its answer has begun."""
        asked = self.page.locator("#chat [data-testid=user]")
        number = asked.count()
        begun = "n => document.querySelector('#prompt .stop-button') || document.querySelectorAll('#chat [data-testid=bot]').length > n"
        answers = self.page.locator(BOT).count()
        self.page.fill("#prompt textarea", text)
        self.page.press("#prompt textarea", "Enter")
        expect(asked).to_have_count(number + 1)
        self.page.wait_for_function(begun, arg=answers)          # or `idle` would find the page idle still

    def idle(self):
        """Wait until the turn, plain measurement included, is over."""
        expect(self.page.locator("#prompt .stop-button")).to_have_count(0)
        expect(self.page.locator("#prompt .submit-button")).to_be_visible()

    def answer(self):
        return self.page.locator(BOT).first


@pytest.fixture
def tab(chromium, site, request):
    site[0].pause_s, site[0].answer, site[0].busy, site[0].fail_after = FAST_S, ANSWER, False, None
    opened = Tab(chromium, site[1], **getattr(request, "param", {}))
    yield opened
    opened.context.close()
    assert not opened.problems and not opened.outside


def test_first_view_is_a_recorded_run_that_plays(tab):
    """Nothing was asked yet: coloured text of a recording is on the screen, the model is ready, and there is one viewer."""
    page = tab.page
    expect(page.locator("#viewer")).to_contain_text("Speculative decoding")
    expect(page.locator("#status")).to_contain_text("ready · Tiny-1B")
    assert page.locator(".specviz-host").count() == 1
    expect(page.locator("#chat .example").nth(2)).to_be_visible()


def test_an_answer_appears_in_chat_and_viewer_with_its_figures(tab):
    """Enter sends; text, footer, status and viewer follow; the viewer is still the one that was mounted first."""
    tab.send("What is it?")
    tab.idle()
    expect(tab.answer()).to_have_text(ANSWER)
    expect(tab.page.locator("#chat .thought").first).to_contain_text("drafts accepted")
    expect(tab.page.locator("#chat .thought").first).to_contain_text("× plain decoding")
    expect(tab.page.locator("#status")).to_contain_text("speculation active · Prompt lookup · K 5 · Tiny-1B")
    expect(tab.page.locator("#viewer")).to_contain_text("only arrives sooner.")
    assert tab.page.evaluate("document.querySelector('#viewer [data-ready]') === window.__viewer")


def test_stop_keeps_the_text(tab, site):
    site[0].pause_s, site[0].answer = SLOW_S, 5 * (ANSWER + " ")
    tab.send()
    expect(tab.answer()).to_contain_text("Speculative decoding lets")
    tab.page.click("#prompt .stop-button")
    tab.idle()
    text = tab.answer().inner_text().strip()
    assert 0 < len(text) < 4 * len(ANSWER) and site[0].answer.startswith(text)
    expect(tab.page.locator("#chat .thought").first).to_contain_text("stopped")


def test_a_message_during_the_measurement_is_answered_at_once(tab, site):
    site[0].pause_s = SLOW_S
    tab.send("First")
    expect(tab.page.locator("#status")).to_contain_text("measuring plain")
    tab.send("Second")
    expect(tab.page.locator("#chat [data-testid=user]")).to_have_count(2)
    expect(tab.page.locator("#status")).to_contain_text("speculation active")
    num_plain = len(site[0].runs[-2].trace().plain)
    site[0].pause_s = FAST_S
    tab.idle()
    assert [m["content"] for m in site[0].requests[-1].messages] == ["First", ANSWER, "Second"]
    assert num_plain < len(site[0].runs[-2].trace().steps) * 5 and len(site[0].runs[-2].trace().plain) <= num_plain + 1


def asked(page, site, number):
    """Wait until the service has been asked `number` times: nothing on the page tells a new answer's beginning from the last one's end."""
    for _ in range(400):
        if len(site[0].requests) >= number:
            break
        page.wait_for_timeout(50)


def test_retry_undo_and_edit(tab, site):
    page = tab.page
    tab.send("Once")
    tab.idle()
    before = len(site[0].requests)
    page.click("#chat [aria-label=Retry]")
    asked(page, site, before + 1)
    tab.idle()
    assert len(site[0].requests) == before + 1 and site[0].requests[-1].messages[-1]["content"] == "Once"
    page.click("#chat [aria-label=Edit]")
    page.fill("#chat textarea", "Twice")
    page.click("#chat [aria-label=Submit]")
    expect(page.locator("#chat [data-testid=user]")).to_have_text("Twice")
    asked(page, site, before + 2)
    tab.idle()
    assert [m["content"] for m in site[0].requests[-1].messages] == ["Twice"]
    page.click("#chat [aria-label=Undo]")
    expect(page.locator(BOT)).to_have_count(0)
    expect(page.locator("#prompt textarea")).to_have_value("Twice")


def test_examples_run_and_clear_brings_them_back(tab, site):
    page = tab.page
    page.locator("#chat .example").first.click()
    expect(page.locator("#chat [data-testid=user]")).to_have_count(1)
    expect(tab.answer()).to_have_text(ANSWER)
    tab.idle()
    assert "lighthouse" in site[0].requests[-1].messages[-1]["content"]
    page.click("#chat [aria-label='Clear']")
    expect(page.locator("#chat .example").first).to_be_visible()
    expect(page.locator("#status")).to_contain_text("ready")


def test_hostile_and_marked_up_text_is_shown_literally(tab, site):
    """Tags in model text stay visible as text, run nothing and fetch nothing; code blocks keep theirs; Markdown still works."""
    site[0].answer = ("Use <b>bold</b> and <think>this</think> or <script>window.pwned=1</script> <img src=http://example.org/a.png "
                      "onerror=window.pwned=2> ${window.pwned=3} {{x}} ![pic](http://example.org/b.png) **strong**\n\n"
                      "```html\n<i>code</i>\n```\n"
                      "    ```\n![late](http://example.org/c.png)")
    tab.send("Give me <u>tags</u>")
    tab.idle()
    shown = tab.answer().inner_text()
    for part in ("<b>bold</b>", "<think>this</think>", "<script>window.pwned=1</script>", "<img src=", "${window.pwned=3}", "{{x}}",
                 "![pic](", "<i>code</i>"):
        assert part in shown
    assert tab.answer().locator("strong").inner_text() == "strong"
    expect(tab.page.locator("#chat [data-testid=user]")).to_contain_text("<u>tags</u>")
    assert tab.page.evaluate("window.pwned") is None
    tab.send("Next")
    tab.idle()
    assert site[0].requests[-1].messages[1]["content"] == site[0].answer
    tab.problems = [text for text in tab.problems if "Content Security Policy" not in text]      # that c.png is refused is the point


def test_settings_reach_the_model_and_greedy_disables_sampling(tab, site):
    page = tab.page
    page.click("#sampling button")
    expect(page.locator("#temperature input[type=range]")).to_be_disabled()
    page.click("#greedy input")
    expect(page.locator("#temperature input[type=range]")).to_be_enabled()
    page.fill("#temperature input[type=number]", "1.5")
    page.press("#temperature input[type=number]", "Tab")
    page.fill("#seed input", "42")
    page.press("#seed input", "Tab")
    page.fill("#k input[type=number]", "3")
    page.press("#k input[type=number]", "Tab")
    page.fill("#stop-strings textarea", "corrects")
    page.click("#system button")
    page.fill("#system-prompt textarea", "Be brief.")
    page.click("#measure-plain input")
    tab.send()
    tab.idle()
    request = site[0].requests[-1]
    assert (request.sampling.temperature, request.sampling.seed, request.k, request.sampling.stop) == (1.5, 42, 3, ("corrects",))
    assert request.messages[0] == {"role": "system", "content": "Be brief."}
    expect(page.locator("#chat .thought").first).to_contain_text("stop string found")
    assert not site[0].runs[-1].trace().plain
    page.click("#greedy input")
    expect(page.locator("#temperature input[type=range]")).to_be_disabled()
    page.click("#new-seed")
    page.wait_for_function("document.querySelector('#seed input').value !== '42'")


def test_unavailable_methods_say_why(tab, site):
    page = tab.page
    page.click("#method input")
    option = page.locator("[role=option][aria-label='Draft model · unavailable']")
    assert float(option.evaluate("e => getComputedStyle(e).opacity")) < 1
    option.click()
    expect(page.locator("#method-note")).to_contain_text("Unavailable: no draft model is loaded")
    page.click("#method input")
    page.locator("[role=option][aria-label='Medusa']").click()
    expect(page.locator("#method-note")).to_contain_text("Untrained: expect few accepted")
    tab.send()
    tab.idle()
    assert site[0].requests[-1].method == "medusa"


def test_a_method_s_own_options_are_set_and_sent(tab, site):
    """The panel shows the chosen method's options and no others; what is changed is in the request and the status line, and is forgotten with the
    method."""
    page = tab.page

    def choose(label):
        page.click("#method input")
        page.locator(f"[role=option][aria-label='{label}']").click()
    choose("Plain decoding")
    page.locator("#method-options button").first.click()
    expect(page.locator("#method-options-hint")).to_contain_text("This method has none")
    choose("Prompt lookup")
    panel, slider = page.locator("#method-options"), page.get_by_label("number input for Shortest match")
    expect(slider).to_have_value("2")
    expect(panel.get_by_label("Branches")).to_be_checked()
    expect(panel).to_contain_text("Tokens that must have appeared before.")
    slider.fill("7")
    slider.press("Tab")
    panel.get_by_label("Branches").uncheck()
    tab.send()
    tab.idle()
    assert dict(site[0].requests[-1].options) == {"min_match": 7, "branches": False}
    expect(page.locator("#status")).to_contain_text("min match 7, branches off")
    choose("Medusa")
    expect(panel.get_by_label("Tree")).to_have_value("best")
    expect(slider).to_have_count(0)
    choose("Prompt lookup")
    expect(slider).to_have_value("2")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_lossy_rule_is_chosen_with_open_eyes(tab, site):
    """The menu of rules has a note for each; a lossy one is called so in menu, note, status line, badge and charts."""
    page = tab.page
    page.click("#sampling button")
    page.click("#verification input")
    page.locator("[role=option]", has_text="Typical acceptance (lossy)").click()
    expect(page.locator("#verification-note")).to_contain_text("LOSSY")
    tab.send()
    tab.idle()
    assert site[0].requests[-1].verification == "typical"
    expect(page.locator("#status")).to_contain_text("Typical acceptance (lossy)")
    expect(page.locator("#viewer .sv-badge")).to_contain_text("Lossy")
    expect(page.locator("#viewer .sv-chart h3").first).to_contain_text("lossy verification")


@pytest.mark.parametrize("trouble", ["busy", "error"])
def test_trouble_is_told_and_the_chat_goes_on(tab, site, trouble):
    site[0].busy, site[0].fail_after = trouble == "busy", 2 if trouble == "error" else None
    tab.send("First")
    expect(tab.page.locator("#chat")).to_contain_text("Try again in a minute" if trouble == "busy" else "Choose a shorter answer")
    tab.idle()
    site[0].busy, site[0].fail_after = False, None
    tab.send("Second")
    tab.idle()
    expect(tab.page.locator(BOT, has_text="only arrives sooner.")).to_have_count(1)
    assert [m["content"] for m in site[0].requests[-1].messages] == ["Second"]


def test_theme_by_address_and_by_button(chromium, site):
    dark = Tab(chromium, site[1], query="?__theme=dark")
    ground = "getComputedStyle(document.querySelector('#viewer')).backgroundColor"
    is_dark = "document.body.classList.contains('dark')"
    assert dark.page.evaluate(is_dark)
    before = dark.page.evaluate(ground)
    dark.page.click("[data-theme]")
    assert not dark.page.evaluate(is_dark) and dark.page.evaluate(ground) != before
    again = dark.context.new_page()                 # another page of the same browser remembers the choice
    again.emulate_media(color_scheme="dark")
    again.goto(site[1])
    again.wait_for_selector("#header [data-ready='1']", state="attached")
    assert not again.evaluate(is_dark)
    dark.context.close()
    assert not dark.problems and not dark.outside


@pytest.mark.parametrize("tab", [dict(width=390, height=844)], indirect=True)
def test_a_phone_shows_one_view_at_a_time_at_full_width(tab):
    """No sideways scrolling in any view; the recording comes first; Run live leads to the chat; touch targets are 44 px high."""
    page = tab.page
    fits = "document.documentElement.scrollWidth <= window.innerWidth"
    expect(page.locator("#viewer")).to_be_visible()
    expect(page.locator("#chat")).to_be_hidden()
    assert page.evaluate(fits)
    page.click(".page-views [data-view=charts]")
    expect(page.locator("#viewer .sv-charts")).to_be_visible()
    expect(page.locator("#viewer .sv-strip")).to_be_hidden()
    assert page.evaluate(fits)
    page.click(".page-live")
    expect(page.locator("#chat")).to_be_visible()
    expect(page.locator("#viewer")).to_be_hidden()
    assert page.evaluate(fits)
    tab.send()
    tab.idle()
    expect(tab.answer()).to_have_text(ANSWER)
    for button in page.locator(".page-views button, #prompt .submit-button").all():
        assert button.bounding_box()["height"] >= 44
    page.click(".page-views [data-view=tokens]")
    expect(page.locator("#viewer .sv-strip")).to_contain_text("only arrives sooner.")
    assert page.evaluate(fits)
    page.click("#viewer .sv-views [data-view=charts]")         # the viewer's own charts, besides the page's
    expect(page.locator("#viewer .sv-charts-view .sv-charts")).to_be_visible()
    assert page.evaluate(fits)


def test_the_page_waits_for_its_model_without_a_reload(chromium):
    """Opened while loading: the recording plays, the status counts up, a question is refused kindly, and then the model is there."""
    service = FakeService(state="loading", message="Reading weights")
    page, address = serve(service, problem="The trace file x.json is broken <b>.")
    try:
        tab = Tab(chromium, address)
        expect(tab.page.locator("#status")).to_contain_text("loading: Reading weights 40 %")
        expect(tab.page.locator("#notice")).to_have_text("The trace file x.json is broken <b>.")
        tab.send("Already?")
        expect(tab.page.locator("#chat")).to_contain_text("not ready")
        service.status_now = Status("ready", "Ready.")
        expect(tab.page.locator("#status")).to_contain_text("ready · Tiny-1B")
        expect(tab.page.locator("#method input")).to_have_value(re.compile("Prompt lookup"))
        tab.page.click("#chat [aria-label=Retry]")
        expect(tab.answer()).to_have_text(ANSWER)
        tab.idle()
        tab.context.close()
        assert not tab.problems and not tab.outside
    finally:
        page.close(verbose=False)


def test_a_lesson_on_the_page(tab):
    """The Learn button opens the course without leaving the page; a lesson plays on a recording that the server sends, and gives the old view back."""
    page = tab.page
    shown = page.evaluate("document.querySelector('.sv-strip').textContent")
    page.click("[data-learn]")
    page.click("[data-lesson=residual]")
    page.wait_for_selector(".sv-choice")
    page.keyboard.press("3")
    page.wait_for_selector(".sv-choice.is-right")
    page.wait_for_function("location.hash.includes('lesson=residual&stop=1')")
    page.click(".sv-lesson-head .sv-icon")
    page.wait_for_function("text => document.querySelector('.sv-strip').textContent === text", arg=shown)
