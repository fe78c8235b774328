"""How much memory a model will take, worked out before a byte of it is fetched. It knows nothing of where models come from.

Counts are exact: from a card's shape by formula, from a config by building the model without storage. Bytes per weight are those of the
code that holds them. What activations and kernels need on top is a rule of thumb, `WORKSPACE_BYTES`.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from .errors import NotEnoughMemory
from .machine import available

__all__ = ["Estimate", "MAX_CONTEXT", "Shape", "Sizes", "WORKSPACE_BYTES", "available", "card_budgets", "estimate", "gigabytes", "require_disk",
           "require_memory", "shortage", "sizes_of", "skeleton"]

MAX_CONTEXT = 8192                    # tokens per row of the cache; see `opening`
WORKSPACE_BYTES = {"cpu": 150_000_000, "cuda": 500_000_000, "mps": 500_000_000}
_PER_WEIGHT = {"int8": 1.0, "nf4": 0.5 + 4 / 64, "fp4": 0.5 + 4 / 64}     # 4 bits: and a float32 scale for every 64 weights
_PER_WEIGHT |= {f"{name}-double": 0.5 + (1 + 4 / 256) / 64 for name in ("nf4", "fp4")}      # the scale is a byte, with one float32 for 256 of them


@dataclass(frozen=True, slots=True)
class Shape:
    """What a dense decoder with gated MLP is made of, as a model card tells it. tied: the LM head is the embedding table.

    attention_bias: query, key and value have biases (Qwen2). head_norms: queries and keys are normed per head (Qwen3).
    """
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    attention_bias: bool = False
    head_norms: bool = False
    num_norms: int = 2               # per layer, of hidden_size


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers a model holds. linear: weights of linears inside the layers, which a quantization shrinks; linear_rows: their outputs, each
    with one scale in INT8. head: weights of the LM head; `tied` if they are the embedding's. other: norms, biases and everything else.
    cache_per_token: keys and values of one token."""
    linear: int
    linear_rows: int
    embedding: int
    head: int
    tied: bool
    other: int
    cache_per_token: int

    @property
    def num_parameters(self) -> int:
        """As people count: a tied table once."""
        return self.linear + self.embedding + (0 if self.tied else self.head) + self.other


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on one device. weights, cache (one full row), drafter (weights and cache), workspace; loading: the most that is held while
    the weights come in, which on a CPU is their unpacked form."""
    weights_bytes: int
    cache_bytes: int
    workspace_bytes: int
    loading_bytes: int
    drafter_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.workspace_bytes + self.drafter_bytes

    @property
    def peak_bytes(self) -> int:
        """What must be free before loading begins."""
        return max(self.total_bytes, self.loading_bytes)

    def parts(self) -> str:
        """In words."""
        names = (("weights", self.weights_bytes), ("drafter", self.drafter_bytes), ("cache", self.cache_bytes),
                 ("working room", self.workspace_bytes))
        text = ", ".join(f"{name} {gigabytes(num_bytes)}" for name, num_bytes in names if num_bytes)
        return text + (f"; {gigabytes(self.loading_bytes)} while loading" if self.loading_bytes > self.total_bytes else "")


def estimate(model: Shape | PretrainedConfig | Sizes, quantization: str = "none", context: int = MAX_CONTEXT, *, device: str = "cpu",
             dtype: torch.dtype | None = None, drafter: Shape | PretrainedConfig | Sizes | None = None,
             drafter_quantization: str | None = None) -> Estimate:
    """The memory of a target, and of a draft model beside it, on one device.

    context: tokens of one conversation; the cache of one row is counted in full. device: cpu, cuda or mps. dtype: of whatever is not
    quantized; by default float32 on a CPU, 16 bits elsewhere. The drafter shares device, dtype and, unless it is named, quantization.
    """
    kind = device.partition(":")[0]
    dtype = dtype or (torch.float32 if kind == "cpu" else torch.bfloat16)
    if drafter is not None:
        alone, second = (estimate(each, packing, context, device=device, dtype=dtype)
                         for each, packing in ((model, quantization), (drafter, drafter_quantization or quantization)))
        return replace(alone, drafter_bytes=second.weights_bytes + second.cache_bytes,
                       loading_bytes=alone.loading_bytes + second.loading_bytes)
    sizes = model if isinstance(model, Sizes) else sizes_of(model)
    width = dtype.itemsize
    linear_bytes = sizes.linear * _PER_WEIGHT.get(quantization, width) + (4 * sizes.linear_rows if quantization == "int8" else 0)
    # on a CPU in float32 the engine packs the head as it packs the layers: a tied one exists twice
    packs_head = kind == "cpu" and dtype == torch.float32
    head_bytes = sizes.head * (1 if quantization == "int8" else width) if packs_head else 0 if sizes.tied else sizes.head * width
    weights = int(linear_bytes) + width * (sizes.embedding + sizes.other) + head_bytes
    unpacked = width * sizes.num_parameters if kind == "cpu" else weights
    return Estimate(weights, width * sizes.cache_per_token * context, WORKSPACE_BYTES[kind], unpacked)


def sizes_of(model: Shape | PretrainedConfig) -> Sizes:
    """Count a shape by formula or a config by its model without storage."""
    return _of_shape(model) if isinstance(model, Shape) else _of_model(skeleton(model))


def _of_shape(shape: Shape) -> Sizes:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = queries + 2 * keys + shape.hidden_size + 2 * shape.intermediate_size + shape.hidden_size
    linear = shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
    other = shape.num_norms * shape.hidden_size
    other += queries + 2 * keys if shape.attention_bias else 0
    other += 2 * shape.head_dim if shape.head_norms else 0
    table = shape.vocab_size * shape.hidden_size
    return Sizes(shape.num_layers * linear, shape.num_layers * rows, table, table, shape.tied, shape.num_layers * other + shape.hidden_size,
                 2 * shape.num_layers * keys)


def skeleton(config: PretrainedConfig) -> Any:
    """The model of a config with every tensor's shape and no storage, in eval mode. Raises what the model class raises."""
    with torch.device("meta"):                    # nothing global is touched: another thread may be loading or answering
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    model.tie_weights()
    return model.eval()


