"""Drafting heads with random weights under the names, shapes and settings of published checkpoints, scaled down to a target.

They know nothing of drafters; each function returns what a folder would hold: (config.json's content, tensors by name).
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specviz.drafters import Heads
from specviz.drafters.checkpoints import checked_heads
from specviz.engine.model import LanguageModel

__all__ = ["eagle", "eagle3", "exit_adapter", "medusa", "random_heads", "write"]

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INNER = 4, 2, 16, 96
Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]


class _Random:
    """Tensors of a size that keeps activations near 1."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        scale = 1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.2
        return torch.randn(shape, generator=self._generator) * scale + (len(shape) == 1)


def layer_config(target: LanguageModel, **more: Any) -> dict[str, Any]:
    return {"hidden_size": target.config.hidden_size, "intermediate_size": INNER, "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "vocab_size": target.num_tokens, "rope_theta": 10000.0, **more}


def layer_tensors(prefix: str, size: int, width: int, new: _Random) -> dict[str, Tensor]:
    shapes = {"self_attn.q_proj": (NUM_HEADS * HEAD_DIM, width), "self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, width),
              "self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, width), "self_attn.o_proj": (size, NUM_HEADS * HEAD_DIM),
              "mlp.gate_proj": (INNER, size), "mlp.up_proj": (INNER, size), "mlp.down_proj": (size, INNER), "post_attention_layernorm": (size,)}
    return {f"{prefix}{name}.weight": new(*shape) for name, shape in shapes.items()}


def eagle(target: LanguageModel, seed: int = 0, bias: bool = True) -> Checkpoint:
    """EAGLE-1/2 as in yuhuili/EAGLE-*: no input norm, no last norm, no LM head."""
    new, size = _Random(seed), target.config.hidden_size
    tensors = {"fc.weight": new(size, 2 * size), **layer_tensors("layers.0.", size, size, new), "embed_tokens.weight": new(target.num_tokens, size)}
    if bias:
        tensors["fc.bias"] = new(size) - 1
    return layer_config(target, architectures=["LlamaForCausalLM"], model_type="llama", **({} if bias else {"bias": False})), tensors


def eagle3(target: LanguageModel, seed: int = 0, prefix: str = "midlayer.", num_own: int = 100) -> Checkpoint:
    """EAGLE-3 as in yuhuili/EAGLE3-*: three taps, a vocabulary of its own with offsets."""
    new, size = _Random(seed), target.config.hidden_size
    ids = torch.randperm(target.num_tokens, generator=torch.Generator().manual_seed(seed))[:num_own].sort().values
    tensors = {"fc.weight": new(size, 3 * size), **layer_tensors(prefix, size, 2 * size, new), f"{prefix}input_layernorm.weight": new(size),
               f"{prefix}hidden_norm.weight": new(size), "norm.weight": new(size), "lm_head.weight": 4 * new(num_own, size),
               "d2t": ids - torch.arange(num_own), "t2d": torch.zeros(target.num_tokens, dtype=torch.bool).index_fill_(0, ids, True)}
    return layer_config(target, architectures=["LlamaForCausalLMEagle3"], model_type="llama", draft_vocab_size=num_own), tensors


def medusa(target: LanguageModel, seed: int = 0, num_heads: int = 4, lm_heads: bool = True) -> Checkpoint:
    """Medusa as in FasterDecoding/medusa-vicuna-*, whose configuration names the wrong number of heads; `lm_heads` False is version 2."""
    new, size = _Random(seed), target.config.hidden_size
    tensors = {}
    for i in range(num_heads):
        tensors[f"{i}.0.linear.weight"], tensors[f"{i}.0.linear.bias"] = new(size, size), new(size) - 1
        if lm_heads:
            tensors[f"{i}.1.weight"] = new(target.num_tokens, size)
    return {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "tiny", **({} if lm_heads else {"version": "2"})}, tensors


def exit_adapter(target: LanguageModel, seed: int = 0, mlp: bool = True, exit_layer: int | None = 1, num_own: int = 0) -> Checkpoint:
    """An adapter behind the first layers: Kangaroo's names, with an MLP as specviz's own have it, or without as published. num_own: size of
    a vocabulary of its own, whose LM head is made of the target's rows."""
    new, size = _Random(seed), target.config.hidden_size
    tensors = {f"layers.0.input_layernorm.weight": new(size), "norm.weight": new(size), **layer_tensors("layers.0.", size, size, new)}
    if not mlp:
        tensors = {name: tensor for name, tensor in tensors.items() if "mlp" not in name and "post_attention" not in name}
    if num_own:
        tensors["d2t"] = torch.arange(num_own) * 2
    config = layer_config(target, model_type="llama", architectures=["AdapterModel"])
    return config | ({"specviz": {"kind": "exit_adapter", "exit_layer": exit_layer}} if exit_layer else {}), tensors


def random_heads(target: LanguageModel, seed: int = 0, lm_heads: bool = True) -> dict[str, Heads]:
    """One of each kind for a target, checked as a loaded file would be. lm_heads: whether Medusa's heads have their own, large ones."""
    made = (eagle(target, seed), eagle3(target, seed + 1), medusa(target, seed + 2, lm_heads=lm_heads), exit_adapter(target, seed + 3))
    heads = [checked_heads(tensors, config, "random heads", target, "the tiny target") for config, tensors in made]
    return {each.kind: each for each in heads}


def write(folder: Path, checkpoint: Checkpoint, file: str = "model.safetensors", rename: Mapping[str, str] | None = None) -> Path:
    """Write a checkpoint as a folder; `rename` replaces beginnings of tensor names. Files that do not end in .safetensors are pickled."""
    config, tensors = checkpoint
    for old, new in (rename or {}).items():
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: tensor for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder
