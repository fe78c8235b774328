"""Suffix decoding: which continuation is proposed, how far, and what a conversation's next turn knows."""
from __future__ import annotations

import random

import pytest
from engine_helpers import IdText, Lab, repeating_prompt

from specviz.drafters import Parts
from specviz.drafters.suffix import Suffix, SuffixIndex
from specviz.engine.drafting import Budget, DraftSettings
from specviz.engine.sampling import SamplingParams
from specviz.engine.sequence import Sequence

MARKER = 99


def sequence(tokens, drafter) -> Sequence:
    return Sequence(0, tokens, SamplingParams(), drafter, DraftSettings(8), IdText(), frozenset())


def propose(tokens, k=8, **options):
    drafter = Suffix(Parts(None, None, marker_ids=frozenset([MARKER])), **options)
    return drafter.propose([sequence(tokens, drafter)], [Budget(k, k)])[0]


def test_the_most_frequent_continuation_comes_first():
    """Of three earlier places two go on with 7: it is tried first, with its share; the other is a sibling, left out of a chain."""
    text = [1, 2, 7, 0, 1, 2, 5, 0, 1, 2, 7, 3, 8, 1, 2]
    draft = propose(text, k=2)
    assert (draft.tokens, draft.parents) == ((7, 5), (-1, -1))
    assert draft.scores == pytest.approx((2 / 3, 1 / 3))
    chain = propose(text, tree=False)
    assert chain.is_chain and chain.tokens[0] == 7
    assert propose(text, k=3, min_share=0.5).tokens == (7,) and propose(text, k=3, min_share=0.5).stop == "few agree"


def test_the_draft_grows_with_the_match():
    """A match of n tokens is trusted for twice as many nodes; the budget cuts in both directions."""
    text = list(range(10, 40))
    assert [len(propose([*text, 1, *text[3:3 + n]], k=30)) for n in (2, 3, 5)] == [4, 6, 10]
    draft = propose([*text, 1, *text[3:6]])
    assert (draft.tokens, draft.stop) == (tuple(text[6:12]), "match length")
    drafter = Suffix()
    drafts = [drafter.propose([sequence([*text, 1, *text[3:6]], drafter)], [budget])[0] for budget in (Budget(3, 9), Budget(9, 2), Budget(0, 0))]
    assert [(len(draft), draft.stop) for draft in drafts] == [(3, "length"), (2, "length"), (0, "budget")]


def test_the_match_with_the_best_score_wins():
    """A long match whose two places disagree is worth less than a short one whose places mostly agree; one that stands once is worth more."""
    often = [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 8, 1, 2, 3, 4, 9, 1, 2, 3, 4, 7]
    draft = propose([6, 1, 2, 70, 70, 6, 1, 2, 80, 80, *often, 6, 1, 2], k=2)
    assert draft.tokens == (3, 4) and draft.scores == pytest.approx((4 / 6, 4 / 6))
    assert propose([6, 1, 2, 70, 70, *often, 6, 1, 2], k=2).tokens == (70, 70)


def test_no_match_no_draft_and_turns_are_kept_apart():
    """The text's own end is no match; nothing is copied across a marker and no match contains one."""
    assert (propose([1, 2, 3]).stop, len(propose([7, 7]))) == ("no match", 0)
    draft = propose([1, 2, 3, MARKER, 4, 8, 1, 2])
    assert (draft.tokens, draft.stop) == ((3,), "end of turn")
    assert propose([3, MARKER, 5, 6, 3, MARKER]).stop == "no match"


def test_a_match_that_runs_into_the_end_repeats():
    """A periodic text goes on with its period past its own end."""
    assert propose([5, 6, 5, 6, 5, 6], k=7).tokens == (5, 6, 5, 6, 5, 6, 5)


