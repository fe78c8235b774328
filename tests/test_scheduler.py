"""Admission by memory, order, and prefixes that everyone shares: many requests on one engine, each with the text it would have alone."""
from __future__ import annotations

import pytest
from engine_helpers import Lab, repeating_prompt

from specviz.drafters import DRAFTERS
from specviz.engine.scheduler import SHARED
from specviz.engine.sequence import Status


def test_requests_wait_until_their_cache_fits_and_none_is_starved():
    """With room for two rows of this size, a third waits though a row is free; order is kept, and every text is that of a single run."""
    prompts = [repeating_prompt(20, seed=i) for i in range(6)]
    alone = [Lab().run(prompt, max_new_tokens=10).tokens for prompt in prompts]
    lab = Lab(max_rows=8, max_parked=8, max_tokens=2 * (20 + 10 + 4) + 10)
    results = [lab.add(prompt, max_new_tokens=10) for prompt in prompts]
    first_step, num_steps = {}, 0
    while lab.step():
        num_steps += 1
        scheduler = lab.engine.scheduler
        assert len(scheduler.running) <= 2
        held = sum(lab.cache.length(row) for row in lab.cache)
        assert held <= scheduler.max_tokens
        for number, result in enumerate(results):
            if result.sequence.status is not Status.WAITING:
                first_step.setdefault(number, num_steps)
    assert [result.tokens for result in results] == alone
    assert [first_step[number] for number in range(6)] == sorted(first_step.values())


def test_parked_rows_make_room_before_anyone_waits():
    """Ended conversations are dropped, oldest first, as soon as a new request needs their place; its own conversation goes last."""
    lab = Lab(max_tokens=90, max_parked=8)
    for name in ("a", "b"):
        lab.run(repeating_prompt(20, seed=ord(name)), max_new_tokens=10, scope=name)
    assert len(lab.engine.scheduler.parked) == 2
    again = lab.run(repeating_prompt(20, seed=ord("a")), max_new_tokens=10, scope="a")
    assert again.sequence.num_reused > 0
    assert [parked.scope for parked in lab.engine.scheduler.parked].count("b") == 0


def test_one_that_is_too_large_for_the_limit_still_runs_alone():
    """The limit keeps many from crowding each other out; it never refuses the only one."""
    lab = Lab(max_tokens=8)
    assert lab.run(repeating_prompt(20), max_new_tokens=5).tokens == Lab().run(repeating_prompt(20), max_new_tokens=5).tokens


@pytest.mark.parametrize("method", list(DRAFTERS))
def test_a_shared_prefix_serves_everyone_and_changes_no_text(method):
    """What was run under the shared scope is reused by other scopes, is never dropped for room, and gives the text of a fresh run."""
    system = repeating_prompt(30, seed=9)
    prompts = [[*system, *repeating_prompt(8, seed=i)] for i in range(3)]
    alone = [Lab().run(prompt, max_new_tokens=8).tokens for prompt in prompts]
    lab = Lab(max_parked=1)
    lab.run(system, max_new_tokens=1, scope=SHARED)
    results = [lab.add(prompt, method, max_new_tokens=8, scope=str(i)) for i, prompt in enumerate(prompts)]
    lab.finish()
    assert [result.tokens for result in results] == alone and len(lab.engine.scheduler.shared) == 1
    if method in ("plain", "prompt_lookup", "suffix", "lookahead"):
        assert [result.sequence.num_reused for result in results] == [len(system)] * 3
    lab.engine.forget()
    assert len(lab.cache) == 0 and not lab.engine.scheduler.shared


def test_nothing_else_crosses_scopes():
    """Two conversations with the same beginning share nothing: only the scope that the operator owns is open to all."""
    lab = Lab()
    lab.run(repeating_prompt(30), max_new_tokens=4, scope="one")
    assert lab.run(repeating_prompt(30), max_new_tokens=4, scope="two").sequence.num_reused == 0
