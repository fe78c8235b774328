"""The user's distribution against transformers' own processors, and the keyed random numbers."""
from itertools import product

import pytest
import torch
from transformers.generation.logits_process import (LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor,
                                                    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)

from fakes import chi_square, chi_square_limit
from specviz.engine.sampling import KeyedNoise, SamplingParams, distribution
from specviz.errors import InputError

HISTORIES = [[0, 1, 1, 5], [2, 2, 2, 7, 40], [63], [10, 11, 12, 13]]


def logits(rows: int = 4, size: int = 64) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(3)) * 3


def reference(row: torch.Tensor, history: list[int], params: SamplingParams) -> torch.Tensor:
    """One row the way transformers' generate makes it."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.tensor([history]), row[None].clone())[0].softmax(-1)


@pytest.mark.parametrize("temperature, top_k, top_p, min_p, penalty", list(product(
    [0.3, 1.0, 1.7], [0, 1, 5, 200], [1.0, 0.9, 0.3], [0.0, 0.02, 0.5], [1.0, 1.3])))
def test_distribution_is_that_of_transformers(temperature, top_k, top_p, min_p, penalty):
    """Every combination of temperature, top-k, top-p, min-p and penalty gives transformers' probabilities, row by row with its history."""
    params = SamplingParams(temperature, top_k, top_p, min_p, penalty)
    ours = distribution(logits(), params, HISTORIES)
    theirs = torch.stack([reference(row, history, params) for row, history in zip(logits(), HISTORIES)])
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert torch.equal(ours > 0, theirs > 0)


@pytest.mark.parametrize("params", [SamplingParams(1.0, top_k=2), SamplingParams(1.0, top_p=0.5), SamplingParams(1.0, top_k=3, top_p=0.6),
                                    SamplingParams(1.0, min_p=0.9)])
def test_ties_fall_as_in_transformers(params):
    """Equal logits at the edge of a filter are kept or dropped as transformers does it."""
    rows = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 0.0, 0.0, 0.0]])
    theirs = torch.stack([reference(row, [0], params) for row in rows])
    torch.testing.assert_close(distribution(rows, params), theirs, atol=1e-6, rtol=0)


def test_greedy_is_one_hot():
    """Temperature 0 puts everything on the argmax, whatever the filters; a penalty still counts, row by row."""
    rows = torch.tensor([[1.0, 3.0, 2.9], [1.0, 3.0, 2.9]])
    assert torch.equal(distribution(rows, SamplingParams()), torch.eye(3)[[1, 1]])
    assert torch.equal(distribution(rows, SamplingParams(top_k=2, top_p=0.1, repetition_penalty=1.1), [[1], [0]]), torch.eye(3)[[2, 1]])


def test_histories_belong_to_rows():
    """A token in one row's history is penalised in that row only, and once however often it occurs."""
    rows = torch.tensor([[2.0, -1.0, 0.5]] * 3)
    params = SamplingParams(1.0, repetition_penalty=2.0)
    expected = torch.tensor([[1.0, -1.0, 0.5], [2.0, -2.0, 0.5], [2.0, -1.0, 0.5]]).softmax(-1)
    torch.testing.assert_close(distribution(rows, params, [[0, 0], [1], []]), expected)
    assert rows[0, 0] == 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precision(dtype):
    """Half precision is raised to float32 before the softmax; rows sum to 1."""
    probs = distribution(logits().to(dtype), SamplingParams(0.8, top_p=0.95))
    assert probs.dtype in (torch.float32, torch.float64)
    torch.testing.assert_close(probs.sum(-1), torch.ones(4, dtype=probs.dtype))


@pytest.mark.parametrize("wrong", [{"temperature": -0.1}, {"temperature": 1e-40}, {"temperature": float("nan")}, {"top_k": -1},
                                   {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 1.0}, {"repetition_penalty": 0.0},
                                   {"max_new_tokens": 0}, {"stop": ("",)}])
def test_values_out_of_range_are_refused(wrong):
    """The error names the value that was given and what was expected."""
    with pytest.raises(InputError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_the_lowest_temperature_is_finite():
    """At the smallest temperature that is allowed no row turns into NaN, even for large logits."""
    probs = distribution(torch.tensor([[1e4, 2e4, -1e4, float("-inf")]]), SamplingParams(0.001, top_p=0.9, min_p=0.1))
    assert torch.equal(probs, torch.eye(4)[[1]])


P = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05, 0.0])


def test_noise_is_repeatable():
    """The same key gives the same number, in another instance and after any other calls."""
    first, second = KeyedNoise(5), KeyedNoise(5)
    for position in range(50):
        second.draw(P, position + 1000)
        second.accepts(0.5, position, 7)
        assert first.draw(P, position) == second.draw(P, position)
        assert first.accepts(0.5, position, 1) == second.accepts(0.5, position, 1)
        assert first.draw_draft(P, position, 2, 1) == second.draw_draft(P, position, 2, 1)


