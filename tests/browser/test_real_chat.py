"""The real default model behind the real page in headless Chromium: what a user does in the first minutes."""
from __future__ import annotations

import json
import time

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.long]
sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect

from test_page import Tab  # noqa: E402


@pytest.fixture(scope="module")
def site(chromium):
    import app
    from specviz.options import Options
    from specviz.service import open_service
    from specviz.ui.layout import build, launch
    from specviz.ui.recordings import opening
    options = Options(browser=False)
    service = open_service(options)
    while (status := service.status()).state == "loading":
        time.sleep(0.1)
    if status.state == "failed":
        service.close()
        pytest.skip(f"the default model is not here: {status.message}")
    page = build(service, opening(None))
    address, _ = launch(page, options, app.free_port("127.0.0.1", 0))
    yield address
    page.close(verbose=False)
    service.close()


@pytest.fixture
def tab(chromium, site):
    opened = Tab(chromium, site)
    opened.page.set_default_timeout(120_000)
    expect.set_options(timeout=60_000)
    yield opened
    expect.set_options(timeout=20_000)
    opened.context.close()
    assert not opened.problems and not opened.outside


def test_a_first_visit(tab, tmp_path):
    """The first example wins and is identical to plain decoding; then scrub, save, retry, stop in the middle, and open the saved trace."""
    page = tab.page
    page.locator("#chat .example").first.click()
    expect(page.locator("#status")).to_contain_text("(measured)")        # the bundled run's badge says "identical" from the beginning
    tab.idle()
    expect(page.locator("#status")).to_contain_text("speculation active · Hybrid")
    expect(page.locator("#viewer")).to_contain_text("Identical to plain decoding")
    answer = tab.answer().inner_text()
    assert "lighthouse stood at the end of the long stone pier" in answer
    with page.expect_download() as download:
        page.get_by_role("button", name="Save trace").click()
    saved = tmp_path / "run.json"
    download.value.save_as(saved)
    trace = json.loads(saved.read_text(encoding="utf-8"))
    assert trace["format"] == "specviz-trace" and trace["compare"]["identical"] is True
    assert trace["stats"]["tokens_per_step"] > 1.5 and trace["stats"]["speed_up"] > 0
    assert trace["compare"]["tokens"] == len(trace["plain"]) == trace["stats"]["num_tokens"]

    strip = page.locator("#viewer .sv-strip")
    strip.focus()
    page.keyboard.press("Home")
    expect(page.locator("#viewer .sv-inspect-head")).to_contain_text("Reading the prompt")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#viewer .sv-step.current")).to_have_count(1)

    page.get_by_role("button", name="Retry").first.click()
    expect(page.locator("#prompt .stop-button")).to_be_visible()
    tab.idle()
    expect(page.locator("#viewer")).to_contain_text("Identical to plain decoding")
    assert tab.answer().inner_text() == answer                 # greedy: the same again

    chat = page.locator("#chat [role=log]")
    tab.send("Write a very long story about a lighthouse keeper and his radio.")
    before = len(chat.inner_text())
    page.wait_for_function(f"document.querySelector('#chat [role=log]').innerText.length > {before + 80}")
    page.locator("#prompt .stop-button").click()
    tab.idle()
    kept = chat.inner_text()
    assert len(kept) > before + 80 and "256 tokens" not in kept                # cut short, and what came stays
    tab.send("What is the capital of France?")
    page.wait_for_function("document.querySelector('#chat [role=log]').innerText.split('What is the capital').pop().includes('Paris')")
    assert kept.split("his radio.")[1][:60] in chat.inner_text()
    tab.idle()

    page.locator("#viewer input[type=file]").set_input_files(str(saved))
    expect(page.locator("#viewer .sv-strip")).to_contain_text("stone pier")
    expect(page.locator("#viewer")).to_contain_text("Identical to plain decoding")


def test_sampling_says_what_it_can_say(tab):
    """With sampling on, text comes, probabilities are judged with a random number, and no identity is claimed."""
    page = tab.page
    page.locator("#sampling").get_by_text("Sampling and limits").click()
    page.locator("#greedy input").uncheck()
    page.locator("#max-new-tokens input[type=number]").fill("48")
    page.locator("#max-new-tokens input[type=number]").press("Tab")
    tab.send("Repeat this list three times: apples, pears, plums, cherries.")
    expect(page.locator("#viewer")).to_contain_text("texts may differ")
    tab.idle()
    expect(page.locator("#viewer")).not_to_contain_text("Identical to plain decoding")
