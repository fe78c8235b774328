"""The comforts of the chat in headless Chromium: colours, folded thinking, formulas, literal text, context meter, kept conversations."""
from __future__ import annotations

import json

import pytest
from fake_service import ANSWER, FakeService
from test_page import Tab, expect, recorded, serve

pytestmark = pytest.mark.browser

THOUGHT = "<think>\nThe visitor wants **Euler**.\n</think>\n\n"
RICH = ("Euler: \\(e^{i\\pi} + 1 = 0\\) is **short**.\n\n\\[ \\int_0^1 x^2\\,dx = \\frac{1}{3} \\]\n\n"
        "```python\nif a < b: print(\"$$ \\[\")\n```\n\n"
        "- one <b>tag</b> stays")
HOSTILE = ("<script>window.pwned=1</script> <img src=x onerror=window.pwned=2> $$ \\href{javascript:window.pwned=3}{x} "
           "<img src=x onerror=window.pwned=4> $$ \\(\\htmlData{a=b}{<svg onload=window.pwned=5>}\\) ${window.pwned=6} "
           "%%%LATEX_BLOCK_0%%%\n\n```mermaid\n<img src=x onerror=window.pwned=7>\n```\n<details open ontoggle=window.pwned=8> end")
PAINTED = "() => Object.fromEntries(['draft', 'correction', 'bonus'].map(o => [o, [...CSS.highlights.get('specviz-' + o)].map(r => " \
          "r.startContainer.data.slice(r.startOffset, r.endOffset))]))"


@pytest.fixture(scope="module")
def site():
    service = FakeService()
    page, address = serve(service)
    yield service, address
    page.close(verbose=False)


@pytest.fixture
def tab(chromium, site, request):
    service = site[0]
    service.pause_s, service.answer, service.config_now["context"] = 0.004, ANSWER, 2048
    opened = Tab(chromium, site[1], **getattr(request, "param", {}))
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.page.wait_for_selector("#chat-bar [data-ready='1']", state="attached")
    yield opened
    opened.context.close()
    assert not opened.problems and not opened.outside


def switch(tab, name):
    if tab.page.locator("[data-look=colour]").is_hidden():
        tab.page.click("[data-open=display]")
    tab.page.click(f"[data-look={name}]")


def kept(tab):
    """The list of conversations, opened."""
    if tab.page.locator(".bar-panel[aria-label=Conversations]").is_hidden():
        tab.page.click("[data-open=list]")
    return tab.page.locator(".bar-list li")


def answer_parts(tab):
    return tab.page.locator("#chat .bot-row .message.panel-full-width")


def test_first_view_is_as_calm_as_before(tab):
    """Nothing of all this is open, no meter is shown before anything was said, and the examples are where they were."""
    expect(tab.page.locator("#chat-bar .bar-panel:visible")).to_have_count(0)
    expect(tab.page.locator("#chat-bar .bar-meter")).to_be_hidden()
    expect(tab.page.locator("#chat .example").first).to_be_visible()
    assert tab.page.locator("#chat-bar").bounding_box()["height"] < 48


def test_accepted_tokens_are_coloured_in_the_chat(tab, site):
    """The painted words are the engine's accepted, corrected and bonus tokens; no node of the chat changes; off means off."""
    tab.send()
    tab.idle()
    before = tab.answer().inner_html()
    switch(tab, "colour")
    expect(tab.page.locator(".chat-bar")).to_have_attribute("data-painted", "1")
    painted, steps = tab.page.evaluate(PAINTED), site[0].runs[-1].trace().steps
    for origin in ("draft", "correction", "bonus"):
        told = "".join(token.text for step in steps for token in step.emitted if token.origin == origin).split()
        assert told and " ".join(painted[origin]).split() == told
    assert tab.answer().inner_html() == before
    style = tab.page.evaluate("""() => { const p = document.querySelector('#chat .bot-row p');
                                         const s = getComputedStyle(p, '::highlight(specviz-draft)');
                                         return [s.textDecorationLine, s.backgroundColor]; }""")
    assert style[0] == "underline" and style[1] not in ("transparent", "rgba(0, 0, 0, 0)"), "a line beside the colour"
    tab.send("Again")
    tab.idle()
    expect(tab.page.locator(".chat-bar")).to_have_attribute("data-painted", "2")
    switch(tab, "colour")
    assert not any(tab.page.evaluate(PAINTED).values())