def test_noise_of_different_keys_differs():
    """Seed, position, purpose, step and sibling each change the number: none of 64 in a row is repeated by a neighbouring key."""
    def numbers(seed=5, shift=0, sibling=0):
        return [KeyedNoise(seed).accepts(0.5, position + shift, sibling)[1] for position in range(64)]
    rows = [numbers(), numbers(seed=6), numbers(sibling=1), numbers(seed=-5), numbers(shift=64), numbers(seed=5 + 2**40)]
    assert len({u for row in rows for u in row}) == 64 * len(rows)
    flat = torch.full((10_000,), 1e-4)
    noise = KeyedNoise(5)
    draws = [noise.draw(flat, 3), noise.draw(flat, 4), KeyedNoise(6).draw(flat, 3), noise.draw_draft(flat, 3, 0),
             noise.draw_draft(flat, 3, 1), noise.draw_draft(flat, 3, 0, 1), noise.draw_draft(flat, 4, 0), noise.draw_draft(flat, 3, 1, 1)]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("purpose, vary", [("token", "position"), ("token", "seed"), ("draft", "position"), ("draft", "seed"),
                                           ("draft", "step"), ("draft", "sibling")])
def test_draws_have_their_distribution(purpose, vary):
    """Along every part of the key, draws have the shares that were asked for, and the impossible never comes.

    4000 draws, chi-square; a correct program would fail with a chance below 1e-6 if the keys were changed.
    """
    counts = [0] * len(P)
    one = KeyedNoise(11)
    for i in range(4000):
        noise = KeyedNoise(i) if vary == "seed" else one
        position = i if vary == "position" else 3
        step, sibling = (i if vary == "step" else 0), (i if vary == "sibling" else 0)
        counts[noise.draw(P, position) if purpose == "token" else noise.draw_draft(P, position, step, sibling)] += 1
    assert chi_square(counts, P.tolist()) < chi_square_limit(len(P) - 2)


@pytest.mark.parametrize("first, second", [
    (lambda noise, i: noise.draw_draft(P, i, 0), lambda noise, i: noise.draw(P, i)),
    (lambda noise, i: noise.draw_draft(P, i, 0), lambda noise, i: noise.draw_draft(P, i, 1)),
    (lambda noise, i: noise.draw_draft(P, i, 0), lambda noise, i: noise.draw_draft(P, i, 0, 1)),
    (lambda noise, i: noise.draw(P, i), lambda noise, i: noise.draw(P, i + 1)),
    (lambda noise, i: noise.draw(P, i), lambda noise, i: 4 - int(noise.accepts(0.5, i, 0)[1] * 5)),
    (lambda noise, i: int(noise.accepts(0.5, i, 0)[1] * 5), lambda noise, i: int(noise.accepts(0.5, i, 1)[1] * 5)),
], ids=["draft-token", "steps", "siblings", "positions", "token-accept", "accept siblings"])
def test_decisions_are_independent(first, second):
    """Two decisions with neighbouring keys, cross-tabulated, are independent.

    4000 pairs against the product of the observed margins, chi-square; false alarm below 1e-6.
    """
    noise = KeyedNoise(23)
    table = torch.zeros(5, 5)
    for i in range(4000):
        table[first(noise, i), second(noise, i)] += 1
    share = table.sum(1, keepdim=True) * table.sum(0) / 4000**2
    assert chi_square(table.flatten().tolist(), share.flatten().tolist()) < chi_square_limit(16)


def test_accept_numbers_are_uniform():
    """u lies in [0, 1), fills ten bins evenly (chi-square, false alarm below 1e-6), and certain outcomes use none."""
    noise = KeyedNoise(1)
    us = [noise.accepts(0.5, position, sibling)[1] for position in range(2000) for sibling in range(3)]
    assert all(0 <= u < 1 for u in us)
    counts = torch.histc(torch.tensor(us), 10, 0, 1).tolist()
    assert chi_square(counts, [0.1] * 10) < chi_square_limit(9)
    assert noise.accepts(0, 1, 1) == (False, None) and noise.accepts(1, 1, 1) == (True, None)
    assert noise.accepts(-1e-9, 1, 1) == (False, None)
    ok, u = noise.accepts(0.3, 4, 2)
    assert ok == (u < 0.3)


def test_one_hot_draws_nothing():
    """Greedy rows give their token whatever the seed."""
    assert {KeyedNoise(seed).draw(torch.eye(6)[4], 0) for seed in range(50)} == {4}


def test_a_draw_s_margin_is_what_it_takes_to_change_it():
    """Raising the second best log-probability by less than the margin leaves the draw alone, by more changes it; one-hot rows have none."""
    for seed in range(50):
        noise, p = KeyedNoise(seed), torch.rand(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(-1)
        token, margin = noise.draw(p, 3), noise.margin(p, 3)
        def drawn(change):
            raised = [(p.log() + change * torch.eye(6, dtype=p.dtype)[other]).softmax(-1) for other in range(6) if other != token]
            return {noise.draw(probs, 3) for probs in raised}
        assert drawn(0.999 * margin) == {token} and len(drawn(1.001 * margin)) == 2
    assert KeyedNoise(0).margin(torch.tensor([0.0, 1.0, 0.0]), 3) is None
