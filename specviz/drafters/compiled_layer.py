"""A drafting head's decoder layer in one call of the compiled kernel, where the target's own layers run there.

It knows nothing of heads and drafts. A draft is a guess, so int8 here costs a little acceptance and never exactness.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine.cache import Feed
from ..engine.linear import Int8Linear
from ..engine.model import LanguageModel
from ..engine.native.stack import CompiledStack, Misfit
from .products import runs_compiled

__all__ = ["LAYER", "CompiledLayer", "compiled_layer"]

LAYER = "layers.0."


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class _Layer:
    """What `CompiledStack` reads of a layer."""
    num_heads: int
    num_rotated: int
    head_dim: int
    intermediate: int
    scaling: float
    input_norm: _Norm | None
    mlp_norm: _Norm
    head_norms: tuple[_Norm, _Norm] | None
    qkv: Int8Linear
    out: Int8Linear
    gate_up: Int8Linear
    down: Int8Linear
    window: int | None = None


@dataclass(slots=True)
class _Rotary:
    """Cosines and signed sines per position, [positions, D], made anew when too short."""
    frequencies: Tensor
    scale: float
    cos: Tensor
    sin: Tensor

    def reaching(self, needed: int) -> tuple[Tensor, Tensor]:
        """Both tables with at least so many positions."""
        if needed > len(self.cos):
            angles = torch.arange(max(needed, 2 * len(self.cos), 1024))[:, None] * self.frequencies
            cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
            self.cos, self.sin = torch.cat([cos, cos], -1).contiguous(), torch.cat([-sin, sin], -1).contiguous()
        return self.cos, self.sin


@dataclass(frozen=True, slots=True)
class _Decoder:
    layers: tuple[_Layer, ...]
    rotary: _Rotary
    beside: tuple[Int8Linear, ...]
    norm: None = None
    head: None = None


class CompiledLayer:
    """x + attention(norm(x)), then the MLP with its norm; the first norm may be missing."""

    def __init__(self, decoder: _Decoder) -> None:
        self.stack, self._weights = CompiledStack(decoder), decoder        # the stack reads weights that somebody else must keep

    def __call__(self, feeds: Seq[Feed], hidden: Tensor) -> Tensor:
        """All feeds' tokens in order over their own rows, [T, H] -> [T, H]."""
        return self.stack.run(hidden.clone(memory_format=torch.contiguous_format), feeds, 1)[0]


def compiled_layer(weights: Mapping[str, Tensor], facts: Mapping[str, Any], frequencies: Tensor, scale: float, target: LanguageModel,
                   beside: Seq[Int8Linear] = ()) -> CompiledLayer | None:
    """The layer, or None where the kernel is not in use or not made for it. Arguments as `DecoderLayer` has them."""
    parts = {name: weights.get(f"{LAYER}{name}.weight") for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        "post_attention_layernorm")}
    size = len(weights.get(f"{LAYER}post_attention_layernorm.weight", ()))
    if not runs_compiled(target) or any(part is None for part in parts.values()):
        return None
    query, key, value, out, gate, up, down, mlp_norm = parts.values()
    if query.shape[1] != size or out.shape[0] != size:         # EAGLE-3's attention reads twice as much
        return None

    def joined(*names: str) -> Int8Linear:
        own = [weights.get(f"{LAYER}{name}.bias") for name in names]
        rows = [weights[f"{LAYER}{name}.weight"] for name in names]
        biases = None if all(bias is None for bias in own) else torch.cat(
            [row.new_zeros(len(row)) if bias is None else bias for row, bias in zip(rows, own)])
        return Int8Linear(torch.cat(rows), biases)

    def norm(name: str) -> _Norm | None:
        weight = weights.get(f"{LAYER}{name}.weight")
        return None if weight is None else _Norm(weight, facts["epsilon"])
    head_dim = facts["head_dim"]
    num_heads, num_kv_heads = len(query) // head_dim, len(key) // head_dim
    head_norms = (norm("self_attn.q_norm"), norm("self_attn.k_norm"))
    try:
        layer = _Layer(num_heads, num_heads + num_kv_heads, head_dim, len(gate), head_dim ** -0.5, norm("input_layernorm"),
                       _Norm(mlp_norm, facts["epsilon"]), head_norms if None not in head_norms else None,
                       joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), joined("self_attn.o_proj"),
                       joined("mlp.gate_proj", "mlp.up_proj"), joined("mlp.down_proj"))
        return CompiledLayer(_Decoder((layer,), _Rotary(frequencies, scale, torch.empty(0), torch.empty(0)), tuple(beside)))
    except (Misfit, RuntimeError):
        return None