def test_matches_and_counts_are_those_of_a_scan():
    """Lengths, places and continuations of the index, grown step by step, against a plain search over the whole text."""
    source = random.Random(3)
    text = [source.randrange(3) for _ in range(70)]
    grown = SuffixIndex(2)
    tokens = text[:3]
    grown.begin(tokens)
    for end in range(4, len(text) + 1):
        tokens.append(text[end - 1])
        grown.extend()
        found = dict(grown.matches())
        lengths = {place: max(n for n in range(place + 1) if text[place - n:place] == text[end - n:end]) for place in range(1, end)}
        for length, places in found.items():
            assert [place for _, place in places] == sorted((p for p, n in lengths.items() if n >= length), reverse=True)
        longest = max(lengths.values())
        assert max(found, default=0) == (longest if longest >= 2 else 0)


def test_an_answer_that_was_asked_again_is_still_known():
    """A second turn that is not the first one continued keeps the first answer in its index; the first one's own index stays as it was."""
    drafter = Suffix()
    prompt = [1, 2, 3]
    first = sequence([*prompt, 50, 51, 52, 53, 54], drafter)
    drafter.propose([first], [Budget(4, 4)])
    second = sequence([*prompt, 60], drafter)
    assert drafter.fork(first, second, 3) == 3
    second.tokens += [50, 51]
    assert drafter.propose([second], [Budget(2, 2)])[0].tokens == (52, 53)
    second.tokens += [77, 78, 79, 77, 78]
    assert drafter.propose([second], [Budget(1, 1)])[0].tokens == (79,)
    first.tokens += [77, 78]
    assert not len(drafter.propose([first], [Budget(2, 2)])[0])
    fresh = sequence(second.tokens, drafter)
    drafter.release(fresh)
    assert not len(drafter.propose([sequence([1, 50, 51], drafter)], [Budget(2, 2)])[0])


def test_a_turn_that_continues_another_drafters_answer_knows_it_too():
    """Switching to suffix decoding in the middle of a conversation takes the texts over from whoever drafted before."""
    drafter = Suffix()
    first = sequence([1, 2, 3, 50, 51, 52, 53], object())
    second = sequence([1, 2, 3, 60], drafter)
    drafter.fork(first, second, 3)
    second.tokens += [50, 51]
    assert drafter.propose([second], [Budget(2, 2)])[0].tokens == (52, 53)


def test_many_old_answers_are_bounded():
    """Asking again and again keeps the latest old answers and their shared beginning; what is dropped is no longer proposed."""
    drafter = Suffix()
    before = sequence([7, 8, 9, 100, 101, 102, 103], drafter)
    drafter.propose([before], [Budget(2, 2)])
    for turn in range(1, 9):
        start = 100 + 10 * turn
        now = sequence([7, 8, 9, start], drafter)
        drafter.fork(before, now, 3)
        now.tokens += [start + 1, start + 2, start + 3]
        drafter.propose([now], [Budget(2, 2)])
        before = now

    def continues(head):
        now = sequence([7, 8, 9, 5], drafter)
        drafter.fork(before, now, 3)
        now.tokens += head
        return drafter.propose([now], [Budget(2, 2)])[0].tokens
    assert continues([170, 171]) == (172, 173) and continues([180, 181]) == (182, 183)
    assert continues([100, 101]) == () and continues([7, 8])[:1] == (9,)


def test_repeated_text_saves_steps():
    """Asked the same thing again, in the same conversation, the old answer is proposed and accepted; for another scope it is not there."""
    lab = Lab()
    prompt = repeating_prompt(12)
    plain = lab.run(prompt, max_new_tokens=40, scope="plain")
    first, again, other = (lab.run(prompt, "suffix", k=8, max_new_tokens=40, scope=scope) for scope in ("mine", "mine", "yours"))
    assert first.tokens == again.tokens == other.tokens == plain.tokens
    assert len(again.steps) < 20 and len(again.steps) < len(first.steps) == len(other.steps)
    assert all(node.q is None and node.score is not None for step in again.steps for node in step.nodes)
