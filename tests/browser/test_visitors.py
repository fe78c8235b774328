"""Several visitors at once, as in a workshop or on a public Space: each waits in sight, in turn, and sees nobody else's text."""
from __future__ import annotations

import re
import time

import app
import pytest
from fake_service import FakeService
from test_page import BOT, Tab, expect, recorded
from test_service import ready

from specviz.limits import Limits
from specviz.options import Options

pytestmark = pytest.mark.browser


class Personal(FakeService):
    """Answers every visitor with the word that they asked with."""

    def submit(self, request):
        word = re.findall(r"\w+", request.messages[-1]["content"])[-1]
        self.answer = f"This answer is meant for {word} alone. " * 3
        return super().submit(request)


def test_a_page_that_closes_frees_its_row_and_a_full_house_is_told(chromium):
    """On the real engine with one row and no place to wait: the second visitor's refusal is a sentence in the chat, the first one's tab closes
    in the middle of an answer, and then there is room at once."""
    from specviz.ui.layout import build, launch
    from specviz.ui.recordings import Recording
    limits = Limits(at_once=1, waiting=0)
    service = ready(limits=limits)
    engine, step = service._opened.engine, service._opened.engine.step
    engine.step = lambda: (time.sleep(0.1), step())[1]
    page = build(service, Recording(trace=recorded()), limits=limits, measure_plain=False)
    address, _ = launch(page, Options(browser=False, limits=limits), app.free_port("127.0.0.1", 0))
    tabs = [Tab(chromium, address) for _ in range(2)]
    try:
        tabs[0].send("First")
        expect(tabs[0].answer()).to_contain_text(re.compile(r"\w"))
        tabs[1].page.fill("#prompt textarea", "Second")
        tabs[1].page.press("#prompt textarea", "Enter")
        expect(tabs[1].answer()).to_contain_text("1 answer is being written and nobody may wait")
        assert service._driver.num_answers == 1
        tabs[0].context.close()
        end_s = time.monotonic() + 30
        while service._driver.num_answers and time.monotonic() < end_s:
            time.sleep(0.05)
        assert engine.idle and not engine.scheduler.parked, "neither the answer goes on nor is anything of it kept"
        engine.step = step
        tabs[1].send("Third")
        tabs[1].idle()
        expect(tabs[1].page.locator("#status")).to_contain_text("tokens in")
        assert not tabs[1].problems and not tabs[1].outside
    finally:
        for tab in tabs:
            tab.context.close()
        page.close(verbose=False)
        service.close()


@pytest.mark.parametrize("queue", ["the engine's", "Gradio's"])
def test_visitors_wait_in_turn_and_see_their_own_text(chromium, queue):
    """While one is answered, the other sees its place in the queue, wherever the page is scrolled to; in the end each has its own answer only."""
    from specviz.ui.layout import build, launch
    from specviz.ui.recordings import Recording
    service = Personal()
    service.pause_s, service.num_rows = 2.0, 1
    page = build(service, Recording(trace=recorded()), one_at_a_time=queue == "Gradio's")
    address, _ = launch(page, Options(browser=False), app.free_port("127.0.0.1", 0))
    tabs = {word: Tab(chromium, address) for word in ("amber", "birch")}
    try:
        for word, tab in tabs.items():
            tab.page.uncheck("#measure-plain input")
            tab.page.fill("#prompt textarea", f"Hello {word}")
            tab.page.press("#prompt textarea", "Enter")
            expect(tab.page.locator("#chat [data-testid=user]")).to_have_count(1)
            if word == "amber":
                expect(tab.page.locator(BOT).first).to_contain_text("This answer")
        waiting = tabs["birch"].page
        place = waiting.locator("#status .progress-text" if queue == "Gradio's" else "#status .page-status")
        expect(place).to_contain_text("queue: 1/1" if queue == "Gradio's" else "waiting · next in the queue")
        expect(place).to_be_in_viewport()
        expect(waiting.locator(BOT)).to_have_count(0)
        service.pause_s = 0.004
        for word, tab in tabs.items():
            expect(tab.page.locator(BOT).first).to_contain_text(f"meant for {word} alone", timeout=60_000)
            tab.idle()
            shown = tab.page.inner_text("body")
            assert not [other for other in tabs if other != word and other in shown] and not tab.problems and not tab.outside
    finally:
        for tab in tabs.values():
            tab.context.close()
        page.close(verbose=False)
