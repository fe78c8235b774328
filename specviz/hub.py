"""Fetches models from the Hugging Face hub into the hub's own cache, which other programs share. It knows nothing of devices or engines.

Small files (configuration, tokenizer) and weights are fetched apart, so that a model can be judged before it is downloaded. The hub's
client goes on with an interrupted download by itself. Written against huggingface_hub 2.4.
"""
from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import LoadError
from .gguf_file import brief
from .machine import free_disk
from .memory import gigabytes, require_disk

__all__ = ["HubModel", "fetch_files", "fetch_small_files", "fetch_weights", "is_hub_id", "page_url"]

HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*(/[\w-][\w.-]*)?)(@(?P<revision>[\w./-]+))?")
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
NOT_OURS = ["*/*", "consolidated*", "*.fp16.*"]
ENDPOINT: str | None = None             # None: the hub's client decides (HF_ENDPOINT)
CACHE: Path | None = None               # None: likewise (HF_HUB_CACHE, HF_HOME)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository at one commit, its small files on this machine. folder: the snapshot. weights_bytes: what is still to be fetched."""
    repo: str
    commit: str
    folder: Path
    weights_bytes: int


def is_hub_id(source: str) -> bool:
    """Whether this could be "owner/name" or "owner/name@revision", rather than a mistyped path."""
    return HUB_ID.fullmatch(source) is not None and not source.startswith((".", "~")) and "\\" not in source


def page_url(source: str) -> str:
    """The repository's page for people."""
    return f"https://huggingface.co/{source.partition('@')[0]}"


def fetch_small_files(source: str, offline: bool) -> HubModel:
    """Configuration and tokenizer of "owner/name[@revision]". Raises LoadError with what to do."""
    match = HUB_ID.fullmatch(source)
    assert match is not None
    repo, revision = match["repo"], match["revision"]
    with _explained(source, repo, offline):
        from huggingface_hub import HfApi, snapshot_download
        weights: dict[str, int] = {}
        if not offline:
            try:
                info = HfApi(endpoint=ENDPOINT).model_info(repo, revision=revision, files_metadata=True, timeout=10)
                weights = {file.rfilename: file.size or 0 for file in info.siblings or () if _is_weights(file.rfilename)}
                if not weights:
                    raise LoadError(f"{repo} has no safetensors weights at its top level; choose another repository of the same model.")
            except Exception as error:
                if not _is_network_trouble(error):
                    raise
                offline = True                    # what was fetched earlier will do
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=offline, allow_patterns=SMALL_FILES,
                                        ignore_patterns=NOT_OURS, endpoint=ENDPOINT, cache_dir=CACHE,
                                        tqdm_class=_bar(lambda fraction: None, 0)))
    missing = sum(size for name, size in weights.items() if not (folder / name).is_file())
    return HubModel(repo, folder.name, folder, missing)


def fetch_files(source: str, offline: bool, patterns: Sequence[str]) -> Path:
    """The snapshot's folder with the top-level files of these patterns, for repositories that are no whole models. Raises LoadError."""
    match = HUB_ID.fullmatch(source)
    assert match is not None
    with _explained(source, match["repo"], offline):
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(match["repo"], revision=match["revision"], local_files_only=offline, allow_patterns=list(patterns),
                                      ignore_patterns=NOT_OURS, endpoint=ENDPOINT, cache_dir=CACHE,
                                      tqdm_class=_bar(lambda fraction: None, 0)))


def fetch_weights(model: HubModel, offline: bool, progress: Callable[[str, float | None], None]) -> Path:
    """The folder with the weights as well. Checks the disk first. Raises LoadError, NotEnoughMemory."""
    if model.weights_bytes and not offline:
        from huggingface_hub.constants import HF_HUB_CACHE
        cache = CACHE or Path(HF_HUB_CACHE)
        require_disk(model.repo, model.weights_bytes, free_disk(cache), cache, "free some space or move the hub's cache with HF_HUB_CACHE")
    size = gigabytes(model.weights_bytes)
    message = f"Fetching {model.repo} from the hub ({size})" if model.weights_bytes else f"Looking for {model.repo}"
    progress(message, None)
    with _explained(model.repo, model.repo, offline):
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(model.repo, revision=model.commit, local_files_only=offline or not model.weights_bytes,
                                      allow_patterns=[*SMALL_FILES, "*.safetensors"], ignore_patterns=NOT_OURS, endpoint=ENDPOINT,
                                      cache_dir=CACHE, tqdm_class=_bar(lambda fraction: progress(message, fraction), model.weights_bytes)))


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name and not name.startswith("consolidated") and ".fp16." not in name


class _explained:
    """Turns what the hub's client raises into sentences. What `progress` raises (a load that was cancelled) passes through."""

    def __init__(self, source: str, repo: str, offline: bool) -> None:
        self._source, self._repo, self._offline = source, repo, offline

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and (sentence := self._sentence(error)):
            raise LoadError(sentence) from error

    def _sentence(self, error: BaseException) -> str:
        from huggingface_hub.errors import (GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError,
                                            RevisionNotFoundError)
        if isinstance(error, LoadError):
            return ""
        if isinstance(error, GatedRepoError):
            return (f"{self._repo} is gated: open {page_url(self._repo)}, accept its terms with your account, log in on this machine with "
                    "`hf auth login`, then try again.")
        if isinstance(error, RevisionNotFoundError):
            return f"{self._repo} has no revision {self._source.partition('@')[2]!r}; leave out what follows the @ for the newest."
        if isinstance(error, RepositoryNotFoundError):
            return f"There is no file, folder or hub model {self._source}, or it is private; check the spelling."
        if isinstance(error, LocalEntryNotFoundError) or _is_network_trouble(error):
            reason = "--offline forbids fetching it" if self._offline else "the hub cannot be reached"
            return f"{self._repo} is not on this machine and {reason}; connect once, or give a local folder."
        if isinstance(error, (HFValidationError, OSError, RuntimeError, ValueError)):
            return f"{self._repo} could not be fetched from the hub ({brief(error)}); what has arrived is kept, try again."
        return ""


def _is_network_trouble(error: BaseException) -> bool:
    """No connection, as the HTTP library underneath says it; an answer with a status is not that."""
    package = type(error).__module__.partition(".")[0]
    is_http = package in ("httpx", "httpx2", "httpcore", "requests")
    return isinstance(error, ConnectionError) or (is_http and "Status" not in type(error).__name__)


def _bar(report: Callable[[float], None], num_bytes: int) -> type:
    """A progress bar class for the hub's client that draws nothing and reports received bytes; its bars live in several threads."""
    from tqdm import tqdm
    lock = threading.Lock()
    seen: dict[int, float] = {}

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._is_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._is_bytes and n and num_bytes:
                with lock:
                    seen[id(self)] = seen.get(id(self), 0) + n
                    most = max(seen.values())
                report(min(1.0, most / num_bytes))
            return None
    return Bar
