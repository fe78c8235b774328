"""The service on another server, over real HTTP against a scripted one: steps, baseline, every way of failing, cancel, and the key."""
from __future__ import annotations

import json
import time

import httpx
import pytest
from remote_server import Script, recorded, serve, wire

from specviz.engine.sampling import SamplingParams
from specviz.errors import Busy, InputError
from specviz.options import Options, parse
from specviz.remote.client import Client, Endpoint, base_url
from specviz.remote.engines import detect
from specviz.remote.reading import RemoteError
from specviz.remote_service import RemoteService
from specviz.service import ChatRequest, Choice
from specviz.trace import dumps

ASK = ChatRequest(({"role": "user", "content": "Hi"},), SamplingParams(max_new_tokens=40))
VLLM = [event for event, _ in recorded("v_ngram_chat")]
LLAMA = [event for event, _ in recorded("x_draft_chat")]
PLAIN = [event for event, _ in recorded("x_none_chat")]


def attached(address, **options):
    service = RemoteService(Options(remote=address, **options))
    end_s = time.monotonic() + 10
    while service.status().is_loading and time.monotonic() < end_s:
        time.sleep(0.005)
    return service


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    for name in ("SPECVIZ_REMOTE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("owner, events, asks, tokens, drafted, accepted", [
    ("vllm", VLLM, {"return_token_ids": True, "logprobs": True}, 10, 8, 6), ("llamacpp", LLAMA, {"timings_per_token": True}, 26, 25, 20)])
def test_an_answer_end_to_end(owner, events, asks, tokens, drafted, accepted):
    """Found by its model list, asked for what its adapter needs, read step by step; the finished trace has the exact counts."""
    script = Script([wire([event], done=False) for event in events] + [b"data: [DONE]\n\n"], owner=owner)
    with serve(script) as address:
        service = attached(address)
        run = service.submit(ASK)
        live = list(run)
    assert script.asked[0].items() >= {"model": "smol", "stream": True, "max_tokens": 40, "temperature": 0.0, **asks}.items()
    trace = run.trace()
    assert (trace.stats["num_tokens"], trace.stats["num_draft_tokens"], trace.stats["num_accepted_draft_tokens"]) == (tokens, drafted, accepted)
    assert len(live) == len(trace.steps) and run.text == "".join(token.text for step in trace.steps for token in step.emitted)
    assert run.reason == "eos" and trace.meta["remote"]["engine"] == owner and trace.meta["remote"]["baseline"] == "none"
    assert list(run.measure_plain()) == [] and trace.stats["speed_up"] is None       # no baseline is no number
    assert service.config()["context"] == 512 and [method.available for method in service.methods()] == [True]


def test_baseline_is_a_second_server_measured_after_the_answer():
    """The plain run is asked for the same prompt and as many tokens, and gives a speed-up; without one there is none."""
    with serve(Script(wire(LLAMA), owner="llamacpp")) as fast, serve(plain := Script(wire(PLAIN), owner="llamacpp")) as slow:
        run = attached(fast, remote_baseline=slow).submit(ASK)
        list(run)
        assert not plain.asked
        tokens = list(run.measure_plain())
    assert plain.asked[0]["messages"] == [{"role": "user", "content": "Hi"}] and plain.asked[0]["max_tokens"] == 26
    assert len(tokens) == 13 and tokens[0].ms == 0 and all(token.ms > 0 for token in tokens[1:])
    trace = run.trace()
    assert trace.meta["remote"]["baseline"] == "measured" and trace.stats["speed_up"] > 0


def test_lm_studio_switches_on_the_same_server():
    """A server that takes its draft model per request is its own baseline: the field is sent for the answer and left out for it."""
    script = Script(wire([{"choices": [{"delta": {"content": "Hi"}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}],
                          "stats": {"total_draft_tokens_count": 9, "accepted_draft_tokens_count": 6}}]), owner="organization_owner")
    with serve(script) as address:
        run = attached(address, remote_kind="lm_studio", remote_draft="tiny").submit(ASK)
        list(run)
        list(run.measure_plain())
    assert [body.get("draft_model") for body in script.asked] == ["tiny", None]
    assert run.trace().meta["remote"]["server"]["stats"]["accepted_draft_tokens_count"] == 6


