"""The page: which components there are, where they stand and which handler each event goes to. It knows nothing of models."""
from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from ..limits import Limits
from ..museum.desk import Desk
from ..options import Options
from ..remote.reach import Reach
from . import strings
from .bodies import look
from .comparison import choices
from .conversations import ChatBar
from .examples import EXAMPLES
from .handlers import Handlers
from .join import Join
from .library import Library
from .messages import LATEX_DELIMITERS
from .method_options import OptionsPanel
from .model_handlers import ModelHandlers
from .models_panel import ModelsPanel
from .recordings import TRACES, Recording, titles
from .server_panel import ServerPanel
from .viewer import Viewer, plotly_address, trace_message

if TYPE_CHECKING:
    from ..service import Service

__all__ = ["build", "launch"]

ASSETS = Path(__file__).resolve().parents[2] / "assets"
ALL = {"concurrency_limit": None}                                # the engine has its own queue, which API and page share
ONE = {"concurrency_id": "model", "concurrency_limit": 1}        # where it has none
THREADS = 40                     # for what is not an answer; each answer and each measurement that waits holds one
PRIVATE = {"api_visibility": "private"}
LIGHT = {"queue": False, "show_progress": "hidden", **PRIVATE}

# The style stands in the head because `css_paths` rewrites selectors (it nests them, so that `body[...]` would match nothing).
# Model text may name pictures anywhere on the web; nothing on this page needs one from outside.
HEAD = """<meta http-equiv="Content-Security-Policy" content="img-src 'self' data: blob:; media-src 'self' data: blob:">
<style>{css}</style>"""

HEADER = f"""
<header class="page-header">
  <div class="page-title"><h1>{strings.NAME}</h1><p>{strings.HEADLINE}</p></div>
  <span class="page-buttons">{{join}}<button type="button" class="page-learn" data-learn>Learn</button></span>
  <button type="button" class="page-theme" data-theme aria-label="Switch between light and dark">◐</button>
</header>
<nav class="page-views" aria-label="View">
  <button type="button" data-view="tokens" aria-pressed="true">Tokens</button>
  <button type="button" data-view="charts" aria-pressed="false">Charts</button>
  <button type="button" data-view="chat" aria-pressed="false">Chat</button>
</nav>
<button type="button" class="page-live" data-view="chat">Run live</button>"""


JOIN = f'<button type="button" class="page-learn" data-join>{strings.JOIN}</button>'