def test_colours_find_their_words_through_markdown(tab, site):
    """Formulas, code, bold and lists: every painted stretch is text of a token of that origin."""
    site[0].answer = THOUGHT + RICH
    tab.send()
    tab.idle()
    switch(tab, "colour")
    expect(tab.page.locator(".chat-bar")).to_have_attribute("data-painted", "1")
    told = tab.page.evaluate("document.querySelector('#chat-bar [data-ready]').bar.state().runs.at(-1)")
    for origin, stretches in tab.page.evaluate(PAINTED).items():
        source = ["".join(text.split()).replace("*", "") for text, one in told if one == origin]
        assert stretches or origin == "bonus"
        for stretch in stretches:
            assert any("".join(stretch.split()) in text for text in source), (origin, stretch)


def test_thinking_is_folded_and_can_be_shown(tab, site):
    site[0].answer = THOUGHT + RICH
    tab.send()
    tab.idle()
    title = tab.page.locator("#chat .thought-group .title")
    expect(title).to_contain_text("Thought, 4 words")
    assert "wants" not in tab.page.locator("#chat").inner_text()
    switch(tab, "thinking")
    expect(tab.page.locator("#chat .thought-group")).to_contain_text("The visitor wants Euler.")
    switch(tab, "thinking")
    expect(tab.page.locator("#chat .thought-group")).not_to_contain_text("wants")
    title.click()
    expect(tab.page.locator("#chat .thought-group")).to_contain_text("The visitor wants Euler.")
    size = "e => getComputedStyle(e).fontSize"
    assert answer_parts(tab).nth(1).locator("p").first.evaluate(size) == tab.page.locator("#chat .user-row p").evaluate(size)
    tab.send("Next")
    tab.idle()
    assert site[0].requests[-1].messages[1]["content"] == RICH and "think" not in site[0].requests[-1].messages[1]["content"]


def test_formulas_and_code_are_rendered_offline(tab, site):
    """KaTeX and the highlighter come with the page (the fixture fails on any request outside); delimiters in code stay code."""
    site[0].answer = RICH
    tab.send()
    tab.idle()
    expect(tab.page.locator("#chat .katex")).to_have_count(2)
    expect(tab.page.locator("#chat .katex-display")).to_have_count(1)
    expect(tab.page.locator("#chat .katex-error")).to_have_count(0)
    assert tab.page.evaluate("document.fonts.check('16px KaTeX_Main')")
    expect(tab.page.locator("#chat pre code")).to_have_text('if a < b: print("$$ \\[")')
    assert tab.page.locator("#chat pre code .token").count() >= 2
    expect(answer_parts(tab).first.locator("li")).to_have_text("one <b>tag</b> stays")


def test_plain_text_shows_exactly_what_was_written(tab, site):
    """Every character, white space included; back in Markdown all is rendered again; the choice outlives a reload."""
    site[0].answer = "  " + RICH + "\n\n&lt; \\<b> **x**"
    tab.send("<u> &amp;")
    tab.idle()
    switch(tab, "plain")
    literal = answer_parts(tab).first.locator(".md")
    expect(literal).to_contain_text("**short**")
    assert literal.evaluate("e => e.textContent") == site[0].answer
    assert tab.page.locator("#chat .user-row .md").evaluate("e => e.textContent") == "<u> &amp;"
    assert literal.evaluate("e => getComputedStyle(e).whiteSpace") in ("pre-wrap", "break-spaces")
    switch(tab, "plain")
    expect(tab.page.locator("#chat .katex")).to_have_count(2)
    switch(tab, "plain")
    tab.page.reload()
    tab.page.wait_for_selector("#chat-bar [data-ready='1']", state="attached")
    expect(tab.page.locator("#status")).to_contain_text("ready")
    tab.send("<i>")
    tab.idle()
    assert answer_parts(tab).first.locator(".md").evaluate("e => e.textContent") == site[0].answer
    assert site[0].requests[-1].messages[-1]["content"] == "<i>"


