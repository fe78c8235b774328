"""Where a model is: a name is resolved to files on this machine, first the small ones, then the weights. It knows nothing of devices.

A source is "default", a local folder, a local .gguf file, or a hub id such as "owner/name" or "owner/name@revision".
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from .checkpoint import read_config, read_tokenizer
from .default_model import DEFAULT, Progress, is_prepared, model_folder, default_cache_dir, prepare_default, silent
from .errors import LoadError
from .gguf_file import read_gguf_config, read_gguf_tokenizer
from .hub import HubModel, fetch_small_files, fetch_weights, is_hub_id

__all__ = ["Described", "describe", "fetch"]


@dataclass(frozen=True, slots=True)
class Described:
    """A model of which everything but the weights is on this machine.

    kind: "default", "folder", "gguf" or "hub". path: the folder, or the GGUF file. download_bytes: what is still to be fetched.
    facts: what identifies the weights.
    """
    kind: str
    source: str
    name: str
    path: Path
    download_bytes: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)
    hub: HubModel | None = None

    def config(self) -> PretrainedConfig:
        """The configuration of a causal language model. Raises LoadError."""
        return read_gguf_config(self.path) if self.kind == "gguf" else read_config(self.path, self.name)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return read_gguf_tokenizer(self.path) if self.kind == "gguf" else read_tokenizer(self.path, self.name)


def describe(source: str, *, cache_dir: Path | None = None, offline: bool = False, progress: Progress | None = None,
             prepare: bool = True) -> Described:
    """Find a model, fetching no more than its configuration and tokenizer, except for the default model, which comes in one piece.

    prepare: False refuses to fetch the default model. Raises LoadError for a source that is not there.
    """
    path = Path(source).expanduser()
    if source == "default":
        if not prepare and not is_prepared(cache_dir):
            raise LoadError(f"{DEFAULT.name} has not been fetched yet; `python app.py --prepare` does.")
        folder = prepare_default(cache_dir, progress, offline=offline) if prepare else model_folder(cache_dir or default_cache_dir())
        return Described("default", source, DEFAULT.name, folder, facts={"weights_sha256": DEFAULT.gguf_sha256})
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise LoadError(f"{path.name} is a file; expected a .gguf file or the folder of a model.")
        return Described("gguf", source, path.stem, path)
    if path.is_dir():
        return Described("folder", source, path.resolve().name, path)
    if not is_hub_id(source):
        raise LoadError(f"There is no file or folder {source}; give a folder with config.json, a .gguf file, or a hub id (owner/name).")
    model = fetch_small_files(source, offline, progress or silent)
    return Described("hub", source, model.repo, model.folder, model.weights_bytes, {"revision": model.commit}, model)


def fetch(described: Described, *, offline: bool = False, progress: Progress) -> Described:
    """The same with its weights on this machine. Raises LoadError, NotEnoughMemory."""
    if described.hub is None:
        return described
    return replace(described, path=fetch_weights(described.hub, offline, progress), download_bytes=0)
