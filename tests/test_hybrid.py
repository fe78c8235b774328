"""Hybrid: who drafts when, each part's own state, and rows that are freed."""
from __future__ import annotations

import pytest
import torch
from engine_helpers import Lab, repeating_prompt

from specviz.drafters import Parts
from specviz.drafters.hybrid import Hybrid, hybrid
from specviz.drafters.plain import Stateless
from specviz.drafters.suffix import SuffixIndex
from specviz.engine.draft import Draft
from specviz.engine.drafting import Budget, DraftSettings
from specviz.engine.model import Row
from specviz.engine.sampling import SamplingParams
from specviz.engine.sequence import Sequence
from specviz.trace import Trace, dumps, loads


class Scripted(Stateless):
    """Drafts for the sequences it is told to, counts its calls in `drafting`, and writes down what it hears."""

    def __init__(self, name, ids, needs=()):
        self.name, self.ids, self.needs = name, ids, needs
        self.asked, self.heard, self.took = [], [], 3

    def propose(self, sequences, budgets):
        self.asked.append([sequence.id for sequence in sequences])
        for sequence in sequences:
            assert sequence.drafter is self
            sequence.drafting = (sequence.drafting or 0) + 1
        return [Draft.chain([sequence.id] * budget.nodes, stop="length") if sequence.id in self.ids else Draft(stop=f"not {self.name}")
                for sequence, budget in zip(sequences, budgets)]

    def observe(self, outcomes):
        self.heard.append([(outcome.sequence.id, outcome.sequence.drafting, None if outcome.hidden is None else outcome.hidden.shape[-1])
                           for outcome in outcomes])

    def fork(self, source, target, length):
        if source.drafter is self:
            target.drafting = source.drafting + 100
        return min(length, self.took)


def sequences(drafter, count=3):
    return [Sequence(i, [1, 2, 3], SamplingParams(), drafter, DraftSettings(4), None, frozenset()) for i in range(count)]


def test_a_batch_splits_between_the_parts():
    """The second part is asked only for sequences that the first has nothing for; every draft says who made it, in the order of the batch."""
    first, second = Scripted("first", {0, 2}), Scripted("second", {1, 2})
    both = Hybrid(first, second)
    batch = sequences(both, 4)
    drafts = both.propose(batch, [Budget(1 + i, 1 + i) for i in range(4)])
    assert (first.asked, second.asked) == ([[0, 1, 2, 3]], [[1, 3]])
    assert [(draft.tokens, draft.by, draft.stop) for draft in drafts] == [
        ((0,), "first", "length"), ((1, 1), "second", "length"), ((2, 2, 2), "first", "length"), ((), "", "not second")]
    assert all(sequence.drafter is both for sequence in batch)


def test_each_part_keeps_its_own_state():
    """States do not mix, survive a part that fails, go on to the next turn part by part, and are let go of together."""
    first, second = Scripted("first", {0}), Scripted("second", set())
    both = Hybrid(first, second)
    batch = sequences(both)
    for _ in range(3):
        both.propose(batch, [Budget(1, 1)] * 3)
    assert [sequence.drafting.states for sequence in batch] == [[3, None], [3, 3], [3, 3]]
    second.took = 2
    [target] = sequences(both, 1)
    assert both.fork(batch[1], target, 3) == 2
    assert target.drafting.states == [103, 103] and batch[1].drafting.states == [3, 3]
    [stranger], [fresh] = sequences(first, 1), sequences(both, 1)
    stranger.drafting = 7
    assert both.fork(stranger, fresh, 3) == 2
    assert fresh.drafting.states == [107, None] and stranger.drafting == 7
    second.propose = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        both.propose(batch[1:2], [Budget(1, 1)])
    assert batch[1].drafter is both and batch[1].drafting.states == [4, 3]
    both.release(batch[1])
    assert batch[1].drafting is None


def test_each_part_hears_of_every_step_with_its_own_hidden_states():
    """Both parts observe all outcomes with their own state; the engine collects the layers of both, each part gets those it asked for."""
    lab = Lab(max_parked=0)
    first, second = Scripted("first", {0}, needs=(2, 0)), Scripted("second", {1}, needs=(1,))
    both = Hybrid(first, second)
    assert both.needs == (0, 1, 2)
    results = [lab.add(repeating_prompt(8, seed=i), both, max_new_tokens=6) for i in range(2)]
    lab.finish()
    assert len(first.heard) == len(second.heard) > 2
    assert all(width == 128 for step in first.heard for _, _, width in step) and all(width == 64 for step in second.heard for _, _, width in step)
    assert {state for step in first.heard for request, state, _ in step if request == 0} >= {1, 2, 3}
    assert [{step.draft_by for step in result.steps if step.nodes} for result in results] == [{"first"}, {"second"}]