CONTEXT = b'{"object":"error","message":"This model\'s maximum context length is 512 tokens. However, you requested 900.","code":400}'
@pytest.mark.parametrize("script, kind, sentence", [
    (Script(raw=(401, "application/json", b'{"error":"Unauthorized"}')), "auth", "refused the key"),
    (Script(raw=(403, "application/json", b'{"error":{"message":"no"}}')), "auth", "refused the key"),
    (Script(raw=(404, "text/plain", b"nothing here")), "not-an-api", "another path than /v1"),
    (Script(raw=(200, "text/html", b"<html>hello</html>")), "not-an-api", "web page"),
    (Script(raw=(200, "application/json", b"[1,2]")), "not-an-api", "not with a list of models"),
    (Script(raw=(503, "application/json", b'{"error":{"message":"Loading model"}}')), "busy", "still loading"),
    (Script(models=()), "no-model", "serves no model")])
def test_a_server_that_cannot_be_attached_says_why(script, kind, sentence):
    """Each failure at the model list has its own sentence, and a chat then says the same instead of crashing."""
    with serve(script) as address:
        service = attached(address)
    assert service.status().state == "failed" and sentence in service.status().message
    with pytest.raises(Busy, match=sentence):
        service.submit(ASK)


@pytest.mark.parametrize("script, kind, sentence", [
    (Script(status=401, error=b'{"error":"Unauthorized"}'), "auth", "refused the key"),
    (Script(status=400, error=CONTEXT), "context", "does not fit this server's context"),
    (Script(status=404, error=b'{"error":{"message":"The model `x` does not exist."}}'), "no-model", "does not know this model"),
    (Script(status=429, error=b'{"error":{"message":"slow down"}}'), "busy", "busy"),
    (Script(status=500, error=b"\xff\xfe<b>oops"), "server", "answered 500"),
    (Script(wire(VLLM[:4], done=False)), "cut", "what had arrived is kept"),
    (Script(wire(VLLM[:4], done=False), cut=True), "cut", "what had arrived is kept"),
    (Script(b"data: {broken\n\n"), "not-an-api", "not JSON"),
    (Script(wire([*VLLM[:4], {"error": {"message": "CUDA out of memory"}}])), "server", "CUDA out of memory")])
def test_an_answer_that_fails_says_why_and_keeps_what_came(script, kind, sentence):
    """Errors before and inside the stream are told apart; tokens that arrived stay in the text and the trace."""
    with serve(script) as address:
        run = attached(address).submit(ASK)
        with pytest.raises(RemoteError, match=sentence) as caught:
            list(run)
    assert caught.value.kind == kind and run.reason == "error"
    if script.status == 200 and kind != "not-an-api":
        assert run.text == "The quick brown" and len(run.trace().steps) == 3


@pytest.mark.parametrize("address, kind, sentence", [
    ("127.0.0.1:9", "refused", "Nothing listens"), ("no-such-machine.invalid:80", "dns", "no machine called")])
def test_unreachable_servers(address, kind, sentence):
    """A wrong port and a wrong name are different mistakes."""
    with pytest.raises(RemoteError, match=sentence) as caught:
        Client(Endpoint(address)).models()
    assert caught.value.kind == kind


def test_tls_where_there_is_none():
    """https towards a server that speaks plain HTTP says which scheme to write."""
    with serve(Script()) as address, pytest.raises(RemoteError, match="http://") as caught:
        Client(Endpoint(address.replace("http://", "https://"), connect_s=2)).models()
    assert caught.value.kind in ("tls", "cut", "timeout")


def test_a_server_that_falls_silent_is_given_up_after_the_time_that_was_set():
    """--remote-timeout: the wait ends with a sentence that names the seconds, and what came stays."""
    options = parse(["--remote-timeout", "0.3"], {})
    with serve(Script([wire(VLLM[:3], done=False), b": ping\n\n"], pause_s=2)) as address:
        run = attached(address, remote_timeout=options.remote_timeout).submit(ASK)
        with pytest.raises(RemoteError, match="Nothing came") as caught:
            list(run)
    assert caught.value.kind == "timeout" and run.text.startswith("The")
    with pytest.raises(SystemExit):
        parse(["--remote-timeout", "nan"], {})


def test_cancel_drops_the_connection():
    """Stop closes the stream at once, though the server is still sending; what came so far stays."""
    script = Script([wire([event], done=False) for event in VLLM[:3]] + [b": ping\n\n"] * 200, pause_s=0.05)
    with serve(script) as address:
        run = attached(address).submit(ASK)
        steps = iter(run)
        next(steps)
        run.cancel()
        assert list(steps) in ([], [run.trace().steps[-1]])
        assert script.dropped.wait(5) and script.num_sent < 150
    assert run.reason == "cancelled" and run.text.startswith("The")