@pytest.mark.parametrize("looks", [["colour", "thinking"], ["colour", "thinking", "plain"]], ids=["rendered", "plain"])
def test_hostile_text_runs_nothing_in_any_look(tab, site, looks):
    """Scripts, handlers, KaTeX commands, diagrams and placeholders of the chat's own renderer: shown, never run, never fetched."""
    site[0].answer = "<think>" + HOSTILE + "</think>" + HOSTILE
    for name in looks:
        switch(tab, name)
    tab.send(HOSTILE)
    tab.idle()
    kept(tab)
    tab.page.wait_for_timeout(300)
    assert tab.page.evaluate("window.pwned") is None
    assert tab.page.locator("#chat :is(script, img, svg[onload], details, form, iframe)").count() == 0
    assert tab.page.locator("#chat a[href^='javascript']").count() == 0
    assert "onerror=window.pwned=2" in tab.page.locator("#chat").inner_text()
    tab.send("Next")
    tab.idle()
    assert [m["content"] for m in site[0].requests[-1].messages] == [HOSTILE, HOSTILE, "Next"]


@pytest.mark.parametrize("look", ["", "plain"])
def test_copy_gives_what_was_written(tab, site, look):
    """Both copy buttons hand out the exact text, without the marks that the chat needs and without figures."""
    site[0].answer = THOUGHT + RICH
    if look:
        switch(tab, look)
    tab.send("<u>?")
    tab.idle()
    clip = "navigator.clipboard.readText()"
    tab.page.locator("#chat .bot-row + * [aria-label*='Copy' i], #chat .message-buttons-left [aria-label*='Copy' i]").first.click()
    tab.page.wait_for_function(f"async () => (await {clip}).startsWith('Euler')")
    assert tab.page.evaluate(clip) == RICH
    tab.page.click("#chat [aria-label='Copy conversation']")
    tab.page.wait_for_function(f"async () => (await {clip}).startsWith('user: ')")
    assert tab.page.evaluate(clip) == f"user: <u>?\n\nassistant: {RICH}"


def test_the_context_meter_and_the_limit(tab, site):
    """The meter fills; turns that no longer fit are named in the chat and on the meter; what cannot fit is refused with numbers."""
    site[0].config_now["context"] = 120
    for text in ("First", "Second", "Third"):
        tab.send(text)
        tab.idle()
    expect(tab.page.locator(".bar-text")).to_contain_text("of 120 tokens")
    expect(tab.page.locator("#chat .bot-row").last).to_contain_text("earlier turn is no longer in the prompt")
    expect(tab.page.locator(".bar-dropped")).to_contain_text("no longer in the prompt")
    expect(tab.page.locator("#chat .user-row")).to_have_count(3)
    assert len(site[0].requests[-1].messages) < 5
    tab.send("w " * 200)
    expect(tab.page.locator("#chat .bot-row").last).to_contain_text("context has 120")
    tab.page.click("#chat [aria-label='Clear']")
    expect(tab.page.locator(".bar-meter")).to_be_hidden()


def test_conversations_survive_a_reload(tab, site):
    """Kept with colours and the trace of the last answer; opened again, the chat goes on where it was and the viewer shows the run."""
    site[0].answer = {"First <b>": THOUGHT + RICH, "Other": ANSWER}
    tab.send("First <b>")
    tab.idle()
    expect(kept(tab).first).to_contain_text("Export trace")
    tab.page.click(".bar-fresh")
    expect(tab.page.locator("#chat .example").first).to_be_visible()
    tab.send("Other")
    tab.idle()
    tab.page.reload()
    tab.page.wait_for_selector("#chat-bar [data-ready='1']", state="attached")
    tab.page.wait_for_selector("#viewer [data-ready='1']", state="attached")
    expect(tab.page.locator("#status")).to_contain_text("ready")
    expect(kept(tab)).to_have_count(2)
    expect(kept(tab).nth(1).locator(".bar-title span")).to_have_text("First <b>")
    kept(tab).nth(1).locator(".bar-title").click()
    expect(tab.page.locator("#chat .katex")).to_have_count(2)
    expect(tab.page.locator("#viewer")).to_contain_text("recorded")
    expect(tab.page.locator("#viewer .sv-strip")).to_contain_text("Euler:")
    expect(tab.page.locator("#chat .bot-row")).to_contain_text("drafts accepted")
    switch(tab, "colour")
    expect(tab.page.locator(".chat-bar")).to_have_attribute("data-painted", "1")
    tab.send("Other")
    tab.idle()
    assert [m["content"] for m in site[0].requests[-1].messages] == ["First <b>", RICH, "Other"]
    expect(kept(tab)).to_have_count(2)
    expect(kept(tab).first).to_contain_text("4 messages")


