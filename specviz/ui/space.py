"""`python -m specviz.ui.space OUT`: two folders to upload as Hugging Face Spaces, OUT/zerogpu with the app and OUT/static without a server.

It knows nothing of decoding. Files over 10 MiB, which the Hub takes only with LFS, and cards with a mistake are refused before anyone
uploads them.
"""
from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import InputError, SpecvizError
from .static import write_site

__all__ = ["card", "check", "main", "requirements", "write_space"]

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 10 * 2**20
MAX_TORCH = "2.12"               # ZeroGPU has 2.8 to 2.11
_PARTS = ("app.py", "specviz", "assets", "models", "LICENSE")
_LEFT_OUT = ("__pycache__", "*.pyc", "*.pyi", "screenshot*.png")
COLOURS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")
_EXPECTED = {                    # field of a card: what its value must look like, for the kinds of Space written here
    "title": r".{1,60}", "emoji": r"\S{1,8}", "colorFrom": "|".join(COLOURS), "colorTo": "|".join(COLOURS), "sdk": "gradio|static",
    "sdk_version": r"\d+\.\d+\.\d+", "python_version": r'"3\.12"', "app_file": r"[\w./-]+", "pinned": "true|false", "license": r"[\w.-]+",
    "short_description": r".{1,60}", "startup_duration_timeout": r"\d+[mh]", "suggested_hardware": r"[\w-]+",
    "fullWidth": "true|false", "header": "mini|default",
}


def write_space(out: Path) -> dict[str, Path]:
    """Write both folders, anew where they are there already, check them, and return them by name. Raises SpecvizError."""
    folders = {"zerogpu": out / "zerogpu", "static": out / "static"}
    for folder in folders.values():
        if folder.exists() and not (folder / "README.md").is_file() and any(folder.iterdir()):
            raise InputError(f"{folder} holds something that is no Space. Choose another folder, or empty this one.")
    try:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        _write_app(folders["zerogpu"])
        write_site(folders["static"])
        (folders["static"] / "README.md").write_text(card("static"), encoding="utf-8")
    except OSError as error:
        raise InputError(f"The Space could not be written to {out}: {error.strerror}. Choose another folder.") from error
    for folder in folders.values():
        check(folder)
    return folders


def _write_app(folder: Path) -> None:
    for name in _PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=_left_out(source))
        elif source.exists():
            shutil.copyfile(source, folder / name)
    shutil.copyfile(ROOT / "assets" / "space" / "space.py", folder / "space.py")
    (folder / "README.md").write_text(card("gradio"), encoding="utf-8")
    (folder / "requirements.txt").write_text(requirements((ROOT / "requirements.txt").read_text(encoding="utf-8")), encoding="utf-8")


def _left_out(source: Path):
    """What `copytree` leaves out: leftovers, and what git ignores, such as weights that someone has trained here."""
    names = shutil.ignore_patterns(*_LEFT_OUT)
    ignored = _ignored(source)

    def rule(folder: str, found: list[str]) -> set[str]:
        return names(folder, found) | {name for name in found if Path(folder, name).resolve() in ignored}
    return rule


def _ignored(source: Path) -> set[Path]:
    try:
        found = subprocess.run(["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z", str(source)], cwd=ROOT,
                               capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):     # not a checkout
        return set()
    return {(ROOT / name).resolve() for name in found.split("\0") if name}


def requirements(project: str) -> str:
    """The Space's requirements.txt from the project's: torch as ZeroGPU has it, and no Gradio, which comes with `sdk_version`."""
    lines = []
    for line in project.splitlines():
        name = re.match(r"[\w-]*", line)[0]
        if name == "torch":
            low = re.search(r">=([\d.]+)", line)[1]
            lines.append(f"torch>={low},<{MAX_TORCH}")
        elif name != "gradio":
            lines.append(line)
    ours, theirs = "# Runtime dependencies of specviz.", "# Runtime dependencies of specviz on a Space; Gradio comes with sdk_version."
    return "\n".join(lines).replace(ours, theirs) + "\n"


def card(sdk: str) -> str:
    """README.md of a Space, "gradio" or "static": the project's own front matter where it applies, and a few words."""
    project = (ROOT / "README.md").read_text(encoding="utf-8")
    own = dict(re.findall(r"^(\w+): (.+)$", project.split("---")[1], re.MULTILINE))
    kept = ["title", "emoji", "colorFrom", "colorTo"]
    if sdk == "gradio":
        kept += ["sdk_version", "python_version"]
        more = {"app_file": "space.py", "startup_duration_timeout": "1h", "suggested_hardware": "zero-a10g"}
        about = ("The page begins with a recorded run; a message starts a live one. Visitors are answered one after the other, and the status line "
                 "shows the place in the queue.\nVariables SPECVIZ_TARGET and SPECVIZ_DRAFT name other models than the default one.")
    else:
        more = {"app_file": "index.html"}
        about = "Recorded runs, lessons and experiments of specviz, played in the browser; nothing is computed here."
    fields = {name: own[name] for name in kept} | {"sdk": sdk} | more | {name: own[name] for name in ("pinned", "license", "short_description")} | {
        "fullWidth": "true", "header": "mini"}
    lines = "\n".join(f"{name}: {value}" for name, value in fields.items())
    return f"---\n{lines}\n---\n\n# specviz\n\nWatch speculative decoding as it happens.\n\n{about}\n"


def check(folder: Path) -> None:
    """Raise InputError for a file that is too large to upload or a card with a field that the Hub would refuse."""
    for file in _files(folder):
        if (size := file.stat().st_size) > MAX_BYTES:
            raise InputError(f"{file} has {size / 2**20:.1f} MiB; the Hub takes files up to 10 MiB without LFS. Remove it, or put it into a model "
                             "repository of its own.")
    text = (folder / "README.md").read_text(encoding="utf-8")
    if not text.startswith("---\n") or text.count("\n---\n") != 1:
        raise InputError(f"{folder / 'README.md'} has no front matter between two lines of ---.")
    for line in text.split("---\n")[1].splitlines():
        name, colon, value = line.partition(": ")
        if not colon or name not in _EXPECTED:
            raise InputError(f"The card has the line {line!r}; expected one of {', '.join(_EXPECTED)}, a colon and a value.")
        if not re.fullmatch(_EXPECTED[name], value):
            raise InputError(f"The card says {name}: {value}; expected {_EXPECTED[name]}.")
        if name == "app_file" and not (folder / value).is_file():
            raise InputError(f"The card names {value}, which is not in {folder}.")


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*")) if file.is_file())


def main(argv: Sequence[str] | None = None) -> int:
    """Write both folders. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specviz.ui.space", description="Write two folders to upload as Hugging Face Spaces.")
    parser.add_argument("out", type=Path, metavar="OUT", help="where the folders zerogpu and static are written")
    try:
        folders = write_space(parser.parse_args(argv).out)
    except SpecvizError as error:
        print(error, file=sys.stderr)
        return 1
    for name, folder in folders.items():
        sizes = [file.stat().st_size for file in _files(folder)]
        print(f"{folder}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB, the largest {max(sizes) / 2**20:.1f} MiB")
        print(f"  hf upload USER/NAME {folder} --repo-type space")
    return 0


if __name__ == "__main__":
    sys.exit(main())