def _of_model(model: Any) -> Sizes:
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not model.get_output_embeddings()]
    linear = sum(module.weight.numel() for module in linears)
    tied = head is embedding
    other = sum(parameter.numel() for parameter in model.parameters()) - linear - embedding.numel() - (0 if tied else head.numel())
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Sizes(linear, sum(module.out_features for module in linears), embedding.numel(), head.numel(), tied, other,
                 2 * config.num_hidden_layers * heads * head_dim)


def card_budgets(needed: Estimate, free_bytes: Sequence[int]) -> dict[int | str, int]:
    """Bytes of weights for each of several cards, in transformers' `max_memory`: beside them its layers' share of the cache must fit, and
    working room; the drafter lies on the first card. Nothing may go to the CPU."""
    share = needed.weights_bytes / (needed.weights_bytes + needed.cache_bytes)
    beside = [needed.workspace_bytes + (0 if index else needed.drafter_bytes) for index in range(len(free_bytes))]
    return {index: int(max(0, free - room) * share) for index, (free, room) in enumerate(zip(free_bytes, beside))} | {"cpu": 0}


def gigabytes(num_bytes: float) -> str:
    """A size for people, in decimal units, two or three digits."""
    if num_bytes < 1e8:
        return f"{num_bytes / 1e6:,.1f} MB"
    value = num_bytes / 1e9
    return f"{value:.2f} GB" if value < 10 else f"{value:,.0f} GB"


def shortage(name: str, needed: Estimate, free_bytes: int, where: str) -> str:
    """The sentence for a model that does not fit, "" if it does. where: "cuda:0, nf4"."""
    if needed.peak_bytes <= free_bytes:
        return ""
    return (f"{name} needs about {gigabytes(needed.peak_bytes)} ({where}: {needed.parts()}), and {gigabytes(free_bytes)} are free. Choose "
            "a smaller model, a stronger quantization or a shorter context, or close other programs.")


def require_memory(name: str, needed: Estimate, free_bytes: int, where: str) -> None:
    """Raise NotEnoughMemory with the numbers."""
    if sentence := shortage(name, needed, free_bytes, where):
        raise NotEnoughMemory(sentence)


def require_disk(name: str, needed_bytes: int, free_bytes: int, folder: Any, remedy: str = "free some space") -> None:
    """Raise NotEnoughMemory if a download would not fit."""
    if needed_bytes > free_bytes:
        raise NotEnoughMemory(f"Fetching {name} needs {gigabytes(needed_bytes)} in {folder}, but only {gigabytes(free_bytes)} are free; "
                              f"{remedy}.")
