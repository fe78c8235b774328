"""Models of a real one's shape with random weights, made on the device layer by layer, in the precisions that the program loads.

They know nothing of text: only cost, memory and arithmetic can be measured with them, and that needs no download.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..errors import InputError

__all__ = ["PRECISIONS", "SHAPES", "Shape", "TOY_SHAPES", "random_model"]

PRECISIONS = ("bf16", "int8", "nf4", "fp4")


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the cost of a forward. family: a model type of transformers."""
    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool

    def config(self) -> Any:
        return AutoConfig.for_model(
            self.family, hidden_size=self.hidden_size, num_hidden_layers=self.num_layers, num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads, head_dim=self.head_dim, intermediate_size=self.intermediate_size, vocab_size=self.vocab_size,
            tie_word_embeddings=self.tied, max_position_embeddings=8192)


SHAPES: Mapping[str, Shape] = {                  # as the configurations of Llama-3.2-1B, Llama-3.1-8B and Qwen3-0.6B have it
    "1B": Shape("llama", 2048, 16, 32, 8, 64, 8192, 128256, True),
    "8B": Shape("llama", 4096, 32, 32, 8, 128, 14336, 128256, False),
    "0.6B": Shape("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True),
}
TOY_SHAPES: Mapping[str, Shape] = {
    "1B": Shape("llama", 128, 2, 4, 2, 32, 256, 512, True),
    "8B": Shape("llama", 192, 3, 6, 2, 32, 384, 512, False),
    "0.6B": Shape("qwen3", 64, 2, 2, 1, 32, 128, 640, True),
}


def random_model(shape: Shape, precision: str, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> PreTrainedModel:
    """A causal LM in eval mode; linears but for the LM head in `precision`, everything else in `dtype`.

    Each linear is made in `dtype`, packed, and forgotten, so that an 8B model in 4 bits never takes more than its own size and one layer.
    The settings are those of `placement.bitsandbytes_config`. Raises InputError for another precision.
    """
    if precision not in PRECISIONS:
        raise InputError(f"Precision {precision!r} is not one of {', '.join(PRECISIONS)}.")
    device, generator = torch.device(device), torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype)
    head = model.get_output_embeddings()

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, device=device, dtype=dtype).normal_(0, columns ** -0.5, generator=generator)

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                if child is not head:
                    setattr(parent, name, _linear(weight(child.out_features, child.in_features), precision))
                elif not shape.tied:
                    child.weight = nn.Parameter(weight(child.out_features, child.in_features), requires_grad=False)
            elif isinstance(child, nn.Embedding):
                child.weight = nn.Parameter(weight(child.num_embeddings, child.embedding_dim), requires_grad=False)
            elif "RMSNorm" in type(child).__name__:
                child.weight = nn.Parameter(torch.ones(child.weight.shape, device=device, dtype=dtype), requires_grad=False)
            elif "RotaryEmbedding" in type(child).__name__:
                with device:                         # the angles are computed, not stored
                    setattr(parent, name, type(child)(model.config))
    if shape.tied:
        head.weight = model.get_input_embeddings().weight
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not left, f"without values: {left[:3]}"
    return model.eval().requires_grad_(False)


def _linear(weight: torch.Tensor, precision: str) -> nn.Module:
    """A linear without bias that holds this weight."""
    num_out, num_in = weight.shape
    if precision == "bf16":
        linear = nn.Linear(num_in, num_out, bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return linear
    import bitsandbytes as bnb
    if precision == "int8":
        linear = bnb.nn.Linear8bitLt(num_in, num_out, bias=False, has_fp16_weights=False, threshold=0.0, device="meta")
        linear.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)       # it packs on the way to the device
        return linear.to(weight.device)
    linear = bnb.nn.Linear4bit(num_in, num_out, bias=False, compute_dtype=weight.dtype, compress_statistics=False, quant_type=precision,
                               device="meta")
    linear.weight = bnb.nn.Params4bit(weight, requires_grad=False, compress_statistics=False, quant_type=precision, module=linear)
    return linear.to(weight.device)
