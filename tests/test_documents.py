"""CONTRIBUTING, CHANGELOG and the README's installation lines: what they name exists, and each line can be typed as it stands."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

import specviz
from specviz.machine import missing_cuda_note

ROOT = Path(__file__).resolve().parent.parent
README, CONTRIBUTING, CHANGELOG = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))


def blocks() -> dict[str, list[str]]:
    """The commands of each system, by the first word of the sentence above them."""
    start = README.partition("## Start")[2].partition("\n## ")[0]
    pattern = r"^(Linux|Windows|macOS)\b[^`]*?(?:`[^`\n]+`[^`]*?)*```\n(.*?)```"
    return {system: lines.strip().splitlines() for system, lines in re.findall(pattern, start, re.MULTILINE | re.DOTALL)}


@pytest.mark.parametrize("system", ["Linux", "Windows", "macOS"])
def test_installation_is_one_command_per_line(system):
    """Clone, environment, install, start, in this order, with the environment's own Python and nothing that PowerShell lacks."""
    lines = blocks()[system]
    python = ".venv\\Scripts\\python" if system == "Windows" else ".venv/bin/python"
    assert lines[0].startswith("git clone ") and lines[1].startswith("cd ") and lines[2].endswith("-m venv .venv")
    assert lines[-2] == f"{python} -m pip install -r requirements.txt" and lines[-1] == f"{python} app.py"
    assert not any(sign in line for line in lines for sign in ("&&", ";", "activate", "source "))


def test_the_cuda_line_is_the_one_the_program_prints(monkeypatch):
    """README and the program's own sentence name the same versions and the same address."""
    from specviz import machine
    monkeypatch.setattr(machine, "driver_present", lambda: True)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.torch.version, "cuda", None)
    command = re.search(r'"torch>=.*$', missing_cuda_note())[0]
    cuda_line = next(line for line in blocks()["Windows"] if "torch" in line)
    assert cuda_line.endswith(command)
    pin = re.search(r"^torch\S+", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert f'"{pin}"' in cuda_line


def test_named_files_exist():
    """Every file that CONTRIBUTING names is there."""
    named = re.findall(r"`((?:specviz|tests|models)/[\w/.-]*\w)`", CONTRIBUTING)
    assert len(named) > 5 and [name for name in named if not (ROOT / name).exists() and name != "specviz/remote"] == []


def test_the_changelog_begins_with_this_version():
    """The newest entry is the version of the package."""
    assert re.search(r"^## ([\d.]+)", CHANGELOG, re.MULTILINE)[1] == specviz.__version__
