"""The drafters that come with specviz for one target: found by the hash of its weights, opened beside it.

It knows nothing of requests and screens. A folder `models/<card>/` has one folder per drafter and `drafters.toml`, which names them with the
hashes of the weights and the chat template that they were trained on. Whatever differs costs acceptance and never exactness.
"""
from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from .catalog import MODELS_DIR
from .drafters import Heads
from .drafters.checkpoints import load_heads
from .engine.model import LanguageModel
from .errors import LoadError

__all__ = ["Shipped", "find_shipped", "read_draft_model"]


@dataclass(frozen=True, slots=True)
class Shipped:
    """Drafters for one target. folders: kind -> folder. default_method: what was measured to be fastest, "" if nothing was. preferred: see
    `Parts.preferred`. difference: in what the opened target differs from the one they were trained on, "" if in nothing."""
    name: str
    folders: Mapping[str, Path]
    default_method: str = ""
    preferred: str = ""
    difference: str = ""

    def heads(self, target: LanguageModel, target_name: str) -> dict[str, Heads]:
        """All drafting heads by kind. Raises LoadError."""
        found = {}
        for kind, folder in self.folders.items():
            if kind != "draft_model":
                heads = load_heads(folder, f"{self.name} {kind}", target, target_name)
                found[heads.kind] = replace(heads, warning=self.difference) if self.difference else heads
        return found

    def draft_model(self, target: LanguageModel, build: Callable[[LlamaForCausalLM], LanguageModel]) -> LanguageModel | None:
        """The small language model, or None if there is none. build: makes it run as the target does. Raises LoadError."""
        folder = self.folders.get("draft_model")
        return None if folder is None else build(read_draft_model(folder, target))


def find_shipped(card: str, facts: Mapping[str, str], models_dir: Path | None = None) -> Shipped | None:
    """The drafters for the target with this card, None if there are none. facts: as `loading.Loaded`. Raises LoadError for a broken list."""
    folder = (models_dir or MODELS_DIR) / card
    if not (folder / "drafters.toml").is_file():
        return None
    try:
        table = tomllib.loads((folder / "drafters.toml").read_text(encoding="utf-8"))
        folders = {kind: folder / name for kind, name in table["folders"].items() if (folder / name / "model.safetensors").is_file()}
        trained_on = table["trained_on"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise LoadError(f"The list of drafters in {folder.name} cannot be read ({error}); fetch specviz again.") from error
    names = {"weights_sha256": "weights", "chat_template_sha256": "chat template"}
    differing = [name for key, name in names.items() if facts.get(key) != trained_on.get(key)]
    difference = f"trained on other {' and another '.join(differing)} of this model: fewer are accepted" if differing else ""
    return Shipped(table.get("name", card), folders, str(table.get("default_method", "")), str(table.get("preferred", "")), difference)


def read_draft_model(folder: Path, target: LanguageModel) -> LlamaForCausalLM:
    """A small Llama whose embeddings and LM head are the target's times stored projections, in float32 on the target's device. Raises LoadError."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        config.pop("specviz", None)
        table = target.embeddings.weight.detach().float().cpu()
        ids = torch.arange(len(table), device=target.embeddings.weight.device)
        head = target.head_rows(ids)
        if head is None:
            raise LoadError(f"The draft model in {folder.name} is for a target whose LM head is its embedding table, and this one's is not.")
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**config))
        model.to_empty(device="cpu")
        tensors["model.embed_tokens.weight"] = table @ tensors.pop("projection")
        tensors["lm_head.weight"] = head.float().cpu() @ tensors.pop("head_projection")
        model.load_state_dict(tensors)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise LoadError(f"The draft model in {folder.name} cannot be read ({str(error)[:160]}); fetch specviz again.") from error
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)        # its angles are computed, not stored
    return model.to(target.device).to(target.dtype).eval().requires_grad_(False)
