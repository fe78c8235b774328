"""Joins linears that read the same input: query, key and value in one, gate and up in one, so that a GPU starts fewer kernels.

It knows nothing of decoding. The model is not edited: each joined linear is replaced by a slice of the one that computes them all. Joining
changes no weight: packed 4-bit bytes and int8 rows are put one after the other with their scales (checked with bitsandbytes 0.50). What
cannot be joined bit for bit stays as it is: double quantized weights, whose scales are packed once more, and layers spread over cards.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .linear import fuse

__all__ = ["fuse_projections", "quantize_head"]

_FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fuse_projections(model: nn.Module) -> int:
    """Join what can be joined in a loaded transformers model of a known family, in place, layer by layer; the originals are freed.

    Returns how many groups were joined; 0 for other families.
    """
    if model.config.get_text_config().model_type not in _FAMILIES:
        return 0
    num_joined = 0
    for parent in list(model.get_decoder().modules()):
        for names in _GROUPS:
            linears = [getattr(parent, name, None) for name in names]
            if all(isinstance(linear, nn.Linear) for linear in linears) and (joined := _join(linears)) is not None:
                shared, start = _Shared(joined, len(names)), 0
                for name, linear in zip(names, linears):
                    setattr(parent, name, _Slice(shared, start, start + linear.out_features))
                    start += linear.out_features
                num_joined += 1
                linears.clear()
    return num_joined


def quantize_head(model: nn.Module, quant_type: str, compute_dtype: torch.dtype) -> None:
    """Let the LM head compute with a copy of its weights in "nf4", "fp4" or "int8"; an embedding tied to it stays as it is.

    The head is the largest single matrix, and bitsandbytes leaves it alone: less is read for every token, and what it rounds shows in the
    text most.
    """
    import bitsandbytes as bnb
    head = model.get_output_embeddings()
    weight = head.weight.detach()
    shape = head.in_features, head.out_features
    if quant_type == "int8":
        quantized = bnb.nn.Linear8bitLt(*shape, bias=head.bias is not None, has_fp16_weights=False, threshold=0.0, device="meta")
        packed, scales, _ = bnb.functional.int8_vectorwise_quant(weight.to(torch.float16))
        quantized.weight = bnb.nn.Int8Params(packed, requires_grad=False, has_fp16_weights=False, CB=packed, SCB=scales)
    else:
        quantized = bnb.nn.Linear4bit(*shape, bias=head.bias is not None, compute_dtype=compute_dtype, compress_statistics=False,
                                      quant_type=quant_type, device="meta")
        packed, state = bnb.functional.quantize_4bit(weight.contiguous(), blocksize=64, quant_type=quant_type)
        _hold(quantized, packed, state)
    quantized.bias = head.bias
    model.set_output_embeddings(quantized.eval())


class _Shared(nn.Module):
    """Computes the joined linear once for the slices that ask with the same input, one after the other."""

    def __init__(self, linear: nn.Module, num_slices: int) -> None:
        super().__init__()
        self.linear, self._num_slices = linear, num_slices
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._num_left = 0

    def forward(self, x: Tensor) -> Tensor:
        if self._input is not x:
            self._input, self._output, self._num_left = x, self.linear(x), self._num_slices
        output = self._output
        self._num_left -= 1
        if self._num_left == 0:                      # nothing is held beyond the last slice
            self._input = self._output = None
        return output


class _Slice(nn.Module):
    """One of the joined linears: [..., K] -> its own outputs of [..., N]."""

    def __init__(self, shared: _Shared, start: int, end: int) -> None:
        super().__init__()
        self.shared, self._start, self._end = shared, start, end

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x)[..., self._start:self._end]


def _join(linears: Sequence[Any]) -> nn.Module | None:
    """One linear for several; None where their weights cannot lie side by side."""
    first, kind = linears[0], type(linears[0])
    if any(type(linear) is not kind or linear.in_features != first.in_features or hasattr(linear, "_hf_hook") for linear in linears):
        return None
    if len({linear.weight.device for linear in linears}) > 1 or first.weight.is_meta:
        return None
    if kind is nn.Linear:
        return fuse(linears) if len({linear.weight.dtype for linear in linears}) == 1 else None
    join = {"Linear4bit": _join_4bit, "Linear8bitLt": _join_8bit}.get(kind.__name__)
    return join(linears) if join is not None else None


def _join_4bit(linears: Sequence[Any]) -> nn.Module | None:
    import bitsandbytes as bnb
    first = linears[0]
    states = [linear.weight.quant_state for linear in linears]
    like = states[0]
    settings = {(state.blocksize, state.quant_type, state.dtype, linear.weight.dtype, linear.compute_dtype)
                for state, linear in zip(states, linears) if state is not None}
    if None in states or len(settings) > 1 or any(state.nested or getattr(state, "packing_format_for_cpu", False) for state in states):
        return None
    if first.in_features % like.blocksize:           # a block of one scale would reach over the end of a row
        return None
    num_out = sum(linear.out_features for linear in linears)
    joined = bnb.nn.Linear4bit(first.in_features, num_out, bias=False, compute_dtype=first.compute_dtype, compress_statistics=False,
                               quant_type=like.quant_type, quant_storage=first.weight.quant_storage, device="meta")
    shape = torch.Size((joined.out_features, joined.in_features))
    state = bnb.functional.QuantState(absmax=torch.cat([state.absmax.flatten() for state in states]), shape=shape, code=like.code,
                                      blocksize=like.blocksize, quant_type=like.quant_type, dtype=like.dtype)
    _hold(joined, torch.cat([linear.weight.data for linear in linears]), state)
    joined.bias = _joined_bias(linears)
    return joined.eval()


def _join_8bit(linears: Sequence[Any]) -> nn.Module | None:
    import bitsandbytes as bnb
    first = linears[0]
    packed = [linear.weight.CB if linear.weight.CB is not None else linear.state.CB for linear in linears]
    scales = [linear.weight.SCB if linear.weight.SCB is not None else linear.state.SCB for linear in linears]
    if any(part is None for part in (*packed, *scales)) or first.state.has_fp16_weights:
        return None
    if len({linear.state.threshold for linear in linears}) > 1:
        return None
    joined = bnb.nn.Linear8bitLt(first.in_features, sum(linear.out_features for linear in linears), bias=False, has_fp16_weights=False,
                                 threshold=first.state.threshold, device="meta")
    rows, scale = torch.cat(packed), torch.cat([part.flatten() for part in scales])
    joined.weight = bnb.nn.Int8Params(rows, requires_grad=False, has_fp16_weights=False, CB=rows, SCB=scale)
    joined.bias = _joined_bias(linears)
    return joined.eval()


def _hold(linear: Any, packed: Tensor, state: Any) -> None:
    """Give a 4-bit linear its packed weight."""
    import bitsandbytes as bnb
    linear.weight = bnb.nn.Params4bit(packed, requires_grad=False, quant_state=state, blocksize=state.blocksize, compress_statistics=False,
                                      quant_type=state.quant_type, quant_storage=packed.dtype, module=linear, bnb_quantized=True)
    linear.quant_state = state


def _joined_bias(linears: Sequence[Any]) -> nn.Parameter | None:
    """All biases in order, zeros for linears that have none."""
    known = [linear.bias for linear in linears if linear.bias is not None]
    if not known:
        return None
    device = known[0].device
    return nn.Parameter(torch.cat([torch.zeros(linear.out_features, dtype=known[0].dtype, device=device) if linear.bias is None
                                   else linear.bias.detach() for linear in linears]), requires_grad=False)
