"""The page's event functions as plain generators over a scripted service; no browser, no server, no model."""
from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import gradio as gr
import pytest
from fake_service import ANSWER, FakeService

from specviz.limits import Limits
from specviz.service import Status, Waiting
from specviz.trace import dumps
from specviz.ui import strings
from specviz.ui.handlers import Handlers as PageHandlers
from specviz.ui.messages import answered, conversation, failed, question, raw, shown, text_of
from specviz.ui.settings import Settings
from specviz.ui.visits import Screen

LOOK = dict(zip(Screen.FIELDS, range(len(Screen.FIELDS))))
DEFAULTS = dict(system="", method="prompt_lookup", k=5, greedy=True, temperature=0.8, top_k=0, top_p=0.95, min_p=0.0,
                repetition_penalty=1.0, seed=0, max_new_tokens=256, stop="", measure_plain=True, keep_probs=True,
                verification="rejection", auto_k=False)


class Handlers(PageHandlers):
    """On a clock that moves 60 ms per look, so that every step is a message of its own however fast the machine is."""

    def __init__(self, service, tick_s: float = 0.06):
        self.now = 0.0
        super().__init__(service, clock=lambda: self.tick(tick_s))

    def tick(self, tick_s):
        self.now += tick_s
        return self.now


def visitor(name: str = "a") -> gr.Request:
    return SimpleNamespace(session_hash=name)


def values(**changes):
    assert changes.keys() <= DEFAULTS.keys()
    return list((DEFAULTS | changes).values())


def is_skip(value) -> bool:
    return isinstance(value, dict) and value.get("__type__") == "update" and len(value) == 1


def seen(screens, name):
    """The values that one output got, in order."""
    return [screen[LOOK[name]] for screen in screens if not is_skip(screen[LOOK[name]])]


def messages(screens):
    return [json.loads(text) for text in seen(screens, "viewer")]


def turn(handlers, text="Hello there", history=(), who=None, **changes):
    """Ask and answer; returns (all screens, the chat at the end)."""
    who = who or visitor()
    _, asked = handlers.ask(who, text, list(history))
    screens = list(handlers.respond(who, asked, *values(**changes)))
    return screens, (seen(screens, "chat") or [asked])[-1]


def test_messages_for_the_viewer_are_ordered_and_tell_the_whole_answer():
    """seq rises by one from start to end, and the emitted tokens of all step messages add up to the text in the chat."""
    screens, chat = turn(Handlers(FakeService()))
    sent = messages(screens)
    assert [m["seq"] for m in sent] == list(range(len(sent)))
    assert len({m["run"] for m in sent}) == 1
    assert sent[0]["type"] == "start" and sent[-1]["type"] == "end"
    emitted = "".join(token["text"] for m in sent if m["type"] == "steps" for step in m["steps"] for token in step.get("emitted", ()))
    assert emitted == ANSWER == text_of(chat[-1])
    plain = [token for m in sent if m["type"] == "plain" for token in m["tokens"]]
    assert "".join(token["text"] for token in plain) == ANSWER
    assert sent[-1]["compare"]["identical"] is True


def test_footer_stands_under_the_answer_and_never_reaches_the_model():
    """The second request holds the first answer word for word, without the figures shown under it."""
    service = FakeService()
    handlers = Handlers(service)
    _, chat = turn(handlers, "First")
    assert "tokens/s" in chat[-1]["content"][1]["text"] and "× plain decoding" in chat[-1]["content"][1]["text"]
    turn(handlers, "Second", chat, system=" Be brief. ")
    assert [dict(m) for m in service.requests[-1].messages] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "First"}, {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "Second"}]
    assert service.requests[0].conversation == service.requests[1].conversation == "a"


