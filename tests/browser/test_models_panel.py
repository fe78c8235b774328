"""The Models panel in headless Chromium over a scripted service: choose, look, agree, load, fail, go on chatting, and look only."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fake_machine import pretend
from fake_service import ANSWER, OFFERS, FakeService
from test_page import BOT, Tab, recorded

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=30_000)         # looking at a real pair takes seconds on a busy machine


@pytest.fixture
def open_site(chromium):
    """Serves a page over a service and opens it with the panel unfolded; afterwards nothing bad was seen on any page."""
    made = []

    def make(service=None, *, read_only=False, unfold=True, **look):
        import app
        from specviz.options import Options
        from specviz.ui.layout import build, launch
        from specviz.ui.recordings import Recording
        service = service or FakeService(pause_s=0.004)
        page = build(service, Recording(trace=recorded()), read_only=read_only)
        address, _ = launch(page, Options(browser=False), app.free_port("127.0.0.1", 0))
        tab = Tab(chromium, address, **look)
        made.append((page, tab))
        if look.get("width", 1400) < 760:
            tab.page.click("#header .page-views [data-view=chat]")       # where the panel stands on a phone
        if unfold:
            tab.page.click("#models > button")
            expect(tab.page.locator("#models-cards label").first).to_be_visible()
        return service, tab
    yield make
    for page, tab in made:
        tab.context.close()
        page.close(verbose=False)
        assert not tab.problems and not tab.outside


def card(tab, name):
    return tab.page.locator("#models-cards label", has_text=name)


def test_every_card_says_what_it_takes_and_text_stays_text(open_site):
    """Fit, licence, download, memory and context of each; markup in a name is shown as it is written and runs nothing."""
    service, tab = open_site()
    expect(tab.page.locator("#models-cards label")).to_have_count(len(OFFERS))
    for words in ("Tiny-1B", "in use", "fits: 1.2 GB memory", "Apache-2.0", "on this machine", "context 2,048 tokens"):
        expect(card(tab, "Tiny-1B")).to_contain_text(words)
    expect(card(tab, "Tiny-1B").locator("input")).to_be_checked()
    hostile = card(tab, "Big-")
    for words in ("Big-<i>8B</i>", "5.1 GB to download", "needs an account", "<img src=x onerror=window.pwned=1>"):
        expect(hostile).to_contain_text(words)
    assert hostile.locator("i, img").count() == 0
    expect(card(tab, "Huge-70B")).to_contain_text("does not fit: needs 45.0 GB, 7.9 GB free")
    hostile.click()
    expect(tab.page.locator("#models-report")).to_contain_text("big/<b>eight</b> and None share one tokenizer.")
    assert tab.page.locator("#models-report b").count() == 0
    assert tab.page.evaluate("window.pwned") is None


def test_loading_another_model_during_a_chat(open_site):
    """The card brings its drafters and quantization; Load shows progress; the chat answers all the while; then the page is the new pair's."""
    service, tab = open_site()
    page = tab.page
    service.may_end.clear()
    tab.send("First")
    tab.idle()
    page.fill("#models-own textarea, #models-own input", "my/model")
    page.press("#models-own textarea, #models-own input", "Enter")
    expect(page.locator("#models-cards input:checked")).to_have_count(0)
    expect(page.locator("#models-report")).to_contain_text("my/model and None")
    page.click("#models-draft input")
    page.fill("#models-draft input", "my/draft")
    page.press("#models-draft input", "Enter")
    expect(page.locator("#models-report")).to_contain_text("my/model and my/draft")
    page.click("#models-load")
    expect(page.locator("#models-state")).to_contain_text("Reading my/model 50 %")
    expect(page.locator("#models-state")).to_contain_text("goes on answering")
    expect(page.locator("#models-load")).to_be_disabled()
    tab.send("Second")
    tab.idle()
    expect(page.locator(BOT, has_text="only arrives sooner.")).to_have_count(2)
    assert service.runs[-1].meta["target"] == "Tiny-1B"
    service.may_end.set()
    expect(page.locator("#status")).to_contain_text("ready · my/model")
    expect(page.locator("#models-state")).to_be_empty()
    expect(page.locator("#models-cancel")).to_be_disabled()
    [(choice, unload_first)] = service.loads
    assert (choice.target, choice.draft, choice.quantization, unload_first) == ("my/model", "my/draft", "auto", False)
    tab.send("Third")
    tab.idle()
    assert service.runs[-1].meta["target"] == "my/model"
    assert [m["content"] for m in service.requests[-1].messages] == ["First", ANSWER, "Second", ANSWER, "Third"]


