"""Our engine as a server, over real HTTP on a tiny engine: OpenAI's shapes, counters, refusals, and clients that go away."""
from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from test_service import PROMPT, ready
from tiny import slow_steps

from app import free_port
from specviz import metrics
from specviz.engine.sampling import SamplingParams
from specviz.limits import Limits
from specviz.options import Options, parse
from specviz.remote_service import RemoteService
from specviz.server.counted import Counted
from specviz.server.serving import not_offered, serve_alone
from specviz.service import ChatRequest

KEY = "sesame"
MESSAGES = [{"role": "user", "content": PROMPT}]
BODY = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def counted():
    service = Counted(ready())
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(counted):
    with served(counted, Options(api_key=KEY, api_only=True, browser=False)) as client:
        yield client


@contextmanager
def served(service, options):
    """A client of the API on a port of its own."""
    port = free_port("127.0.0.1", 0)
    stop = serve_alone(service, options, port)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as client:
        while client.get("/v1/models").status_code != 200:
            time.sleep(0.02)
        yield client
    stop()


def direct(counted, method="prompt_lookup", **sampling):
    run = counted.submit(ChatRequest(tuple(MESSAGES), SamplingParams(**{"max_new_tokens": 24, **sampling}), method, 5))
    list(run)
    return run


def events(response):
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def counters(client):
    lines = [line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line.startswith("specviz:")]
    return {name: float(value) for name, value in lines}


def test_an_answer_in_one_piece_and_as_a_stream_is_the_engines_own(client, counted):
    """Both forms carry the text of a direct run; the stream has one chunk per step with its ids, then the counts of the same steps."""
    run = direct(counted)
    whole = client.post("/v1/chat/completions", json=BODY | {"speculative": {"method": "prompt_lookup"}}).json()
    assert whole["choices"][0]["message"]["content"] == run.text and whole["choices"][0]["finish_reason"] == "length"
    asked = BODY | {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                    "speculative": {"method": "prompt_lookup", "k": 5}}
    with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == run.text
    steps = [choice["token_ids"] for choice in choices if "token_ids" in choice]
    trace = run.trace()
    assert steps == [[token.id for token in step.emitted] for step in trace.steps if step.emitted]
    used = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"] and "token_ids" in chunk["choices"][0]]
    assert used == [sum(map(len, steps[:i + 1])) for i in range(len(steps))] and used[-1] == 24
    stats, told = metrics.summarize(trace), chunks[-1]["metrics"]["speculative_decoding"]
    assert told["per_step_accepted"] == list(stats.per_step_accepted) and told["per_step_drafted"] == list(stats.per_step_drafted)
    assert told["num_spec_steps"] > 0 and chunks[-1]["usage"]["prompt_tokens"] == run.meta["prompt_tokens"]
    assert whole["metrics"]["speculative_decoding"]["per_step_accepted"] == told["per_step_accepted"]


def test_our_own_adapter_reads_our_own_server(client, counted, monkeypatch):
    """Attached to itself, both sides tell the same story: text, tokens, drafted and accepted per step, and the figures made of them."""
    monkeypatch.setenv("SPECVIZ_REMOTE_API_KEY", KEY)
    service = RemoteService(Options(remote=str(client.base_url)))
    while service.status().is_loading:
        time.sleep(0.01)
    assert service.config()["engine"] == "specviz"
    run = service.submit(ChatRequest(tuple(MESSAGES), SamplingParams(max_new_tokens=24)))
    list(run)
    local, remote = direct(counted, counted.default_method()).trace(), run.trace()
    tokens = [[(token.id, token.text, token.origin) for token in step.emitted] for step in remote.steps if step.emitted]
    assert tokens == [[(token.id, token.text, token.origin) for token in step.emitted] for step in local.steps if step.emitted]
    same = ("num_tokens", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "per_step_accepted", "per_step_drafted",
            "mean_acceptance_length", "tokens_per_step", "acceptance_histogram")
    assert {name: remote.stats[name] for name in same} == {name: local.stats[name] for name in same}
    assert {step.source for step in remote.steps[1:]} == {"exact"}


