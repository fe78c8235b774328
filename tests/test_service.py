"""The service on a tiny random engine: runs, cancelling, plain measurement, errors in the middle; the real one only knows more words."""
from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from specviz.drafters import Parts
from specviz.engine.engine import Engine
from specviz.engine.model import LanguageModel
from specviz.engine.record import Recorder
from specviz.engine.sampling import SamplingParams
from specviz.errors import Busy, InputError, LoadError, NotEnoughMemory, PromptTooLong
from specviz.local_service import AnswerText, LocalService
from specviz.opening import Opened
from specviz.options import Options
from specviz.service import ChatRequest
from specviz.text import TextCodec, special_ids
from specviz.trace import dumps, loads

PROMPT = "Guess, check, keep what was right. Guess, check, keep what was right. Guess, check"


def open_tiny(options: Options, progress) -> Opened:
    """An engine over a tiny llama whose words are those of the tiny tokenizer; it never ends by itself."""
    tokenizer = tiny_tokenizer()
    target = LanguageModel(tiny_model("llama", dtype=torch.float64), num_tokens=len(tokenizer))
    draft = LanguageModel(tiny_model("llama", seed=1, dtype=torch.float64), num_tokens=len(tokenizer))
    cache = target.new_cache(400)
    parts = Parts(target, cache, draft, marker_ids=special_ids(tokenizer))
    codec = TextCodec(tokenizer)
    config = {"target": "tiny", "drafter": "tiny too", "device": "cpu", "dtype": "float64", "quantization": "none", "threads": 1}
    return Opened(Engine(target, cache, Recorder(codec.piece)), parts, codec, frozenset(), config, {})


def ready(opener=open_tiny) -> LocalService:
    service = LocalService(Options(browser=False), opener)
    while service.status().state == "loading":
        threading.Event().wait(0.01)
    return service


@pytest.fixture(scope="module")
def service():
    service = ready()
    yield service
    service.close()


def ask(prompt: str = PROMPT, method: str = "prompt_lookup", conversation: str = "", **sampling) -> ChatRequest:
    return ChatRequest(({"role": "user", "content": prompt},), SamplingParams(**{"max_new_tokens": 40, **sampling}), method, 4,
                       conversation=conversation)


@pytest.mark.parametrize("method", ["plain", "prompt_lookup", "draft_model", "early_exit"])
def test_a_run_is_complete(service, method):
    """Steps, text, reason, meta, measured plain run, comparison and the file agree with each other, for every method."""
    run = service.submit(ask(method=method))
    steps = list(run)
    assert run.reason == "length"
    emitted = [token for step in steps for token in step.emitted]
    assert len(emitted) == 40
    assert "".join(token.text for token in emitted if not token.text.startswith("<|")) == run.text
    plain = list(run.measure_plain(100))
    assert [token.id for token in plain] == [token.id for token in emitted]
    assert all(token.margin is not None and token.margin >= 0 for token in plain)
    assert all(a.t_ms < b.t_ms for a, b in zip(plain, plain[1:]))
    trace = run.trace()
    assert trace.compare["identical"] and trace.compare["tokens"] == 40
    assert trace.stats["num_tokens"] == 40 and trace.stats["speed_up"] > 0
    assert trace.meta["method"] == method and trace.meta["config"]["dtype"] == "float64"
    again = loads(dumps(trace))
    assert [step.emitted for step in again.steps] == [step.emitted for step in steps]


def test_plain_measurement_goes_on_where_it_stopped(service):
    """Two measurements of 15 and the rest give one timeline and the same tokens as one; more than the answer is never measured."""
    run = service.submit(ask())
    answer = [token.id for step in run for token in step.emitted]
    first = list(run.measure_plain(15))
    assert len(first) == 15
    rest = list(run.measure_plain(1000))
    assert [token.id for token in first + rest] == answer
    assert rest[0].t_ms > first[-1].t_ms
    assert list(run.measure_plain(10)) == []


def test_sampling_measures_without_comparing(service):
    """A sampled run says so instead of comparing texts."""
    run = service.submit(ask(temperature=1.0, seed=3, method="draft_model"))
    list(run)
    assert len(list(run.measure_plain(20))) == 20
    assert run.trace().compare["mode"] == "sampling"
    judged = [node for step in run.trace().steps for node in step.nodes if node.state in ("accepted", "rejected")]
    assert judged and all(0 <= node.accept_prob <= 1 and node.q is not None for node in judged)
    assert any(step.residual for step in run.trace().steps)


def test_cancel_in_the_middle_keeps_the_text(service):
    """After cancel the steps end, the text stays, and the next request runs."""
    run = service.submit(ask(max_new_tokens=300))
    for number, _ in enumerate(run):
        if number == 3:
            run.cancel()
    assert run.reason == "cancelled" and 0 < len(run.trace().steps) < 300
    assert run.text
    assert list(service.submit(ask(max_new_tokens=3)))


def test_a_new_question_ends_the_measurement(service):
    """Submitting while plain decoding is measured ends the measurement early; its tokens so far stay."""
    run = service.submit(ask(max_new_tokens=300))
    list(run)
    measured = run.measure_plain(300)
    next(measured)
    other = service.submit(ask(max_new_tokens=5))
    list(other)
    rest = list(measured)
    assert 1 + len(rest) == len(run.trace().plain) < 300
    assert run.trace().compare["partial"]


def test_closing_a_measurement_frees_the_engine(service):
    """A generator that is dropped (page closed) leaves nothing running."""
    run = service.submit(ask(max_new_tokens=300))
    list(run)
    measured = run.measure_plain(300)
    next(measured)
    measured.close()
    assert list(service.submit(ask(max_new_tokens=3)))
    assert service._opened.engine.idle


