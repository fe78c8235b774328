"""What the bar under the chat is told, what comes back from a browser, and which turns a prompt keeps. No browser, no model."""
from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from fake_service import ANSWER, FakeService, pieces
from test_handlers import Handlers, is_skip, seen, turn, values, visitor

from specviz.errors import InputError, PromptTooLong
from specviz.trace import EmittedToken, StepTrace, Trace
from specviz.ui import strings
from specviz.ui.context import fit, free_for_answer
from specviz.ui.conversations import record, reopened, rows, runs
from specviz.ui.messages import Look, answered, dressed, failed, parts_of, question, reply, text_of

HOSTILE = "</script><img src=x onerror=p()> ${x} {{y}} \\<b> $$z$$ ```"
HISTORY = [question("One"), *reply("<think>hm</think>" + HOSTILE, "5 tokens"), question("Two " + HOSTILE), failed("Busy.", "half"),
           question("stopped"), question("Three"), *reply("x")]


def count(messages):
    return sum(len(pieces(message["content"])) for message in messages)


def bars(screens):
    return [json.loads(text) for text in seen(screens, "bar")]


def talk(num_turns, words=10):
    out = []
    for i in range(num_turns):
        out += [{"role": "user", "content": f"q{i} " + "w " * (words - 1)}, {"role": "assistant", "content": "a " * words}]
    return [*out, {"role": "user", "content": "last one"}]


# ---- rows and back

@pytest.mark.parametrize("look", [Look(), Look(plain=True, thinking=True)])
def test_a_conversation_survives_the_browser(look):
    """Rows through JSON and back are the same messages, failed turns and thinking included, in whatever look they were."""
    sent = json.loads(record(dressed(HISTORY, look), seq=1))["rows"]
    back = reopened([{"role": row["role"], "parts": [{"kind": p["kind"], "text": p["text"]} for p in row["parts"]]} for row in sent])
    assert [(m["role"], parts_of(m), (m.get("metadata") or {}).get("id")) for m in back] == [
        (m["role"], parts_of(m), (m.get("metadata") or {}).get("id")) for m in HISTORY]


def test_rows_group_as_the_chat_does():
    """One row for what one side said in a row: the browser finds an answer's bubble by counting rows and parts."""
    told = rows(HISTORY)
    assert [row["role"] for row in told] == ["user", "assistant"] * 3
    assert [[part["kind"] for part in row["parts"]] for row in told] == [
        ["text"], ["thinking", "text", "footer"], ["text"], ["text", "failed"], ["text", "text"], ["text"]]


def test_copies_name_what_the_chat_was_given_and_what_was_said():
    """`shown` is what Gradio's Copy would write, `text` what it should have written."""
    part = rows([answered("a <b>")])[0]["parts"][0]
    assert part["shown"] == "a \\<b>" and part["text"] == "a <b>"


@pytest.mark.parametrize("data", [
    None, {}, "x", [1], [{}], [{"role": "user"}], [{"role": "system", "parts": []}], [{"role": "user", "parts": [1]}],
    [{"role": "user", "parts": [{"kind": "text"}]}], [{"role": "user", "parts": [{"kind": "text", "text": 5}]}],
    [{"role": "assistant", "parts": [{"kind": "html", "text": "x"}]}],
    [{"role": "user", "parts": [{"kind": "text", "text": "x" * 4_000_001}]}],
    [{"role": "user", "parts": []}] * 4001])
def test_broken_rows_are_refused_in_words(data):
    """What a browser hands back is checked; a broken one is named and nothing is made of it."""
    with pytest.raises(InputError, match="expected"):
        reopened(data)


def test_odd_but_valid_rows_lose_nothing_but_order():
    """A footer without a text and a failure after thinking still give messages that the chat and the prompt can use."""
    back = reopened([{"role": "assistant", "parts": [{"kind": "footer", "text": "f"}, {"kind": "thinking", "text": "t"},
                                                     {"kind": "failed", "text": "⚠ No."}]}])
    assert [parts_of(message) for message in back] == [["t"], ["⚠ No."]]


def test_a_measurement_that_a_reload_ended_is_not_announced_again():
    footer = strings.footer({"tokens_per_s": 5.0, "num_tokens": 3}, "eos", still_measuring=True)
    back = reopened([{"role": "assistant", "parts": [{"kind": "text", "text": "x"}, {"kind": "footer", "text": footer}]}])
    assert parts_of(back[0]) == ["x", "5.0 tokens/s · 3 tokens"]


# ---- colours

def trace_of(*tokens):
    emitted = tuple(EmittedToken(i, text, origin) for i, (text, origin) in enumerate(tokens))
    return Trace({}, (StepTrace("spec", 0, 0, 0, 0, emitted=emitted),))