def test_chat_is_updated_at_most_four_times_a_second():
    """On a clock that moves 10 ms per look, chat updates of the answering phase are at least 250 ms apart."""
    stamped = []
    handlers = Handlers(FakeService(ANSWER * 8), 0.01)
    _, asked = handlers.ask(visitor(), "Go", [])
    for screen in handlers.respond(visitor(), asked, *values(measure_plain=False, max_new_tokens=1000)):
        if not is_skip(screen[LOOK["chat"]]):
            stamped.append(handlers.now)
    assert len(stamped) > 4
    assert all(b - a >= 0.249 for a, b in zip(stamped[:-1], stamped[1:-1]))


def test_stop_keeps_the_partial_answer():
    """After Stop no further step is shown, the text so far stays in the chat, plain decoding is not measured, and the next turn works."""
    service = FakeService()
    handlers, who = Handlers(service), visitor()
    _, asked = handlers.ask(who, "Go", [])
    screens, generator = [], handlers.respond(who, asked, *values())
    for screen in generator:
        screens.append(screen)
        if len(service.runs[0].text) > 40:
            handlers.stop(who)
            break
    screens += list(generator)
    final = seen(screens, "chat")[-1]
    assert 0 < len(text_of(final[-1])) < len(ANSWER) and ANSWER.startswith(text_of(final[-1]))
    assert "stopped" in final[-1]["content"][1]["text"]
    assert not [m for m in messages(screens) if m["type"] == "plain"]
    assert seen(screens, "prompt")[-1]["submit_btn"] is True and seen(screens, "prompt")[-1]["stop_btn"] is False
    assert text_of(turn(handlers, "Again", final, who)[1][-1]) == ANSWER


def test_stop_while_measuring_keeps_the_answer_and_compares_the_common_length():
    handlers, who = Handlers(FakeService()), visitor()
    _, asked = handlers.ask(who, "Go", [])
    screens, generator = [], handlers.respond(who, asked, *values())
    for screen in generator:
        screens.append(screen)
        if messages(screens[-1:]) and messages(screens[-1:])[0]["type"] == "plain":
            handlers.stop(who)
    end = messages(screens)[-1]
    assert end["type"] == "end" and end["compare"]["partial"] is True and 0 < end["compare"]["of"] < end["stats"]["num_tokens"]
    assert text_of(seen(screens, "chat")[-1][-1]) == ANSWER
    assert seen(screens, "more")[-1]["visible"] is False


def test_a_new_question_ends_the_measurement_at_once_and_is_not_overwritten():
    """While plain decoding is measured a question is taken; from then on the old turn leaves the chat alone and stops measuring."""
    service = FakeService()
    handlers, who = Handlers(service), visitor()
    _, asked = handlers.ask(who, "First", [])
    generator, screens, after = handlers.respond(who, asked, *values()), [], None
    for screen in generator:
        screens.append(screen)
        if after is None and messages([screen]) and messages([screen])[0]["type"] == "plain":
            _, after = handlers.ask(who, "Second", seen(screens, "chat")[-1])
            num_plain = len(service.runs[0].trace().plain)
            late = []
        elif after is not None:
            late.append(screen)
    assert [m["role"] for m in after] == ["user", "assistant", "user"]
    assert "measuring" not in after[1]["content"][1]["text"]
    assert not seen(late, "chat") and not seen(late, "prompt") and messages(late)[-1]["type"] == "end"
    assert len(service.runs[0].trace().plain) == num_plain
    final = seen(list(handlers.respond(who, after, *values())), "chat")[-1]
    assert len(final) == 4 and text_of(final[-1]) == ANSWER


def test_questions_are_refused_while_an_answer_is_made():
    """A second question during an answer changes nothing: the text stays in its box and the chat is not touched."""
    handlers, who = Handlers(FakeService()), visitor()
    _, asked = handlers.ask(who, "First", [])
    assert all(map(is_skip, handlers.ask(who, "Second", asked)))
    assert all(map(is_skip, handlers.retry(who, asked)))
    assert not any(map(is_skip, handlers.ask(visitor("someone else"), "Second", [])))


