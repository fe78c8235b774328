"""The Models panel with the real service and a hub on this machine: gated, fetched, cancelled in the middle, taken up again; two tabs."""
from __future__ import annotations

from dataclasses import replace

import pytest
from fake_hub import FakeHub
from test_models_panel import BOT, Tab, expect, open_site  # noqa: F401
from tiny import save_tiny

from specviz import hub, hub_download
from specviz.local_service import LocalService
from specviz.opening import open_engine
from specviz.options import Options
from specviz.ui.strings import disturbed

pytestmark = pytest.mark.browser
OWN = "#models-own textarea, #models-own input"
PATIENCE_MS = 120_000                # real models are loaded, on a machine that may be busy; nothing is judged by how long it takes


def endless(options, progress):
    opened = open_engine(options, progress)
    opened.eos_ids = frozenset()
    return opened


@pytest.fixture
def site(open_site, tmp_path, monkeypatch):  # noqa: F811
    """A page over a small local model, and a hub with an ordinary and a gated repository."""
    server = FakeHub({"owner/tiny": save_tiny(tmp_path / "tiny", "qwen3", 3), "owner/closed": save_tiny(tmp_path / "closed")},
                     gated=frozenset({"owner/closed"}))
    monkeypatch.setattr(hub, "CACHE", tmp_path / "hub-cache")
    monkeypatch.setattr(hub, "ENDPOINT", server.url)
    monkeypatch.setattr(hub_download, "_BLOCK_BYTES", 1 << 14)
    options = Options(target=str(save_tiny(tmp_path / "one")), device="cpu", threads=1, cache_dir=tmp_path, browser=False)
    service = LocalService(options, endless)
    submit = service.submit
    service.submit = lambda request: submit(replace(request, sampling=replace(request.sampling, max_new_tokens=30)))
    _, tab = open_site(service)
    expect(tab.page.locator("#status")).to_contain_text("ready · one", timeout=PATIENCE_MS)
    tab.page.set_default_timeout(PATIENCE_MS)
    expect(tab.page.locator(OWN)).to_have_value(options.target, timeout=PATIENCE_MS)       # the form is filled once, then it is the operator's
    yield server, service, tab
    service.close()
    server.close()


def look(page, name: str, words: str) -> None:
    page.fill(OWN, name)
    page.press(OWN, "Enter")
    expect(page.locator("#models")).to_contain_text(words, timeout=PATIENCE_MS)
    expect(page.locator("#models-load")).to_be_enabled(timeout=PATIENCE_MS)


def test_from_the_hub_with_an_interruption(site):
    """What is gated says where to go. A download is agreed to, shown, cancelled while the hub is silent, and goes on later from there; an
    answer written meanwhile says that its times were disturbed."""
    server, service, tab = site
    page = tab.page
    look(page, "owner/closed", "accept its terms with your account, log in on this machine with `hf auth login`")
    look(page, "owner/nothing", "There is no file, folder or hub model owner/nothing")
    look(page, "owner/tiny", "methods that can run")
    expect(page.locator("#models-consent")).to_contain_text("Download it: 1 MB")
    server.silent_after = 1 << 17
    page.check("#models-consent input")
    page.click("#models-load")
    expect(page.locator("#models-state")).to_contain_text("Fetching owner/tiny from the hub", timeout=PATIENCE_MS)
    tab.send("Guess, check, keep what was right. Guess, check")
    tab.idle()
    expect(page.locator("#chat .thought").first).to_contain_text(disturbed("a model was loading"))
    expect(page.locator("#viewer .sv-notes")).to_contain_text("the speed-up is withheld")
    assert server.is_silent.is_set()
    page.click("#models-cancel")
    expect(page.locator("#models-load")).to_be_enabled(timeout=PATIENCE_MS)
    expect(page.locator("#status")).to_contain_text("ready · one", timeout=PATIENCE_MS)
    [part] = hub.CACHE.rglob("*.part")
    received, server.silent_after = part.stat().st_size, None
    server.go_on.set()
    page.wait_for_timeout(300)                                    # an event's last update and its end come apart; no hand is that fast
    page.check("#models-consent input")
    page.click("#models-load")
    expect(page.locator("#status")).to_contain_text("ready · owner/tiny", timeout=PATIENCE_MS)
    assert [wanted for _, path, wanted in server.requests if path.startswith("store/")][-1] == f"bytes={received}-"
    tab.send("And now?")
    tab.idle()
    expect(page.locator(BOT)).to_have_count(4)                    # two answers with a footer each
    expect(page.locator("#chat .thought").last).not_to_contain_text(disturbed(""))


def test_another_tab_gets_the_new_menu_when_it_is_touched(site, chromium, tmp_path):
    """A switch in one tab: the other one's menu and status line follow as soon as somebody goes to its text box."""
    _, service, tab = site
    other = Tab(chromium, tab.page.url)
    other.page.set_default_timeout(PATIENCE_MS)
    expect(other.page.locator("#status")).to_contain_text("ready · one", timeout=PATIENCE_MS)
    other.page.click("#method input")
    expect(other.page.locator("[role=option]", has_text="Draft model")).to_contain_text("unavailable")
    other.page.keyboard.press("Escape")
    other.page.locator("#header h1").click()
    draft = save_tiny(tmp_path / "small", seed=1, num_hidden_layers=1)
    target = service.choice().target
    service.load(replace(service.choice(), draft=str(draft)))
    while service.status().is_loading:
        tab.page.wait_for_timeout(50)
    assert service.choice().target == target and not service.status().last_error
    other.page.click("#prompt textarea")
    other.page.wait_for_timeout(500)
    other.page.click("#method input")
    option = other.page.locator("[role=option]", has_text="Draft model")
    expect(option).to_be_visible()
    expect(option).not_to_contain_text("unavailable")
    option.click()
    other.send("Guess")
    other.idle()
    expect(other.page.locator("#status")).to_contain_text("Draft model")
    other.context.close()
    assert not other.problems and not other.outside