def test_the_key_reaches_the_server_and_nothing_else(monkeypatch):
    """From the environment into the header; not into options, status, configuration, errors or the trace."""
    monkeypatch.setenv("SPECVIZ_REMOTE_API_KEY", "sk-secret-123")
    with serve(script := Script(wire(VLLM))) as address:
        service = attached(address, remote_headers=(("X-Team", "hush-456"),))
        run = service.submit(ASK)
        list(run)
    assert all(headers["Authorization"] == "Bearer sk-secret-123" and headers["X-Team"] == "hush-456" for headers in script.headers)
    shown = dumps(run.trace()) + repr((service.status(), service.config(), service.methods(), service.offers(), service._endpoint))
    assert "secret" not in shown and "hush" not in shown


@pytest.mark.parametrize("where, sent", [("http://other:80/v1/models", (None, None)), ("http://gate:81/v1/models", (None, None)),
                                         ("https://gate/v1/models", ("hush", "Bearer sk-1")), ("/elsewhere", ("hush", "Bearer sk-1"))])
def test_a_redirect_takes_secrets_no_further(where, sent):
    """Key and extra headers follow a redirect on the same server, or to its https, never to another one; a circle ends with a sentence."""
    def answer(request):
        seen.append(request)
        if len(seen) == 1 or where == "circle":
            return httpx.Response(307, headers={"Location": where})
        return httpx.Response(200, json={"data": []})
    seen, endpoint = [], Endpoint("http://gate", api_key="sk-1", headers=(("X-Team", "hush"),))
    assert Client(endpoint, httpx.MockTransport(answer)).models() == []
    assert seen[0].headers["X-Team"] == "hush" and (seen[1].headers.get("X-Team"), seen[1].headers.get("Authorization")) == sent
    where = "circle"
    with pytest.raises(RemoteError, match="in a circle"):
        Client(endpoint, httpx.MockTransport(answer)).models()


def test_samplers_that_a_server_does_not_take_are_refused():
    """A setting is never dropped in silence: OpenAI's own API has no top_k, vLLM has."""
    sampled = ChatRequest(ASK.messages, SamplingParams(temperature=0.8, top_k=5, max_new_tokens=9))
    with serve(script := Script(wire(VLLM))) as address:
        with pytest.raises(InputError, match="takes no top_k"):
            attached(address, remote_kind="openai").submit(sampled)
        list(attached(address).submit(sampled))
    assert script.asked[-1]["top_k"] == 5 and "top_p" not in script.asked[-1]


def test_choosing_another_model_of_the_list():
    """The list of models is the server's; one that is not in it is refused and the one in use stays."""
    with serve(script := Script(wire(VLLM), models=("small", "large"))) as address:
        service = attached(address)
        assert [offer.source for offer in service.offers()] == ["small", "large"]
        service.load(Choice("large"))
        while service.status().is_loading:
            time.sleep(0.005)
        list(service.submit(ASK))
        service.load(Choice("gone"))
        while service.status().is_loading:
            time.sleep(0.005)
        assert service.status().state == "ready" and "does not list" in service.status().last_error
        list(service.submit(ASK))
    assert [body["model"] for body in script.asked] == ["large", "large"]


@pytest.mark.parametrize("text, url", [("127.0.0.1:8000", "http://127.0.0.1:8000/v1"), ("https://host/v3/", "https://host/v3"),
                                       (" http://[::1]:80 ", "http://[::1]:80/v1"), ("host/prefix/v1", "http://host/prefix/v1")])
def test_addresses_as_people_type_them(text, url):
    """A scheme and /v1 are added where missing; paths and other versions are kept."""
    assert base_url(text) == url


@pytest.mark.parametrize("text", ["", "ftp://host", "http://", "a b", "http://user:pw@host", "host:99999"])
def test_addresses_that_are_none(text):
    """What cannot be an address is said before anything is sent; a password never stands in an address."""
    with pytest.raises(InputError, match="address"):
        base_url(text)


def test_command_line():
    """--remote and its companions arrive as options; a header without a colon ends the program."""
    options = parse(["--remote", "gpu:8000", "--remote-kind", "vllm", "--remote-header", "X-A: b"], {})
    assert (options.remote, options.remote_kind, options.remote_headers) == ("gpu:8000", "vllm", (("X-A", "b"),))
    with pytest.raises(SystemExit):
        parse(["--remote-header", "nothing"], {})


def test_detection_by_owner_then_by_address():
    """`owned_by` decides; a gateway that hides it leaves an OpenAI-compatible server, never a wrong guess."""
    with serve(Script(raw=(200, "application/json", json.dumps({"data": [{"id": "m", "owned_by": "sglang"}]}).encode()))) as address:
        client = Client(Endpoint(address))
        assert detect(client, client.models()).name == "sglang"
        assert detect(client, [{"id": "m", "owned_by": "someone"}]).name == "openai"