def test_plain_measurement_stops_at_128_tokens_and_can_be_continued():
    service = FakeService(ANSWER * 4)
    handlers, who = Handlers(service), visitor()
    screens, chat = turn(handlers, who=who, max_new_tokens=1000)
    button = seen(screens, "more")[-1]
    assert button["visible"] is True and "128 of " in button["value"]
    before = messages(screens)[-1]["seq"]
    more = list(handlers.measure_more(who, chat))
    assert messages(more)[0]["seq"] == before + 1
    end = messages(more)[-1]
    assert end["compare"]["of"] == end["stats"]["num_tokens"] and seen(more, "more")[-1]["visible"] is False
    assert text_of(seen(more, "chat")[-1][-1]) == service.answer


@pytest.mark.parametrize(("service", "words"), [
    (FakeService(state="loading", message="Reading weights."), "not ready"),
    (FakeService(state="failed", message="The weights are missing."), "weights are missing"),
    (FakeService(busy=True), "waiting already"),
    (FakeService(max_prompt_tokens=1), "longer than 1 tokens"),
])
def test_refusals_are_one_sentence_in_the_chat(service, words):
    """A refused turn shows why, leaves the text box usable, and is not part of what the model reads next."""
    screens, chat = turn(Handlers(service), "Hello out there")
    assert words in text_of(chat[-1]) and seen(screens, "prompt")[-1]["submit_btn"] is True
    assert conversation([*chat, question("Next")]) == [{"role": "user", "content": "Next"}]


def test_an_error_in_the_middle_keeps_the_text_and_the_conversation():
    service = FakeService(fail_after=3)
    handlers = Handlers(service)
    screens, chat = turn(handlers)
    assert messages(screens)[-1]["type"] == "error" and "does not fit" in messages(screens)[-1]["error"]["message"]
    assert ANSWER.startswith(chat[-1]["content"][0]["text"]) and "does not fit" in chat[-1]["content"][1]["text"]
    service.fail_after = None
    assert text_of(turn(handlers, "Again", chat)[1][-1]) == ANSWER
    assert [m["content"] for m in service.requests[-1].messages] == ["Again"]


def test_an_unforeseen_error_is_told_too(capsys):
    service = FakeService()
    service.submit = lambda request: 1 / 0
    _, chat = turn(Handlers(service))
    assert "ZeroDivisionError" in text_of(chat[-1]) and "ZeroDivisionError" in capsys.readouterr().err


def test_who_waits_sees_the_place_and_may_leave():
    """With every row taken the status says the place in the queue and the chat stays as it is; Stop gives the place up, and the next answer
    comes when its turn does."""
    service = FakeService()
    service.num_rows = 1
    handlers, first, second = Handlers(service), visitor("a"), visitor("b")
    _, asked = handlers.ask(first, "First", [])
    running = handlers.respond(first, asked, *values(measure_plain=False))
    next(running)
    _, asked = handlers.ask(second, "Second", [])
    waiting = handlers.respond(second, asked, *values(measure_plain=False))
    screen = next(waiting)
    assert "waiting · next in the queue" in seen([screen], "status")[0] and not seen([screen], "chat")
    assert strings.waiting(3) == "waiting · number 3 in the queue"
    handlers.stop(second)
    rest = list(waiting)
    assert not messages(rest) and seen(rest, "prompt")[-1]["submit_btn"] is True and not service.runs[1].text
    assert strings.GAVE_UP in text_of(seen(rest, "chat")[-1][-1]) and not conversation(seen(rest, "chat")[-1])
    list(running)
    assert text_of(turn(handlers, "Third", who=second, measure_plain=False)[1][-1]) == ANSWER