def test_a_failing_load_shows_its_sentence_and_the_chat_goes_on(open_site):
    """The sentence stands in the panel, escaped; form, menu and chat are as they were."""
    service, tab = open_site()
    page = tab.page
    service.load_problems["my/model"] = "The weight file <b>model</b> is damaged or cut short; fetch it again."
    tab.send("First")
    tab.idle()
    page.fill("#models-own textarea, #models-own input", "my/model")
    page.press("#models-own textarea, #models-own input", "Enter")
    expect(page.locator("#models-report")).to_contain_text("my/model")
    page.click("#models-load")
    expect(page.locator("#models-state [role=alert]")).to_have_text(
        "The weight file <b>model</b> is damaged or cut short; fetch it again. The model in use stays.")
    expect(page.locator("#models-load")).to_be_enabled()
    expect(page.locator("#models-own textarea, #models-own input")).to_have_value("my/model")
    expect(page.locator("#status")).to_contain_text("Tiny-1B")
    tab.send("Second")
    tab.idle()
    expect(page.locator(BOT, has_text="only arrives sooner.")).to_have_count(2)
    assert service.runs[-1].meta["target"] == "Tiny-1B"


def test_nothing_large_is_fetched_unasked(open_site):
    """Without the tick, Load explains; with it, the load begins. What is impossible is never loaded; both that do not fit need a second tick."""
    from specviz.service import Inspection, Line
    service, tab = open_site()
    page = tab.page
    service.inspections["huge/model"] = Inspection((Line("bad", "Huge-70B needs 45 GB, and 7.9 GB are free."),))
    service.inspections["room/needed"] = Inspection((Line("note", "Tight."),), 0, fits_beside=False)
    card(tab, "Big-").click()
    consent = page.locator("#models-consent")
    expect(consent).to_contain_text("Download it: 5.1 GB")
    page.click("#models-load")
    expect(page.locator("#models-state")).to_contain_text("This would download 5.1 GB")
    assert not service.loads
    consent.locator("input").check()
    page.click("#models-load")
    expect(page.locator("#status")).to_contain_text("ready · Big-<i>8B</i>")
    assert service.loads[0][0].quantization == "nf4" and service.loads[0][0].draft is None
    card(tab, "Huge-70B").click()
    expect(page.locator("#models-report")).to_contain_text("needs 45 GB")
    expect(consent).to_have_count(0)
    page.click("#models-load")
    expect(page.locator("#models-state")).to_contain_text("needs 45 GB")
    page.fill("#models-own textarea, #models-own input", "room/needed")
    page.press("#models-own textarea, #models-own input", "Enter")
    expect(page.locator("#models-room")).to_be_visible()
    page.click("#models-load")
    expect(page.locator("#models-state")).to_contain_text("do not fit into memory")
    assert len(service.loads) == 1
    page.check("#models-room input")
    page.click("#models-load")
    expect(page.locator("#status")).to_contain_text("ready · room/needed")
    assert service.loads[1][1] is True


def test_cancel_and_unload(open_site):
    """Cancel ends the wait with the old pair in place; after Unload the status says so, questions are refused kindly, Load brings it back."""
    service, tab = open_site()
    page = tab.page
    service.may_end.clear()
    page.click("#models-load")
    expect(page.locator("#models-cancel")).to_be_enabled()
    page.click("#models-cancel")
    expect(page.locator("#models-cancel")).to_be_disabled()
    expect(page.locator("#models-load")).to_be_enabled()
    expect(page.locator("#status")).to_contain_text("ready · Tiny-1B")
    service.may_end.set()
    page.click("#models-unload")
    expect(page.locator("#status")).to_contain_text("No model is loaded")
    expect(page.locator("#models-unload")).to_be_disabled()
    tab.send("Hello?")
    expect(page.locator("#chat")).to_contain_text("Choose one under Models")
    page.click("#models-load")
    expect(page.locator("#status")).to_contain_text("ready · Tiny-1B")
    page.click("#chat [aria-label=Retry]")
    expect(tab.answer()).to_have_text(ANSWER)
    tab.idle()


def test_the_first_start_with_cuda_offers_one_click(open_site):
    """The panel opens by itself with one button that tells model and download; the click is the agreement."""
    service = FakeService(pause_s=0.004)
    service.suggested = OFFERS[1]
    _, tab = open_site(service, unfold=False)
    button = tab.page.locator("#models-suggest")
    expect(button).to_have_text("Load Big-<i>8B</i>: 5.1 GB to download")
    button.click()
    expect(tab.page.locator("#status")).to_contain_text("ready · Big-<i>8B</i>")
    assert service.loads[0][0].target == OFFERS[1].source and service.loads[0][0].quantization == "nf4"


