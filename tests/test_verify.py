"""What verification records and how it asks for randomness; that its law is exact is proved in test_lossless_exact."""
from fractions import Fraction as F

import pytest
import torch

from fakes import Choices, EnumeratingNoise, FractionVector, chi_square, chi_square_limit, law, one_hot, vector
from specviz.engine.draft import EMPTY, ROOT, Draft
from specviz.engine.sampling import KeyedNoise
from specviz.engine.verify import residual, verify, without


class Scripted:
    """Answers from two lists, and keeps what it was asked."""

    def __init__(self, accepts=(), draws=()):
        self._accepts, self._draws = list(accepts), list(draws)
        self.asked, self.drawn = [], []

    def accepts(self, prob, position, sibling):
        self.asked.append((prob, position, sibling))
        return self._accepts.pop(0), 0.5

    def draw(self, probs, position):
        self.drawn.append((probs, position))
        return self._draws.pop(0)


def test_an_empty_draft_is_plain_decoding():
    """Without a draft one token is drawn from p, untouched, and nothing is judged."""
    noise = Scripted(draws=[2])
    p = vector(1, 2, 3)
    verdict = verify(EMPTY, [p], noise, 7)
    assert (verdict.path, verdict.token, verdict.origin, verdict.judgements, verdict.residuals) == ((), 2, "plain", (), ())
    assert noise.drawn == [(p, 7)] and noise.asked == []


def test_a_draft_that_only_feeds_a_window_is_plain_decoding():
    """Nodes that are not judged change neither the draw nor its origin."""
    noise = Scripted(draws=[0])
    verdict = verify(Draft((1, 1), (ROOT, 0), judged=(False, False)), [vector(1, 1)] * 3, noise, 4)
    assert (verdict.path, verdict.origin) == ((), "plain") and noise.asked == []


def test_full_acceptance_ends_with_the_bonus():
    """If all drafts on the path are accepted, one more token comes from the leaf's own untouched row, at the next position."""
    rows = [vector(1, 1, 2), vector(1, 2, 1), vector(3, 1, 1)]
    noise = Scripted([True, True], [2])
    verdict = verify(Draft.chain([2, 1], [vector(1, 1, 1)] * 2), rows, noise, 10)
    assert (verdict.path, verdict.token, verdict.origin, verdict.residuals) == ((0, 1), 2, "bonus", ())
    assert noise.drawn == [(rows[2], 12)]
    assert [(j.node, j.target_prob, j.draft_prob, j.accept_prob, j.accepted) for j in verdict.judgements] == [
        (0, F(1, 2), F(1, 3), 1, True), (1, F(1, 2), F(1, 3), 1, True)]


def test_a_rejection_ends_with_the_correction():
    """After a rejection in a chain the rest is unjudged, and the correction is drawn from the recorded residual at the same position."""
    rows = [vector(1, 1, 2), vector(1, 2, 1), vector(3, 1, 1)]
    noise = Scripted([True, False], [0])
    verdict = verify(Draft.chain([2, 1, 0], [vector(1, 1, 1), vector(1, 4, 0), vector(1, 1, 1)]), rows + rows[:1], noise, 10)
    left = residual(rows[1], vector(1, 4, 0))
    assert (verdict.path, verdict.token, verdict.origin) == ((0,), 0, "correction")
    assert [j.node for j in verdict.judgements] == [0, 1] and verdict.residuals == ((0, left),) and noise.drawn == [(left, 11)]
    assert verdict.judgements[1].accept_prob == F(1, 2) / F(4, 5)


def test_siblings_are_judged_with_what_is_left():
    """The second sibling's p is the remaining one; a rejection before an acceptance leaves its residual in the record."""
    p, q = vector(4, 3, 3), vector(6, 2, 2)
    noise = Scripted([False, True], [1])
    verdict = verify(Draft((0, 1), (ROOT, ROOT), [q, q]), [p] + [vector(1, 1, 1)] * 2, noise, 0)
    assert (verdict.path, verdict.origin) == ((1,), "bonus")
    assert [j.target_prob for j in verdict.judgements] == [F(2, 5), F(1, 2)] and [j.accepted for j in verdict.judgements] == [False, True]
    assert verdict.residuals == ((ROOT, vector(0, 1, 1)),)
    chosen = verify(Draft((0, 1), (ROOT, ROOT)), [p] + [vector(1, 1, 1)] * 2, Scripted([False, True], [1]), 0)
    assert [(j.target_prob, j.draft_prob, j.accept_prob) for j in chosen.judgements] == [(F(2, 5), None, F(2, 5)), (F(1, 2), None, F(1, 2))]


def test_no_two_decisions_share_a_key():
    """Within a step every acceptance has its own (position, sibling), at the token's absolute position: equal keys would mean equal u."""
    draft = Draft((0, 1, 0, 1, 0, 1), (ROOT, ROOT, 1, 1, 3, 3))
    noise = Scripted([False, True, False, True, False, False], [0])
    verify(draft, [vector(1, 1, 2)] * 7, noise, 5)
    assert [key for _, *key in noise.asked] == [[5, 0], [5, 1], [6, 0], [6, 1], [7, 0], [7, 1]]
    assert noise.drawn[0][1] == 7