def test_a_measurement_that_waits_says_so_and_gives_up_in_time():
    """While others are answered the status says what plain decoding waits for; after the longest wait a button is there to go on later."""
    service = FakeService()
    handlers, who = Handlers(service, tick_s=1.0), visitor()
    _, asked = handlers.ask(who, "Go", [])
    generator = handlers.respond(who, asked, *values())
    screens = [next(generator)]
    tokens = service.runs[0].measure_plain

    def busy(num_tokens=128):
        yield from [token for _, token in zip(range(3), tokens(num_tokens))]
        while True:
            yield Waiting(2)
    service.runs[0].measure_plain = busy
    screens += list(generator)
    waits = [line for line in seen(screens, "status") if "waiting" in line]
    assert waits and "after 2 answers · 3 of " in waits[-1] and "waiting" not in seen(screens, "status")[-1]
    assert seen(screens, "more")[-1]["visible"] is True and "3 of " in seen(screens, "more")[-1]["value"]


def test_answers_that_ran_together_say_so():
    """Steps that were shared give no speed-up: the line under the answer and the status say how many answers ran at once."""
    stats = {"num_tokens": 9, "num_steps": 4, "shared": True, "most_at_once": 3, "speed_up": None, "tokens_per_s": 20.0}
    assert "– × plain decoding: up to 3 answers at once" in strings.footer(stats, "eos") and "up to 3 answers at once" in strings.outcome(stats)


def test_a_visitor_who_asks_too_often_is_told_when_to_come_back():
    """The limit is each visitor's own, and the refusal is a sentence in the chat."""
    handlers = PageHandlers(FakeService(), limits=Limits(per_minute=2))
    for _ in range(2):
        assert text_of(turn(handlers, measure_plain=False)[1][-1]) == ANSWER
    refused = turn(handlers)[1]
    assert re.search(r"2 requests a minute are allowed here. The next one is welcome in \d+ seconds", text_of(refused[-1]))
    assert text_of(turn(handlers, who=visitor("b"), measure_plain=False)[1][-1]) == ANSWER


def test_nothing_of_a_visitor_stays():
    """Of each visitor a few runs are kept; when the page closes, or after long silence, neither those nor what the engine has read stay."""
    service = FakeService()
    handlers = PageHandlers(service, limits=Limits(runs_kept=2, forget_minutes=0.01))
    runs = [messages(turn(handlers, who=visitor(name), measure_plain=False)[0])[0]["run"] for name in "aaab"]

    def kept():
        return [bool(json.loads(handlers.archive.resync(run, 0))["messages"]) for run in runs]
    assert kept() == [False, True, True, True]
    handlers.leave(visitor("b"))
    assert kept() == [False, True, True, False] and service.forgotten == ["b"]
    handlers._visits._clock = lambda: time.monotonic() + 5
    handlers.ask(visitor("c"), "Hello", [])
    assert kept() == [False] * 4 and service.forgotten == ["b", "a"]


def test_closing_the_page_cancels_the_run():
    """Gradio closes the generator of a page that went away; the engine must not go on for nobody."""
    service = FakeService()
    handlers, who = Handlers(service), visitor()
    _, asked = handlers.ask(who, "Go", [])
    generator = handlers.respond(who, asked, *values())
    next(generator), next(generator)
    generator.close()
    assert service.runs[0]._cancelled.is_set()


def test_retry_edit_and_undo():
    handlers, who = Handlers(FakeService()), visitor()
    _, chat = turn(handlers, "One", who=who)
    _, chat = turn(handlers, "Two", chat, who)
    _, again = handlers.retry(who, chat)
    assert [text_of(m) for m in again] == ["One", ANSWER, "Two"]
    handlers.stop(who)
    _, edited = handlers.edit(who, SimpleNamespace(index=0, value="Uno <b>"), chat)
    assert [text_of(m) for m in edited] == ["Uno <b>"]
    handlers.stop(who)
    box, rest = handlers.undo(who, chat)
    assert box["value"] == "Two" and [text_of(m) for m in rest] == ["One", ANSWER]


def test_clear_during_an_answer_stays_clear():
    handlers, who = Handlers(FakeService()), visitor()
    _, asked = handlers.ask(who, "Go", [])
    generator = handlers.respond(who, asked, *values())
    next(generator)
    assert handlers.clear(who)[LOOK["chat"]] == []
    assert not seen(list(generator), "chat")


