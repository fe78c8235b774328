"""Comparing methods in the whole page over a scripted service: from the button to the table, stopped on the way, beside the chat."""
from __future__ import annotations

import pytest
from fake_service import FakeService
from test_page import Tab, expect, serve

pytestmark = pytest.mark.browser


def test_methods_are_compared_from_one_button(chromium):
    """The view knows the methods of the loaded pair; the button runs them through the service and fills the table; Stop ends the run in
    progress; the chat works before and after; on a phone nothing is wider than the page."""
    service = FakeService(pause_s=0.004)
    page, address = serve(service)
    try:
        tab = Tab(chromium, address)
        tab.send("What is it?")
        tab.idle()
        tab.page.click("#viewer .sv-views >> text=Compare")
        expect(tab.page.locator(".sv-box")).to_have_count(3)
        expect(tab.page.locator(".sv-text")).to_have_value("What is it?")
        tab.page.check(".sv-box >> text=Medusa")
        tab.page.select_option(".sv-compare-go select", "32")
        num_before = service.num_submitted
        tab.page.click(".sv-compare-go .sv-primary")
        expect(tab.page.locator(".sv-compare-go")).to_contain_text("Done: 2 compared.")
        expect(tab.page.locator(".sv-table tbody tr")).to_have_count(3)
        expect(tab.page.locator(".sv-text-word.is-same")).to_have_count(2)
        assert [r.method for r in service.requests[num_before:]] == ["prompt_lookup", "prompt_lookup", "medusa", "medusa"]
        service.pause_s = 0.2
        tab.page.click(".sv-compare-go .sv-primary")
        expect(tab.page.locator(".sv-compare-go")).to_contain_text("1 of 2: Prompt lookup")
        tab.page.click(".sv-compare-go .sv-primary")
        expect(tab.page.locator(".sv-compare-go")).to_contain_text("Stopped")
        tab.page.wait_for_function("!document.querySelector('.sv-compare .sv-track:not([hidden])')")
        service.pause_s = 0.004
        tab.send("And now?")
        tab.idle()
        assert service.runs[-1].reason == "eos" and all(run._cancelled.is_set() for run in service.runs[num_before:-1])
        tab.page.set_viewport_size({"width": 390, "height": 844})
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
        tab.context.close()
        assert not tab.problems and not tab.outside
    finally:
        page.close(verbose=False)
