"""What one visitor does is not to be seen in anything that another one gets: drafts, reuse, records, names of runs."""
from __future__ import annotations

import json
from dataclasses import replace

import pytest
from engine_helpers import Lab
from fake_service import FakeService
from head_files import random_heads
from test_handlers import messages, seen, turn, visitor
from test_service import PROMPT, ask, open_tiny, ready

from specviz.drafters import DRAFTERS
from specviz.engine.graph_backends import TapeBackend
from specviz.engine.graphs import StaticSteps
from specviz.server.requests import parsed
from specviz.ui.handlers import Handlers
from specviz.ui.library import Library
from specviz.trace import dumps
from specviz.ui.settings import Settings

SECRET = f"{PROMPT} the quick brown fox"
CANARY = "violet heron 7261"
HEADS = [method.name for method in DRAFTERS.values() if method.heads]


def open_with_heads(options, progress):
    """The tiny engine with heads of every kind, so that every method runs."""
    opened = open_tiny(options, progress)
    opened.parts = replace(opened.parts, heads=random_heads(opened.parts.target))
    return opened


@pytest.fixture(scope="module")
def services():
    """One on which somebody else has been before, and one on which nobody has."""
    used, fresh = ready(open_with_heads), ready(open_with_heads)
    yield used, fresh
    used.close()
    fresh.close()


def told(run):
    """What a run tells of itself, without times: drafts, where they came from, what was emitted, reused and kept."""
    steps = list(run)
    assert steps and run.reason == "length"
    return [(step.kind, step.emitted, [(node.id, node.parent, node.state, node.q) for node in step.nodes], step.num_reused, step.num_pooled,
             step.draft_by, step.draft_stop, step.kv) for step in steps]


@pytest.mark.parametrize("method", DRAFTERS)
def test_drafts_do_not_depend_on_other_visitors(services, method):
    """A visitor's whole record is the same where another one asked the very same and more before, and is being answered at the same time, as
    where nobody else ever was: no pool of drafts, no cached row and no state of a drafter crosses over."""
    used, fresh = services
    for conversation in ("other", "another"):
        assert list(used.submit(ask(SECRET, method, conversation, max_new_tokens=30)))
        assert list(used.submit(ask(PROMPT, method, conversation, max_new_tokens=30)))
    beside = used.submit(ask(PROMPT, method, "other", max_new_tokens=200))
    steps = iter(beside)
    next(steps)
    mine = used.submit(ask(PROMPT, method, f"mine {method}", max_new_tokens=30))
    ours = told(mine)
    beside.cancel()
    list(steps)
    assert ours == told(fresh.submit(ask(PROMPT, method, f"mine {method}", max_new_tokens=30)))
    assert ours[0][3] == 0
    for service, conversation in ((used, "other"), (used, "another"), (used, f"mine {method}"), (fresh, f"mine {method}")):
        service.forget(conversation)


@pytest.mark.parametrize("method", HEADS)
def test_one_visitors_words_reach_no_other_page(services, method):
    """Words that only one visitor wrote stand in that one's own record and messages, and in nothing that others are told while its page is
    open or when it is gone: no trace, no message, no link to a run. A link dies with its visitor."""
    used, _ = services
    handlers = Handlers(used)

    def asked(name, text):
        screens = turn(handlers, text, who=visitor(name), method=method, k=4, max_new_tokens=16, measure_plain=False)[0]
        run = messages(screens)[0]["run"]
        return run, dumps(handlers._visits.of(visitor(name)).run.trace()) + json.dumps(messages(screens)) + handlers.archive.resync(run, 0)
    link, theirs = asked("heron", f"{PROMPT} {CANARY}")
    assert theirs.count(CANARY) >= 2 and CANARY in json.dumps(json.loads(handlers.archive.resync(link, 0)))
    assert CANARY not in asked("beside", PROMPT)[1]
    handlers.leave(visitor("heron"))
    assert not json.loads(handlers.archive.resync(link, 0))["messages"]
    mine, ours = asked("after", PROMPT)
    assert CANARY not in ours and link not in ours and json.loads(handlers.archive.resync(mine, 0))["messages"]
    for name in ("beside", "after"):
        handlers.leave(visitor(name))