def test_stop_before_its_turn_asks_nothing_of_the_model():
    service = FakeService()
    handlers, who = Handlers(service), visitor()
    _, asked = handlers.ask(who, "Go", [])
    handlers.stop(who)
    list(handlers.respond(who, asked, *values()))
    assert not service.requests


def test_settings_reach_the_engine():
    """Greedy switches every sampling control off; otherwise all of them arrive as they were set."""
    service = FakeService()
    turn(Handlers(service), greedy=False, temperature=1.2, top_k=7, top_p=0.5, min_p=0.1, seed=3, stop="END\n\\n\\n\n", k=3,
         max_new_tokens=17, repetition_penalty=1.1, method="medusa", keep_probs=False)
    request = service.requests[-1]
    got = request.sampling
    assert (got.temperature, got.top_k, got.top_p, got.min_p) == (1.2, 7, 0.5, 0.1)
    assert (got.seed, got.max_new_tokens, got.repetition_penalty) == (3, 17, 1.1)
    assert got.stop == ("END", "\n\n") and (request.method, request.k, request.keep_probs) == ("medusa", 3, False)
    turn(Handlers(service), greedy=True, temperature=1.2, top_k=7)
    assert service.requests[-1].sampling.greedy and service.requests[-1].sampling.top_k == 0


@pytest.mark.parametrize(("changes", "name"), [({"seed": None}, "seed"), ({"k": 2.5}, "k"), ({"max_new_tokens": 0}, "max_new_tokens")])
def test_an_empty_or_wrong_field_is_named(changes, name):
    _, chat = turn(Handlers(FakeService()), **changes)
    assert name in text_of(chat[-1]) and chat[-1]["metadata"]["id"] == "failed"


def test_an_empty_menu_means_the_default_method():
    """The menu is empty when the page was opened before the model was there."""
    service = FakeService()
    turn(Handlers(service), method=None)
    assert service.requests[-1].method == "prompt_lookup"


@pytest.mark.parametrize("text", [
    "a <b>bold</b> word", "\\<b>", "\\\\<b>", "![x](http://example.org/p.png)", "!\\[x]", "`<i>` and <i>", "``a`<b>`` <c>",
    "```html\n<b>\n```\n<b>", "~~~\n<b> never closed", "1 < 2 && 3 > 2", "<!-- note -->", "<think>\n",
    "\\`<b>\\`", "&lt;b&gt;", "", "\n\n  x\n"])
def test_shown_text_can_be_taken_back_exactly(text):
    """What the model is given is what was typed or generated, whatever was escaped for the eye."""
    assert raw(shown(text)) == text
    assert text_of(question(text)) == text_of(answered(text, "footer <b>")) == text


def test_only_text_outside_code_is_escaped():
    assert shown("<b> `<i>`\n```\n<u>\n```\n![p](u)") == "\\<b> `<i>`\n```\n<u>\n```\n!\\[p](u)"


def test_conversation_drops_failed_and_unanswered_turns():
    """Templates insist on turns in turn: user and assistant alternate whatever went wrong before."""
    history = [question("a"), failed("Busy."), question("b"), answered("B"), question("stopped"), question("c")]
    assert [(turn["role"], turn["content"]) for turn in conversation(history)] == [("user", "b"), ("assistant", "B"), ("user", "c")]


def test_a_recording_is_shown_unless_a_run_is_live(tmp_path):
    """Choosing a bundled run sends its trace; during a live run it would mix two runs in one viewer, so nothing happens."""
    run = FakeService().submit(Settings(**DEFAULTS).request([{"role": "user", "content": "Hi"}], "x"))
    assert list(run)
    (tmp_path / "01-copy-draft_model.json").write_text(dumps(run.trace()))
    (tmp_path / "02-broken.json").write_text("{")
    handlers, who = PageHandlers(FakeService(), recordings=tmp_path), visitor()
    message, _ = handlers.show_recording(who, "copy, draft model")
    assert json.loads(message)["type"] == "trace" and json.loads(message)["trace"]["steps"]
    assert is_skip(handlers.show_recording(who, "../../etc/passwd")[0])
    assert "error: " in handlers.show_recording(who, "broken")[1]
    _, asked = handlers.ask(who, "Go", [])
    generator = handlers.respond(who, asked, *values())
    next(generator)
    assert is_skip(handlers.show_recording(who, "copy, draft model")[0])
    generator.close()
    assert not is_skip(handlers.show_recording(who, "copy, draft model")[0])


