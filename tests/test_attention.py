"""Attention: a token's result may depend neither on its companions nor on chunking."""
import pytest
import torch

from specviz.engine.attention import capped_attention, one_query_attention, packed_attention, view_length

SHAPES = [(3, 3, 64), (2, 7, 64), (8, 2, 128), (2, 2, 8)]       # key heads, query heads per key head, head size


def problem(num_kv_heads, group, head_dim, num_keys, num_tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_keys)
    length = view_length(num_keys) + 64
    keys, values = (torch.randn(num_kv_heads, length, head_dim, generator=generator, dtype=dtype) for _ in range(2))
    query = torch.randn(num_tokens, num_kv_heads * group, head_dim, generator=generator, dtype=dtype)
    limit = torch.arange(num_keys - num_tokens, num_keys)
    mask = torch.where(torch.arange(length) <= limit[:, None], 0.0, float("-inf")).to(dtype)
    return query, keys, values, mask


def naive(query, keys, values, mask, scaling):
    group = query.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("thd,hld->htl", query, keys) * scaling + mask
    return torch.einsum("htl,hld->thd", scores.softmax(-1), values).flatten(1)


@pytest.mark.parametrize("attention", [one_query_attention, packed_attention])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_definition(attention, shape):
    """Both forms compute softmax(q k^T * scaling + mask) v with grouped heads, to float64 rounding."""
    query, keys, values, mask = problem(*shape, num_keys=131, num_tokens=6, dtype=torch.float64)
    expected = naive(query, keys, values, mask, 0.3)
    assert (attention(query, keys, values, mask, 0.3, num_keys=131) - expected).abs().max() < 1e-12
    assert (attention(query, keys, values, mask, 0.3) - expected).abs().max() < 1e-12


def test_capped_scores_match_the_definition():
    """softmax(cap tanh(q k^T scaling / cap) + mask) v, one token at a time and all together."""
    query, keys, values, mask = problem(2, 3, 16, num_keys=131, num_tokens=6)
    grouped = [x.repeat_interleave(3, 0) for x in (keys, values)]
    scores = torch.tanh(torch.einsum("thd,hld->htl", query, grouped[0]) * 0.3 / 5) * 5 + mask
    expected = torch.einsum("htl,hld->thd", scores.softmax(-1), grouped[1]).flatten(1)
    for ours in (one_query_attention(query, keys, values, mask, 0.3, num_keys=131, softcap=5.0), capped_attention(query, keys, values, mask, 0.3, 5.0)):
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("softcap", [None, 30.0], ids=["", "capped"])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_alone_equals_the_token_in_a_chain(shape, num_threads, softcap):
    """T tokens at once give bitwise what T forwards of one token give, also where the view grows in the middle of the chain."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_keys, num_tokens in [(20, 6), (67, 6), (300, 2), (323, 7), (388, 8), (450, 16), (517, 12), (900, 256), (1503, 6)]:
            query, keys, values, mask = problem(*shape, num_keys=num_keys, num_tokens=num_tokens)
            together = one_query_attention(query, keys, values, mask, 0.125, num_keys=num_keys, softcap=softcap)
            for i in range(num_tokens):
                used = num_keys - num_tokens + i + 1
                view = view_length(used)
                alone = one_query_attention(query[i:i + 1], keys[:, :view], values[:, :view], mask[i:i + 1, :view], 0.125, num_keys=used,
                                            softcap=softcap)
                assert torch.equal(alone[0], together[i]), (num_keys, num_tokens, i)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
