"""The soak on a tiny engine: 200 requests from 50 clients, through HTTP and the service, and that the soak itself sees faults."""
from __future__ import annotations

import gc
import threading

import pytest
from test_service import open_tiny, ready

from specviz.bench import soak as soaking
from specviz.bench.own_server import own_server
from specviz.bench.soak import KINDS, LIMITS, Case, cases, soak
from specviz.local_run import LocalRun

PROMPTS = ("Guess, check, keep what was right. Guess, check", "The quick brown fox", "def add(a, b):", "A small model", "one two one two")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(soaking, "PROMPTS", PROMPTS)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.long
def test_everybody_gets_what_is_theirs_and_nothing_stays():
    """Every request ends with its full text, which is that of a single run, or with a clear reason; the cached rows of target and draft
    model are as many as before, and when all is closed no thread is left."""
    before = {thread.ident for thread in threading.enumerate()}
    service = ready(open_tiny, limits=LIMITS, system_prompt="Keep what was right.")
    while not service._opened.engine.scheduler.shared or not service._opened.engine.idle:
        threading.Event().wait(0.01)
    with own_server(limits=LIMITS, service=service) as own:
        methods = [method.name for method in service.methods() if method.available]
        draft = service._opened.drafter("draft_model")
        num_shared = len(service._opened.engine.scheduler.shared)
        report = soak(own, cases(200, methods), 50, 12, PROMPTS)
        shared = service._opened.engine.scheduler.shared
        assert not report.faults, "\n".join(report.faults)
        assert sum(report.ended.values()) == 200 and {kind for kind, _ in report.ended} == set(KINDS) and report.num_tokens > 500
        assert report.rows[1] - report.rows[0] == len(shared) - num_shared, "every row but those of the system prompt was given back"
        assert len(draft._cache) == sum(sequence.drafter is draft for sequence in shared) and not report.threads
        assert "Every request ended as it must" in report.lines()[-1]
    left = [thread.name for thread in threading.enumerate() if thread.ident not in before and not thread.name.startswith(("asyncio_", "AnyIO"))]
    assert not left


def test_a_text_that_is_not_its_own_is_seen(monkeypatch):
    """An answer that got another's text, and one that ended without a reason, are faults with the request's number."""
    with own_server(limits=LIMITS, service=ready(open_tiny, limits=LIMITS)) as own:
        todo = [Case(0, "full", 0, "plain", "service"), Case(1, "bad option", 0, "plain", "whole"), Case(2, "leave", 1, "plain", "stream", 2)]
        assert soak(own, todo, 3, 12, PROMPTS).is_good
        text = LocalRun.text.fget
        monkeypatch.setattr(LocalRun, "text", property(lambda run: text(run) + ("" if run._job.request.conversation == "soak" else "!")))
        report = soak(own, todo[:1], 1, 12, PROMPTS)
        assert len(report.faults) == 1 and "Request 0 (full, plain, service): its text is" in report.faults[0] and not report.is_good