def test_load_follows_the_model_and_fills_the_menu(monkeypatch):
    """While loading the status line shows progress; when ready the menu has all methods, unavailable ones with their reason."""
    service = FakeService(state="loading", message="Reading weights")
    monkeypatch.setattr("specviz.ui.handlers.POLL_S", 0)
    handlers = Handlers(service)
    updates = handlers.load()
    assert "Reading weights 40 %" in next(updates)[0]
    service.status_now = FakeService().status_now
    status, menu, _ = list(updates)[-1]
    assert "ready" in status and "Tiny-1B" in status
    assert menu["value"] == "prompt_lookup" and ("Draft model · unavailable", "draft_model") in menu["choices"]
    assert handlers.method_note("draft_model") == "Unavailable: no draft model is loaded; start with --draft."
    assert "untrained: expect few accepted" in handlers.method_note("medusa").lower()


def test_status_says_whether_speculation_works_and_why_not():
    assert strings.speculation_state("plain", [0] * 20, "") == "off: the method is plain decoding"
    assert strings.speculation_state("prompt_lookup", [0] * 8, "no match") == "paused: no match"
    assert strings.speculation_state("prompt_lookup", [0] * 7 + [3], "no match") == "active"


def test_the_chosen_verification_reaches_the_engine_and_the_status_line():
    """The menu's value is in the request; a rule that is not the usual one stands in the status line, a lossy one with that word."""
    for rule, word in (("rejection", None), ("shared-noise", "Shared noise"), ("typical", "Typical acceptance (lossy)")):
        service = FakeService()
        screens = list(Handlers(service).respond(visitor(), [question("Go")], *values(verification=rule)))
        assert service.requests[-1].verification == rule
        lines = [line for line in seen(screens, "status") if "measuring" not in line]
        assert all((word in line) if word else ("acceptance" not in line and "noise" not in line) for line in lines)
        assert word is None or word in messages(screens)[-1]["status"]
        assert (messages(screens)[-1]["compare"]["mode"] == "lossy") == (rule == "typical")


def test_status_and_notice_escape_what_they_show():
    assert "<img" not in strings.status_html("failed: <img src=x onerror=alert(1)>")


def test_settings_fields_match_the_defaults_here():
    """layout.py hands values over by position."""
    assert [*DEFAULTS, "options"] == list(Settings.__dataclass_fields__)


def panel(handlers, method):
    """The controls' values as the page would hold them after choosing a method: key first."""
    _, key, *updates = handlers.options.fresh(method)
    return [key, *(update.get("value") for update in updates)]


def test_a_method_s_options_are_drawn_set_and_sent():
    """Every declared option gets a control of its kind with its range; what is changed reaches the request and the status line, the rest does not."""
    service = FakeService()
    handlers = Handlers(service)
    hint, key, *updates = handlers.options.fresh("prompt_lookup")
    shown = {update["label"]: update for update in updates if update["visible"]}
    assert list(shown) == ["Shortest match", "Smallest share", "Branches", "Looks text up by"]
    assert (shown["Shortest match"]["minimum"], shown["Shortest match"]["maximum"], shown["Shortest match"]["step"]) == (1, 16, 1)
    assert shown["Smallest share"]["step"] < 0.1 and shown["Looks text up by"]["choices"] == [("suffix decoding", "suffix"), ("words", "words")]
    assert hint["value"] == strings.OPTIONS_HINT and handlers.options.fresh("plain")[0]["value"] == strings.NO_OPTIONS
    assert not any(update["visible"] for update in handlers.options.fresh("plain")[2:])
    raw = panel(handlers, "prompt_lookup")
    screens = list(handlers.respond(visitor(), [question("Go")], *values(), *raw))
    assert service.requests[-1].options == () and "min match" not in seen(screens, "status")[0]
    raw[1], raw[1 + [u["visible"] for u in updates].index(True, 2)] = 7.0, False
    screens = list(handlers.respond(visitor(), [question("Go")], *values(), *raw))
    assert dict(service.requests[-1].options) == {"min_match": 7, "branches": False}
    assert "K 5 · min match 7, branches off · Tiny-1B" in seen(screens, "status")[0]
    assert all(is_skip(update) for update in handlers.options.again("prompt_lookup", key))


