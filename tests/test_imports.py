"""Who may import whom, read from the source, and what a recorded trace needs in order to open."""
import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "specviz"

# What each part may import of the package, besides itself and `errors`. Parts that are not named here may import anything but `ui`.
# `engine.sampling` is open to those who fill in a request: `SamplingParams` is part of it.
ALLOWED = {
    "errors": set(),
    "trace": set(),
    "cost": set(),
    "metrics": {"trace", "cost"},
    "folders": set(),
    "engine": {"trace", "folders"},
    "drafters": {"engine"},
    "museum": {"engine", "drafters", "trace"},
    "remote": {"trace", "options"},
    "server": {"service", "metrics", "trace", "engine.sampling", "options", "limits"},
    "limits": set(),
    "ui": {"service", "remote", "limits", "catalog", "metrics", "trace", "engine.sampling", "options", "museum"},
}
FORBIDDEN = {
    "catalog": {"service", "server", "remote", "bench", "train"},
    "loading": {"service", "server", "remote", "bench", "train", "catalog", "drafters"},
    "service": {"server", "remote", "bench", "train"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def part(module: str) -> str:
    """The first name below the package: "specviz.engine.draft" belongs to "engine", the package itself to ""."""
    return module.removeprefix("specviz").lstrip(".").split(".")[0]


def name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, source: str | None = None) -> set[str]:
    """Modules of the package that a file imports, anywhere in it, by absolute name; a name from a package may be a module of it."""
    package = name(path) if path.name == "__init__.py" else name(path).rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8") if source is None else source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[:len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "specviz" else {base}
    return {module for module in found if part(module) and module.startswith("specviz.")}


def faults(path: Path, source: str | None = None) -> set[str]:
    mine = part(name(path))
    others = {module for module in imported(path, source) if part(module) not in (mine, "errors")}
    if mine in ALLOWED:
        return {module for module in others
                if part(module) not in ALLOWED[mine] and module.removeprefix("specviz.") not in ALLOWED[mine]}
    return {module for module in others if part(module) in FORBIDDEN.get(mine, set()) | {"ui"}}


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_nobody_imports_what_it_must_not_know(path):
    """The layers of the design hold: records at the bottom, the engine blind to methods and screens, nothing above the screen."""
    assert not faults(path), f"{path.relative_to(ROOT)} must not import {', '.join(sorted(faults(path)))}"


@pytest.mark.parametrize("path, source, wrong", [
    ("metrics.py", "from .engine.draft import Draft", {"specviz.engine.draft"}), ("metrics.py", "from .trace import Trace", set()),
    ("engine/draft.py", "from ..drafters import plain", {"specviz.drafters"}), ("engine/draft.py", "from .verify import verify", set()),
    ("engine/engine.py", "def f():\n    from .. import metrics, trace", {"specviz.metrics"}),
    ("drafters/plain.py", "import specviz.service", {"specviz.service"}), ("drafters/plain.py", "from ..engine.draft import Draft", set()),
    ("ui/layout.py", "from ..engine.engine import Engine", {"specviz.engine.engine"}), ("ui/layout.py", "from . import charts", set()),
    ("ui/layout.py", "from ..engine.sampling import SamplingParams", set()), ("service.py", "from .ui import layout", {"specviz.ui"}),
    ("anything_new.py", "from . import ui, trace", {"specviz.ui"}), ("trace.py", "from .errors import TraceError\nimport json", set())])
def test_the_check_itself(path, source, wrong):
    """Forbidden imports are seen in every form, at any depth of a file, and allowed ones are not reported."""
    assert faults(PACKAGE / path, source) == wrong


def test_files_are_found():
    """The rules are applied to something."""
    assert {"specviz.trace", "specviz.metrics", "specviz.engine.verify"} <= set(map(name, FILES))


@pytest.mark.parametrize("modules", ["specviz", "specviz.errors, specviz.trace, specviz.metrics", "specviz.options",
                                     *(["specviz.remote"] if (PACKAGE / "remote").exists() else [])])
def test_a_recorded_trace_needs_neither_torch_nor_gradio(modules):
    """Reading a trace and working out its figures load no package besides Python's own."""
    code = (f"import sys, {modules}\n"
            "heavy = {'torch', 'transformers', 'gradio', 'numpy', 'plotly', 'safetensors', 'tokenizers'} & set(sys.modules)\n"
            "sys.exit(f'loaded {sorted(heavy)}' if heavy else 0)")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
