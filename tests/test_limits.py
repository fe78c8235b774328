"""What one visitor may take: options, counting by the minute, and sentences that name the limit. No engine, no clock but a given one."""
from __future__ import annotations

import pytest

from specviz.errors import InputError, PromptTooLong, TooManyRequests
from specviz.limits import MOST_VISITORS, Limits, Turnstile
from specviz.options import parse
from specviz.ui.context import fit


def test_a_turnstile_counts_any_minute_of_each_visitor():
    """Three pass in any 60 seconds, a refused one does not count, and the refusal says exactly when the next one is welcome."""
    now = [0.0]
    turnstile = Turnstile(3, lambda: now[0])
    for at in (0.0, 10.0, 20.0):
        now[0] = at
        turnstile.enter("a")
    for at, wait in ((20.0, 40), (59.0, 1)):
        now[0] = at
        with pytest.raises(TooManyRequests, match=f"welcome in {wait} second") as refused:
            turnstile.enter("a")
        assert refused.value.retry_s == wait
    turnstile.enter("b")
    now[0] = 60.0
    turnstile.enter("a")
    with pytest.raises(TooManyRequests):
        turnstile.enter("a")


def test_a_turnstile_without_a_limit_and_one_with_many_names():
    """0 lets everybody pass; names that nobody uses any more are dropped, so that a flood of them costs no memory."""
    free, busy = Turnstile(0), Turnstile(1, lambda: 0.0)
    for _ in range(100):
        free.enter("a")
    for number in range(MOST_VISITORS + 10):
        busy.enter(str(number))
    assert len(busy._passed) == MOST_VISITORS and not free._passed


def test_every_limit_is_an_option():
    """The command line sets each; one that makes no sense is refused with its range; only a public page has a rate by default."""
    line = "--at-once 3 --waiting 5 --max-prompt 700 --max-new-tokens 90 --per-minute 8 --keep-runs 2 --forget-after 1.5"
    assert parse(line.split(), {}).limits == Limits(3, 5, 700, 90, 8, 2, 1.5)
    assert parse([], {}).limits == Limits() and parse(["--host", "0.0.0.0", "--force-public"], {}).limits.per_minute == 30
    for wrong in ("--at-once 0", "--waiting -1", "--max-prompt 0", "--forget-after 0"):
        with pytest.raises(InputError, match=wrong.split()[0]):
            parse(wrong.split(), {})


def test_lengths_are_refused_with_the_limit():
    limits = Limits(prompt_tokens=10, new_tokens=20)
    limits.check_length(10, 20)
    with pytest.raises(PromptTooLong, match="11 tokens; the operator of this page allows 10"):
        limits.check_length(11, 1)
    with pytest.raises(InputError, match="21 new tokens were asked for; the operator of this page allows 20"):
        limits.check_length(1, 21)


def test_a_conversation_is_cut_to_the_operators_limit():
    """The oldest turns leave the prompt as they do for the model's own context, and one message that is too long is refused with the number."""
    turns = [{"role": role, "content": "w " * 10} for role in ("user", "assistant", "user", "assistant", "user")]

    def count(messages):
        return sum(len(message["content"].split()) for message in messages)
    assert fit(turns, count, 1000, 10, most=30).num_dropped == 1 and fit(turns, count, None, 10, most=30).num_dropped == 1
    assert fit(turns, count, 1000, 10).num_dropped == 0
    with pytest.raises(PromptTooLong, match="10 tokens; the operator of this page allows 9"):
        fit(turns, count, 1000, 10, most=9)