@pytest.mark.parametrize("static", [False, True], ids=["rows of their own", "rows at fixed addresses"])
@pytest.mark.parametrize("method", [*HEADS, "draft_model"])
def test_a_row_that_is_used_again_holds_nothing_of_the_one_before(method, static):
    """After `forget`, caches of target and drafter have no row and no request has drafting state left; the next request, which takes the
    same places, drafts and decides as on an engine that nobody ever used, also where rows keep their addresses in memory."""
    def lab():
        return Lab(exact=not static, static=StaticSteps(TapeBackend()) if static else None)
    used, prompts = lab(), [[(7 * i * n + n) % 380 + 3 for i in range(40 + 9 * n)] for n in (1, 2, 3)]
    before = [used.add(prompt, method, scope=f"of {number}", max_new_tokens=10) for number, prompt in enumerate(prompts[:2])]
    used.finish()
    assert len(used.cache) == 2
    for number in range(2):
        used.engine.forget(f"of {number}")
    own = getattr(used.drafters[method], "_cache", None)
    assert len(used.cache) == 0 and (own is None or len(own) == 0) and all(each.sequence.drafting is None for each in before)

    def told(result):
        return [(step.kind, step.emitted, [(node.id, node.parent, node.state, node.p, node.q) for node in step.nodes],
                 step.num_reused, step.kv) for step in result.steps]
    again, fresh = (told(each.run(prompts[2], method, scope="of 2", max_new_tokens=10)) for each in (used, lab()))
    assert again == fresh


def test_a_forgotten_conversation_is_read_anew(services):
    """What the engine has read of a conversation goes when its visitor does; those of others stay."""
    used, _ = services
    for conversation in ("stays", "goes"):
        list(used.submit(ask(PROMPT, "plain", conversation, max_new_tokens=4)))
    num_rows = used.num_cached_rows()
    used.forget("goes")
    again = {name: list(used.submit(ask(PROMPT, "plain", name, max_new_tokens=4)))[0].num_reused for name in ("stays", "goes")}
    assert again["goes"] == 0 and again["stays"] > 10 and used.num_cached_rows() == num_rows + 1
    for name in again:
        used.forget(name)


def test_the_names_of_runs_and_conversations_cannot_be_had():
    """A run is known by a random name that only its own page is told; a page that asks for another's run by session, number or a made-up name
    gets nothing, and neither does whoever asks the library of recorded runs for it."""
    service = FakeService("A secret of amber")
    handlers = Handlers(service)
    run = messages(turn(handlers, "amber", who=visitor("amber"), measure_plain=False)[0])[0]["run"]
    assert len(run) == 32
    for name in ("amber", "", "0", run[:-1], run.upper(), run + " ", None, ["x"], {"run": run}):
        assert json.loads(handlers.archive.resync(name, 0))["messages"] == []
    assert json.loads(handlers.archive.resync(run, 0))["messages"]
    library = Library({})
    for name in (run, "amber", "../README", "1-add_commas-prompt_lookup.json/../../README"):
        assert set(json.loads(library.answer(name))) == {"error"}


def test_pages_get_their_own_chat_and_nothing_else():
    """Of two visitors who ask in turn, each one's screens hold only that one's text, and each request only its own conversation."""
    service = FakeService({"amber": "A1 amber secret", "birch": "B1 birch secret"})
    handlers = Handlers(service)
    shown = {}
    for name in ("amber", "birch", "amber"):
        screens, chat = turn(handlers, name, shown.get(name, (None, ()))[1], visitor(name), measure_plain=False)
        shown[name] = screens, chat
    for name, other in (("amber", "birch"), ("birch", "amber")):
        everything = json.dumps([messages(shown[name][0]), seen(shown[name][0], "chat"), seen(shown[name][0], "bar"), seen(shown[name][0], "status")])
        assert name in everything and other not in everything
    assert [request.conversation for request in service.requests] == ["amber", "birch", "amber"]
    assert all("birch" not in json.dumps(service.requests[at].messages) for at in (0, 2))


def test_a_key_of_the_cache_is_its_clients_own():
    """Two clients that choose the same prompt_cache_key share nothing, and no name is that of the scope which everybody shares."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "prompt_cache_key": "*"}

    def name(client, **change):
        return parsed(body | change, chat=True, methods=("plain",), default_method="plain", client=client).request.conversation
    assert name("10.0.0.1") == name("10.0.0.1") != name("10.0.0.2") and name("", prompt_cache_key="") != name("", prompt_cache_key="")
    settings = Settings("", "plain", 5, True, 0.0, 0, 1.0, 0.0, 1.0, 0, 8, "", False, False)
    assert replace(settings).request([{"role": "user", "content": "x"}], "*").conversation == "*", "the driver gives it a prefix"
    from specviz.engine.scheduler import SHARED
    from specviz.job import scope_of
    assert scope_of(SHARED) != SHARED
