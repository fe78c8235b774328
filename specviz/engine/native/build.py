"""Compiles the C sources beside it once per machine and loads the library. It knows nothing of what the functions in it compute.

The library lies in the cache folder, under a name made of the sources, the compiler, its flags and the processor; beside it lies its
hash, so that a broken file is noticed before it is loaded, and made anew. Nothing but a C compiler is needed: no headers of Python, no
build tools.
"""
from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...errors import SpecvizError

__all__ = ["NoKernel", "build", "compiler", "load", "sources_hash"]

SOURCES = Path(__file__).parent / "source"
_MAIN = "decoder.c"
_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-w")
_TARGETS = (("-march=native",), ("-mcpu=native",), ())       # for this very processor, as the compiler says it; else for any of its kind
_LONGEST_S = 180
_UNUSED_S = 60 * 86400.0         # libraries of earlier versions, compilers and processors go when nobody loaded them for so long


class NoKernel(SpecvizError):
    """No compiled kernel can be had on this machine; the message says why, without a full stop."""


def compiler() -> str:
    """The machine's C compiler: $CC if it names a program, or the first of cc, gcc and clang. Raises NoKernel."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise NoKernel("there is no C compiler (cc, gcc or clang) on this machine")


def load(folder: Path, targets: Sequence[Sequence[str]] = _TARGETS) -> ctypes.CDLL:
    """The library, from `folder` if it lies there whole, compiled into it otherwise. Raises NoKernel.

    A folder that cannot be written to does no harm: the library then serves this process only.
    """
    program = compiler()
    try:
        version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, errors="replace").stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoKernel(f"the compiler {program} cannot be run ({error})") from error
    name = f"kernel-{_fingerprint(version, targets)}.so"
    if (found := _whole(folder / name)) is not None:
        return found
    with tempfile.TemporaryDirectory(prefix="specviz-", ignore_cleanup_errors=True) as work:       # a loaded file cannot go on Windows
        made = Path(work) / name
        build(program, made, targets)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _move(made, folder / name)
            _tidy(folder)
        except OSError:
            return _open(made)
    if (found := _whole(folder / name)) is None:
        raise NoKernel(f"the compiled library in {folder} cannot be loaded")
    return found


def build(program: str, to: Path, targets: Sequence[Sequence[str]] = _TARGETS) -> None:
    """Compile the sources into one shared library, with the first target's flags that the compiler accepts. Raises NoKernel."""
    problem = ""
    for target in targets:
        try:
            done = subprocess.run([program, *_FLAGS, *target, "-o", str(to), str(SOURCES / _MAIN), "-lm"], capture_output=True, text=True,
                                  errors="replace", timeout=_LONGEST_S, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            raise NoKernel(f"the compiler {program} cannot be run ({error})") from error
        if done.returncode == 0 and to.is_file():
            return
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines() or ["no message"]
        problem = problem or lines[0][:160]
    raise NoKernel(f"the compiler {program} could not build it ({problem})")


def sources_hash() -> str:
    """SHA-256 of the sources, hexadecimal: what was measured with others no longer holds."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _fingerprint(version: str, targets: Sequence[Sequence[str]]) -> str:
    digest = hashlib.sha256(sources_hash().encode())
    flags = [list(target) for target in targets]
    digest.update(repr((version, _FLAGS, flags, platform.machine(), platform.system(), _processor())).encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """What decides which instructions -march=native stands for."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        wanted = ("flags", "features", "model name", "cpu part", "cpu family", "model", "stepping")
        return "\n".join(sorted({line for line in lines if line.partition(":")[0].strip().lower() in wanted}))
    except OSError:
        return platform.processor() or platform.machine()


def _move(made: Path, to: Path) -> None:
    """Put the library and its hash in place, each at once; the hash is last, so a library without one counts as unfinished."""
    hash_of = hashlib.sha256(made.read_bytes()).hexdigest()
    for content, target in ((made.read_bytes(), to), (hash_of.encode(), to.with_suffix(".sha256"))):
        handle, temporary = tempfile.mkstemp(dir=to.parent, prefix=f".{to.stem}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o755)
            os.replace(temporary, target)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


def _tidy(folder: Path) -> None:
    for path in folder.glob("kernel-*.so"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNUSED_S:
                path.unlink()
                path.with_suffix(".sha256").unlink(missing_ok=True)


def _whole(path: Path) -> ctypes.CDLL | None:
    """The library, if its bytes are those that were written: loading half a file could end the process."""
    try:
        with suppress(OSError):
            os.utime(path)               # in use, see `_UNUSED_S`
        if hashlib.sha256(path.read_bytes()).hexdigest() != path.with_suffix(".sha256").read_text(encoding="ascii").strip():
            return None
        return _open(path)
    except (OSError, UnicodeDecodeError, NoKernel):
        return None


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernel(f"the compiled library cannot be loaded ({error})") from error