def test_runs_add_up_to_the_answer():
    """Stretches of one origin are joined, thinking before the answer and the end token behind it are left out, even inside a token."""
    trace = trace_of(("<think>a</think>\n", "plain"), ("\nHe", "draft"), ("llo", "draft"), (" <b>", "correction"), ("!", "bonus"),
                     ("<|end|>", "plain"))
    text = "<think>a</think>\n\nHello <b>!"
    assert runs(trace, "Hello <b>!", text) == [["Hello", "draft"], [" <b>", "correction"], ["!", "bonus"]]


def test_runs_are_withheld_where_tokens_do_not_spell_the_answer():
    """Colours on the wrong words would be a lie; none are sent instead."""
    assert runs(trace_of(("abc", "draft")), "xyz", "xyz") is None
    assert runs(trace_of(("abc", "draft")), "", "") is None


def test_the_record_comes_with_the_finished_answer():
    """The question is kept at once, the answer with its colours when it is complete, long before plain decoding has been measured."""
    handlers = Handlers(FakeService())
    screens, chat = turn(handlers)
    told = bars(screens)
    assert [row["role"] for row in told[0]["rows"]] == ["user"] and told[0]["runs"] is None
    assert "".join(text for text, _ in told[1]["runs"]) == ANSWER == text_of(chat[-1])
    assert {origin for _, origin in told[1]["runs"]} == {"plain", "draft", "correction", "bonus"}
    assert "× plain" not in told[1]["rows"][-1]["parts"][-1]["text"] and "× plain" in told[-1]["rows"][-1]["parts"][-1]["text"]
    assert len({message["seq"] for message in told}) == len(told)
    first_plain = next(i for i, screen in enumerate(screens) if not is_skip(screen[0]) and json.loads(screen[0])["type"] == "plain")
    assert any(not is_skip(screen[-1]) and json.loads(screen[-1])["runs"] for screen in screens[:first_plain])


def test_the_bar_costs_nothing_while_an_answer_is_written():
    """Between the question and the finished answer no message goes to the bar: streaming is as it was."""
    screens, _ = turn(Handlers(FakeService(ANSWER * 6)), max_new_tokens=1000, measure_plain=False)
    assert len(screens) > 50 and len(bars(screens)) == 2


# ---- the rule at the context's limit

def test_everything_stays_while_it_fits():
    fitted = fit(talk(3), count, 1000, 100)
    assert fitted.num_dropped == 0 and len(fitted.messages) == 7 and fitted.num_tokens == count(talk(3))


@pytest.mark.parametrize("context", [60, 80, 100, 140, 200, 260])
def test_oldest_turns_go_and_the_system_prompt_stays(context):
    """The longest end that fits is kept, and what it leaves free is what was promised to the answer."""
    system, talked = {"role": "system", "content": "Be brief."}, talk(8)
    fitted = fit([system, *talked], count, context, 40)
    room = context - free_for_answer(40, context)
    assert fitted.messages[0] == system and list(fitted.messages[1:]) == talked[2 * fitted.num_dropped:]
    assert fitted.num_tokens == count(fitted.messages) <= room
    if fitted.num_dropped:
        assert count([system, *talked[2 * (fitted.num_dropped - 1):]]) > room


def test_one_message_too_long_is_refused_with_numbers():
    with pytest.raises(PromptTooLong, match=r"300 tokens.*room for 90.*context has 100, and 10 stay free"):
        fit([*talk(2)[:-1], {"role": "user", "content": " ".join(["w"] * 300)}], count, 100, 10)


def test_an_unknown_context_leaves_all_turns():
    assert fit(talk(50), count, None, 10).num_dropped == 0


def test_dropped_turns_are_said_in_the_chat_and_on_the_meter():
    """The request holds what fits, the footer says how many turns are gone, the chat still shows them, and the meter agrees."""
    service = FakeService("yes " * 20)
    service.config_now["context"] = 120
    handlers, chat = Handlers(service), []
    for i in range(4):
        screens, chat = turn(handlers, f"question {i} " + "w " * 20, chat, system="Be brief.", max_new_tokens=30, measure_plain=False)
    sent = service.requests[-1].messages
    assert sent[0] == {"role": "system", "content": "Be brief."} and len(sent) < 8 and service.count_tokens(sent) <= 90
    num_dropped = (8 - len(sent)) // 2
    assert strings.dropped(num_dropped) in chat[-1]["content"][1]["text"] and len(chat) == 8
    meter = bars(screens)[-1]["meter"]
    assert "of 120 tokens" in meter["text"] and meter["dropped"] == strings.dropped(num_dropped) and 0 < meter["share"] <= 1


