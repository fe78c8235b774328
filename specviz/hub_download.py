"""Fetches the large files of a hub repository into the hub's own cache, going on where an earlier attempt stopped. It knows no models.

The hub's client throws an unfinished file away, and its Xet transport cannot be stopped. So large files come over plain HTTP, into a file
beside their place; the client then finds them there. Written against huggingface_hub 2.4.
"""
from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from .default_model import file_sha256
from .errors import ChecksumError, LoadError
from .watched import Stopped

__all__ = ["LargeFile", "described_file", "fetch_large_files", "is_network_trouble", "received_bytes"]

_BLOCK_BYTES = 1 << 18
_TIMEOUT_S = 10
_TRIES = 5                              # without a byte in between
_PAUSE_S = 1.0
_AT_ONCE = 3


@dataclass(frozen=True, slots=True)
class LargeFile:
    """A file of a repository at one commit. url: where the hub answers for it. etag: its name in the cache, for large files its SHA-256."""
    name: str
    url: str
    etag: str
    num_bytes: int

    def part(self, storage: Path) -> Path:
        return storage / "blobs" / f"{self.etag}.part"


def received_bytes(files: Sequence[LargeFile], storage: Path) -> int:
    """What earlier attempts have left of them."""
    return sum(min(file.num_bytes, part.stat().st_size) for file in files if (part := file.part(storage)).exists())


def fetch_large_files(files: Sequence[LargeFile], storage: Path, headers: dict[str, str], report: Callable[[int], None]) -> None:
    """Write them into `storage`, the repository's folder in the cache, several at once.

    report: told the bytes that are there of all files, from several threads; what it raises ends the download and keeps what has arrived.
    Raises ChecksumError, LoadError, and what the hub's client raises.
    """
    if not files:
        return
    (storage / "blobs").mkdir(parents=True, exist_ok=True)
    have, lock, failed = dict.fromkeys((file.etag for file in files), 0), threading.Lock(), threading.Event()

    def receive(file: LargeFile, num_bytes: int) -> None:
        if failed.is_set():
            raise Stopped
        with lock:
            have[file.etag] = num_bytes
            total = sum(have.values())
        report(total)

    with ThreadPoolExecutor(min(_AT_ONCE, len(files)), "specviz-fetch") as threads:
        jobs = [threads.submit(_fetch, file, storage, headers, lambda num_bytes, file=file: receive(file, num_bytes)) for file in files]
        try:
            for job in jobs:
                job.result()
        except BaseException:                     # one is enough: the others end at their next block
            failed.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _fetch(file: LargeFile, storage: Path, headers: dict[str, str], report: Callable[[int], None]) -> None:
    blob, part = storage / "blobs" / file.etag, file.part(storage)
    locks = storage.parent / ".locks" / storage.name
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{file.etag}.lock"):   # the one that the hub's client takes for this file
        if blob.exists():
            return report(file.num_bytes)
        have = part.stat().st_size if part.exists() else 0
        if have > file.num_bytes:
            part.unlink()
            have = 0
        tries = 0
        while have < file.num_bytes:
            report(have)
            before = have
            try:
                have = _stream(file, part, have, headers, report)
                if have < file.num_bytes:
                    raise ConnectionError(f"it ended after {have:,} of {file.num_bytes:,} bytes")
            except Exception as error:
                have = part.stat().st_size if part.exists() else 0
                tries = 0 if have > before else tries + 1
                if not is_network_trouble(error) or tries == _TRIES:
                    raise
                report(have)
                time.sleep(_PAUSE_S)
        if re.fullmatch("[0-9a-f]{64}", file.etag) and file_sha256(part) != file.etag:
            part.unlink()
            raise ChecksumError(f"{file.name} arrived with other contents than the hub announced; what was fetched of it is deleted, try "
                                "again.")
        os.replace(part, blob)
        report(file.num_bytes)


def _stream(file: LargeFile, part: Path, have: int, headers: dict[str, str], report: Callable[[int], None]) -> int:
    """Append what is missing and return how much there is. A server that ignores the range sends all, and then all is written anew."""
    from huggingface_hub.utils import get_session, hf_raise_for_status
    asked = {**headers, "Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with get_session().stream("GET", file.url, headers=asked, timeout=_TIMEOUT_S, follow_redirects=True) as answer:
        hf_raise_for_status(answer)
        goes_on = have and answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if goes_on else 0
        with open(part, "ab" if goes_on else "wb") as sink:
            for block in answer.iter_bytes(_BLOCK_BYTES):
                report(have + len(block))         # first: whoever has been stopped must not write behind the back of the next attempt
                sink.write(block)
                have += len(block)
                if have > file.num_bytes:
                    raise LoadError(f"The hub sent more of {file.name} than it had announced; try again.")
    return have


def is_network_trouble(error: BaseException) -> bool:
    """No connection, or one that broke, as the HTTP library underneath says it; an answer with a status is not that."""
    package = type(error).__module__.partition(".")[0]
    is_http = package in ("httpx", "httpx2", "httpcore", "requests")
    return isinstance(error, ConnectionError) or (is_http and "Status" not in type(error).__name__)


def described_file(url: str, name: str, **options: Any) -> LargeFile:
    """Ask the hub for a file's size and name in the cache. Raises what the hub's client raises."""
    from huggingface_hub import get_hf_file_metadata
    found = get_hf_file_metadata(url, timeout=_TIMEOUT_S, **options)
    if not found.etag or not found.size:
        raise LoadError(f"The hub does not say how large {name} is; try again.")
    return LargeFile(name, url, found.etag, found.size)
