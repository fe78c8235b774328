"""What each drafter proposes, apart from whether it is accepted, and the registry's promises."""
from __future__ import annotations

import pytest
import torch
from engine_helpers import IdText, Lab, repeating_prompt
from tiny import tiny_model

from specviz.drafters import DRAFTERS, Parts
from specviz.drafters.prompt_lookup import NGramIndex, PromptLookup
from specviz.engine.drafting import Budget, DraftSettings
from specviz.engine.engine import Engine
from specviz.engine.model import LanguageModel
from specviz.engine.record import Recorder
from specviz.engine.sampling import SamplingParams
from specviz.engine.sequence import Sequence

MARKER = 99


def sequence(tokens: list[int], drafter, k: int = 8) -> Sequence:
    return Sequence(0, tokens, SamplingParams(), drafter, DraftSettings(k), IdText(), frozenset())


def look_up(tokens: list[int], k: int = 8, min_match: int = 2) -> tuple[tuple[int, ...], str]:
    drafter = PromptLookup(Parts(None, None, marker_ids=frozenset([MARKER])), min_match=min_match)
    draft = drafter.propose([sequence(tokens, drafter)], [Budget(k, k)])[0]
    return draft.tokens, draft.stop


def test_lookup_copies_what_followed_the_longest_match():
    """A longer match wins over a more recent one; of equal ones the most recent wins; the draft grows with the match."""
    assert look_up([1, 2, 3, 4, 5, 6, 9, 2, 3, 7, 1, 2, 3])[0] == (4, 5, 6, 9, 2)
    assert look_up([2, 3, 4, 8, 2, 3, 5, 6, 7, 2, 3])[0] == (5, 6, 7)


def test_lookup_never_matches_the_text_s_own_end():
    """Without an earlier place there is no draft, and the reason is given."""
    assert look_up([1, 2, 3, 4]) == ((), "no match")
    assert look_up([7, 7]) == ((), "no match")


def test_lookup_runs_into_its_own_guess():
    """A short period is continued past the end of the text."""
    assert look_up([5, 6, 5, 6, 5, 6], k=7)[0] == (5, 6, 5, 6, 5, 6, 5)


def test_lookup_stops_at_turns():
    """Nothing is copied across an end-of-turn marker, and no match contains one."""
    assert look_up([1, 2, 3, MARKER, 4, 8, 1, 2]) == ((3,), "end of turn")
    assert look_up([3, MARKER, 5, 6, 3, MARKER]) == ((), "no match")


def test_lookup_keeps_to_its_budget():
    """The least of nodes and depth; nothing at zero."""
    drafter = PromptLookup()
    repeated = [1, 2, 3, 4, 5, 6] * 3
    assert [len(drafter.propose([sequence(repeated, drafter)], [budget])[0]) for budget in (Budget(3, 9), Budget(9, 2), Budget(0, 0))] == [3, 2, 0]


def test_the_index_grown_step_by_step_equals_one_built_at_once():
    """Incremental indexing loses and invents nothing."""
    tokens = [t % 5 for t in repeating_prompt(120, period=11)]
    grown = NGramIndex(2)
    for end in range(1, len(tokens) + 1):
        grown.extend(tokens[:end])
        fresh = NGramIndex(2)
        fresh.extend(tokens[:end])
        assert grown.longest(tokens[:end]) == fresh.longest(tokens[:end])