def test_conversations_are_renamed_exported_and_deleted(tab, site):
    site[0].answer = THOUGHT + RICH
    tab.send("My question")
    tab.idle()
    expect(kept(tab).first).to_contain_text("Export trace")
    kept(tab).first.get_by_text("Rename").click()
    tab.page.fill(".bar-name", "A <i>name</i>")
    tab.page.press(".bar-name", "Enter")
    expect(kept(tab).first.locator(".bar-title span")).to_have_text("A <i>name</i>")
    with tab.page.expect_download() as got:
        kept(tab).first.get_by_text("Export Markdown").click()
    assert got.value.suggested_filename == "a-i-name-i.md"
    text = got.value.path().read_text()
    assert text.startswith("# A <i>name</i>\n\n## You\n\nMy question\n\n## Answer\n\n"
                           "Thinking:\n\n> The visitor wants **Euler**.\n\n" + RICH)
    with tab.page.expect_download() as got:
        kept(tab).first.get_by_text("Export trace").click()
    trace = json.loads(got.value.path().read_text())
    assert trace["format"] == "specviz-trace" and len(trace["steps"]) == len(site[0].runs[-1].trace().steps)
    assert [step.get("emitted") for step in trace["steps"]]
    kept(tab).first.get_by_text("Delete").click()
    kept(tab).first.get_by_text("Really delete?").click()
    expect(kept(tab)).to_have_count(0)
    tab.page.reload()
    tab.page.wait_for_selector("#chat-bar [data-ready='1']", state="attached")
    expect(kept(tab)).to_have_count(0)
    expect(tab.page.locator(".bar-panel[aria-label=Conversations]")).to_contain_text("Nothing kept yet")


def test_undo_and_edit_change_what_is_kept(tab, site):
    tab.send("One")
    tab.idle()
    tab.send("Two")
    tab.idle()
    expect(kept(tab).first).to_contain_text("4 messages")
    tab.page.click("#chat [aria-label=Undo]")
    expect(kept(tab).first).to_contain_text("2 messages")
    expect(kept(tab)).to_have_count(1)


@pytest.mark.parametrize("tab", [dict(width=390, height=844, query="?__theme=dark")], indirect=True)
def test_on_a_phone_nothing_overflows_and_targets_are_large(tab, site):
    site[0].answer = THOUGHT + RICH + "\n\n$$ " + "x + " * 60 + "y $$"
    tab.page.click(".page-live")
    tab.send("A long question, " + "w" * 120)
    tab.idle()
    fits = "document.documentElement.scrollWidth <= window.innerWidth"
    assert tab.page.evaluate(fits)
    switch(tab, "colour")
    assert tab.page.evaluate(fits)
    expect(kept(tab)).to_have_count(1)
    expect(kept(tab).first).to_contain_text("Export trace")         # comes last: the list is drawn anew with it
    assert tab.page.evaluate(fits)
    heights = tab.page.locator("#chat-bar button:visible").evaluate_all("all => all.map(each => each.getBoundingClientRect().height)")
    assert len(heights) > 4 and min(heights) >= 44


def test_a_public_page_keeps_nothing_and_says_why(chromium, site):
    import app
    from specviz.options import Options
    from specviz.ui import strings
    from specviz.ui.layout import build, launch
    from specviz.ui.recordings import Recording
    page = build(FakeService(), Recording(trace=recorded()), not_kept=strings.not_kept(True, True))
    address, _ = launch(page, Options(browser=False), app.free_port("127.0.0.1", 0))
    try:
        tab = Tab(chromium, address)
        tab.page.wait_for_selector("#chat-bar [data-ready='1']", state="attached")
        tab.send()
        tab.idle()
        tab.page.click("[data-open=list]")
        expect(tab.page.locator(".bar-panel[aria-label=Conversations]")).to_have_text(strings.not_kept(True, True))
        assert tab.page.evaluate("indexedDB.databases().then(all => all.length)") == 0
        tab.context.close()
        assert not tab.problems and not tab.outside
    finally:
        page.close(verbose=False)
