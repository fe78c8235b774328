"""A decoder for the Llama family on a CPU that spends few operators per layer: llama, mistral, qwen2, qwen3.

It knows nothing of caches, masks or rows of a batch: the caller's `attend` stores keys and values and attends. Built from a loaded,
unmodified transformers model (checked with 5.24), to which it is equal up to rounding; int8 layers are smoothed first.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import Feed
from .linear import describe, fuse, make_linear
from .native.kernel import why_not
from .native.stack import CompiledStack, Misfit, proven
from .smooth import input_sizes, smoothing_scales

__all__ = ["Attend", "LeanDecoder", "LeanOutput"]

Attend = Callable[[int, Tensor, Tensor, Tensor, float, "int | None"], Tensor]

_CLASSES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_NORM_STRENGTH, _DOWN_STRENGTH = 0.7, 0.5        # of smoothing before int8; best of a few tried on SmolLM2-135M, `bench/precision.py`
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}        # the angles depend on the position alone, not on the length of the text


@dataclass(frozen=True, slots=True)
class LeanOutput:
    """hidden: [T, H] after the final norm. taps: layer -> [T, H], the input of that layer."""
    hidden: Tensor
    taps: Mapping[int, Tensor]


class LeanDecoder(nn.Module):
    """Token embedding, decoder layers, final norm and LM head, with fused projections and precomputed rotary angles.

    precision, head_precision: "fp32", "bf16" or "int8", see `linear.py`; other dtypes than float32 keep torch's linears.
    consume: take the weights over: the model given is left without layers and head and is of no further use.
    calibration: int64 [T], text as token ids by which int8 layers are smoothed (`smooth.py`); None takes random tokens.
    """

    def __init__(self, model: Any, precision: str = "fp32", head_precision: str | None = None, *, consume: bool = False,
                 calibration: Tensor | None = None) -> None:
        super().__init__()
        config, inner = model.config, model.model
        self.embed: nn.Embedding = inner.embed_tokens
        self.norm = _norm(inner.norm)
        self.rotary = _RotaryTable(inner.rotary_emb, inner.norm.weight.dtype)
        self.layers = nn.ModuleList()
        smooth = precision == "int8" and inner.norm.weight.dtype == torch.float32
        sizes = input_sizes(model, calibration) if smooth else None
        for index, layer in enumerate(inner.layers):
            self.layers.append(_LeanLayer(index, layer, config, precision, sizes))
            if consume:                          # layer by layer, so that two copies of all weights never exist
                inner.layers[index] = nn.Identity()
        self.head = make_linear(model.lm_head, head_precision or precision)
        if consume:
            inner.layers = nn.ModuleList()
            model.lm_head = nn.Identity()
        self.stack, self.why_not = _compiled(self) if precision == "int8" else (None, "")

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether the model is one of the known classes, on the CPU, with plain linears and rotary angles that never change."""
        if type(model).__name__ not in _CLASSES or model.config.hidden_act not in ("silu", "swish"):
            return False
        rotary = model.model.rotary_emb
        if getattr(rotary, "rope_type", None) not in _ROPE_TYPES or len(rotary.inv_freq) * 2 != model.model.layers[0].self_attn.head_dim:
            return False
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        return all(type(linear) is nn.Linear and linear.weight.device.type == "cpu" for linear in linears)

    def describe(self) -> dict[str, Any]:
        """Precision, kernel, instruction set and row independence, as `linear.describe`. layers: "compiled", or "one by one" in Python.

        not_compiled: why int8 layers are not compiled, without a full stop; absent if they are.
        """
        facts = describe(self, self.head) | {"layers": "one by one" if self.stack is None else "compiled"}
        return facts | ({"not_compiled": self.why_not} if self.why_not else {})

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, num_layers: int | None = None, taps: Sequence[int] = ()
                ) -> LeanOutput:
        """Run T tokens through the layers.

        token_ids, positions: int64 [T]. attend(layer, query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D], scaling, window): called once
        per layer, returns [T, Hq * D]; keys come rotated. num_layers: only the first ones, then the final norm (early exit).
        taps: layers whose input is wanted; `num_layers` means the last layer's output before the norm.
        """
        num_layers = len(self.layers) if num_layers is None else num_layers
        cos, sin = self.rotary.at(positions)
        hidden = F.embedding(token_ids, self.embed.weight)
        tapped: dict[int, Tensor] = {}
        for index in range(num_layers):
            if index in taps:
                tapped[index] = hidden
            hidden = self.layers[index].forward(hidden, cos, sin, attend)
        if num_layers in taps:
            tapped[num_layers] = hidden
        return LeanOutput(self.norm(hidden), tapped)

    def read(self, token_ids: Tensor, feeds: Sequence[Feed], num_layers: int | None = None, taps: Sequence[int] = ()) -> LeanOutput:
        """As `forward`, over rows of a cache, by the compiled stack; only where there is one."""
        num_layers = len(self.layers) if num_layers is None else num_layers
        return LeanOutput(*self.stack.run(F.embedding(token_ids, self.embed.weight), feeds, num_layers, taps))

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] after the final norm -> [n, V]."""
        return self.head(hidden)


def _compiled(decoder: LeanDecoder) -> tuple[CompiledStack | None, str]:
    """The decoder's layers as one compiled call, tried on a few tokens, or None and why not, without a full stop."""
    if problem := why_not():
        return None, problem
    try:
        stack = CompiledStack(decoder)
    except Misfit as misfit:
        return None, str(misfit)
    return (stack, "") if proven(stack, decoder) else (None, "on a trial it did not compute what PyTorch does")


