"""The service on a tiny random engine: runs, cancelling, plain measurement, errors in the middle; the real one only knows more words."""
from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from tiny import slow_steps, tiny_model, tiny_tokenizer

from specviz.cost import CostTable
from specviz.drafters import DRAFTERS, Parts
from specviz.engine.engine import Engine
from specviz.engine.model import LanguageModel
from specviz.engine.record import Recorder
from specviz.engine.sampling import SamplingParams
from specviz.errors import Busy, InputError, LoadError, NotEnoughMemory, PromptTooLong
from specviz.local_run import AnswerText
from specviz.local_service import LocalService
from specviz.opening import Opened
from specviz.options import Options
from specviz.service import ChatRequest, Waiting
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


def ready(opener=open_tiny, **options) -> LocalService:
    service = LocalService(Options(browser=False, **options), opener)
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
    assert trace.meta["guesses_by_text"] is DRAFTERS[method].by_text
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
    with slow_steps(service._opened.engine):
        for number, _ in enumerate(run):
            if number == 3:
                run.cancel()
    assert run.reason == "cancelled" and 0 < len(run.trace().steps) < 300
    assert run.text
    assert list(service.submit(ask(max_new_tokens=3)))


def test_a_measurement_makes_way_and_goes_on(service):
    """An answer interrupts plain decoding that is being measured, which waits, says so, and goes on to its end: the same tokens as at one go,
    on one clock without the time that it waited or read the prompt again, and never in one step with an answer."""
    run = service.submit(ask(max_new_tokens=300))
    answer = [token.id for step in run for token in step.emitted]
    measured, found, others = run.measure_plain(300), [], []
    with slow_steps(service._opened.engine, 0.01):
        for item in measured:
            found.append(item)
            if len(found) in (5, 40):
                others.append(service.submit(ask(f"{PROMPT} {len(found)}", max_new_tokens=20)))
                list(others[-1])
            if len(found) == 60:
                break
    found += measured
    tokens = [item for item in found if not isinstance(item, Waiting)]
    assert [token.id for token in tokens] == answer and 2 <= len(found) - len(tokens)
    assert all(a.t_ms < b.t_ms for a, b in zip(tokens, tokens[1:])) and abs(tokens[-1].t_ms - sum(t.ms for t in tokens[1:])) < 1e-6
    assert all(step.num_rows == 1 for other in others for step in other.trace().steps)
    assert run.trace().compare["identical"] and not run.trace().compare["partial"]


def test_a_measurement_waits_for_everyone_and_can_be_given_up(service):
    """While somebody is answered nothing is measured, the reader hears so again and again, and closing it leaves nothing behind."""
    run = service.submit(ask(max_new_tokens=8))
    list(run)
    with slow_steps(service._opened.engine):
        other = service.submit(ask(max_new_tokens=300))
        steps = iter(other)
        next(steps)
        measured = run.measure_plain(300)
        assert next(measured) == Waiting(1)
        measured.close()
    assert len(list(steps)) and other.reason == "length" and not run.trace().plain
    assert len([token for token in run.measure_plain(300) if not isinstance(token, Waiting)]) == 8


def test_the_queue_has_places(service):
    """Who finds all rows taken learns the place in the queue, moves up as others end, and one that is cancelled while it waits never runs."""
    with slow_steps(service._opened.engine):
        running = [service.submit(ask(max_new_tokens=300)) for _ in range(8)]
        waiting = [service.submit(ask(max_new_tokens=4)) for _ in range(3)]
        assert all(run.wait(30) and run.place == 0 for run in running)
        assert [run.place for run in waiting] == [1, 2, 3] and not waiting[2].wait(0.01)
        waiting[1].cancel()
        assert waiting[1].wait(30) and list(waiting[1]) == [] and waiting[1].reason == "cancelled"
        next(iter(running[0]))                        # one more step: the others have moved up
        for run in running:
            run.cancel()
    assert len(list(waiting[2])) and len(list(waiting[0])) and waiting[2].reason == "length" and waiting[2].place == 0


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


