"""The viewer's script and style as text: the files of `assets/viewer/`, joined in the order of their names and squeezed.

It knows nothing of Gradio or of what the viewer draws; `specviz.ui.viewer`, the exported pages and the tests use the same text.
"""
from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

__all__ = ["PAGE", "script_safe", "viewer_script", "viewer_style"]

ASSETS = Path(__file__).resolve().parents[2] / "assets"
PARTS = ASSETS / "viewer"
PAGE = (ASSETS / "page.html").read_text(encoding="utf-8")       # an exported run, and the static site; places like {{title}} are filled in


@lru_cache(maxsize=1)
def viewer_style() -> str:
    """Every `*.css` of the viewer, in the order of the file names."""
    style = _squeezed("\n".join(path.read_text(encoding="utf-8") for path in sorted(PARTS.glob("*.css"))))
    return re.sub(r"\s*([{};,])\s*", r"\1", style)


@lru_cache(maxsize=1)
def viewer_script(*, with_style: bool = True) -> str:
    """One plain script that defines the global `SpecViz`; with_style: it also puts the style into the page, once."""
    parts = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PARTS.glob("*.js")))
    # The function has a name because an export takes its own source from it.
    script = f"(function specviz(global) {{\n'use strict';\nconst PAGE = {script_safe(json.dumps(PAGE))};\n{_squeezed(parts)}\n}})(window);"
    return script + (f"\nSpecViz.style({json.dumps(viewer_style(), ensure_ascii=False)});" if with_style else "")


def script_safe(text: str) -> str:
    """JSON as it may stand inside a script element: `</script>` in a string would end it, `<!--` change how it is read."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _squeezed(source: str) -> str:
    """Without indentation, blank lines and comments. Safe for our own files only: no text of theirs spans lines or holds `/*`."""
    lines = (line.strip() for line in source.splitlines())
    kept = (re.sub(r"\s{2,}// .*$", "", line) for line in lines if line and not line.startswith("//"))
    return re.sub(r"/\*.*?\*/", "", "\n".join(kept), flags=re.DOTALL)