def test_a_refused_message_leaves_the_conversation_as_it_was():
    service = FakeService()
    service.config_now["context"] = 100
    handlers = Handlers(service)
    _, chat = turn(handlers, "w " * 300, max_new_tokens=10)
    assert "context has 100" in text_of(chat[-1]) and not service.requests
    turn(handlers, "short", chat, max_new_tokens=10)
    assert [m["content"] for m in service.requests[-1].messages] == ["short"]


# ---- handlers

def test_a_kept_conversation_takes_the_chat_and_goes_on():
    """What was kept is shown, a run in progress ends, and the next prompt holds the turns word for word."""
    service = FakeService()
    handlers, who = Handlers(service), visitor()
    _, asked = handlers.ask(who, "Go", [])
    running = handlers.respond(who, asked, *values())
    next(running)
    kept = [{"role": role, "parts": [{"kind": "text", "text": text}]} for role, text in (("user", HOSTILE), ("assistant", "<i>"))]
    screen = handlers.recall(who, SimpleNamespace(rows=kept))
    assert service.runs[0]._cancelled.is_set() and not seen(list(running), "chat")
    turn(handlers, "Next", seen([screen], "chat")[0], who)
    assert [m["content"] for m in service.requests[-1].messages] == [HOSTILE, "<i>", "Next"]


def test_a_broken_kept_conversation_changes_nothing_but_the_status():
    screen = Handlers(FakeService()).recall(visitor(), SimpleNamespace(rows=[{"role": "user"}]))
    assert not seen([screen], "chat") and "error: " in seen([screen], "status")[0]


def test_the_look_is_changed_in_the_middle_of_an_answer():
    """What comes after the switch is literal, what stood there is made literal, and the next prompt does not notice."""
    service = FakeService("a <b> " * 40)
    handlers, who = Handlers(service), visitor()
    _, asked = handlers.ask(who, "<u>", [])
    chats, update = [], None
    for screen in handlers.respond(who, asked, *values(measure_plain=False)):
        chats += seen([screen], "chat")
        if len(chats) == 3 and update is None:
            update = handlers.change_look(who, SimpleNamespace(plain=True, thinking=False), asked)
    assert update["render_markdown"] is False and [m["content"][0]["text"] for m in update["value"]][0] == "&lt;u&gt;"
    assert len(update["value"]) == 2, "the answer so far is not lost by the switch"
    assert chats[-1][-1]["content"][0]["text"].startswith("a &lt;b&gt;") and text_of(chats[-1][-1]) == service.answer
    turn(handlers, "Next", chats[-1], who)
    assert [m["content"] for m in service.requests[-1].messages] == ["<u>", service.answer, "Next"]
    assert handlers.change_look(who, SimpleNamespace(), [])["render_markdown"] is True


def test_editing_in_the_plain_look_takes_the_text_as_it_stands_there():
    handlers, who = Handlers(FakeService()), visitor()
    handlers.change_look(who, SimpleNamespace(plain=True, thinking=False), [])
    _, chat = turn(handlers, "<b>", who=who)
    _, edited = handlers.edit(who, SimpleNamespace(index=0, value="&lt;b&gt; more"), chat)
    assert [text_of(message) for message in edited] == ["<b> more"]


def test_thinking_answers_keep_figures_colours_and_the_next_turn():
    """A folded answer is settled, measured and continued like any other."""
    service = FakeService("<think>\nhm hm\n</think>\n\nIt is so.")
    handlers, who = Handlers(service), visitor()
    screens, chat = turn(handlers, who=who)
    assert [parts_of(m)[0] for m in chat] == ["Hello there", "hm hm", "It is so."] and "× plain" in parts_of(chat[-1])[1]
    assert "".join(text for text, _ in bars(screens)[-1]["runs"]) == "It is so."
    more = list(handlers.measure_more(who, chat))
    assert [text_of(m) for m in seen(more, "chat")[-1]] == [text_of(m) for m in chat]
    turn(handlers, "Next", chat, who)
    assert service.requests[-1].messages[1] == {"role": "assistant", "content": "It is so.", "reasoning_content": "hm hm"}


def test_after_undo_nothing_of_the_undone_run_is_told():
    """The record of a shortened chat names no run and no colours, even where the answer before reads the same."""
    handlers, who = Handlers(FakeService()), visitor()
    _, chat = turn(handlers, "One", who=who)
    _, chat = turn(handlers, "Two", chat, who)
    _, rest = handlers.undo(who, chat)
    told = json.loads(handlers.settled(who, rest))
    assert len(told["rows"]) == 2 and told["runs"] is None and told["run"] == ""


def test_why_nothing_is_kept_is_said():
    assert "others can reach" in strings.not_kept(True, True) and "--no-history" in strings.not_kept(False, False)
    assert strings.not_kept(False, True) == ""
