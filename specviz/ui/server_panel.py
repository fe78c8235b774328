"""The panel "Attach a server": the same page on another inference engine, and back. It knows nothing of wire formats.

Only the operator may use it: where the page is shared it is not there, and its events refuse whatever the browser sends.
"""
from __future__ import annotations

import html
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import gradio as gr

from ..errors import InputError
from ..options import KINDS
from ..remote.reach import MOST_SECONDS, Reach
from . import strings
from .handlers import Handlers
from .turns import POLL_S, sentence_of
from .visits import SKIP

if TYPE_CHECKING:                # the service imports torch; the page opens without waiting for it
    from ..service import Service

__all__ = ["ServerPanel"]

TITLE = "Attach a server: vLLM, llama.cpp, SGLang, TensorRT-LLM, LM Studio"
INTRO = ("Watch the speculation of an engine that runs elsewhere. Only what it tells is shown: counts and times of each step, never its "
         "rejected tokens.")
LABELS = {"auto": "find out", "vllm": "vLLM", "llamacpp": "llama.cpp", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM",
          "lm_studio": "LM Studio", "specviz": "specviz", "openai": "OpenAI-compatible"}
MORE = "More: headers, certificates, timeout"
HEADERS_INFO = "For gateways. Values are secrets like the key, kept in memory only."
CA_INFO = "For certificates of one's own, such as a company's."
TIMEOUT_INFO = f"How long it may be silent: above 0, at most {MOST_SECONDS:,}."
SHARED = "This page is shared with others, so only its operator attaches a server, with --remote."
UNTRIED = " Its stream is read by its documentation; nobody has tried it on a live server yet."
PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}