def test_the_parts_are_chosen_by_what_is_loaded():
    """A draft model, else trained heads, else a target trained for early exit, else nothing but the text."""
    lab = Lab()
    assert [part.name for part in hybrid(lab.parts)._parts] == ["suffix", "prompt_lookup", "draft_model"]
    seconds = {kind: hybrid(Parts(lab.target, lab.cache, heads={kind: heads}))._parts[-1].name for kind, heads in lab.parts.heads.items()}
    assert seconds == {"medusa": "medusa", "eagle": "eagle2", "eagle3": "eagle3", "exit_adapter": "exit_adapter"}
    assert [part.name for part in hybrid(Parts(lab.target, lab.cache, trained_exits=(1,)))._parts] == ["suffix", "prompt_lookup", "early_exit"]
    assert [part.name for part in hybrid(Parts(lab.target, lab.cache))._parts] == ["suffix", "prompt_lookup", "plain"]


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_heads_follow_what_the_first_part_drafted(kind):
    """Heads that want the target's states get those of every committed token, whoever drafted it: the text stays plain decoding's in a
    batch, over chunked prompts and warm turns, and both parts draft."""
    lab = Lab(token_budget=7)
    both = hybrid(Parts(lab.target, lab.cache, heads={kind: lab.parts.heads[kind]}))
    prompts = [repeating_prompt(12, seed=seed) for seed in range(2)]
    for num_tokens in (10, 25):
        results = [lab.add(prompt, both, k=5, max_new_tokens=num_tokens, scope=str(i)) for i, prompt in enumerate(prompts)]
        lab.finish()
        for prompt, result in zip(prompts, results):
            assert result.tokens == lab.run(prompt, max_new_tokens=num_tokens, scope="plain").tokens
    assert {step.draft_by for result in results for step in result.steps if step.nodes} == {"suffix", both._parts[-1].name}
    lab.engine.forget()
    assert len(lab.cache) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_draft_model_catches_up_after_copied_passages(temperature):
    """Asked the same thing again with room for more, the old answer is copied, and the draft model reads nothing meanwhile; where it goes
    on it has read all, and only then is its cache in the record. The trace tells who drafted."""
    lab = Lab(likeness=0.95)
    prompt = repeating_prompt(12)
    expected = lab.run(prompt, max_new_tokens=40, scope="plain").tokens
    lab.run(prompt, "hybrid", k=4, max_new_tokens=20, scope="mine", temperature=temperature)
    result = lab.run(prompt, "hybrid", k=4, max_new_tokens=40, scope="mine", temperature=temperature)
    assert temperature or result.tokens == expected
    by = [step.draft_by for step in result.steps if step.nodes]
    assert set(by) == {"suffix", "draft_model"}
    assert by[0] == "suffix" and by[-1] == "draft_model"
    assert [step.draft_by for step in loads(dumps(Trace({}, tuple(result.steps)))).steps] == [step.draft_by for step in result.steps]
    for step in result.steps:
        assert ("drafter" in step.kv) == (step.draft_by == "draft_model")
        assert step.draft_by != "suffix" or all(node.q is None for node in step.nodes)
    cache, row = lab.drafters["hybrid"]._parts[-1]._cache, result.sequence.drafting.states[-1].row
    fresh = cache.allocate()
    length = cache.length(row)
    lab.draft.forward([Row(fresh, result.sequence.tokens[:length], num_logits=0)], cache)
    for ours, theirs in zip(cache._rows[row].keys, cache._rows[fresh].keys):
        torch.testing.assert_close(ours[:, :length], theirs[:, :length], rtol=0, atol=1e-9)


def test_both_parts_go_on_to_the_next_turn_and_free_their_rows():
    """A warm second turn has the index and the draft model's row of the first; after `forget` no row is left anywhere."""
    lab = Lab()
    both = lab.drafters["hybrid"]
    prompt = repeating_prompt(20)
    first = lab.run(prompt, both, k=4, max_new_tokens=12)
    second = lab.add(prompt + first.tokens + [5, 6, 7], both, k=4, max_new_tokens=12)
    lab.step()
    index, _, state = second.sequence.drafting.states
    assert isinstance(index, SuffixIndex) and (state is None or both._parts[-1]._cache.length(state.row) >= len(prompt))
    lab.finish()
    cancelled = lab.add(repeating_prompt(9, seed=2), both, k=4, scope="other")
    lab.step(), lab.step()
    lab.engine.cancel(cancelled.sequence.id)
    lab.engine.forget()
    assert len(lab.cache) == 0 and len(both._parts[-1]._cache) == 0


def test_switching_methods_in_the_middle_of_a_conversation():
    """Suffix, hybrid, draft tree, heads and adapter in turn: every turn's text is that of plain decoding read anew. Who needs the target's
    states of the whole prompt reads it anew, or goes on from its own last turn."""
    lab = Lab()
    text = repeating_prompt(14)
    for turn, method in enumerate(("suffix", "hybrid", "draft_tree", "exit_adapter", "hybrid", "lookahead", "exit_adapter", "medusa", "suffix")):
        answer = lab.run(text, method, k=5, max_new_tokens=10)
        assert answer.tokens == Lab().run(text, max_new_tokens=10).tokens
        assert turn in (0, 3) or answer.sequence.num_reused > 10
        text = [*text, *answer.tokens, 5, 6 + turn]
    lab.engine.forget()
    assert len(lab.cache) == 0
    assert all(len(lab.drafters[name]._cache) == 0 for name in ("exit_adapter", "draft_tree"))
