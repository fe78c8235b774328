"""The one-layer decoder that EAGLE methods draft with: from a token and the state before it to a guess of the state there.

It knows nothing of requests, trees or files: it reads what `checkpoints.py` has named and checked.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine.attention import packed_attention
from ..engine.cache import Feed
from ..engine.model import FINAL, LanguageModel
from .parts import Heads

__all__ = ["EagleHead", "Guess", "rope_frequencies"]

_LAYER = "layers.0."


@dataclass(frozen=True, slots=True)
class Guess:
    """carried: [T, H], the state that a child of the token is read with. read: [T, H], what the LM head reads."""
    carried: Tensor
    read: Tensor


class EagleHead:
    """Weights of one head on the target's device and in its dtype.

    EAGLE (arXiv 2401.15077): x = fc([embedding of token t + 1, feature f_t]) goes through one decoder layer without an input norm and
    becomes the guess of f_{t + 1}, which the target's own LM head reads; f is the state after the target's last norm.
    EAGLE-3 (arXiv 2503.01840): f is three of the target's states joined by fc; the layer attends over [norm(embedding), norm(f)], twice
    as wide, and has an LM head of its own over fewer tokens. What is guessed is fed back in place of f in both.

    needs: the target's layers whose states it reads, see `LanguageModel.forward`. token_ids: [D] the target's id of each of its own
    tokens, None if they are the same.
    """

    def __init__(self, heads: Heads, target: LanguageModel) -> None:
        facts = heads.facts
        self._target, self._facts = target, facts
        self._fused = heads.kind == "eagle3"
        self.needs: tuple[int, ...] = tuple(facts["taps"]) if self._fused else (FINAL,)
        self._weights = {name: tensor.to(target.device, target.dtype) for name, tensor in heads.tensors.items()
                         if tensor.is_floating_point()}
        self.token_ids: Tensor | None = None
        self._unknown: Tensor | None = None                    # own tokens that the target does not have
        if (offsets := heads.tensors.get("d2t")) is not None:
            self.token_ids = (torch.arange(len(offsets)) + offsets).to(target.device)
            unknown = self.token_ids >= target.num_tokens
            self._unknown = unknown if unknown.any() else None
            self.token_ids = self.token_ids.clamp(max=target.num_tokens - 1)
        self._frequencies = rope_frequencies(facts["rope"], facts["head_dim"]).to(target.device)

    def fuse(self, states: Tensor) -> Tensor:
        """The target's states for `needs`, [T, H'] -> what the layer takes for f, [T, H]."""
        if not self._fused:
            return states
        if self._facts.get("norm_before_fc"):
            states = self._norm(states, "input_norm")
        if self._facts.get("fc_norm"):
            parts = states.chunk(len(self.needs), -1)
            states = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return self._linear(states, "fc")

    def forward(self, feeds: Seq[Feed], token_ids: Tensor, states: Tensor) -> Guess:
        """Read T tokens of all feeds in order. token_ids: int64 [T]. states: [T, H], f of the token before each: fused or carried."""
        embedded = self._embed(token_ids)
        if self._fused:
            normed = self._norm(states, _LAYER + "hidden_norm")
            kept = normed if self._facts.get("norm_before_residual") else states
            mixed = torch.cat([self._norm(embedded, _LAYER + "input_layernorm"), normed], -1)
        else:
            if "embedding_layernorm.weight" in self._weights:
                embedded, states = self._norm(embedded, "embedding_layernorm"), self._norm(states, "hidden_states_layernorm")
            kept = self._linear(torch.cat([embedded, states], -1), "fc")
            mixed = self._norm(kept, _LAYER + "input_layernorm") if _LAYER + "input_layernorm.weight" in self._weights else kept
        hidden = kept + self._attend(feeds, mixed)
        inner = self._norm(hidden, _LAYER + "post_attention_layernorm")
        gated = F.silu(self._linear(inner, _LAYER + "mlp.gate_proj")) * self._linear(inner, _LAYER + "mlp.up_proj")
        hidden = hidden + self._linear(gated, _LAYER + "mlp.down_proj")
        if self._fused:
            read = self._norm(hidden, "norm")
            return Guess(read if self._facts.get("norm_output") else hidden, read)
        return Guess(hidden, self._norm(hidden, "pre_lm_head_layernorm") if "pre_lm_head_layernorm.weight" in self._weights else hidden)

    def log_probs(self, read: Tensor) -> Tensor:
        """The guess of the next token, [n, H] -> [n, D], float32 or better; -inf for tokens that the target does not have."""
        if "lm_head.weight" in self._weights:
            logits = self._linear(read, "lm_head")
            logits = logits if self.token_ids is not None else logits[:, :self._target.num_tokens]
            if self._unknown is not None:
                logits = logits.masked_fill(self._unknown, float("-inf"))
        else:
            logits = self._target.head(read)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).clamp(max=0)

    def _embed(self, token_ids: Tensor) -> Tensor:
        own = self._weights.get("embed_tokens.weight")
        embedded = self._target.embed(token_ids) if own is None else F.embedding(token_ids, own)
        return _rms(embedded, self._facts["epsilon"]) if self._facts.get("normalize_embeddings") else embedded

    def _attend(self, feeds: Seq[Feed], mixed: Tensor) -> Tensor:
        head_dim, num_tokens = self._facts["head_dim"], len(mixed)
        query, key, value = (self._linear(mixed, f"{_LAYER}self_attn.{name}_proj").view(num_tokens, -1, head_dim) for name in "qkv")
        if _LAYER + "self_attn.q_norm.weight" in self._weights:                  # Qwen3-style layers
            query, key = self._norm(query, _LAYER + "self_attn.q_norm"), self._norm(key, _LAYER + "self_attn.k_norm")
        positions = torch.tensor([position for feed in feeds for position in feed.positions], device=mixed.device)
        angles = positions[:, None, None] * self._frequencies
        cos, sin = angles.cos().to(mixed.dtype), angles.sin().to(mixed.dtype)
        query, key = _rotated(query, cos, sin).contiguous(), _rotated(key, cos, sin)
        parts, start = [], 0
        for feed in feeds:
            end = start + feed.num_tokens
            keys, values = feed.write(0, key[start:end], value[start:end])
            parts.append(packed_attention(query[start:end], keys, values, feed.mask(None, mixed.dtype), head_dim ** -0.5))
            start = end
        return self._linear(torch.cat(parts), _LAYER + "self_attn.o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[name + ".weight"], self._weights.get(name + ".bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return _rms(x, self._facts["epsilon"]) * self._weights[name + ".weight"]


def _rms(x: Tensor, epsilon: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head, [T, heads, D]; cos and sin are [T, 1, D / 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rope_frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Radians per position of each rotated pair, float32 [D / 2].

    rope: {"rope_theta", "rope_type": "default", "linear" or "llama3", and what that type needs}. RoPE: arXiv 2104.09864; llama3: the
    slow frequencies are divided by "factor", the fast ones kept, those between interpolated.
    """
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope["rope_type"] == "linear":
        return frequencies / rope["factor"]
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)      # over the length it was trained on
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (share + (1 - share) / rope["factor"])
    return frequencies
