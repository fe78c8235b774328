"""The Models panel: which components it has and where their events go. It knows nothing of models."""
from __future__ import annotations

import html
from typing import Any

import gradio as gr

from . import model_texts as texts
from .model_handlers import ModelHandlers, Update

__all__ = ["ModelsPanel"]

QUANTIZATIONS = ("auto", "none", "int8", "nf4", "nf4-double", "fp4", "fp4-double")
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16")
PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}


class ModelsPanel:
    """Draws the panel where it is made; `wire` connects it once the rest of the page exists."""

    def __init__(self, handlers: ModelHandlers) -> None:
        self._handlers, free = handlers, not handlers.read_only
        self._notices = gr.HTML("", padding=False, visible=False, elem_id="models-notices")
        with gr.Accordion(texts.TITLE, open=False, elem_id="models") as self._panel:
            if handlers.read_only:
                gr.HTML(f'<p class="page-models-note">{html.escape(texts.READ_ONLY)}</p>', padding=False, elem_id="models-read-only")
            self._suggest = gr.Button("", visible=False, variant="primary", size="sm", elem_id="models-suggest")
            self._cards = gr.Radio([], show_label=False, container=False, interactive=free, elem_id="models-cards")
            with gr.Row(elem_id="models-form", visible=free):
                self._own = gr.Textbox(label="Or your own: hub name, folder, .gguf file", placeholder="owner/name", lines=1,
                                       max_lines=1, scale=3, min_width=240, elem_id="models-own")
                self._draft = gr.Dropdown([(texts.NO_DRAFT, "")], value="", label="Drafter: a model or heads", allow_custom_value=True,
                                          scale=3, min_width=180, elem_id="models-draft")
                self._quantization = gr.Dropdown(QUANTIZATIONS, value="auto", label="Quantization", filterable=False, min_width=140,
                                                 elem_id="models-quantization")
                self._device = gr.Dropdown(DEVICES, value="auto", label="Device", allow_custom_value=True, min_width=100,
                                           elem_id="models-device")
                self._dtype = gr.Dropdown(DTYPES, value="auto", label="Number format", filterable=False, min_width=110,
                                          elem_id="models-dtype")
            self._report = gr.HTML("", padding=False, elem_id="models-report")
            self._consent = gr.Checkbox(False, label=texts.CONSENT, visible=False, container=False, elem_id="models-consent")
            self._room = gr.Checkbox(False, label=texts.MAKE_ROOM, visible=False, container=False, elem_id="models-room")
            with gr.Row(elem_id="models-buttons", visible=free):
                self._load = gr.Button("Load", variant="primary", size="sm", min_width=96, elem_id="models-load")
                self._cancel = gr.Button("Cancel", size="sm", interactive=False, min_width=96, elem_id="models-cancel")
                self._unload = gr.Button("Unload", size="sm", min_width=96, interactive=False, elem_id="models-unload")
            self._state = gr.HTML("", padding=False, elem_id="models-state")

    def wire(self, status: gr.HTML, method: gr.Dropdown, note: gr.Markdown) -> dict[str, Any]:
        """Connect the events. Returns the keyword arguments of the event that fills the panel once the first model is there."""
        handlers = self._handlers
        mine = dict(panel=self._panel, notices=self._notices, suggest=self._suggest, cards=self._cards, own=self._own, draft=self._draft,
                    quantization=self._quantization, report=self._report, consent=self._consent, room=self._room, load=self._load,
                    cancel=self._cancel, unload=self._unload, state=self._state)
        outputs = [{"status": status, "method": method, "note": note, **mine}[name] for name in Update.FIELDS]
        waiting = dict(concurrency_limit=None, **PRIVATE)
        self._panel.expand(handlers.expanded, None, outputs, queue=False, **PRIVATE)
        if not handlers.read_only:
            form = [self._cards, self._own, self._draft, self._quantization, self._device, self._dtype]
            self._cards.input(handlers.choose, [self._cards, self._device, self._dtype], outputs, trigger_mode="always_last", **waiting)
            gr.on([self._own.submit, self._own.blur, self._draft.input, self._quantization.input, self._device.input, self._dtype.input],
                  handlers.edited, form, outputs, trigger_mode="always_last", **waiting)
            self._load.click(handlers.load, [method, self._consent, self._room, *form], outputs, **waiting)
            self._suggest.click(handlers.take_suggestion, method, outputs, **waiting)
            self._cancel.click(handlers.cancel, None, outputs, queue=False, **PRIVATE)
            self._unload.click(handlers.unload, None, outputs, queue=False, **PRIVATE)
        return dict(fn=handlers.opened, inputs=method, outputs=outputs, **waiting)