@pytest.mark.parametrize("width", [1400, 390])
def test_an_idle_graphics_card_is_told_with_the_command(open_site, monkeypatch, width):
    """On Windows with an NVIDIA driver and a PyTorch without CUDA the page shows, above everything that can be unfolded, the command that
    the terminal prints, whole and without sideways scrolling."""
    from specviz.options import Options
    from specviz.placement import choose_placement
    from specviz.shelf import Shelf
    pretend(monkeypatch, driver=True, cuda_build=False, platform="win32")
    service = FakeService(pause_s=0.004)
    service.advice = Shelf(Options()).advice
    _, tab = open_site(service, unfold=False, width=width)
    notice = tab.page.locator("#models-notices .page-notice")
    expect(notice).to_be_visible()
    told = notice.inner_text()
    assert told in choose_placement("auto").notes                # what the terminal prints after loading
    assert ('.venv\\Scripts\\python -m pip install --force-reinstall "torch>=2.8,<=2.13.0" --index-url '
            "https://download.pytorch.org/whl/cu128") in told
    assert tab.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_shared_page_only_looks(open_site):
    """Cards can be read; there is nothing to press; the sentence says who decides."""
    service, tab = open_site(read_only=True)
    page = tab.page
    expect(page.locator("#models-read-only")).to_contain_text("only its operator chooses")
    for name in ("load", "cancel", "unload", "own", "draft", "suggest"):
        expect(page.locator(f"#models-{name}")).to_have_count(0)
    expect(card(tab, "Huge-70B").locator("input")).to_be_disabled()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_shows_the_panel_at_full_width(open_site, theme):
    """No sideways scrolling, buttons high enough for a finger."""
    _, tab = open_site(width=390, height=844, query=f"?__theme={theme}")
    card(tab, "Big-").click()
    expect(tab.page.locator("#models-consent")).to_be_visible()
    assert tab.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    for button in tab.page.locator("#models-buttons button").all():
        assert button.bounding_box()["height"] >= 40
    expect(tab.page.locator("#models > button")).to_have_text(re.compile("Models"))
    for panel in ("models", "server"):           # nothing to push sideways within them either
        assert tab.page.locator(f"#{panel}").evaluate("e => getComputedStyle(e).overflowX") == "hidden"
        assert tab.page.locator(f"#{panel} > button").evaluate("e => getComputedStyle(e).textAlign") == "left"


def test_switching_for_real(open_site, tmp_path):
    """The real service on tiny checkpoints: a switch in the middle of an answer, a load that fails, and the chat that goes on."""
    from tiny import save_tiny

    from specviz.local_service import LocalService
    from specviz.opening import open_engine
    from specviz.options import Options

    def endless(options, progress):
        opened = open_engine(options, progress)
        opened.eos_ids = frozenset()
        return opened
    first, second, broken = (save_tiny(tmp_path / name, family, seed) for name, family, seed in
                             (("one", "llama", 0), ("two", "qwen3", 3), ("broken", "llama", 4)))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4000])
    service = LocalService(Options(target=str(first), device="cpu", threads=1, cache_dir=tmp_path, offline=True, browser=False), endless)
    submit = service.submit
    service.submit = lambda request: submit(replace(request, sampling=replace(request.sampling, max_new_tokens=60)))
    own = "#models-own textarea, #models-own input"
    try:
        _, tab = open_site(service)
        page = tab.page
        expect(page.locator("#status")).to_contain_text("ready · one")
        expect(page.locator(own)).to_have_value(str(first))
        page.click("#measure-plain input")
        for folder, words in ((broken, "damaged or cut short"), (second, "methods that can run")):
            page.fill(own, str(folder))
            page.press(own, "Enter")
            expect(page.locator("#models-report")).to_contain_text("methods that can run")
            tab.send("Guess, check, keep what was right.")
            page.click("#models-load")
            if folder is broken:
                expect(page.locator("#models-state")).to_contain_text(words)
                assert service.config()["target"] == "one" and service.choice().target == str(first)
            tab.idle()
        expect(page.locator("#status")).to_contain_text("ready · two")          # the load goes on behind the answer
        expect(page.locator("#models-state")).to_be_empty()
        assert service.config()["target"] == "two"
        expect(page.locator(BOT)).to_have_count(4)                    # two answers with a footer each
        tab.send("And now?")
        tab.idle()
        expect(page.locator("#status")).to_contain_text("two")
        expect(page.locator("#chat [data-testid=user]")).to_have_count(3)
    finally:
        service.close()
