"""Two ways to attend from a few tokens to one sequence's cached keys and values on a CPU: exact per token, and packed.

They know nothing of the cache, of rows or of layers: the caller writes the cache, makes the mask and passes views.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["VIEW_MULTIPLE", "capped_attention", "one_query_attention", "packed_attention", "view_length"]

VIEW_MULTIPLE = 64


def view_length(num_keys: int) -> int:
    """The length of the key and value view for `num_keys` entries: rounded up to `VIEW_MULTIPLE`. The mask hides the rest."""
    return -(-num_keys // VIEW_MULTIPLE) * VIEW_MULTIPLE


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, softcap: float | None) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    if softcap is not None:                  # token by token: the same products of the same shapes, whatever is fed beside it
        return torch.cat([capped_attention(query[i:i + 1], keys, values, mask[i:i + 1], scaling, softcap) for i in range(num_tokens)])
    num_kv_heads, length, _ = keys.shape
    out = scaled_dot_product_attention(
        query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim),
        keys.expand(num_tokens, num_kv_heads, length, head_dim),
        values.expand(num_tokens, num_kv_heads, length, head_dim), attn_mask=mask[:, None, None, :], scale=scaling)
    return out.reshape(num_tokens, num_heads * head_dim)


def one_query_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float,
                        num_keys: int | None = None, softcap: float | None = None) -> Tensor:
    """Attention in which a token's result does not depend on the tokens fed with it, [T, Hq * D].

    query: [T, Hq, D], contiguous. keys, values: [Hkv, L, D] views of one sequence, L a multiple of `VIEW_MULTIPLE` and not copied.
    mask: [T, L], added to the scores: 0 where a token may look, -inf elsewhere; every row sees at least one key.
    num_keys: how many of the L entries are in use, the T fed tokens being the last of them in order. Given, every token gets the
        view that it would get alone, so one forward of T tokens equals T forwards of one, bit for bit. Without it all share L.
    softcap: see `capped_attention`.

    Each token is a batch entry of its own, with its grouped heads packed, so that its matrix products always have the same shape.
    The view must be a function of the token too: a longer one, though masked, makes the product with the values add in another
    order (measured on AVX2 and AVX512). For the same reason attention runs on one thread; the caller's count is restored.
    """
    num_tokens, length = query.shape[0], keys.shape[1]
    num_threads = torch.get_num_threads()
    if num_threads > 1:
        torch.set_num_threads(1)
    try:
        if num_keys is None:
            return _attend(query, keys, values, mask, scaling, softcap)
        start, parts = 0, []
        while start < num_tokens:
            view = view_length(num_keys - num_tokens + start + 1)
            end = min(num_tokens, start + view - (num_keys - num_tokens + start))
            if start == 0 and end == num_tokens and view == length:
                return _attend(query, keys, values, mask, scaling, softcap)
            parts.append(_attend(query[start:end], keys[:, :view], values[:, :view], mask[start:end, :view], scaling, softcap))
            start = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    finally:
        if num_threads > 1:
            torch.set_num_threads(num_threads)


def packed_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, num_keys: int | None = None) -> Tensor:
    """The same attention with all tokens of a head group in one matrix product, [T, Hq * D]; arguments as `one_query_attention`.

    Reads keys and values once instead of T times, which pays for prefill and long contexts, but a token's result differs in the
    last bits with T. `num_keys` is accepted and not needed. mask: may also be [T * group, L], each token's row once for each of its heads.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, length, _ = keys.shape
    group = num_heads // num_kv_heads
    rows = query.view(num_tokens, num_kv_heads, group, head_dim).transpose(0, 1).reshape(1, num_kv_heads, num_tokens * group, head_dim)
    if len(mask) != num_tokens * group:
        mask = mask[:, None, :].expand(num_tokens, group, length).reshape(num_tokens * group, length)
    out = scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=mask[None, None], scale=scaling)
    return out.view(num_kv_heads, num_tokens, group, head_dim).transpose(0, 1).reshape(num_tokens, num_heads * head_dim)


def capped_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    """Attention whose scores are soft-capped before the mask (Gemma 2), which no fused kernel offers on every device, [T, Hq * D].

    Arguments as `one_query_attention`. All tokens share the matrix products; one token at a time is exact.
    """
    num_tokens, num_heads, head_dim = query.shape
    grouped = query.view(num_tokens, keys.shape[0], -1, head_dim)
    scores = (grouped @ keys.transpose(-1, -2)) * scaling
    weights = (torch.tanh(scores / softcap) * softcap + mask[:, None, None, :]).float().softmax(-1).to(values.dtype)
    return (weights @ values).reshape(num_tokens, -1)
