"""The page as others reach it: behind a reverse proxy, below a path, with a password; in headless Chromium over a scripted service."""
from __future__ import annotations

import pytest
from fake_service import ANSWER, FakeService
from reverse_proxy import ReverseProxy
from test_page import BOT, expect, recorded

pytestmark = pytest.mark.browser


def test_chatting_behind_a_proxy_with_a_password(chromium):
    """A wrong password is refused, the right one opens the page; viewer, chat and answer work below the path and ask nothing outside of it;
    nothing is kept, and the models can only be looked at."""
    import app
    from specviz.options import Options
    from specviz.ui import strings
    from specviz.ui.layout import build, launch
    from specviz.ui.recordings import Recording
    options = Options(host="127.0.0.1", browser=False, auth=("me", "secret"), root_path="/spec")
    page = build(FakeService(pause_s=0.004), Recording(trace=recorded()), read_only=True, not_kept=strings.not_kept(True, True))
    address, _ = launch(page, options, app.free_port("127.0.0.1", 0))
    proxy = ReverseProxy(address.rstrip("/").removesuffix("/spec"), "/spec")
    context = chromium.new_context(viewport={"width": 1400, "height": 1000}, reduced_motion="reduce")
    tab, problems, hosts = context.new_page(), [], set()
    tab.set_default_timeout(60_000)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda request: hosts.add(request.url.partition("/spec")[0]) if request.url.startswith("http") else None)
    try:
        tab.goto(proxy.url)
        name, password = tab.locator("input[type=text], input:not([type])").first, tab.locator("input[type=password]")
        for word in ("wrong", "secret"):
            name.fill("me")
            password.fill(word)
            tab.get_by_role("button", name="Login").click()
            if word == "wrong":
                expect(tab.get_by_text("Incorrect")).to_be_visible()
        tab.wait_for_selector("#viewer [data-ready='1']", state="attached")
        expect(tab.locator("#status")).to_contain_text("ready · Tiny-1B")
        tab.fill("#prompt textarea", "Hello")
        tab.press("#prompt textarea", "Enter")
        expect(tab.locator(BOT).first).to_have_text(ANSWER)
        expect(tab.locator("#viewer")).to_contain_text("only arrives sooner.")
        expect(tab.locator("#prompt .submit-button")).to_be_visible()
        tab.click("[data-open=list]")
        expect(tab.locator(".bar-panel[aria-label=Conversations]")).to_have_text(strings.not_kept(True, True))
        tab.click("#models > button")
        expect(tab.locator("#models-read-only")).to_contain_text("only its operator chooses")
        assert not problems and hosts == {proxy.url.partition("/spec")[0]}
        assert [path for path in proxy.missed if path != "/favicon.ico"] == []
    finally:
        context.close()
        proxy.close()
        page.close(verbose=False)
