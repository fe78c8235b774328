"""Reads the files of drafting heads: tensors under one spelling, and the configuration. It knows nothing of what the tensors mean.

Pickled files are read as plain data only (`weights_only`), so no code in them runs.
"""
from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import LoadError
from .decoder_layer import LAYER

__all__ = ["HOT_TOKENS", "PICKLED", "Files", "clean", "read_config"]

PICKLED = ("*.bin", "*.pt")
HOT_TOKENS = "hot_token_id"      # the tokens that a head guesses among, where a list of them lies beside it (FR-Spec, SGLang)
SCALE = "_scale"                 # behind a tensor's name: one factor per row of an int8 tensor, as specviz stores some of its own heads
_MOST_BYTES = 16_000_000         # of a file that may hold such a list


class Files(Mapping[str, Tensor]):
    """The tensors of a folder's weight files, safetensors before pickled ones, under one spelling; read when asked for."""

    def __init__(self, folder: Path, name: str) -> None:
        self._places: dict[str, tuple[Path, str]] = {}
        self._pickled: dict[str, Tensor] = {}
        try:
            for path in (safe := sorted(folder.glob("*.safetensors"))):
                with safe_open(path, "pt") as file:
                    self._places.update((clean(key), (path, key)) for key in file.keys())
        except (SafetensorError, OSError) as error:
            raise LoadError(f"The weights of {name} cannot be read ({str(error)[:120]}); fetch them again.") from error
        if not safe:
            self._pickled = _read_pickled([path for pattern in PICKLED for path in sorted(folder.glob(pattern))], name)
        else:
            self._pickled = _read_token_list([path for path in sorted(folder.glob("*.pt")) if path.stat().st_size <= _MOST_BYTES])

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._places | self._pickled if not key.endswith(SCALE))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, key: str) -> Tensor:
        if key in self._pickled:
            return self._pickled[key]
        path, name = self._places[key]
        with safe_open(path, "pt") as file:
            tensor = file.get_tensor(name)
        return tensor * self[key + SCALE][:, None].float() if key + SCALE in self._places else tensor


def _read_pickled(paths: list[Path], name: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    failure: Exception | None = None
    for path in paths:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
            failure = error
            continue
        if isinstance(content, Mapping):
            tensors.update((clean(key), value) for key, value in content.items() if isinstance(value, Tensor))
        elif (ids := _token_ids(content)) is not None:
            tensors[HOT_TOKENS] = ids
    if failure is not None and not tensors:
        raise LoadError(f"{paths[0].name} of {name} is damaged, or holds more than tensors, which specviz never reads; look for "
                        "a safetensors file of these heads.") from failure
    return tensors


def _read_token_list(paths: list[Path]) -> dict[str, Tensor]:
    """A list of tokens beside weights that need no pickled file; files of another kind are left alone."""
    for path in paths:
        try:
            ids = _token_ids(torch.load(path, map_location="cpu", weights_only=True))
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError):
            continue
        if ids is not None:
            return {HOT_TOKENS: ids}
    return {}


def _token_ids(content: Any) -> Tensor | None:
    """int64 [D] from what a file holds, a list of whole numbers or a tensor of one dimension; None for anything else."""
    if isinstance(content, Tensor):
        return content.long() if content.dim() == 1 and not content.is_floating_point() else None
    is_list = isinstance(content, list) and content and all(type(each) is int and 0 <= each < 1 << 40 for each in content)
    return torch.tensor(content) if is_list else None


def clean(name: str) -> str:
    """One spelling for tensors that projects name differently."""
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.", LAYER, name)
    name = re.sub(r"^transformer\.(?=self_attn\.|mlp\.|input_layernorm\.|post_attention_layernorm\.)", LAYER, name)
    return re.sub(r"^fusion_fc\.", "fc.", name)


def read_config(folder: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"The config.json of {name} is missing or cannot be read ({str(error)[:120]}); copy it beside the "
                        "weights.") from error
    if not isinstance(config, dict):
        raise LoadError(f"The config.json of {name} holds no table of settings; fetch it again.")
    return config
