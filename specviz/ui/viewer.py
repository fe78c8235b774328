"""The viewer as a Gradio component: mounts `assets/viewer.js` once and feeds it JSON strings; makes `start` and `trace` messages.

It knows nothing of models, of the engine or of the page around it. Importing this module makes Gradio write a `viewer.pyi` beside it.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr
import plotly

from .. import metrics
from .. import trace as records
from ..trace import FORMAT, VERSION, Trace
from . import charts
from .slicer import Slicer, encode

__all__ = ["Viewer", "plotly_address", "start_body", "start_message", "trace_body", "trace_message"]

ASSETS = Path(__file__).resolve().parents[2] / "assets"

# Runs once per mount. `watch` does not fire for the value that is there at mount, hence the first call. The words in quotes are
# events that Python can listen to: `viewer.pick(fn)` gets `evt.step`.
_MOUNT = """
const viewer = SpecViz.mount(element.querySelector('.specviz-host'), {
  onResync: async (run, fromSeq) => server.resync ? JSON.parse(await server.resync([run, fromSeq])) : null,
  onPick: step => trigger('pick', {step}),
});
element.viewer = viewer;
const take = () => { if (props.value) viewer.take(JSON.parse(props.value)); };
take();
watch('value', take);
element.dataset.ready = '1';
//# sourceURL=specviz-viewer.js
"""


class Viewer(gr.HTML):
    """One always-mounted viewer. Its value is one JSON message as `start_message`, `trace_message` and `Slicer` make them.

    `resync(run, from_seq) -> str` answers a page that missed messages, for example `Archive.resync`; its arguments come from the
    browser and are not trusted. Never put the component into an unselected tab: there it would not be mounted and drop messages.
    """

    def __init__(self, value: str | None = None, *, resync: Callable[[str, int], str] | None = None, **kwargs: Any) -> None:
        for fixed in ("html_template", "css_template", "js_on_load", "apply_default_css", "server_functions"):
            kwargs.pop(fixed, None)          # Gradio passes them back when it copies a component; they are constants here
        super().__init__(value=value, html_template="<div class='specviz-host'></div>", css_template="", js_on_load=_script(),
                         apply_default_css=False, server_functions=[_server_function(resync)] if resync else None, **kwargs)

    def api_info(self) -> dict[str, Any]:
        return {"type": "string"}

    def postprocess(self, value: str | None) -> str | None:
        """The message as it is: it is data, never markup, so Gradio's warning about script tags would be a false alarm."""
        return value


def start_body(meta: dict[str, Any], status: str, *, note: str = "") -> dict[str, Any]:
    """What a `start` message holds besides its envelope: for `Slicer.start`. `status` is the status line, beginning with its state
    ("active", "off: <reason>", "paused: <reason>", "waiting: ...", "recorded"); `note` is one sentence shown under it."""
    figures = charts.figures(lossy=meta.get("promise") == "nothing")
    return {"meta": meta, "status": status, "figures": figures, "plotly": plotly_address(), "formulas": formulas()} | (
        {"note": note} if note else {})


def trace_body(trace: Trace, status: str = "recorded", *, note: str = "") -> dict[str, Any]:
    """What a `trace` message holds besides its envelope: the file's own shape under `trace`, with figures and formulas."""
    file = {"format": FORMAT, "version": VERSION} | records.to_dict(trace)
    body = start_body(trace.meta, status, note=note)
    del body["meta"]
    return body | {"trace": {"steps": [], "plain": []} | file}


def start_message(meta: dict[str, Any], status: str, *, run: str | None = None, note: str = "") -> str:
    """A `start` message that stands alone (seq 0 of a fresh run)."""
    return Slicer(run).start(start_body(meta, status, note=note))[0]


def trace_message(trace: Trace, status: str = "recorded", *, run: str | None = None, note: str = "") -> str:
    """A whole recording as one message: the first view of a page, or an opened file."""
    return Slicer(run).trace(trace_body(trace, status, note=note))[0]


def formulas() -> dict[str, dict[str, str]]:
    """{name: {label, formula, source, note}} from `specviz.metrics.FORMULAS`, JSON-ready; empty texts are left out."""
    return {name: {key: text for key, text in asdict(entry).items() if text} for name, entry in metrics.FORMULAS.items()}


@lru_cache(maxsize=1)
def plotly_address() -> str:
    """The address of plotly.min.js from the installed package, relative to the page, so that it works under a root path and on Spaces.

    Only this one file is opened to visitors; with `auth` it needs the login as everything else does.
    """
    file = Path(plotly.__file__).resolve().parent / "package_data" / "plotly.min.js"
    gr.set_static_paths([file])
    return "gradio_api/file=" + quote(file.as_posix(), safe="/:")


def _script() -> str:
    style = re.sub(r"\s*([{};,])\s*", r"\1", _squeezed((ASSETS / "viewer.css").read_text(encoding="utf-8")))
    script = _squeezed((ASSETS / "viewer.js").read_text(encoding="utf-8"))
    return script + f"\nSpecViz.style({json.dumps(style, ensure_ascii=False)});" + _MOUNT


def _squeezed(source: str) -> str:
    """Without indentation, blank lines and comments. Safe for our own two files only: no text of theirs spans lines or holds `/*`."""
    lines = (line.strip() for line in source.splitlines())
    kept = (re.sub(r"\s{2,}// .*$", "", line) for line in lines if line and not line.startswith("//"))
    return re.sub(r"/\*.*?\*/", "", "\n".join(kept), flags=re.DOTALL)


def _server_function(resync: Callable[[str, int], str]) -> Callable[[Any], str]:
    def answer(request: Any) -> str:         # Gradio hands the browser's whole argument over as one value
        if not isinstance(request, (list, tuple)) or len(request) != 2:
            return encode({"v": 1, "type": "resync", "messages": []})
        return resync(*request)

    answer.__name__ = "resync"               # the name in JavaScript: server.resync
    return answer
