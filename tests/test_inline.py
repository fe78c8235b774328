"""The engine without a thread: the same records as the driver's, text that grows, an end on request, errors as sentences."""
from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from test_service import PROMPT, ask, open_tiny

from specviz.errors import Busy, InputError
from specviz.inline import InlineService, answer, seconds_needed
from specviz.options import Options


@pytest.fixture(scope="module")
def service():
    torch.set_num_threads(1)

    def stream(*arguments):
        yield from answer(made.opened, *pickle.loads(pickle.dumps(arguments)))
    made = InlineService(Options(), stream, open_tiny)
    return made


def test_an_answer_and_its_plain_run(service):
    """Ready at once; steps, text and reason as from the threaded driver; plain decoding agrees; nothing stays cached."""
    assert service.status().state == "ready" and service.config()["target"]
    run = service.submit(ask(max_new_tokens=24))
    texts = [run.text for _ in run]
    assert run.reason == "length" and sum(len(step.emitted) for step in run.trace().steps) == 24
    assert texts == sorted(texts, key=len) and texts[-1] == run.text and run.text
    assert len(list(run.measure_plain(16))) == 16 and run.trace().compare["identical"]
    assert service.opened.engine.idle and not service.opened.engine.scheduler.parked and len(service.opened.engine.cache) == 0


def test_cancel_ends_the_call_and_frees_the_engine(service):
    """Stop between two steps keeps what came; a run that was never begun ends at once; closing the iterator does the same."""
    run = service.submit(ask(max_new_tokens=200))
    for number, _ in enumerate(run):
        if number == 3:
            run.cancel()
    assert run.reason == "cancelled" and run.text and len(run.trace().steps) == 4
    steps = iter(service.submit(ask(max_new_tokens=200)))
    next(steps)
    steps.close()
    assert service.opened.engine.idle and not service._driver._open


def test_errors_cross_the_call_as_sentences(service, monkeypatch):
    """An error of ours keeps its class, an unforeseen one is told, a broken call is a Busy; afterwards the next answer comes."""
    def failing(error):
        def step(self):
            raise error
        return step
    engine = type(service.opened.engine)
    for given, expected, words in ((InputError("too much"), InputError, "too much"), (ValueError("odd"), Exception, "unexpected error")):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", failing(given))
            run = service.submit(ask())
            with pytest.raises(expected, match=words):
                list(run)
            assert run.reason == "error"

    def broken(*arguments):
        raise RuntimeError("GPU task aborted")
        yield
    with monkeypatch.context() as patch:
        patch.setattr(service._driver, "_stream", broken)
        with pytest.raises(Busy, match="GPU task aborted"):
            list(service.submit(ask()))
    assert list(service.submit(ask(max_new_tokens=2)))


def test_seconds_asked_for():
    """Longer answers ask for more time, within what a visitor may use."""
    request = ask(PROMPT)
    asked = [seconds_needed([1], replace(request, sampling=replace(request.sampling, max_new_tokens=n)), 5, (), False) for n in (8, 256, 9999)]
    assert asked == [16, 41, 120]
