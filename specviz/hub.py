"""Fetches models from the Hugging Face hub into the hub's own cache, which other programs share. It knows nothing of devices or engines.

Small files (configuration, tokenizer) and weights are fetched apart, so that a model can be judged before it is downloaded. What
`progress` raises ends a download at once, also one that hears nothing from the hub. Written against huggingface_hub 2.4.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from .default_model import Progress, silent
from .errors import LoadError
from .gguf_file import brief
from .hub_download import LargeFile, described_file, fetch_large_files, is_network_trouble, received_bytes
from .machine import free_disk
from .memory import gigabytes, require_disk
from .watched import watched

__all__ = ["HubModel", "fetch_files", "fetch_small_files", "fetch_weights", "is_hub_id", "page_url"]

HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*(/[\w-][\w.-]*)?)(@(?P<revision>[\w./-]+))?")
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
NOT_OURS = ["*/*", "consolidated*", "*.fp16.*"]
_LARGE_BYTES = 10_000                   # what is smaller is fetched anew, should it be cut
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


def fetch_small_files(source: str, offline: bool, progress: Progress = silent) -> HubModel:
    """Configuration and tokenizer of "owner/name[@revision]". Raises LoadError with what to do, and what `progress` raises."""
    repo, revision = _parts(source)
    message = f"Looking for {source}" + (" in the hub's cache" if offline else " on the hub")
    with _explained(source, repo, offline):
        weights: dict[str, int] = {}
        if not offline:
            try:
                _, sizes = watched(lambda check: _listing(repo, revision), lambda: progress(message, None))
                weights = {name: size for name, size in sizes.items() if _is_weights(name)}
                if not weights:
                    raise LoadError(f"{repo} has no safetensors weights at its top level; choose another repository of the same model.")
            except Exception as error:
                if not is_network_trouble(error):
                    raise
                offline = True                    # what was fetched earlier will do
        folder = watched(lambda check: _snapshot(repo, revision, offline, SMALL_FILES), lambda: progress(message, None))
    missing = sum(size for name, size in weights.items() if not (folder / name).is_file())
    return HubModel(repo, folder.name, folder, missing)


def fetch_files(source: str, offline: bool, patterns: Sequence[str], progress: Progress = silent) -> Path:
    """The snapshot's folder with the top-level files of these patterns, for repositories that are no whole models. Raises LoadError,
    NotEnoughMemory where the disk is too small, and what `progress` raises."""
    repo, revision = _parts(source)
    with _explained(source, repo, offline):
        if not offline and any(not pattern.endswith(".json") for pattern in patterns):
            try:
                _fetch_large(repo, revision, lambda name: _is_top_level(name) and any(fnmatch(name, each) for each in patterns), progress)
            except Exception as error:
                if not is_network_trouble(error):
                    raise                         # without a connection, what was fetched earlier will do
        return watched(lambda check: _snapshot(repo, revision, offline, patterns),
                       lambda: progress(f"Fetching the small files of {repo}", None))


def fetch_weights(model: HubModel, offline: bool, progress: Progress) -> Path:
    """The folder with the weights as well. Checks the disk first. Raises LoadError, NotEnoughMemory, and what `progress` raises."""
    with _explained(model.repo, model.repo, offline, has_begun=not offline):
        if model.weights_bytes and not offline:
            _fetch_large(model.repo, model.commit, _is_weights, progress)
        here = offline or not model.weights_bytes
        return watched(lambda check: _snapshot(model.repo, model.commit, here, [*SMALL_FILES, "*.safetensors"]),
                       lambda: progress(f"Fetching the small files of {model.repo}", None))


def _fetch_large(repo: str, revision: str | None, is_wanted: Callable[[str], bool], progress: Progress) -> None:
    """Fetch what is wanted and not small into the hub's cache, from where an earlier attempt stopped."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import build_hf_headers
    storage = (CACHE or Path(HF_HUB_CACHE)) / repo_folder_name(repo_id=repo, repo_type="model")

    def listed(check: Callable[[], None]) -> list[LargeFile]:
        commit, sizes = _listing(repo, revision)
        names = [name for name, size in sizes.items() if is_wanted(name) and size > _LARGE_BYTES]
        files = [described_file(hf_hub_url(repo, name, revision=commit, endpoint=ENDPOINT), name, endpoint=ENDPOINT) for name in names]
        return [file for file in files if not (storage / "blobs" / file.etag).exists()]

    files = watched(listed, lambda: progress(f"Looking for {repo} on the hub", None))
    num_bytes, received = sum(file.num_bytes for file in files), received_bytes(files, storage)
    if not files:
        return
    require_disk(repo, num_bytes - received, free_disk(storage), storage.parent,
                 "free some space or move the hub's cache with HF_HUB_CACHE")
    message = f"Fetching {repo} from the hub ({gigabytes(num_bytes)})"
    have = received

    def fetched(check: Callable[[], None]) -> None:
        def report(num_received: int) -> None:
            nonlocal have
            check()
            have = num_received
        fetch_large_files(files, storage, build_hf_headers(), report)

    watched(fetched, lambda: progress(message, min(1.0, have / num_bytes)))


def _parts(source: str) -> tuple[str, str | None]:
    """Repository and revision."""
    match = HUB_ID.fullmatch(source)
    assert match is not None
    return match["repo"], match["revision"]


def _listing(repo: str, revision: str | None) -> tuple[str | None, dict[str, int]]:
    """A repository's commit, and every file with its bytes."""
    from huggingface_hub import HfApi
    info = HfApi(endpoint=ENDPOINT).model_info(repo, revision=revision, files_metadata=True, timeout=10)
    return info.sha, {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _snapshot(repo: str, revision: str | None, offline: bool, patterns: Sequence[str]) -> Path:
    """The hub's own download of small files; large ones that lie in its cache get their names in the snapshot."""
    from huggingface_hub import snapshot_download
    return Path(snapshot_download(repo, revision=revision, local_files_only=offline, allow_patterns=list(patterns),
                                  ignore_patterns=NOT_OURS, endpoint=ENDPOINT, cache_dir=CACHE, tqdm_class=_no_bar()))


def _is_top_level(name: str) -> bool:
    return "/" not in name and not name.startswith("consolidated") and ".fp16." not in name


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and _is_top_level(name)


class _explained:
    """Turns what the hub's client raises into sentences. What `progress` raises (a load that was cancelled) passes through."""

    def __init__(self, source: str, repo: str, offline: bool, has_begun: bool = False) -> None:
        self._source, self._repo, self._offline, self._has_begun = source, repo, offline, has_begun

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
        if is_network_trouble(error) and self._has_begun:
            return f"The connection broke while {self._repo} was being fetched ({brief(error)}); what has arrived is kept, try again."
        if isinstance(error, LocalEntryNotFoundError) or is_network_trouble(error):
            reason = "--offline forbids fetching it" if self._offline else "the hub cannot be reached"
            return f"{self._repo} is not on this machine and {reason}; connect once, or give a local folder."
        if isinstance(error, (HFValidationError, OSError, RuntimeError, ValueError)):
            return f"{self._repo} could not be fetched from the hub ({brief(error)}); what has arrived is kept, try again."
        return ""


def _no_bar() -> type:
    """A progress bar for the hub's client that draws nothing: what it would draw runs through the program's own lines."""
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
    return Bar