def build(service: Service, recording: Recording, *, method: str | None = None, k: int | str | None = None,
          options: Sequence[tuple[str, str]] = (), recordings: Path = TRACES, read_only: bool = False, not_kept: str = "",
          measure_plain: bool = True, limits: Limits = Limits(), one_at_a_time: bool = False,
          join: Join | None = None, reach: Reach = Reach()) -> gr.Blocks:
    """The whole page, not launched. recording: what the viewer shows until the first run. method, k, options: what to begin with.

    recordings: a folder of traces to choose from; the menu appears where there are at least two. read_only: visitors may look at the
    list of models, and only the operator chooses. not_kept: why the browser keeps no conversations; empty if it does.
    measure_plain: whether plain decoding is measured unless a visitor says otherwise. limits: what one visitor may take. one_at_a_time:
    the service has no queue of its own, so visitors wait in Gradio's. join: how others reach the page, None where nobody can. reach: how
    servers that the operator attaches are reached unless the panel says otherwise.
    """
    handlers = Handlers(service, method=method, recordings=recordings, options=options, limits=limits, one_at_a_time=one_at_a_time)
    many = ONE if one_at_a_time else ALL
    with gr.Blocks(title="specviz: speculative decoding, made visible", fill_width=True, analytics_enabled=False) as page:
        gr.HTML(html_template=HEADER.replace("{join}", JOIN if join else ""), css_template="",
                js_on_load=(ASSETS / "page.js").read_text(encoding="utf-8"), apply_default_css=False,
                elem_id="header")
        status = gr.HTML(strings.status_html(handlers.resting_line()), elem_id="status", padding=False)
        if recording.problem:
            gr.HTML(f'<p class="page-notice" role="alert">{html.escape(recording.problem)}</p>', elem_id="notice", padding=False)
        models = ModelsPanel(ModelHandlers(service, handlers, read_only))
        server = ServerPanel(service, handlers, read_only, reach)
        with gr.Row(elem_id="main", equal_height=False):
            with gr.Column(scale=4, min_width=320, elem_id="chat-column"):
                chat = gr.Chatbot(
                    elem_id="chat", show_label=False, height="max(340px, calc(100vh - 430px))", placeholder=strings.EMPTY_CHAT,
                    examples=[{"text": example.prompt, "display_text": example.card} for example in EXAMPLES], editable="user",
                    buttons=["copy", "copy_all"], sanitize_html=True, latex_delimiters=LATEX_DELIMITERS, feedback_options=None,
                    layout="bubble")
                prompt = gr.Textbox(elem_id="prompt", label="Message", show_label=False, container=False, placeholder="Write a message …",
                                    lines=1, max_lines=8, submit_btn=True, stop_btn=False, autofocus=True)
                bar = ChatBar(off=not_kept, elem_id="chat-bar", padding=False)
                more = gr.Button("Continue measuring", elem_id="more", size="sm", visible=False)
                settings, menus = _controls(handlers, k, measure_plain, limits.new_tokens)
            with gr.Column(scale=7, min_width=320, elem_id="viewer-column"):
                library = Library(look(plotly_address()), recordings=recordings)
                name = recording.name if recording.name in library.files else ""
                first = trace_message(recording.trace, name=name) if recording.trace else None
                viewer = Viewer(first, resync=handlers.archive.resync, library=library.answer, museum=Desk().answer,
                                methods=lambda: choices(service), elem_id="viewer")
                names = list(titles(recordings))
                shelf = gr.Dropdown(names, value=None, label="Show a recorded run", filterable=False, visible=len(names) > 1,
                                    elem_id="recordings")

        screen, method = [viewer, chat, status, prompt, more, bar], menus[0]
        live = dict(outputs=screen, trigger_mode="multiple", show_progress="minimal" if one_at_a_time else "hidden",
                    show_progress_on=[status], **many, **PRIVATE)

        def answered_by(event: Callable[..., Any], take: Callable[..., Any], inputs: list[Any]) -> None:
            """First the question appears, at once; then, in its turn, the answer."""
            answered = event(take, inputs, [prompt, chat], **LIGHT).then(handlers.respond, [chat, *settings], **live)
            answered.then(handlers.refreshed, method, [*menus, status], **LIGHT)

        answered_by(prompt.submit, handlers.ask, [prompt, chat])
        answered_by(chat.example_select, handlers.ask_example, [chat])
        answered_by(chat.retry, handlers.retry, [chat])
        answered_by(chat.edit, handlers.edit, [chat])
        chat.undo(handlers.undo, [chat], [prompt, chat], **LIGHT).then(handlers.settled, [chat], bar, **LIGHT)
        chat.clear(handlers.clear, None, screen, **LIGHT)
        bar.fresh(handlers.clear, None, screen, **LIGHT)
        bar.recall(handlers.recall, None, screen, **LIGHT)
        bar.look(handlers.change_look, [chat], chat, **LIGHT)
        prompt.stop(handlers.stop, None, prompt, **LIGHT)
        gr.on([prompt.focus, method.focus], handlers.refreshed, method, [*menus, status], **LIGHT)
        more.click(handlers.measure_more, [chat], **live)
        shelf.change(handlers.show_recording, shelf, [viewer, status], **LIGHT)
        loaded = page.load(handlers.load, None, [status, *menus], show_progress="hidden", concurrency_limit=None, **PRIVATE)
        filled = models.wire(status, *menus)
        loaded.then(**filled)
        server.wire(status, *menus, filled)
        viewer.compare(handlers.compare, settings, outputs=screen, trigger_mode="once", show_progress="hidden", **PRIVATE,
                       **(ONE if one_at_a_time else {"concurrency_id": "compare", "concurrency_limit": 1}))
        viewer.halt(handlers.halt, None, None, **LIGHT)
        page.unload(handlers.leave)
        if join:
            page.load(join.markup, None, gr.HTML(elem_id="join", padding=False), **LIGHT)
        gr.api(handlers.generate, api_name="generate", **many)
    return page.queue(max_size=limits.waiting + 1 if one_at_a_time else None)


def launch(page: gr.Blocks, options: Options, port: int) -> tuple[str, str | None]:
    """Serve the page and return at once: (local address, public address or None)."""
    head = HEAD.format(css=(ASSETS / "page.css").read_text(encoding="utf-8"))
    _, address, public = page.launch(
        server_name=options.host, server_port=port, share=options.share, auth=options.auth, root_path=options.root_path,
        inbrowser=options.browser and not options.on_space, quiet=True, prevent_thread_lock=True,
        run_history=None if options.history else False, theme=_theme(), head=head, footer_links=["api", "settings"], ssr_mode=False,
        state_session_capacity=1000, max_threads=THREADS + 2 * options.limits.most_open)
    return address, public


