"""Comparing methods over a scripted service: order, the common baseline, stopping, refusals. No browser, no model."""
from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from fake_service import FakeService
from test_handlers import LOOK, Handlers, values, visitor

from specviz import metrics
from specviz.errors import NotEnoughMemory
from specviz.trace import loads
from specviz.ui.comparison import choices

ASKED = dict(ticket=7, prompt="Explain it", methods=["prompt_lookup", "medusa"], num_tokens=24)


def messages(handlers, who=None, during=lambda told: None, settings=None, **changes):
    found = []
    for screen in handlers.compare(who or visitor(), SimpleNamespace(**(ASKED | changes)), *(settings or values())):
        found.append(json.loads(screen[LOOK["viewer"]]))
        during(found[-1])
    return found


def test_methods_run_one_after_the_other_against_one_plain_run():
    """Each method gets an uncounted warm-up and one measured run, in a conversation of its own and in the page's settings; plain decoding is
    measured once, and every trace comes with it, its figures and its comparison, as a file that can be read."""
    service = FakeService(pause_s=0.002)
    told = messages(Handlers(service), settings=values(k=3, system="Be brief.", seed=5))
    assert all(message["type"] == "compare" and message["ticket"] == 7 for message in told) and told[-1]["state"] == "done"
    assert [(r.method, r.sampling.max_new_tokens) for r in service.requests] == [("prompt_lookup", 8), ("prompt_lookup", 24), ("medusa", 8), ("medusa", 24)]
    assert len({r.conversation for r in service.requests}) == 4 and all(r.k == 3 and r.sampling.seed == 5 for r in service.requests)
    assert [m["content"] for m in service.requests[1].messages] == ["Be brief.", "Explain it"]
    traces = [loads(json.dumps(message["trace"])) for message in told if "trace" in message]
    assert [trace.meta["method"] for trace in traces] == ["prompt_lookup", "medusa"]
    assert traces[0].plain == traces[1].plain and len(traces[0].plain) == 24
    for trace in traces:
        assert trace.stats["speed_up"] == pytest.approx(metrics.summarize(trace).speed_up, rel=0.01) and trace.compare["identical"] is True
    phases = [message["phase"] for message in told if "phase" in message]
    assert phases[0] == "warm-up" and {"answer", "plain"} <= set(phases) and [m["at"] for m in told[:-1]] == sorted(m["at"] for m in told[:-1])


@pytest.mark.parametrize("moment", ["before", "warm-up", "answer", "plain"])
def test_stopping_ends_the_run_in_progress_and_begins_no_other(moment):
    """Stopped while it waits, warms up, answers or measures: no further request, no half trace, the end is told."""
    service, who = FakeService(), visitor()
    handlers = Handlers(service)
    if moment == "before":
        handlers.halt(who, SimpleNamespace(ticket=7))
    told = messages(handlers, who, lambda message: message.get("phase") == moment and handlers.halt(who, SimpleNamespace(ticket=7)))
    assert told[-1]["state"] == "stopped" and not any("trace" in message for message in told)
    assert len(service.requests) == {"before": 0, "warm-up": 1, "answer": 2, "plain": 2}[moment]
    assert all(run._cancelled.is_set() for run in service.runs)
    other = messages(handlers, who, ticket=8)
    assert other[-1]["state"] == "done", "a stop is of one comparison only"


def test_a_closed_page_ends_the_run():
    """When the browser goes away the generator is closed, and the engine is let go of."""
    service = FakeService()
    screens = Handlers(service).compare(visitor(), SimpleNamespace(**ASKED), *values())
    while "answer" not in next(screens)[LOOK["viewer"]]:
        pass
    screens.close()
    assert len(service.runs) == 2 and all(run._cancelled.is_set() for run in service.runs)


@pytest.mark.parametrize("change, words", [
    ({"prompt": "  "}, "empty"), ({"prompt": None}, "empty"), ({"prompt": "x" * 20_001}, "20,001 characters"), ({"methods": []}, "expected some of"),
    ({"methods": ["draft_model"]}, "expected some of"), ({"methods": ["<b>"] * 3}, "prompt_lookup, medusa"), ({"methods": "plain"}, "expected some of"),
    ({"num_tokens": 100_000}, "1 to 512"), ({"num_tokens": "9"}, "1 to 512"), ({"methods": ["prompt_lookup"] * 17}, "expected some of")])
def test_what_cannot_be_compared_is_refused_in_words(change, words):
    """The browser's wish is not trusted: nothing runs, and a sentence says what was expected."""
    service = FakeService()
    [told] = messages(Handlers(service), **change)
    assert told["state"] == "failed" and words in told["message"] and not service.requests


def test_one_method_that_fails_does_not_end_the_others(monkeypatch):
    """The sentence is told with the method's place; the next one is measured, with a baseline of its own."""
    service = FakeService()
    submit = service.submit

    def refuse(request):
        if request.method == "prompt_lookup":
            raise NotEnoughMemory("No memory for it. Choose a shorter answer.")
        return submit(request)
    monkeypatch.setattr(service, "submit", refuse)
    told = messages(Handlers(service))
    assert [(m["at"], m["failed"]) for m in told if "failed" in m] == [(0, "No memory for it. Choose a shorter answer.")]
    [trace] = [loads(json.dumps(m["trace"])) for m in told if "trace" in m]
    assert trace.meta["method"] == "medusa" and len(trace.plain) == 24 and told[-1]["state"] == "done"


def test_choices_are_the_methods_that_draft():
    """Plain decoding is the baseline and no choice; what cannot run is named with its reason."""
    found = {method["name"]: method for method in json.loads(choices(FakeService()))}
    assert "plain" not in found and found["draft_model"]["reason"] and not found["prompt_lookup"]["reason"]
    assert json.loads(choices(FakeService(state="loading"))) == []
