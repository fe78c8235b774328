"""Chat messages on their way to the screen and back: exact, whatever a model or a visitor writes."""
from __future__ import annotations

import random
import re

import pytest

from specviz.ui.messages import (LATEX_DELIMITERS, Look, answered, conversation, dressed, failed, is_failed, is_thinking, parts_of,
                                 question, raw, reply, shown, split_thinking, text_of)

PIECES = ["\\", "\\(", "\\)", "\\[", "\\]", "$$", "$", "`", "```", "~~~", "\n", "\n\n", " ", "x", "<", "<b>", "</div>",
          "<img src=x onerror=p()>", "![", "[a](b)", "!", "&lt;", "&amp", "<think>", "</think>", "mermaid", "\u2060", "🦊", "\ufdd0",
          "\ufdd1",
          "\ufdd4", "\ufdd5", "\ufdd6", "\ufde0", "\ufde6", "${x}", "{{x}}", "⚠ "]


def texts(number=6000, seed=7):
    source = random.Random(seed)
    return ["".join(source.choice(PIECES) for _ in range(source.randint(1, 14))) for _ in range(number)]


def test_shown_text_is_taken_back_exactly():
    """`raw` undoes `shown` for mixtures of marks, tags, code, formulas, entities and the characters that stand for formulas."""
    for text in texts():
        assert raw(shown(text)) == text


def test_looks_change_nothing_but_the_look():
    """A message has the same parts in every look and back, and being dressed twice is being dressed once."""
    for i, text in enumerate(texts(1500)):
        history = [question(text), *reply(text, "1 token", opened=i % 2 == 0), failed("Busy.", text)]
        parts, marks = [parts_of(message) for message in history], [(is_failed(m), is_thinking(m)) for m in history]
        for look in (Look(plain=True, thinking=True), Look(thinking=True), Look(plain=True), Look()):
            history = dressed(history, look)
            assert [parts_of(message) for message in history] == parts and [(is_failed(m), is_thinking(m)) for m in history] == marks
            assert all(one is other for one, other in zip(dressed(history, look), history))


def test_the_plain_look_holds_no_markup():
    """What the chat is given for a literal text is free of tags and of anything that it would take for a formula of ours."""
    for text in texts(2000, seed=8):
        [message] = dressed([answered(text)], Look(plain=True))
        assert "<" not in message["content"][0]["text"] and text_of(message) == text


def test_tags_never_reach_the_chat_unescaped_outside_code_and_formulas():
    """Everywhere else a "<" that could begin a tag follows an odd number of backslashes."""
    for text in texts(3000, seed=9):
        if "`" in text or "~~~" in text:
            continue
        plain = re.sub("|".join(f"{d['left']}[^{d['left']}{d['right']}]+{d['right']}" for d in LATEX_DELIMITERS), "", shown(text))
        for match in re.finditer(r"(\\*)<[A-Za-z/!?]", plain):
            assert len(match[1]) % 2 == 1


@pytest.mark.parametrize(("text", "formulas"), [
    ("so \\(a<b\\) and \\[x\\] and $$y$$", ["a<b", "x", "y"]),
    ("\\[\nx =\n1\n\\]", ["\nx =\n1\n"]),
    ("it costs $5 or $$ in all", []), ("$$ a\n\nb $$", []), ("\\\\(x\\\\)", []), ("`\\(x\\)` and `$$y$$`", []),
    ("```\necho $$\n```\n$$z$$", ["z"]), ("```\nre.compile(\"\\[a\\]\")", []),
])
def test_formulas_are_marked_and_nothing_else(text, formulas):
    """The three usual delimiters within a paragraph and outside code; a single dollar is money."""
    pattern = "|".join(f"{d['left']}([^{d['right']}]+){d['right']}" for d in LATEX_DELIMITERS)
    assert [next(filter(None, match)) for match in re.findall(pattern, shown(text))] == formulas
    assert raw(shown(text)) == text


def test_delimiters_of_ours_in_a_text_are_no_formula():
    """A model that writes the characters with which formulas are marked gets no formula rendered."""
    left, right = LATEX_DELIMITERS[0]["left"], LATEX_DELIMITERS[0]["right"]
    assert left not in shown(f"{left}x{right}") and raw(shown(f"{left}x{right}")) == f"{left}x{right}"


@pytest.mark.parametrize("text", ["```mermaid\ngraph TD\n```", "> ```mermaid\n> <form>\n> ```", "````\n```mermaid\n````"])
def test_diagrams_stay_code(text):
    """The chat would build a diagram from unescaped text, so no block is left that it takes for one."""
    assert "```mermaid" not in shown(text) and raw(shown(text)) == text


@pytest.mark.parametrize(("text", "opened", "expected"), [
    ("<think>\nhm\n</think>\n\nYes.", False, ("hm", True, "Yes.")), ("<think>\nhm", False, ("hm", False, "")),
    ("hm\n</think>\n\nYes.", True, ("hm", True, "Yes.")), ("hm\n</think>\n\nYes.", False, (None, True, "hm\n</think>\n\nYes.")),
    ("Write <think>a</think>.", False, (None, True, "Write <think>a</think>.")), ("[THINK]a[/THINK]b", False, ("a", True, "b")),
    ("<think>a</think>b<think>c</think>d", False, ("a", True, "b<think>c</think>d")), ("", False, (None, True, "")),
    ("<think>\n</think>\n\nNo thought.", False, ("", True, "No thought.")),
])
def test_thinking_is_what_an_answer_begins_with(text, opened, expected):
    """Only a leading block, or one that the prompt opened, is folded; an answer may speak of the tags without losing a word."""
    assert split_thinking(text, opened) == expected


def test_thinking_stands_apart_from_the_next_prompt():
    """The turn holds the answer alone; the thinking is beside it for templates that ask for it, and failed turns leave nothing."""
    history = [question("a"), *reply("<think>\nhm\n</think>\n\nYes.", "5 tokens"), question("b"), *reply("<think>x", error="Busy."),
               question("c")]
    assert [is_thinking(message) for message in history] == [False, True, False, False, True, False, False]
    assert conversation(dressed(history, Look(plain=True))) == [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"},
        {"role": "user", "content": "c"}]


def test_thinking_is_folded_unless_asked_for():
    """The chat opens a block whose status is not "done"; the switch takes the status away, also while the answer is written."""
    for ended in (True, False):
        folded, _ = reply("<think>\nhm", ended=ended)
        assert folded["metadata"]["status"] == "done" and folded["metadata"]["title"]
        [unfolded] = dressed([folded], Look(thinking=True))
        assert "status" not in unfolded["metadata"] and dressed([unfolded], Look()) == [folded]