def test_counters_add_up(client, counted):
    """What Prometheus reads grows by what one answer's own record says, and nothing is left running."""
    before = counters(client)
    answer = client.post("/v1/chat/completions", json=BODY | {"speculative": {"method": "prompt_lookup"}}).json()
    after, told = counters(client), answer["metrics"]["speculative_decoding"]
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["specviz:spec_decode_num_drafts_total"] == told["num_spec_steps"]
    assert grown["specviz:spec_decode_num_draft_tokens_total"] == told["num_draft_tokens"]
    assert grown["specviz:spec_decode_num_accepted_tokens_total"] == told["num_accepted_draft_tokens"] == sum(
        value for name, value in grown.items() if "per_pos_total" in name)
    assert grown["specviz:generation_tokens_total"] == 24 and after["specviz:num_requests_running"] == 0
    assert grown["specviz:prompt_tokens_total"] == answer["usage"]["prompt_tokens"]
    assert grown['specviz:request_success_total{finished_reason="length"}'] == 1
    names = {name.split("{")[0] for name in after if "_created" not in name}
    vllms = {"num_requests_waiting", "num_requests_running", "prompt_tokens_total", "prefix_cache_hits_total", "generation_tokens_total",
             "request_success_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
             "spec_decode_num_accepted_tokens_total",
             *(f"{each}_seconds_{part}" for each in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
               for part in ("bucket", "count", "sum"))}
    assert names - {"specviz:spec_decode_num_accepted_tokens_per_pos_total"} == {f"specviz:{name}" for name in vllms}, "vLLM 0.32's names, as its /metrics gave them"


def test_a_client_that_goes_away_frees_its_row(client, counted):
    """A dropped stream is cancelled within a step: nothing runs on, and the counters saw it end."""
    before = counters(client)
    with client.stream("POST", "/v1/chat/completions", json=BODY | {"max_tokens": 300, "stream": True}) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number == 6:
                break
    end_s = time.monotonic() + 10
    while counters(client)["specviz:num_requests_running"] and time.monotonic() < end_s:
        time.sleep(0.02)
    after = counters(client)
    ended = 'specviz:request_success_total{finished_reason="abort"}'
    assert after["specviz:num_requests_running"] == 0 and after[ended] == before.get(ended, 0) + 1
    assert after["specviz:generation_tokens_total"] - before["specviz:generation_tokens_total"] < 300


def test_several_clients_at_once_get_what_they_would_get_alone(client, counted):
    """Eight streams side by side, with different methods, in one batch: each greedy text is that of a single run."""
    alone, texts = direct(counted, "plain").text, {}

    def ask(method):
        texts[method] = client.post("/v1/chat/completions", json=BODY | {"speculative": {"method": method}}).json()
    methods = [m.name for m in counted.methods() if m.available][:8]
    threads = [threading.Thread(target=ask, args=(method,)) for method in methods]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {answer["choices"][0]["message"]["content"] for answer in texts.values()} == {alone} and len(texts) == len(methods)


