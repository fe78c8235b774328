"""The Join dialog in headless Chromium: its code is the address that stands below it, at any width, and nothing asks the network."""
from __future__ import annotations

import app
import pytest
import segno
from fake_service import FakeService
from test_page import Tab, expect, recorded

from specviz.options import Options
from specviz.ui import join

pytestmark = pytest.mark.browser
ADDRESSES = ["192.168.1.20", "10.0.0.7"]


@pytest.fixture(scope="module")
def site():
    from specviz.ui.layout import build, launch
    from specviz.ui.recordings import Recording
    patch = pytest.MonkeyPatch()
    patch.setattr(join, "own_addresses", lambda: ADDRESSES)
    others = join.Join(Options(host="0.0.0.0", auth=("a", "b")), 7860)
    page = build(FakeService(), Recording(trace=recorded()), join=others)
    address, _ = launch(page, Options(browser=False), app.free_port("127.0.0.1", 0))
    yield address
    page.close(verbose=False)
    patch.undo()


@pytest.mark.parametrize("width, theme", [(1400, "light"), (390, "dark")])
def test_the_dialog_shows_each_address_and_its_code(chromium, site, width, theme):
    """One address at a time, its code beside it, whole on the screen; the other one is a click away; Escape, × and a click beside it close it."""
    tab = Tab(chromium, site, width=width, height=844, query=f"?__theme={theme}")
    page = tab.page
    try:
        page.click("#header [data-join]")
        card = page.locator("#join dialog")
        for number, address in enumerate(f"http://{each}:7860" for each in ADDRESSES):
            if number:
                page.click(f"#join [data-join-choice='{number}']")
            panel = page.locator("#join figure:visible")
            expect(panel).to_have_count(1)
            expect(panel.locator("figcaption")).to_have_text(address)
            path = panel.locator("svg path[stroke]").get_attribute("d")
            assert path in segno.make(address, error="m", micro=False).svg_inline(omitsize=True, border=3, lineclass=None)
            box = panel.locator("svg").bounding_box()
            assert 180 <= box["width"] <= width and abs(box["width"] - box["height"]) < 2
        expect(card).to_contain_text("name and a password")
        assert page.evaluate("(d => d.scrollWidth <= d.clientWidth && d.scrollHeight <= d.clientHeight)(document.querySelector('#join dialog'))")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for close in (lambda: page.keyboard.press("Escape"), lambda: page.click("#join [data-join-close]"), lambda: page.mouse.click(3, 3)):
            expect(card).to_be_visible()
            close()
            expect(card).to_be_hidden()
            page.click("#header [data-join]")
    finally:
        tab.context.close()
    assert not tab.problems and not tab.outside