class ServerPanel:
    """Draws the panel where it is made, unless the page is shared or the program was started for one server; `wire` connects it once the rest
    of the page exists."""

    def __init__(self, service: Service, page: Handlers, read_only: bool, reach: Reach = Reach()) -> None:
        """reach: what the command line says of headers, CA file and timeout. Its header values never reach the browser."""
        self.service, self.read_only, self._page, self._reach = service, read_only, page, reach
        self._drawn = not read_only and getattr(service, "can_attach", True)
        if not self._drawn:
            return
        with gr.Accordion(TITLE, open=False, elem_id="server"):
            gr.HTML(f'<p class="page-models-note">{html.escape(INTRO)}</p>', padding=False)
            with gr.Row():
                self._url = gr.Textbox(label="Address", placeholder="127.0.0.1:8000", lines=1, max_lines=1, scale=3, min_width=200,
                                       elem_id="server-url")
                self._key = gr.Textbox(label="Key (kept in memory only)", type="password", lines=1, max_lines=1, scale=2, min_width=160,
                                       elem_id="server-key")
                self._kind = gr.Dropdown([(LABELS[kind], kind) for kind in KINDS], value="auto", label="Kind", filterable=False,
                                         min_width=140, elem_id="server-kind")
            with gr.Row():
                self._model = gr.Textbox(label="Model (empty: the first of its list)", lines=1, max_lines=1, scale=2, min_width=180,
                                         elem_id="server-model")
                self._baseline = gr.Textbox(label="Second server without speculation, to compare with", placeholder="none: no speed-up",
                                            lines=1, max_lines=1, scale=3, min_width=220, elem_id="server-baseline")
                self._draft = gr.Textbox(label="Draft model (LM Studio)", lines=1, max_lines=1, scale=2, min_width=160, elem_id="server-draft")
            with gr.Accordion(MORE, open=False, elem_id="server-more"):
                with gr.Row():
                    self._headers = gr.Textbox(label="Extra headers, one Name: value per line", placeholder="X-Team: blue",
                                               info=_besides(reach.header_names), lines=2, max_lines=4, scale=3, min_width=240,
                                               elem_id="server-headers")
                    self._ca = gr.Textbox(str(reach.ca_file or ""), label="CA file (PEM, a path on this machine)",
                                          placeholder="none: what this machine trusts", info=CA_INFO, lines=1, max_lines=1, scale=3,
                                          min_width=240, elem_id="server-ca")
                    self._timeout = gr.Number(reach.timeout_s, label="Timeout in seconds", info=TIMEOUT_INFO, scale=2, min_width=180,
                                              elem_id="server-timeout")
            with gr.Row(elem_id="server-buttons"):
                self._attach = gr.Button("Attach", variant="primary", size="sm", min_width=96, elem_id="server-attach")
                self._detach = gr.Button("Back to this machine", size="sm", min_width=96, elem_id="server-detach")
            self._state = gr.HTML("", padding=False, elem_id="server-state")

    def wire(self, status: gr.HTML, method: gr.Dropdown, note: gr.Markdown, then: dict[str, Any]) -> None:
        """then: the event that fills the Models panel anew."""
        if not self._drawn:
            return
        outputs = [status, method, note, self._state]
        form = [self._url, self._key, self._kind, self._model, self._baseline, self._draft, self._headers, self._ca, self._timeout]
        options = dict(concurrency_limit=None, trigger_mode="once", **PRIVATE)
        gr.on([self._attach.click, self._url.submit], self.attach, form, outputs, **options).then(**then)
        self._detach.click(self.detach, None, outputs, **options).then(**then)

    def attach(self, url: str, key: str, kind: str, model: str, baseline: str, draft: str, headers: str = "", ca_file: str = "",
               timeout: float | None = None) -> Iterator[tuple[Any, ...]]:
        """Ask the server and follow how it goes; the model in use stays until it has answered."""
        number = self.service.status().number
        try:
            self._operator_only()
            if not (url or "").strip():
                raise InputError("No address is given; expected something like 127.0.0.1:8000.")
            self.service.attach(url.strip(), api_key=(key or "").strip(), model=(model or "").strip(), kind=kind or "auto",
                                baseline=(baseline or "").strip(), draft=(draft or "").strip(),
                                reach=self._reach.changed(headers or "", ca_file or "", timeout))
        except Exception as error:
            yield SKIP, SKIP, SKIP, _line("bad", sentence_of(error))
            return
        while (status := self.service.status()).is_loading:
            yield SKIP, SKIP, SKIP, _line("note", f"{status.message} …")
            time.sleep(POLL_S)
        if status.number == number:
            yield SKIP, SKIP, SKIP, _line("bad", status.last_error or status.message)
            return
        config = self.service.config()
        told = "" if config.get("evidence") == "run" else UNTRIED
        where = f"Attached to {config.get('engine')} at {config.get('device')}, model {config.get('target')}.{told}"
        yield *self._menu(), _line("good", where)

    def detach(self) -> Iterator[tuple[Any, ...]]:
        try:
            self._operator_only()
            self.service.detach()
        except Exception as error:
            yield SKIP, SKIP, SKIP, _line("bad", sentence_of(error))
            return
        yield *self._menu(), _line("good", "This machine's own engine answers again.")

    def _menu(self) -> tuple[Any, Any, Any]:
        menu = self._page.method_menu(None)
        return strings.status_html(self._page.resting_line()), gr.update(**menu), self._page.method_note(menu["value"])

    def _operator_only(self) -> None:
        if self.read_only:
            raise InputError(SHARED)


def _line(level: str, text: str) -> str:
    """A sentence; servers' words are in it, so it is escaped."""
    kind, role = ("failed", "alert") if level == "bad" else ("busy", "status")
    return f'<p class="page-models-state" data-kind="{kind}" role="{role}">{html.escape(text)}</p>'


def _besides(names: tuple[str, ...]) -> str:
    """What the field of headers says of itself; names of the command line's, never their values."""
    return HEADERS_INFO + (f" Sent besides, from the command line: {', '.join(names)}." if names else "")