@pytest.mark.parametrize("change, status, words", [
    ({"n": 2}, 400, "supports only 1"), ({"temperature": 9}, 400, "from 0 to 2"), ({"messages": []}, 400, "at least one message"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "role"), ({"stop": [""]}, 400, "stop"), ({"max_tokens": 0}, 400, "max_tokens"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text parts"), ({"nonsense": 1}, 400, "Unrecognized"),
    ({"model": "gpt-9"}, 404, "does not exist"), ({"tools": [{"type": "function"}]}, 400, "tools"), ({"seed": "x"}, 400, "seed"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"), ({"speculative": {"method": "magic"}}, 400, "magic"),
    ({"speculative": {"k": 99}}, 400, "1 to 64"), ({"speculative": {"method": "prompt_lookup", "options": {"magic": 1}}}, 400, "magic"),
    ({"speculative": {"options": 3}}, 400, "object"), ({"messages": [{"role": "user", "content": "word " * 900}]}, 400, "room for")])
def test_refusals_have_openais_shape(client, change, status, words):
    """What this engine cannot do is refused with a sentence, never done in another way: status, message, type and code as OpenAI has."""
    answer = client.post("/v1/chat/completions", json=BODY | change)
    assert answer.status_code == status and words in answer.json()["error"]["message"]
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_limits_are_refused_as_openai_does():
    """One row and one place to wait: the third request is a 429 with Retry-After, a waiting client that goes away gives its place up, and
    too many in a minute, too long a prompt and too long an answer are refused with the limit in the sentence."""
    limits = Limits(at_once=1, waiting=1, prompt_tokens=60, new_tokens=300, per_minute=9)
    service = Counted(ready(limits=limits))
    short = BODY | {"messages": [{"role": "user", "content": "Guess"}]}
    try:
        with served(service, Options(api_key=KEY, limits=limits)) as client:
            with slow_steps(service._opened.engine):
                first = service.submit(ChatRequest(({"role": "user", "content": "Guess"},), SamplingParams(max_new_tokens=300), "plain"))
                with pytest.raises(httpx.ReadTimeout):                             # nothing is sent while it waits
                    client.post("/v1/chat/completions", json=short | {"max_tokens": 4}, timeout=0.5)
                end_s = time.monotonic() + 10
                while service._driver.num_answers > 1 and time.monotonic() < end_s:
                    time.sleep(0.01)
                second = service.submit(ChatRequest(({"role": "user", "content": "Guess"},), SamplingParams(max_new_tokens=4), "plain"))
                full = client.post("/v1/chat/completions", json=short)
                assert (full.status_code, full.headers["retry-after"], full.json()["error"]["code"]) == (429, "5", "queue_full")
                assert "1 answer is being written and 1 is waiting already" in full.json()["error"]["message"]
                first.cancel()
            assert list(second) and second.reason == "length" and first.reason == "cancelled"
            long = client.post("/v1/chat/completions", json=BODY | {"messages": [{"role": "user", "content": "word " * 60}]}).json()
            assert "the operator of this page allows 60" in long["error"]["message"] and long["error"]["code"] == "context_length_exceeded"
            assert "at most 300" in client.post("/v1/chat/completions", json=short | {"max_tokens": 301}).json()["error"]["message"]
            answers = [client.post("/v1/chat/completions", json=short | {"max_tokens": 2}) for _ in range(6)]
            assert [answer.status_code for answer in answers] == [200] * 5 + [429]
            assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded" and 1 <= int(answers[-1].headers["retry-after"]) <= 60
            assert "9 requests a minute from one address (everybody behind one proxy" in answers[-1].json()["error"]["message"]
    finally:
        service.close()


def test_fields_that_change_nothing_are_taken(client):
    """Clients send many fields with their neutral value; none of these is a reason to refuse."""
    neutral = {"n": 1, "logprobs": False, "frequency_penalty": 0, "presence_penalty": 0.0, "user": "me", "tools": [], "logit_bias": None,
               "response_format": {"type": "text"}, "stream_options": None, "max_completion_tokens": 4}
    assert client.post("/v1/chat/completions", json=BODY | neutral).json()["usage"]["completion_tokens"] == 4


def test_plain_completions_stop_strings_and_seeds(client):
    """/v1/completions goes on with a raw text; a stop string ends it and is not part of it; the same seed gives the same text."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert text
    stop = text[3:6]
    cut = client.post("/v1/completions", json=body | {"stop": stop}).json()["choices"][0]
    assert cut["text"] == text[:text.index(stop)] and cut["finish_reason"] == "stop"
    sampled = [client.post("/v1/completions", json=body | {"temperature": 1.0, "seed": seed}).json()["choices"][0]["text"] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_keys_and_health(client):
    """Without the key nothing but /health answers; a broken body is a 400, not a crash."""
    bare = httpx.Client(base_url=client.base_url)
    assert bare.get("/health").json()["status"] == "ready"
    for path in ("/v1/models", "/metrics"):
        answer = bare.get(path)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert bare.post("/v1/chat/completions", json=BODY, headers={"Authorization": "Bearer sesam"}).status_code == 401
    assert client.post("/v1/chat/completions", content=b"{nope").status_code == 400
    assert client.get("/v1/models/tiny").json()["owned_by"] == "specviz" and client.get("/v1/models/other").status_code == 404


def test_the_openai_client_itself(client):
    """The real client: an answer, a stream, and its own exception for a refusal."""
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    real = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key=KEY, max_retries=0)
    text = real.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10, temperature=0).choices[0].message.content
    stream = real.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10, temperature=0, stream=True,
                                          stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == 10 and chunks[-1].model_extra["metrics"]["speculative_decoding"]
    assert real.models.list().data[0].id == "tiny"
    with pytest.raises(openai.BadRequestError, match="supports only 1"):
        real.chat.completions.create(model="tiny", messages=MESSAGES, n=3)


def test_the_api_is_off_where_strangers_could_use_it():
    """A page that others can reach offers the API only with a key; the command line says so and refuses an open --api-only."""
    assert not not_offered(Options()) and not not_offered(Options(host="0.0.0.0", auth=("a", "b"), api_key="k"))
    assert "no --api-key" in not_offered(Options(host="0.0.0.0", auth=("a", "b")))
    assert parse(["--api-only"], {"SPECVIZ_API_KEY": "k"}).api_key == "k" and "secret" not in repr(Options(api_key="secret"))
    with pytest.raises(Exception, match="Add --api-key"):
        parse(["--api-only", "--host", "0.0.0.0"], {})
