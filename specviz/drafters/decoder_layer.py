"""One Llama-style decoder layer with weights by name, over rows of a cache of its own: what drafting heads are made of.

It knows nothing of requests, trees or files, and nothing of what is fed to it.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine.attention import packed_attention
from ..engine.cache import Feed
from ..engine.linear import Int8Linear
from ..engine.model import LanguageModel
from .compiled_layer import LAYER, compiled_layer
from .products import products

__all__ = ["LAYER", "DecoderLayer", "rms", "rope_frequencies"]


class DecoderLayer:
    """Attention and, where there is one, MLP, whole or piece by piece: norms before the pieces are the caller's to apply.

    weights: all of a head's, under their published names. facts: "head_dim", "epsilon", "rope" (see `rope_frequencies`). target: what the
    head belongs to; where its layers run through the compiled kernel, so does this one. beside: compiled linears that are read in
    the same passes, to lie beside it in memory.
    """

    def __init__(self, weights: Mapping[str, Tensor], facts: Mapping[str, Any], target: LanguageModel, beside: Seq[Int8Linear] = ()) -> None:
        self._weights, self._head_dim, self._epsilon = weights, facts["head_dim"], facts["epsilon"]
        frequencies, self._scale = rope_frequencies(facts["rope"], self._head_dim)
        self.compiled = compiled_layer(weights, facts, frequencies, self._scale, target, beside)
        rest = {name: tensor for name, tensor in weights.items() if self.compiled is None or not name.startswith(LAYER)}
        self._products = products(rest, target)
        self._frequencies = frequencies.to(target.device)

    def has(self, name: str) -> bool:
        return name + ".weight" in self._weights

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self._products[name](x)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self._epsilon) * self._weights[name + ".weight"]

    def forward(self, feeds: Seq[Feed], hidden: Tensor) -> Tensor:
        """The whole layer: all feeds' tokens in order over their own rows, [T, H] -> [T, H]. Where it has no first norm or no MLP, without."""
        if self.compiled is not None:
            return self.compiled(feeds, hidden)
        first = LAYER + "input_layernorm"
        hidden = hidden + self.attend(feeds, self.norm(hidden, first) if self.has(first) else hidden)
        return self.mlp(hidden) if self.has(LAYER + "mlp.gate_proj") else hidden

    def attend(self, feeds: Seq[Feed], mixed: Tensor) -> Tensor:
        """Attention of all feeds' tokens in order over their own rows, [T, width] -> [T, H]."""
        num_tokens = len(mixed)
        query, key, value = (self.linear(mixed, f"{LAYER}self_attn.{name}_proj").view(num_tokens, -1, self._head_dim) for name in "qkv")
        if self.has(LAYER + "self_attn.q_norm"):                                 # Qwen3-style layers
            query, key = self.norm(query, LAYER + "self_attn.q_norm"), self.norm(key, LAYER + "self_attn.k_norm")
        positions = torch.tensor([position for feed in feeds for position in feed.positions], device=mixed.device)
        angles = positions[:, None, None] * self._frequencies
        cos, sin = (angles.cos() * self._scale).to(mixed.dtype), (angles.sin() * self._scale).to(mixed.dtype)
        query, key = _rotated(query, cos, sin).contiguous(), _rotated(key, cos, sin)
        parts, start = [], 0
        for feed in feeds:
            end = start + feed.num_tokens
            keys, values = feed.write(0, key[start:end], value[start:end])
            parts.append(packed_attention(query[start:end], keys, values, feed.mask(None, mixed.dtype), self._head_dim ** -0.5))
            start = end
        return self.linear(torch.cat(parts), LAYER + "self_attn.o_proj")

    def mlp(self, hidden: Tensor) -> Tensor:
        """The layer's second half with its norm and its residual, [T, H]."""
        inner = self.norm(hidden, LAYER + "post_attention_layernorm")
        gated = F.silu(self.linear(inner, LAYER + "mlp.gate_proj")) * self.linear(inner, LAYER + "mlp.up_proj")
        return hidden + self.linear(gated, LAYER + "mlp.down_proj")


def rms(x: Tensor, epsilon: float) -> Tensor:
    """x over its root mean square, worked out in float32 or better."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head, [T, heads, D]; cos and sin are [T, 1, D / 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rope_frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Radians per position of each rotated pair, float32 [D / 2], and what cosines and sines are multiplied with.

    rope: {"rope_theta", "rope_type": "default", "linear", "llama3" or "yarn", and what that type needs}. RoPE: arXiv 2104.09864; llama3:
    the slow frequencies are divided by "factor", the fast ones kept, those between interpolated; YaRN (arXiv 2309.00071) does the same
    between two numbers of turns over the trained length, and sharpens attention a little.
    """
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope["rope_type"] == "linear":
        return frequencies / rope["factor"], 1.0
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)      # over the length it was trained on
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (share + (1 - share) / rope["factor"]), 1.0
    if rope["rope_type"] == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies, 1.0


def _yarn(frequencies: Tensor, rope: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    factor, trained = rope["factor"], rope["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """The pair, as a fraction between two, that turns so often over the trained length."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))
    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    share = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)      # 1: kept as it is

    def sharpness(strength: float) -> float:
        return 0.1 * strength * math.log(factor) + 1 if factor > 1 else 1.0
    scale = rope.get("attention_factor")
    if scale is None:
        ours, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = sharpness(ours) / sharpness(all_dims) if ours and all_dims else sharpness(1.0)
    return frequencies * (share + (1 - share) / factor), float(scale)