def test_controls_of_another_method_count_for_nothing():
    """Between choosing a method and redrawing the panel, or after another pair came into use, its values are those of another method."""
    service = FakeService()
    handlers = Handlers(service)
    raw = panel(handlers, "prompt_lookup")
    raw[1] = 9
    list(handlers.respond(visitor(), [question("Go")], *values(method="medusa"), *raw))
    assert service.requests[-1].options == ()
    service.status_now = replace(service.status_now, number=5)
    list(handlers.respond(visitor(), [question("Go")], *values(), *raw))
    assert service.requests[-1].options == () and not is_skip(handlers.options.again("prompt_lookup", raw[0])[1])


def test_defaults_that_change_under_an_open_page_are_followed():
    """Costs are measured after the page opened, and defaults follow from them: what the page showed untouched counts for nothing, what was set
    does, and unfolding the panel shows the new ones."""
    service = FakeService()
    handlers, before = Handlers(service), service.methods
    raw = panel(handlers, "prompt_lookup")

    def methods() -> list:
        return [replace(info, options=tuple(replace(option, default=6) if option.name == "min_match" else option for option in info.options))
                for info in before()]
    service.methods = methods
    list(handlers.respond(visitor(), [question("Go")], *values(), *raw))
    assert service.requests[-1].options == ()
    assert not is_skip(handlers.options.again("prompt_lookup", raw[0])[1]) and panel(handlers, "prompt_lookup")[1] == 6
    list(handlers.respond(visitor(), [question("Go")], *values(), raw[0], 9.0, *raw[2:]))
    assert dict(service.requests[-1].options) == {"min_match": 9}


def test_options_given_at_the_start_belong_to_the_method_it_begins_with():
    """They are in its controls and in its first request; other methods have their defaults. A wrong value is answered in a sentence."""
    service = FakeService()
    handlers = PageHandlers(service, method="prompt_lookup", options=(("min_match", "5"), ("branches", "off")))
    assert panel(handlers, "prompt_lookup")[1] == 5 and False in panel(handlers, "prompt_lookup")[1:]
    list(handlers.respond(visitor(), [question("Go")], *values()))
    assert dict(service.requests[-1].options) == {"min_match": "5", "branches": "off"}
    list(handlers.respond(visitor(), [question("Go")], *values(method="medusa")))
    assert service.requests[-1].options == ()
    answer = list(handlers.generate(visitor(), "Go", options={"min_match": 4}))[-1]
    assert answer["trace"]["meta"]["config"]["options"]["min_match"] == 4
    with pytest.raises(gr.Error, match="expected a whole number from 1 to 16"):
        list(handlers.generate(visitor(), "Go", options={"min_match": 99}))
    with pytest.raises(gr.Error, match="its options are min_match"):
        list(handlers.generate(visitor(), "Go", options={"window": 4}))


def test_the_resting_line_tells_of_measuring():
    """While costs are measured between answers the status line says how far that is; afterwards it says nothing of it."""
    service = FakeService()
    handlers = Handlers(service)
    assert "Measuring" not in handlers.resting_line()
    service.status = lambda: Status("ready", "Ready. Measuring what a step costs on this machine: 40%.", 1.0)
    assert handlers.resting_line().endswith("Measuring what a step costs on this machine: 40%")
