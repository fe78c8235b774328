"""The viewer as a Gradio component: mounts the script of `assets/viewer/` once and feeds it JSON strings; makes `start` and `trace` messages.

It knows nothing of models, of the engine or of the page around it. Importing this module makes Gradio write a `viewer.pyi` beside it.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr
import plotly

from ..trace import Trace
from .bodies import look, trace_file
from .script import viewer_script
from .slicer import Slicer, encode

__all__ = ["Viewer", "plotly_address", "start_body", "start_message", "trace_body", "trace_message"]

# Runs once per mount. `watch` does not fire for the value that is there at mount, hence the first call. The words in quotes are
# events that Python can listen to: `viewer.pick(fn)` gets `evt.step`.
_MOUNT = """
const viewer = SpecViz.mount(element.querySelector('.specviz-host'), {
  onResync: async (run, fromSeq) => server.resync ? JSON.parse(await server.resync([run, fromSeq])) : null,
  onPick: step => trigger('pick', {step}),
  library: server.library ? async name => JSON.parse(await server.library(name)) : null,
  museum: server.museum ? async message => JSON.parse(await server.museum(message)) : null,
  compare: server.methods ? {methods: async () => JSON.parse(await server.methods('')), start: wanted => trigger('compare', wanted),
      stop: ticket => trigger('halt', {ticket})} : null,
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
    browser and are not trusted. `library(name) -> str` gives the course and recorded runs, as `Library.answer` does;
    `museum(message) -> str` runs experiments, as `museum.desk.Desk.answer` does; `methods() -> str` names what can be compared, as
    `comparison.choices` does, and whoever gives it listens to the events `compare` and `halt`. Never put the component into an unselected tab: there it
    would not be mounted and drop messages.
    """

    def __init__(self, value: str | None = None, *, resync: Callable[[str, int], str] | None = None,
                 library: Callable[[object], str] | None = None, museum: Callable[[Any], str] | None = None,
                 methods: Callable[[], str] | None = None, **kwargs: Any) -> None:
        for fixed in ("html_template", "css_template", "js_on_load", "apply_default_css", "server_functions"):
            kwargs.pop(fixed, None)          # Gradio passes them back when it copies a component; they are constants here
        functions = [*([_resync(resync)] if resync else []), *([_library(library)] if library else []), *([_museum(museum)] if museum else []),
                     *([_methods(methods)] if methods else [])]
        super().__init__(value=value, html_template="<div class='specviz-host'></div>", css_template="", js_on_load=viewer_script() + _MOUNT,
                         apply_default_css=False, server_functions=functions or None, **kwargs)

    def api_info(self) -> dict[str, Any]:
        return {"type": "string"}

    def postprocess(self, value: str | None) -> str | None:
        """The message as it is: it is data, never markup, so Gradio's warning about script tags would be a false alarm."""
        return value


def start_body(meta: dict[str, Any], status: str, *, note: str = "") -> dict[str, Any]:
    """What a `start` message holds besides its envelope: for `Slicer.start`. `status` is the status line, beginning with its state
    ("active", "off: <reason>", "paused: <reason>", "waiting: ...", "recorded"); `note` is one sentence shown under it."""
    return {"meta": meta, "status": status} | look(plotly_address(), lossy=meta.get("promise") == "nothing") | ({"note": note} if note else {})


def trace_body(trace: Trace, status: str = "recorded", *, note: str = "", name: str = "") -> dict[str, Any]:
    """What a `trace` message holds besides its envelope: the file's own shape under `trace`, with figures and formulas. `name` is the
    recording's in the `Library`, for links to it."""
    body = start_body(trace.meta, status, note=note)
    del body["meta"]
    return body | {"trace": trace_file(trace)} | ({"name": name} if name else {})


def start_message(meta: dict[str, Any], status: str, *, run: str | None = None, note: str = "") -> str:
    """A `start` message that stands alone (seq 0 of a fresh run)."""
    return Slicer(run).start(start_body(meta, status, note=note))[0]


def trace_message(trace: Trace, status: str = "recorded", *, run: str | None = None, note: str = "", name: str = "") -> str:
    """A whole recording as one message: the first view of a page, or an opened file."""
    return Slicer(run).trace(trace_body(trace, status, note=note, name=name))[0]


@lru_cache(maxsize=1)
def plotly_address() -> str:
    """The address of plotly.min.js from the installed package, relative to the page, so that it works under a root path and on Spaces.

    Only this one file is opened to visitors; with `auth` it needs the login as everything else does.
    """
    file = Path(plotly.__file__).resolve().parent / "package_data" / "plotly.min.js"
    gr.set_static_paths([file])
    return "gradio_api/file=" + quote(file.as_posix(), safe="/:")


# The names of the inner functions are their names in JavaScript: server.resync, server.library, server.museum.
def _resync(resync_of: Callable[[str, int], str]) -> Callable[[Any], str]:
    def resync(request: Any) -> str:         # Gradio hands the browser's whole argument over as one value
        if not isinstance(request, (list, tuple)) or len(request) != 2:
            return encode({"v": 1, "type": "resync", "messages": []})
        return resync_of(*request)
    return resync


def _library(answer: Callable[[object], str]) -> Callable[[Any], str]:
    def library(name: Any) -> str:
        return answer(name)
    return library


def _museum(answer: Callable[[Any], str]) -> Callable[[Any], str]:
    def museum(message: Any) -> str:
        return answer(message)
    return museum


def _methods(answer: Callable[[], str]) -> Callable[[Any], str]:
    def methods(_: Any) -> str:
        return answer()
    return methods
