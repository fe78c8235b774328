"""Writes a trained drafter as a folder: as it ships, next to its target and without what that has already, or in full for other tools.

It knows nothing of training. The names are those of published checkpoints; `specviz/drafters/checkpoints.py` and `specviz/shipped.py` read
them back.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..drafters.checkpoint_files import SCALE
from .heads import DraftModelNet, Net

__all__ = ["export", "read_exported"]


def export(net: Net, folder: Path, facts: Mapping[str, Any], *, in_full: bool = False, dtype: torch.dtype = torch.float16,
           int8: bool = False) -> None:
    """Write config.json and model.safetensors.

    facts: for the block "specviz" of the configuration: the hashes of the target's weights and chat template, and what was measured.
    in_full: with LM head, embeddings and both maps of the vocabulary, as EAGLE's, Medusa's (vLLM) and transformers' readers want them; without,
    rows of the target's own tables are left to be taken from there. int8: matrices as int8 with a factor per row, half as large; for specviz only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = net.config()
    tensors = {name: tensor.detach().to(dtype) for name, tensor in net.published().items()}
    ids = net.given.draft_ids.cpu()
    if isinstance(net, DraftModelNet):
        if in_full:
            for name, table, projection in (("model.embed_tokens.weight", net.given.embeddings, tensors.pop("projection")),
                                            ("lm_head.weight", net.given.head, tensors.pop("head_projection"))):
                tensors[name] = (table @ projection.float()).to(dtype)
    elif net.kind == "medusa":
        tensors["token_map"] = ids
        if in_full:
            for i in range(net.depth):
                tensors[f"lm_heads.{i}.weight"] = (net.given.rows @ tensors.pop(f"blocks.{i}.projection.weight").float()).to(dtype)
    else:
        tensors["d2t"] = ids - torch.arange(len(ids))
        config["draft_vocab_size"] = len(ids)
        if in_full:
            known = torch.zeros(len(net.given.head), dtype=torch.bool)
            known[ids] = True
            rows = net.given.rows
            if "projection.weight" in tensors:
                rows = rows @ tensors.pop("projection.weight").float()
            tensors |= {"lm_head.weight": rows.to(dtype), "t2d": known}
            if net.kind == "eagle":
                tensors["embed_tokens.weight"] = net.given.embeddings.to(dtype)
    own = {"kind": net.kind, **config.pop("specviz", {}), **facts}
    if net.recipe.get("normalize_embeddings"):
        own["normalize_embeddings"] = True
    if int8:
        for name in [name for name, tensor in tensors.items() if tensor.dim() == 2 and "projection" not in name]:       # outliers would coarsen those
            scale = tensors[name].float().abs().amax(1).clamp_min(1e-8) / 127
            tensors[name] = (tensors[name].float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
            tensors[name + SCALE] = scale
    (folder / "config.json").write_text(json.dumps(config | {"specviz": own}, indent=1) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous().clone().cpu() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def read_exported(folder: Path) -> tuple[dict[str, Tensor], Tensor | None]:
    """Of a folder that `export` wrote, not in full: float32 tensors for `Net.load_published`, and the tokens that it guesses among, int64 [D];
    None where it does not say."""
    stored = load_file(folder / "model.safetensors")
    offsets, ids = stored.pop("d2t", None), stored.pop("token_map", None)
    if offsets is not None:
        ids = offsets + torch.arange(len(offsets))
    return {name: tensor.float() * (stored[name + SCALE][:, None] if name + SCALE in stored else 1) for name, tensor in stored.items()
            if not name.endswith(SCALE)}, ids