def test_the_longest_match_is_what_a_scan_finds():
    """The hash index against a plain search over the whole text; both measure matches up to 32 tokens."""
    tokens = [t % 3 for t in repeating_prompt(90, period=17, seed=2)]
    for end in range(4, len(tokens) + 1):
        text = tokens[:end]
        index = NGramIndex(2)
        index.extend(text)
        found, length = index.longest(text)
        recent = [e for e in range(2, end) if text[e - 2:e] == text[-2:]][-8:]
        lengths = {e: next((n for n in range(e + 1) if n == e or n == 32 or text[e - n - 1] != text[end - n - 1])) for e in recent}
        assert length == max(lengths.values(), default=0)
        if length:
            assert lengths[found] == length


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("method", ["draft_model", "early_exit"])
def test_model_drafts_say_what_they_were_drawn_from(method, greedy):
    """Drawn chains carry a distribution per node, chosen ones none; both show q to the eye; the draft is as long as asked."""
    lab = Lab()
    result = lab.run(repeating_prompt(10), method, k=5, max_new_tokens=12, temperature=0.0 if greedy else 1.0)
    nodes = [node for step in result.steps for node in step.nodes]
    assert max(len(step.nodes) for step in result.steps) == 5
    assert all((node.q is None) == greedy for node in nodes)
    assert all((node.q_t1 is not None) == greedy for node in nodes)
    assert all(0 < (node.q_t1 if greedy else node.q) <= 1 for node in nodes)


@pytest.mark.parametrize("num_draft_tokens", [300, 384])
def test_vocabularies_of_different_size_work_together(num_draft_tokens):
    """A draft model with fewer known tokens, or a larger padded head, drafts only tokens both have, and the text stays the target's."""
    lab = Lab()
    target = LanguageModel(tiny_model("llama", dtype=torch.float64), num_tokens=350)
    draft = LanguageModel(tiny_model("llama", dtype=torch.float64, vocab_size=num_draft_tokens), num_tokens=num_draft_tokens)
    lab.target, lab.cache = target, target.new_cache(256)
    lab.engine = Engine(target, lab.cache, Recorder(str))
    drafter = DRAFTERS["draft_model"].create(Parts(target, lab.cache, draft))
    for temperature in (0.0, 1.0):
        prompt = [token % 290 for token in repeating_prompt(10)]
        result = lab.run(prompt, drafter, k=4, max_new_tokens=30, temperature=temperature)
        assert len(result.tokens) == 30
        assert all(node.id < min(350, num_draft_tokens) for step in result.steps for node in step.nodes)
        if not temperature:
            assert result.tokens == lab.run(prompt, max_new_tokens=30).tokens
    if num_draft_tokens < 350:
        unknown = lab.run([*prompt, 340], drafter, max_new_tokens=8)
        assert unknown.steps[1].draft_stop == "a token that the draft model does not know"


def test_a_perfect_draft_model_is_always_accepted():
    """With the target itself as draft model every draft token is accepted, greedy and sampled."""
    lab = Lab(likeness=1.0)
    for temperature in (0.0, 1.0):
        result = lab.run(repeating_prompt(10), "draft_model", k=4, max_new_tokens=26, temperature=temperature)
        assert {node.state for step in result.steps for node in step.nodes} == {"accepted"}
        assert len(result.steps) == 1 + 5


def test_exiting_after_all_layers_is_always_accepted():
    """Early exit with every layer is the target itself; its entries leave no trace in the shared cache."""
    from specviz.drafters.early_exit import EarlyExit
    lab = Lab()
    result = lab.run(repeating_prompt(10), EarlyExit(lab.parts, exit_layer=3), k=4, max_new_tokens=26)
    assert {node.state for step in result.steps for node in step.nodes} == {"accepted"}
    assert lab.cache.length(result.sequence.row) == 10 + 25


def test_methods_say_what_they_lack():
    """A draft model that is not loaded, or a target with one layer, is a reason, not an error."""
    lab = Lab()
    without = Parts(lab.target, lab.cache)
    assert "--draft" in DRAFTERS["draft_model"].missing(without)
    assert not DRAFTERS["draft_model"].missing(lab.parts)
    assert DRAFTERS["early_exit"].untrained(without)
    assert not DRAFTERS["early_exit"].untrained(Parts(lab.target, lab.cache, trained_exits=(1,)))


def test_the_registry_is_keyed_by_the_drafters_own_names():
    """What a trace calls a method is what the registry calls it."""
    lab = Lab()
    assert all(name == method.name == lab.drafters[name].name for name, method in DRAFTERS.items())
