"""A copy of a model with some of its layers left out: a draft model for where no smaller one is at hand.

It knows nothing of drafting. Nothing is trained: the other layers stay as they are, as in Draft & Verify (Zhang et al. 2023, arXiv
2309.08168), so such a copy guesses worse than a trained small model and costs more.
"""
from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .errors import LoadError

__all__ = ["thin_copy"]

_LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..*)$")


def thin_copy(folder: Path, leave_out: Collection[int], into: Path) -> Path:
    """Write the model of `folder` without the layers numbered in `leave_out` (from 0) into a new folder below `into`, and return it.

    For one safetensors file with Llama's tensor names. Raises LoadError if a layer is not there or the files are not what they should be.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        num_layers = int(config["num_hidden_layers"])
        if wrong := sorted(set(leave_out) - set(range(num_layers))):
            raise LoadError(f"Layer {wrong[0]} cannot be left out: {folder.name} has the layers 0 to {num_layers - 1}.")
        kept = [layer for layer in range(num_layers) if layer not in set(leave_out)]
        with safe_open(folder / "model.safetensors", framework="pt") as weights:
            tensors = {name: weights.get_tensor(old) for old in weights.keys() if (name := _renamed(old, kept))}
        copy = into / f"{folder.name.partition('.')[0]}-{len(kept)}-of-{num_layers}-layers"
        copy.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            if file.is_file() and file.name not in ("config.json", "model.safetensors", "specviz.json"):
                shutil.copy2(file, copy / file.name)
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        per_layer = {name: [value[layer] for layer in kept] for name, value in config.items()
                     if isinstance(value, list) and len(value) == num_layers}
        (copy / "config.json").write_text(json.dumps(config | per_layer | {"num_hidden_layers": len(kept)}), encoding="utf-8")
        return copy
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise LoadError(f"No copy of {folder.name} without some layers could be made ({type(error).__name__}: {error}). It needs "
                        "config.json and one model.safetensors.") from error


def _renamed(name: str, kept: list[int]) -> str | None:
    """A tensor's name in the copy; None if its layer is left out."""
    found = _LAYER.match(name)
    if not found:
        return name
    layer = int(found[2])
    return f"{found[1]}{kept.index(layer)}{found[3]}" if layer in kept else None
