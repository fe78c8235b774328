"""The README keeps its promises: methods, files and pins it names are those that exist."""
from __future__ import annotations

import re
import tomllib
from pathlib import Path

from engine_helpers import Lab

import specviz
from specviz.drafters import DRAFTERS
from specviz.options import parse

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_method_table_is_the_registry():
    """One row per method, with its menu name, in the registry's order, and with the options that it declares."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+?) \|[^|]*\|[^|]*\|([^|]*)\|", README, re.MULTILINE)
    assert [row[:2] for row in rows] == [(method.name, method.label) for method in DRAFTERS.values()]
    parts = Lab().parts
    for name, _, options in rows:
        declared = [option.name for option in DRAFTERS[name].options(parts)]
        assert re.findall(r"`(\w+)`", options) == (declared[:1] if name == "hybrid" else declared)


def test_named_files_exist():
    """Every path of the layout, every picture and every file named in backticks is there."""
    layout = re.search(r"## Layout\n\n```\n(.*?)```", README, re.DOTALL)[1]
    named = [line.split()[0] for line in layout.splitlines()] + re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README) + re.findall(r"`(specviz/[\w/.]+)`", README)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_named_options_exist():
    """Every --option in the README is one that app.py or a benchmark takes; the flags of other programs stand in a section of their own."""
    own = re.sub(r"^## Another engine\n.*?(?=^## )", "", README, flags=re.DOTALL | re.MULTILINE)
    remote = set(re.findall(r"--remote[a-z-]*", README))
    known = {flag for name in ("options.py", "bench/suite.py", "bench/load.py") for flag in re.findall(r"--[\w-]+", (ROOT / "specviz" / name).read_text(encoding="utf-8"))}
    named = remote | set(re.findall(r"(?<![\w-])--[a-z][\w-]+", own)) - {"--index-url", "--help", "--quantization", "--repo-type", "--dist"}
    assert named <= known
    assert parse(["--quantization", "int8"], {}).quantization == "int8"


def test_versions_are_in_step():
    """The Space's Gradio lies in the range of requirements.txt, its Python is one we support, and the package version stands in both places."""
    sdk = re.search(r"^sdk_version: ([\d.]+)$", README, re.MULTILINE)[1]
    low, high = re.search(r"^gradio>=([\d.]+),<([\d.]+)$", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE).groups()

    def number(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))
    assert number(low) <= number(sdk) < number(high)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == specviz.__version__
    assert number(re.search(r'^python_version: "([\d.]+)"$', README, re.MULTILINE)[1]) >= number(project["requires-python"].removeprefix(">="))


def test_first_lines_tell_the_astronomy_tool_apart():
    """Who looks for the other specviz notices at once."""
    assert "not the astronomy tool" in "\n".join(README.splitlines()[13:24])
