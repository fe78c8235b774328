"""The page attached to another server from its panel, in headless Chromium: steps and their source, or text and why there are none."""
from __future__ import annotations

import app
import pytest
from fake_service import FakeService
from remote_server import Script, recorded as stream, serve, wire
from test_page import BOT, Tab, expect, recorded

from specviz.attached import Attachable
from specviz.options import Options

pytestmark = pytest.mark.browser
BARE = wire([*({"choices": [{"delta": {"content": text}}]} for text in ("Only ", "text ", "<i id=evil>came</i>.")),
             {"choices": [{"delta": {}, "finish_reason": "stop"}]}])


@pytest.fixture
def tab(chromium, monkeypatch):
    from specviz.ui.layout import build, launch
    from specviz.ui.recordings import Recording
    for name in ("SPECVIZ_REMOTE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    page = build(Attachable(FakeService(), Options()), Recording(trace=recorded()))
    address, _ = launch(page, Options(browser=False), app.free_port("127.0.0.1", 0))
    opened = Tab(chromium, address)
    yield opened
    opened.context.close()
    page.close(verbose=False)
    assert not opened.problems and not opened.outside


def attach(tab, address, sentence, **fields):
    page = tab.page
    page.click("#models button.label-wrap >> nth=0")
    page.click("#server button.label-wrap >> nth=0")
    for name, text in {"url": address, **fields}.items():
        page.fill(f"#server-{name} input, #server-{name} textarea", text)
    page.click("#server-attach")
    expect(page.locator("#server-state")).to_contain_text(sentence)


def test_steps_of_an_attached_server_with_their_source(tab):
    """vLLM's stream: the key is sent, the answer and its figures appear, a step says what was accepted of what was drafted, what the server
    does not tell is a sentence, and without a second server no speed-up is claimed."""
    script = Script(wire([event for event, _ in stream("v_ngram_chat")]))
    with serve(script) as address:
        attach(tab, address, "Attached to vLLM", key="sk-7261")
        tab.send("Hello")
        tab.idle()
    expect(tab.answer()).to_contain_text("quick brown fox jumps over lazy dog.")
    viewer = tab.page.locator("#viewer")
    expect(viewer).to_contain_text("Rejected tokens and draft probabilities are not told by this server.")
    tab.page.locator("#viewer .sv-tok").nth(3).click()
    expect(tab.page.locator(".sv-inspect-head")).to_contain_text("3 of 4 drafts accepted · exact count")
    assert script.headers[-1]["Authorization"] == "Bearer sk-7261" and "7261" not in tab.page.content()
    assert "×" not in tab.page.locator("#chat .thought").first.inner_text()


def test_a_server_that_counts_nothing_gives_text_and_says_why(tab):
    """No step is invented: the text is there, as text, and a sentence says why there is no view of steps; a server that nobody runs keeps
    the model in use."""
    attach(tab, "127.0.0.1:9", "Nothing listens")
    tab.page.click("#server button.label-wrap >> nth=0")
    tab.page.click("#models button.label-wrap >> nth=0")
    with serve(Script(BARE, owner="someone")) as address:
        attach(tab, address, "Attached to OpenAI-compatible server")
        tab.send("Hello")
        tab.idle()
    expect(tab.page.locator("#viewer")).to_contain_text("does not say how many tokens a chunk holds, so there is no step view")
    expect(tab.page.locator(BOT).first).to_contain_text("came")
    assert tab.page.locator("#evil").count() == 0


def test_what_the_server_decides_goes_and_comes_back(tab):
    """A header under "More" arrives; attached, K, autopilot, options and verification are not there and a sentence says why; the meter is the
    server's count; back on this machine everything is there as it was set."""
    page = tab.page
    page.fill("#k input[type=number]", "7")
    page.click("#sampling button.label-wrap")
    page.click("#server button.label-wrap >> nth=0")
    expect(page.locator("#server-headers")).to_be_hidden()
    page.click("#server-more button.label-wrap")
    page.fill("#server-headers textarea", "X-Team: hush-1")
    ours = [page.locator(f"#{name}") for name in ("k", "auto-k", "keep-probs", "method-options", "verification")]
    with serve(script := Script(wire([event for event, _ in stream("v_ngram_chat")]))) as address:
        page.fill("#server-url input, #server-url textarea", address)
        page.click("#server-attach")
        expect(page.locator("#method-note")).to_contain_text("are decided there")
        for each in ours:
            expect(each).to_be_hidden()
        tab.send("Hello")
        tab.idle()
    expect(page.locator("#chat-bar")).to_contain_text("last prompt: 44 of 512 tokens")
    assert script.headers[-1]["X-Team"] == "hush-1"
    expect(page.locator("#more")).to_be_hidden()                 # no second server, so no plain decoding to go on with
    page.click("#server-detach")
    for each in ours:
        expect(each).to_be_visible()
    expect(page.locator("#k input[type=number]")).to_have_value("7")
    expect(page.locator("#method-note")).not_to_contain_text("decided there")