def _controls(handlers: Handlers, k: int | str | None, measure_plain: bool, most_new: int) -> tuple[list[Any], list[Any]]:
    """The settings in the order of `handlers.Settings`, and what the loading of the model fills in."""
    menu = handlers.method_menu()
    ours = handlers.is_decided_here(menu["value"])
    with gr.Group(elem_id="speculation"):
        with gr.Row():
            method = gr.Dropdown(**menu, label="Drafting method", filterable=False, min_width=180, elem_id="method")
            length = gr.Slider(1, 64, value=5 if k in (None, "auto") else k, step=1, label="Draft length K", min_width=140, elem_id="k",
                               interactive=k != "auto", visible=ours)
        note = gr.Markdown(handlers.method_note(menu["value"]), elem_id="method-note")
        auto = gr.Checkbox(k == "auto", label=strings.AUTO_K, info=strings.AUTO_K_INFO, elem_id="auto-k", visible=ours)
        with gr.Row():
            measure = gr.Checkbox(measure_plain, label="Measure plain decoding too", min_width=140, elem_id="measure-plain",
                                  visible=handlers.is_comparable(menu["value"]))
            keep = gr.Checkbox(True, label="Keep probabilities", min_width=140, elem_id="keep-probs", visible=ours)
    panel = OptionsPanel(handlers.options, ours)
    with gr.Accordion("Sampling and limits", open=False, elem_id="sampling"):
        greedy = gr.Checkbox(True, label="Greedy: always the most probable token", elem_id="greedy")
        with gr.Row():
            temperature = gr.Slider(0.05, 2, value=0.8, step=0.05, label="Temperature", interactive=False, min_width=140,
                                    elem_id="temperature")
            top_k = gr.Slider(0, 200, value=0, step=1, label="Top-k (0 is off)", interactive=False, min_width=140, elem_id="top-k")
        with gr.Row():
            top_p = gr.Slider(0.05, 1, value=0.95, step=0.01, label="Top-p (1 is off)", interactive=False, min_width=140, elem_id="top-p")
            min_p = gr.Slider(0, 0.5, value=0, step=0.01, label="Min-p (0 is off)", interactive=False, min_width=140, elem_id="min-p")
        with gr.Row():
            seed = gr.Number(0, label="Seed", precision=0, min_width=100, elem_id="seed")
            fresh = gr.Button("New seed", size="sm", min_width=90, elem_id="new-seed")
        with gr.Row():
            limit = gr.Slider(min(8, most_new), min(2048, most_new), value=min(256, most_new), step=8 if most_new > 8 else 1,
                              label="New tokens at most", min_width=140, elem_id="max-new-tokens")
            penalty = gr.Slider(1, 2, value=1, step=0.01, label="Repetition penalty (1 is off)", min_width=140,
                                elem_id="repetition-penalty")
        rule = gr.Dropdown([(label, name) for name, (label, _) in strings.VERIFICATIONS.items()], value="rejection", label="Verification",
                           filterable=False, elem_id="verification", visible=ours)
        rule_note = gr.Markdown(strings.verification_note("rejection"), elem_id="verification-note", visible=ours)
        stop = gr.Textbox(label="Stop strings, one per line (\\n is a line break)", lines=1, max_lines=4, elem_id="stop-strings")
    with gr.Accordion("System prompt", open=False, elem_id="system"):
        system = gr.Textbox(show_label=False, container=False, lines=2, max_lines=8, placeholder="You are a helpful assistant.",
                            elem_id="system-prompt")

    method.change(handlers.method_note, method, note, **LIGHT)
    panel.wire(method, **LIGHT)
    settable = [length, auto, keep, rule, rule_note, panel.panel]
    method.change(lambda name: [gr.update(visible=handlers.is_comparable(name)), *[gr.update(visible=handlers.is_decided_here(name))] * len(settable)],
                  method, [measure, *settable], **LIGHT)
    auto.change(lambda on: gr.update(interactive=not on), auto, length, **LIGHT)
    rule.change(strings.verification_note, rule, rule_note, **LIGHT)
    greedy.change(lambda on: [gr.update(interactive=not on)] * 4, greedy, [temperature, top_k, top_p, min_p], **LIGHT)
    fresh.click(None, None, seed, js="() => Math.floor(Math.random() * 2147483648)")
    return ([system, method, length, greedy, temperature, top_k, top_p, min_p, penalty, seed, limit, stop, measure, keep, rule, auto,
             *panel.inputs], [method, note])


def _theme() -> gr.themes.Base:
    """Neutral, with fonts that come with Gradio: a theme from the Hub or a Google font would call outside."""
    font = (gr.themes.LocalFont("IBM Plex Sans", weights=(400, 700)), "ui-sans-serif", "system-ui", "sans-serif")   # its 600 lacks letters
    colors = gr.themes.colors
    return gr.themes.Base(font=font, primary_hue=colors.emerald, secondary_hue=colors.emerald, neutral_hue=colors.gray)