def test_options_shape_the_drafts_and_stand_in_the_trace(service):
    """What a request sets reaches the drafter, the rest has its default; all of it is in the trace, with what was changed. Every method
    that can run tells its options, and a wrong one is refused with the list."""
    infos = {info.name: info for info in service.methods()}
    assert [option.name for option in infos["draft_tree"].options] == ["width", "depth", "siblings"] and not infos["plain"].options
    assert next(option for option in infos["early_exit"].options if option.name == "exit_layer").high == 2
    runs = {width: service.submit(replace(ask(method="draft_tree"), options=(("width", width),))) for width in (1, 3)}
    traces = {}
    for width, run in runs.items():
        assert list(run)
        traces[width] = loads(dumps(run.trace()))
        config = traces[width].meta["config"]
        assert config["options"] == {"width": width, "depth": 8, "siblings": "drawn"}
        assert config["changed_options"] == (["width"] if width != 3 else [])
    assert all(node.parent == i - 1 for step in traces[1].steps for i, node in enumerate(step.nodes))
    assert any(node.parent != i - 1 for step in traces[3].steps for i, node in enumerate(step.nodes))
    assert runs[1].text == runs[3].text
    with pytest.raises(InputError, match="width is 0; expected a whole number from 1 to 8"):
        service.submit(replace(ask(method="draft_tree"), options=(("width", 0),)))
    with pytest.raises(InputError, match="Draft tree has no option 'window'; its options are width, depth, siblings"):
        service.submit(replace(ask(method="draft_tree"), options=(("window", 2),)))


def test_a_method_s_defaults_follow_the_measured_cost():
    """Once a step's cost is known, Lookahead's window suits it."""
    opened = open_tiny(Options(), None)
    before = {option.name: option.default for option in opened.options("lookahead")}
    opened.costs = CostTable((1, 64), (256,), ((1.0, 1.0),))
    flat = {option.name: option.default for option in opened.options("lookahead")}
    opened.costs = CostTable((1, 64), (256,), ((1.0, 64.0),))
    steep = {option.name: option.default for option in opened.options("lookahead")}
    assert flat["window"] > before["window"] > steep["window"] and flat["ngram"] > steep["ngram"]


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
    with slow_steps(service._opened.engine):
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


def test_the_operators_system_prompt_is_read_once_and_nothing_else_is_shared():
    """Every conversation begins with the operator's text, from the first request on taken over and not read again, by every method, with
    the same answer as where it is part of the messages; what one visitor wrote is never taken over by another, whatever it is called."""
    operator = "Keep what was right. " * 6
    service, usual = ready(system_prompt=operator), ready()
    try:
        while not service._driver.opened.engine.scheduler.shared:
            threading.Event().wait(0.01)
        shared = len(service._opened.shared)
        texts = {}
        for method in ("prompt_lookup", "suffix", "draft_model", "early_exit", "lookahead"):
            reused = []
            for name in ("a", "b", "*"):
                run = service.submit(ask("My own words", method, name, max_new_tokens=8))
                reused.append(list(run)[0].num_reused)
                texts[method, name] = run.text
                service.forget(name)
            assert reused == [shared] * 3 or method == "early_exit" and reused[1:] == [shared] * 2, (method, reused)
        assert run.meta["prompt"][0] == {"role": "system", "content": operator} and run.meta["shared_tokens"] == shared > 20
        expected = usual.submit(replace(ask(max_new_tokens=8), messages=(
            {"role": "system", "content": operator}, {"role": "user", "content": "My own words"})))
        assert list(expected) and set(texts.values()) == {expected.text}
        assert service.count_tokens([{"role": "user", "content": "My own words"}]) == run.meta["prompt_tokens"]
        own = service.submit(replace(ask(max_new_tokens=8), messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"})))
        assert list(own)[0].num_reused == shared and own.meta["prompt"][0]["content"] == f"{operator}\n\nBe brief."
        assert all(sequence.tokens[:shared] == list(service._opened.shared) and len(sequence.tokens) == shared + 1
                   for sequence in service._opened.engine.scheduler.shared)
    finally:
        service.close()
        usual.close()
    long = ready(system_prompt="word " * 300)
    assert "--system-prompt has" in long.status().message and long.status().state == "failed"
    long.close()