def test_conversations_reuse_their_own_prefix_only(service):
    """The second turn of a conversation reads only what is new; another conversation with the same text reads everything."""
    first = service.submit(ask(conversation="a", max_new_tokens=8))
    list(first)
    messages = ({"role": "user", "content": PROMPT}, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on."})
    second = list(service.submit(ChatRequest(messages, SamplingParams(max_new_tokens=4), "plain", 4, conversation="a")))
    other = list(service.submit(ChatRequest(messages, SamplingParams(max_new_tokens=4), "plain", 4, conversation="b")))
    assert second[0].num_reused > 10 and other[0].num_reused == 0
    assert [step.emitted for step in second] == [step.emitted for step in other]


def test_refusals_are_sentences(service):
    """A prompt that is too long, an unknown or impossible method, a k out of range: the sentence says what was given and what is possible."""
    with pytest.raises(PromptTooLong, match="400"):
        service.submit(ask("word " * 2000))
    with pytest.raises(InputError, match="telepathy.*plain"):
        service.submit(ask(method="telepathy"))
    with pytest.raises(InputError, match="64"):
        service.submit(ChatRequest(({"role": "user", "content": "x"},), SamplingParams(), "plain", 65))
    assert list(service.submit(ask(max_new_tokens=2)))


def test_a_failing_step_ends_the_answer_not_the_service(service, monkeypatch):
    """Whatever a step raises reaches the one who waits; the next request runs on a clean engine."""
    forward, calls = service._opened.parts.target.forward, []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise NotEnoughMemory("No memory.")
        return forward(*args, **kwargs)
    monkeypatch.setattr(service._opened.parts.target, "forward", fail)
    run = service.submit(ask())
    with pytest.raises(NotEnoughMemory):
        list(run)
    assert run.reason == "error" and run.trace().steps
    monkeypatch.undo()
    assert len(list(service.submit(ask(method="plain")))) == 40
    assert len(service._opened.parts.cache) <= 5


@pytest.mark.parametrize("method", ["prompt_lookup", "draft_model", "early_exit"])
def test_shared_noise_is_compared_token_by_token(service, method):
    """A sampled run under shared noise is identical to the plain run measured after it, in two parts; the trace says why it may claim so."""
    run = service.submit(replace(ask(method=method, temperature=1.2, seed=5), verification="shared-noise"))
    assert list(run) and list(run.measure_plain(13)) and list(run.measure_plain(100))
    trace = loads(dumps(run.trace()))
    assert trace.compare == {"mode": "shared-noise", "identical": True, "tokens": 40, "of": 40, "partial": False}
    assert all(token.margin is not None and token.margin > 0 for token in trace.plain)
    assert (trace.meta["verification"], trace.meta["promise"], trace.meta["config"]["lossless"]) == ("shared-noise", "text", True)


def test_a_lossy_rule_is_labelled_and_an_unknown_one_refused(service):
    """The trace of a lossy run says so and claims no identity even where the texts agree; the refusal names the rules there are."""
    run = service.submit(replace(ask(), verification="typical"))
    assert list(run) and list(run.measure_plain(100))
    trace = run.trace()
    assert (trace.meta["verification"], trace.meta["promise"], trace.meta["config"]["lossless"]) == ("typical", "nothing", False)
    assert trace.compare == {"mode": "lossy"}
    with pytest.raises(InputError, match="'luck'.*rejection, shared-noise, block, typical"):
        service.submit(replace(ask(), verification="luck"))


def test_many_at_once_are_served_and_too_many_refused(service):
    """Requests from several threads all end with their own full text; beyond the limit the refusal comes at once."""
    expected = [token.id for step in service.submit(ask(method="plain")) for token in step.emitted]
    found: list[list[int]] = []

    def one(method: str) -> None:
        found.append([token.id for step in service.submit(ask(method=method)) for token in step.emitted])
    threads = [threading.Thread(target=one, args=(method,)) for method in ("plain", "prompt_lookup", "draft_model", "early_exit", "plain")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 5
    runs = []
    with pytest.raises(Busy, match="waiting already"):
        for _ in range(200):
            runs.append(service.submit(ask(max_new_tokens=300)))
    for run in runs:
        run.cancel()
        assert list(run) is not None and run.reason == "cancelled"
    assert list(service.submit(ask(max_new_tokens=2)))


def test_loading_and_failing_are_told(service):
    """Before the model is there, requests are refused with the state; a load error becomes the status, and recorded runs need no model."""
    gate = threading.Event()

    def slow(options, progress):
        progress("Fetching the model", 0.5)
        gate.wait(10)
        raise LoadError("There is no network and nothing is cached.")
    waiting = LocalService(Options(browser=False), slow)
    while waiting.status().fraction is None:
        threading.Event().wait(0.01)
    with pytest.raises(Busy, match="Fetching"):
        waiting.submit(ask())
    assert waiting.methods() == [] and waiting.config() == {}
    gate.set()
    while waiting.status().state == "loading":
        threading.Event().wait(0.01)
    assert waiting.status().message == "There is no network and nothing is cached."
    with pytest.raises(Busy, match="no network"):
        waiting.submit(ask())
    waiting.close()


def test_the_answer_s_text_holds_back_stop_strings_and_characters():
    """Text that may begin a stop string is not released; what was held back comes out when the answer ends otherwise."""
    codec = TextCodec(tiny_tokenizer())
    answer = AnswerText(codec, ("was right",))
    for token in codec.encode("keep what was"):
        answer.push(token)
    assert answer.text == "keep what "
    answer.finish()
    assert answer.text == "keep what was"
    answer = AnswerText(codec, ("was right",))
    pushed = [answer.push(token) for token in codec.encode("keep what was right, and go on")]
    assert answer.text == "keep what " and pushed[-1][1]