class _LeanLayer(nn.Module):
    """One decoder layer. Norm weights are taken over, projections fused: query, key and value in one, gate and up in one."""

    def __init__(self, index: int, layer: Any, config: Any, precision: str, sizes: Mapping[nn.Module, Tensor] | None) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        self.head_dim: int = attention.head_dim
        self.num_heads: int = config.num_attention_heads
        self.num_rotated: int = self.num_heads + config.num_key_value_heads
        self.rotated_size = self.num_rotated * self.head_dim
        self.scaling: float = attention.scaling
        self.window: int | None = attention.sliding_window if hasattr(attention, "sliding_window") else _window(config)
        self.head_norms = (_norm(attention.q_norm), _norm(attention.k_norm)) if hasattr(attention, "q_norm") else None
        self.intermediate: int = mlp.gate_proj.out_features
        qkv, gate_up, down = fuse([attention.q_proj, attention.k_proj, attention.v_proj]), fuse([mlp.gate_proj, mlp.up_proj]), mlp.down_proj
        input_scales = mlp_scales = None
        if sizes is not None:
            down = fuse([down])                  # a copy: the model's own stays as it is
            scales = smoothing_scales(sizes[mlp.down_proj], down.weight, _DOWN_STRENGTH)
            down.weight.mul_(scales)
            gate_up.weight[self.intermediate:].div_(scales[:, None])
            if gate_up.bias is not None:
                gate_up.bias[self.intermediate:].div_(scales)
            input_scales = smoothing_scales(sizes[attention.q_proj], qkv.weight, _NORM_STRENGTH)
            mlp_scales = smoothing_scales(sizes[mlp.gate_proj], gate_up.weight, _NORM_STRENGTH)
            qkv.weight.mul_(input_scales)
            gate_up.weight.mul_(mlp_scales)
        self.input_norm, self.mlp_norm = _norm(layer.input_layernorm, input_scales), _norm(layer.post_attention_layernorm, mlp_scales)
        self.qkv, self.out = make_linear(qkv, precision), make_linear(attention.o_proj, precision)
        self.gate_up, self.down = make_linear(gate_up, precision), make_linear(down, precision)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        num_tokens, head_dim = hidden.shape[0], self.head_dim
        mixed = self.qkv(self.input_norm(hidden))
        rotated = mixed[:, :self.rotated_size].view(num_tokens, self.num_rotated, head_dim)
        value = mixed[:, self.rotated_size:].view(num_tokens, -1, head_dim)
        if self.head_norms is not None:
            query_norm, key_norm = self.head_norms
            rotated = torch.cat((query_norm(rotated[:, :self.num_heads]), key_norm(rotated[:, self.num_heads:])), 1)
        half = head_dim // 2
        swapped = torch.cat((rotated[..., half:], rotated[..., :half]), -1)
        rotated = torch.addcmul(rotated * cos, swapped, sin)                     # sin carries the sign of the rotated half
        query, key = rotated[:, :self.num_heads].contiguous(), rotated[:, self.num_heads:]
        hidden = hidden + self.out(attend(self._index, query, key, value, self.scaling, self.window))
        both = self.gate_up(self.mlp_norm(hidden))
        return hidden + self.down(F.silu(both[:, :self.intermediate]).mul_(both[:, self.intermediate:]))


class _RotaryTable:
    """Cosines and signed sines per position, [positions, 1, D], asked of the model's own rotary module and doubled when too short."""

    def __init__(self, rotary: nn.Module, dtype: torch.dtype) -> None:
        self._rotary, self._dtype = rotary, dtype
        self._cos = self._sin = torch.empty(0)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.reaching(int(positions.max()) + 1)
        return cos[positions], sin[positions]

    def reaching(self, needed: int) -> tuple[Tensor, Tensor]:
        """Both tables, [positions, 1, D], with at least so many positions."""
        if needed > len(self._cos):
            self._grow(max(needed, 2 * len(self._cos), 1024))
        return self._cos, self._sin

    @torch.inference_mode()
    def _grow(self, length: int) -> None:
        cos, sin = self._rotary(torch.empty(0, dtype=self._dtype), torch.arange(length)[None])
        half = cos.shape[-1] // 2
        self._cos, self._sin = cos[0, :, None].contiguous(), torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), -1)


class _Norm:
    """The RMS norm in few operators, its weight divided by `divisor` [H]; torch's own takes seven on a CPU (8 against 5 microseconds)."""

    def __init__(self, weight: Tensor, epsilon: float, divisor: Tensor | None = None) -> None:
        self.weight, self.epsilon = weight if divisor is None else weight / divisor, epsilon
        self._epsilon, self._share = torch.full((1,), epsilon), 1 / len(weight)

    def __call__(self, x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, 2, -1, True)
        return (x * torch.addcmul(self._epsilon, size, size, value=self._share).rsqrt_()).mul_(self.weight)


def _norm(module: nn.Module, divisor: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Our norm in place of transformers', which computes in float32 even in a float64 model and is left as it is there."""
    weight = module.weight.detach()
    return _Norm(weight, module.variance_epsilon, divisor) if weight.dtype == torch.float32 else module


def _window(config: Any) -> int | None:
    """The window of models that keep it in the config only (Mistral)."""
    return getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