@pytest.mark.parametrize("probs", [None, "rows"])
def test_greedy_needs_no_numbers(probs):
    """One-hot targets accept exactly the argmax, draw exactly the argmax, and use no random number at all."""
    rows = [torch.eye(4)[i] for i in (2, 3, 1)]
    draft_probs = None if probs is None else torch.full((2, 4), 0.25)
    verdict = verify(Draft((2, 3), (ROOT, 0), draft_probs), rows, KeyedNoise(0), 3)
    assert verdict.path == (0, 1) and verdict.token == 1 and all(j.u is None for j in verdict.judgements)
    verdict = verify(Draft((2, 1), (ROOT, 0), draft_probs), rows, KeyedNoise(0), 3)
    assert verdict.path == (0,) and verdict.token == 3 and verdict.origin == "correction" and all(j.u is None for j in verdict.judgements)


def test_the_impossible_is_never_accepted():
    """p = 0 is rejected for every seed, with a drawn and with a chosen draft."""
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([[0.25, 0.25, 0.5]])
    for seed in range(200):
        for probs in (q, None):
            verdict = verify(Draft((2,), (ROOT,), probs), [p, p], KeyedNoise(seed), 1)
            assert verdict.path == () and verdict.token != 2


def test_residual():
    """norm(max(p - q, 0)) on tensors and fractions; where rounding leaves nothing, p itself."""
    assert residual(vector(5, 3, 2), vector(2, 5, 3)) == vector(1, 0, 0)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.2, 0.7])
    torch.testing.assert_close(residual(p, q), torch.tensor([0.8, 0.2, 0.0]))
    assert residual(p, p) is p and residual(vector(1, 2), vector(1, 2)) == vector(1, 2)


def test_without():
    """A chosen token is taken out and the rest renormalised, leaving the argument alone; if it held everything, p itself."""
    p = torch.tensor([0.5, 0.3, 0.2])
    torch.testing.assert_close(without(p, 0), torch.tensor([0.0, 0.6, 0.4]))
    assert p[0] == 0.5 and without(one_hot(1, 3), 1) == one_hot(1, 3)


def test_random_numbers_decide_as_recorded():
    """The verdict in the record can be checked by hand: accepted where u < min(1, p/q), u in [0, 1)."""
    seen = set()
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        p, q = torch.rand(2, 5, generator=generator).softmax(-1)
        verdict = verify(Draft((seed % 5,), (ROOT,), q[None]), [p, p], KeyedNoise(seed), 9)
        judged = verdict.judgements[0]
        ratio = p[seed % 5].item() / q[seed % 5].item()
        assert judged.accept_prob == min(1, ratio)
        assert judged.accepted == (judged.u is None or judged.u < ratio) and (judged.u is None) == (ratio >= 1)
        assert judged.u is None or 0 <= judged.u < 1
        seen.add((judged.accepted, judged.u is None))
    assert seen == {(True, True), (True, False), (False, False)}


def test_the_real_noise_follows_the_target():
    """Drawn trees judged with `KeyedNoise` emit pairs of tokens with the target's shares.

    6000 seeds, chi-square over nine pairs; a correct program fails with a chance below 1e-6 if the seeds were changed.
    """
    p = {(): torch.tensor([0.5, 0.3, 0.2]), 0: torch.tensor([0.1, 0.6, 0.3]), 1: torch.tensor([0.7, 0.1, 0.2]),
         2: torch.tensor([0.2, 0.2, 0.6])}
    q = torch.tensor([0.3, 0.3, 0.4])
    counts = [0] * 9
    for seed in range(6000):
        noise, tokens, step = KeyedNoise(seed), [], 0
        while len(tokens) < 2:
            draws = [noise.draw_draft(q, len(tokens), step, sibling) for sibling in range(2)]
            draft = Draft(tuple(draws), (ROOT, ROOT), q.expand(2, 3))
            verdict = verify(draft, [p[tokens[0] if tokens else ()], *(p[token] for token in draws)], noise, len(tokens))
            tokens += [draft.tokens[node] for node in verdict.path] + [verdict.token]
            step += 1
        counts[3 * tokens[0] + tokens[1]] += 1
    expected = [(p[()][a] * p[a][b]).item() for a in range(3) for b in range(3)]
    assert chi_square(counts, expected) < chi_square_limit(8)


def test_the_double_is_a_noise():
    """The enumerating double gives each outcome its exact weight, so that the proofs rest on `verify` alone."""
    def run(choices: Choices):
        noise = EnumeratingNoise(choices)
        return noise.accepts(F(1, 4), 0, 0)[0], noise.draw(FractionVector([F(1, 3), 0, F(2, 3)]), 0)
    assert law(run) == {(True, 0): F(1, 12), (True, 2): F(2, 12), (False, 0): F(3, 12), (False, 2): F(6, 12)}
