"""Turning to another server and back while the program runs: the one in use stays until the new one has answered."""
from __future__ import annotations

import json
import time
from types import SimpleNamespace

import certifi
import pytest
from fake_service import FakeService
from remote_server import Script, recorded, serve, wire

from specviz.attached import Attachable
from specviz.engine.sampling import SamplingParams
from specviz.errors import Busy, InputError
from specviz.options import Options
from specviz.remote.reach import Reach
from specviz.remote.reading import RemoteError
from specviz.service import ChatRequest
from specviz.trace import dumps
from specviz.ui.handlers import Handlers
from specviz.ui.messages import question
from specviz.ui.server_panel import ServerPanel, _besides
from specviz.ui.visits import Screen

STREAM = wire([event for event, _ in recorded("v_ngram_chat")])
ASK = ChatRequest(({"role": "user", "content": "Hi"},), SamplingParams(max_new_tokens=20))


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    for name in ("SPECVIZ_REMOTE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def settled(service):
    while service.status().is_loading:
        time.sleep(0.01)
    return service.status()


def panel_of(service, reach=Reach()):
    panel = ServerPanel.__new__(ServerPanel)
    panel.service, panel.read_only, panel._page, panel._reach = service, False, Handlers(service), reach
    return panel


def test_there_and_back():
    """After `attach` the menu, the configuration and the answers are the server's; after `detach` this machine's again; each turn counts."""
    service = Attachable(FakeService(), Options())
    before = service.status().number
    with serve(script := Script(STREAM)) as address:
        service.attach(address, api_key="sk-1")
        there = settled(service)
        assert there.number > before and service.config()["engine"] == "vLLM" and [m.name for m in service.methods()] == ["server"]
        list(service.submit(ASK))
        assert script.headers[-1]["Authorization"] == "Bearer sk-1"
    service.detach()
    assert service.status().number > there.number and service.config()["target"] == "Tiny-1B" and not service.is_attached
    assert list(service.submit(ChatRequest(ASK.messages, ASK.sampling, "prompt_lookup")))


def test_a_server_that_fails_changes_nothing():
    """Refused, wrong address, asked twice: a sentence, and the model in use goes on answering."""
    service = Attachable(FakeService(), Options())
    number = service.status().number
    service.attach("127.0.0.1:9")
    status = settled(service)
    assert status.number == number and "Nothing listens" in status.last_error and status.state == "ready"
    assert list(service.submit(ChatRequest(ASK.messages, ASK.sampling, "plain")))
    with pytest.raises(InputError, match="address"):
        service.attach("ftp://x")
    service._asking = "somebody"
    with pytest.raises(Busy, match="somebody"):
        service.attach("127.0.0.1:9")


def test_the_panel_follows_and_refuses_visitors():
    """The panel's events end with a sentence in every case; on a shared page they refuse whatever the browser sends."""
    service = Attachable(FakeService(), Options())
    panel = panel_of(service)
    assert "No address" in list(panel.attach("", "", "auto", "", "", ""))[-1][3]
    assert "Nothing listens" in list(panel.attach("127.0.0.1:9", "", "auto", "", "", ""))[-1][3]
    with serve(Script(STREAM, models=("<b>m",))) as address:
        *_, last = panel.attach(address, "", "auto", "", "", "")
        assert "Attached to vLLM" in last[3] and "&lt;b&gt;m" in last[3] and "<b>" not in last[3]
    assert "own engine" in list(panel.detach())[-1][3]
    panel.read_only = True
    assert "only its operator" in list(panel.attach("127.0.0.1:9", "", "auto", "", "", ""))[-1][3] and not service.is_attached


def test_headers_ca_file_and_timeout_of_the_panel():
    """What is typed under "More" reaches the server, beside the command line's or in its place, and is written nowhere, not even where a
    gateway quotes it."""
    options = Options(remote_headers=(("X-Team", "hush-1"), ("X-Keep", "hush-2")), remote_timeout=7)
    service = Attachable(FakeService(), options)
    panel, typed = panel_of(service, options.reach), ("x-team: hush-3\n\n X-Gate : hush:4 ", certifi.where())
    with serve(script := Script(STREAM)) as address:
        said = list(panel.attach(address, "", "auto", "", "", "", *typed, 9))
        run = service.submit(ASK)
        list(run)
    sent = {name.lower(): value for name, value in script.headers[-1].items()}
    assert (sent["x-team"], sent["x-keep"], sent["x-gate"]) == ("hush-3", "hush-2", "hush:4") and service._now._endpoint.read_s == 9
    with serve(Script(raw=(401, "application/json", b'{"error":"hush:4 and sk-hush-5 are refused"}'))) as address:
        said += panel.attach(address, "sk-hush-5", "auto", "", "", "", *typed, None)
    assert "refused the key" in said[-1][3] and service._now._endpoint.read_s == 9
    shown = repr((said, options, service._now._options, service.status(), service.config(), _besides(options.reach.header_names)))
    shown += dumps(run.trace())
    assert "X-Team, X-Keep" in shown and "hush" not in shown
    with serve(Script(wire([{"error": "hush:4 is out of credit"}]))) as address:
        list(panel.attach(address, "", "auto", "", "", "", *typed, None))
        with pytest.raises(RemoteError, match="ended the answer with an error: … is out of credit"):
            list(service.submit(ASK))


@pytest.mark.parametrize("headers, ca, timeout, sentence", [
    ("X-A: 1\nhush", "", 9, "Line 2 of the extra headers is no header"), ("X A: hush", "", 9, "Line 1"), ("X-A: hush\x07", "", 9, "Line 1"),
    ("X-A: hüsh", "", 9, "plain ASCII"), ("X-A:", "", 9, "Line 1"), ("Content-Length: 5", "", 9, "Leave it out"),
    ("", "no/such/file.pem", 9, "There is no CA file no/such/file.pem"), ("", __file__, 9, "holds no certificate in PEM form"),
    ("", "", 0, "above 0"), ("", "", float("nan"), "above 0"), ("", "", 86_401, "at most 86,400")])
def test_what_cannot_be_used_under_more_is_a_sentence(headers, ca, timeout, sentence):
    """A broken header, CA file or timeout is named without its secret, nothing is sent, and the model in use stays; the same on a shared
    page, where not even the fields are read."""
    service = Attachable(FakeService(), Options())
    panel = panel_of(service)
    with serve(script := Script(STREAM)) as address:
        said = list(panel.attach(address, "", "auto", "", "", "", headers, ca, timeout))[-1][3]
        assert sentence in said and "hush" not in said and not script.headers and not service.is_attached
        panel.read_only = True
        assert "only its operator" in list(panel.attach(address, "", "auto", "", "", "", headers, ca, timeout))[-1][3]
        assert not script.headers


def test_what_a_server_decides_is_not_offered():
    """Draft length, autopilot, options and verification leave the page with the server's method, with a sentence, and return with ours."""
    from specviz.ui.layout import build
    from specviz.ui.recordings import Recording
    service = Attachable(FakeService(), Options())
    page = build(service, Recording())
    names = {block._id: block.elem_id for block in page.blocks.values()}
    [choose] = [fn for fn in page.fns.values() if "k" in [names[block._id] for block in fn.outputs] and names[fn.targets[0][0]] == "method"]
    assert {"k", "auto-k", "method-options", "verification"} < {names[block._id] for block in choose.outputs}
    with serve(Script(STREAM)) as address:
        service.attach(address)
        settled(service)
        assert not any(update["visible"] for update in choose.fn("server"))
        assert "are decided there" in Handlers(service).method_note("server")
    service.detach()
    assert all(update["visible"] for update in choose.fn("prompt_lookup")) and Handlers(service).is_decided_here(None)


BARE = wire([{"choices": [{"delta": {"content": "Hi"}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}])
@pytest.mark.parametrize("body, text", [(STREAM, "last prompt: 44 of 512 tokens"), (BARE, None)])
def test_the_context_meter_shows_the_servers_own_count_or_nothing(body, text):
    """Never a zero for what is not known: the server's `prompt_tokens`, else no meter; a turn on this machine is counted here again."""
    service = Attachable(FakeService(), Options())
    handlers, visitor = Handlers(service), SimpleNamespace(session_hash="a")

    def meter():
        controls = ["", None, 5, True, 0.8, 0, 0.95, 0.0, 1.0, 0, 64, "", False, True, "rejection", False]
        _, asked = handlers.ask(visitor, "Hello", [])
        screens = list(handlers.respond(visitor, asked, *controls))
        return [json.loads(bar)["meter"] for screen in screens if isinstance(bar := screen[Screen.FIELDS.index("bar")], str)]
    with serve(Script(body)) as address:
        service.attach(address)
        settled(service)
        first, *_, last = meter()
        assert first == {} and last.get("text") == text
        assert json.loads(handlers.settled(visitor, [question("Hello")]))["meter"].get("text") == text
        handlers.clear(visitor)
        assert json.loads(handlers.settled(visitor, [question("Hello")]))["meter"] == {}      # another conversation: not counted yet
    service.detach()
    assert meter()[-1]["text"].endswith("of 2,048 tokens")
