"""Finds drafting heads by folder or hub name, and tells them from ordinary models. It knows nothing of targets and of drafting."""
from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .default_model import Progress
from .drafters.checkpoints import PICKLED, head_kind
from .errors import LoadError
from .hub import fetch_files, is_hub_id

__all__ = ["FoundHeads", "find_heads", "may_hold_heads"]

_TELLTALE = ("medusa_num_heads", "medusa_num_layers", "draft_vocab_size", "eagle_config", "eagle_fc_bias", "speculators_model_type",
             "num_heads", "dflash_config", "specviz", "n_predict")


class FoundHeads:
    """A folder with heads. kind: as `checkpoints.head_kind` says. name: for the eye."""

    def __init__(self, folder: Path, name: str, kind: str) -> None:
        self.folder, self.name, self.kind = folder, name, kind


def find_heads(source: str, *, offline: bool = False, progress: Progress) -> FoundHeads | None:
    """The heads that a local folder or a hub repository holds, their weights on this machine; None for anything else.

    Of a hub repository the configuration comes first; weights are fetched only if it does not describe an ordinary model of several layers.
    Pickled files are fetched only where there is no safetensors file. Raises LoadError.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        folder, name = path, path.resolve().name
    elif source == "default" or path.exists() or not is_hub_id(source):
        return None
    else:
        name = source.partition("@")[0]
        folder = fetch_files(source, offline, ["config.json"], progress)
        if may_hold_heads(folder):
            folder = fetch_files(source, offline, ["config.json", "*.safetensors"], progress)
            if not any(folder.glob("*.safetensors")):
                folder = fetch_files(source, offline, ["config.json", *PICKLED], progress)
    if path.is_dir() and _is_projected(folder):
        raise LoadError(f"{name} is a draft model without embeddings and LM head of its own: those are its target's. It opens by itself beside "
                        "that target; start without a drafter. `python -m specviz.train export --full` writes it whole.")
    cheap = path.is_dir() and any(folder.glob("*.safetensors"))         # names can be read without the weights
    kind = head_kind(folder, name) if cheap or may_hold_heads(folder) else None
    return FoundHeads(folder, name, kind) if kind is not None else None


def _is_projected(folder: Path) -> bool:
    """Whether it is a draft model as specviz ships them, which `shipped.read_draft_model` alone can read."""
    try:
        with safe_open(folder / "model.safetensors", "pt") as tensors:
            return "head_projection" in tensors.keys()
    except (OSError, SafetensorError):
        return False                             # whoever reads the weights says what is wrong


def may_hold_heads(folder: Path) -> bool:
    """Whether a configuration is not plainly that of an ordinary model. What the folder holds is then read from its tensors."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False                             # the reader of ordinary models says what is wrong
    if not isinstance(config, dict):
        return False
    return config.get("num_hidden_layers") in (None, 1) or any(key in config for key in _TELLTALE)
