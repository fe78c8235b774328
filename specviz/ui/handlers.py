"""What happens when someone writes, stops, retries, undoes or edits: generators over `service.submit()` that yield screen updates.

It knows nothing of layout, models or drafting methods, and never times anything itself: steps carry the engine's own times.
"""
from __future__ import annotations

import json
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from ..errors import InputError, SpecvizError
from ..trace import StepTrace, dumps, load
from . import strings
from .conversations import reopened
from .messages import Look, Message, conversation, dressed, failed, is_failed, last_question, question, reply, text_of
from .recordings import TRACES, titles
from .settings import Settings
from .slicer import Archive, Slicer
from .transcript import Transcript
from .viewer import start_body, trace_message
from .visits import SKIP, Pace, Screen, Visit, Visits

if TYPE_CHECKING:                # the service imports torch; the page opens without waiting for it
    from ..service import Run, Service

__all__ = ["Handlers", "PLAIN_TOKENS", "POLL_S", "sentence_of"]

PLAIN_TOKENS = 128
CHAT_S = 0.25                    # the chat parses its Markdown anew at every update; faster costs more than it shows
POLL_S = 0.4
WRITING = {"submit_btn": False, "stop_btn": True}
MEASURING = {"submit_btn": True, "stop_btn": True}
IDLE = {"submit_btn": True, "stop_btn": False}


class Handlers:
    """The page's event functions. Their first parameter is what Gradio passes in by type, the others are component values."""

    def __init__(self, service: Service, *, archive: Archive | None = None, method: str | None = None, recordings: Path = TRACES,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """method: the one to begin with, where the service has it; None is the service's own default. recordings: their folder."""
        self.service, self.archive, self._method, self._recordings = service, archive or Archive(), method, recordings
        self._clock = clock
        self._visits = Visits()
        self.transcript = Transcript(service)

    # ---- the chat ---------------------------------------------------------------------------------------------------------------

    def ask(self, request: gr.Request, text: str, history: list[Message]) -> tuple[Any, Any]:
        """A new message, shown at once, before its turn in the queue comes. Returns updates of the text box and the chat.

        While an answer is being made nothing new is taken: the text stays in its box.
        """
        if not text or not text.strip():
            return SKIP, SKIP
        return self._take(request, history, [*self._settled(request, history), question(text)], value="")

    def ask_example(self, request: gr.Request, event: gr.SelectData, history: list[Message]) -> tuple[Any, Any]:
        text = event.value.get("text", "") if isinstance(event.value, dict) else str(event.value)
        return self._take(request, history, [*self._settled(request, history), question(text)])

    def retry(self, request: gr.Request, history: list[Message]) -> tuple[Any, Any]:
        return self._take(request, history, history[:last_question(history) + 1])

    def edit(self, request: gr.Request, event: gr.EditData, history: list[Message]) -> tuple[Any, Any]:
        """An earlier question was rewritten: what came after it is dropped and it is asked again."""
        index = event.index[0] if isinstance(event.index, (tuple, list)) else event.index
        written = history[index] | {"content": event.value}              # in the look in which it was edited
        return self._take(request, history, [*history[:index], question(text_of(written))])

    def undo(self, request: gr.Request, history: list[Message]) -> tuple[Any, Any]:
        """Takes the last question and its answer away; the question goes back into the text box."""
        visit, index = self._visits.of(request), last_question(history)
        if visit.busy or not history:
            return SKIP, SKIP
        visit.turn += 1
        visit.run, visit.chat, visit.num_dropped = None, None, 0
        visit.interrupted.set()
        return gr.update(value=text_of(history[index]), **IDLE), history[:index]

    def clear(self, request: gr.Request) -> Screen:
        return self._fresh(request, [])

    def stop(self, request: gr.Request) -> Any:
        """Ends the answer after the step in progress, or the plain measurement; a turn that still waits is not begun."""
        visit = self._visits.of(request)
        visit.stopped.set()
        visit.busy = False
        if visit.run is not None:
            visit.run.cancel()
        return gr.update(**IDLE)

    def settled(self, request: gr.Request, history: list[Message]) -> str:
        """The message for the bar after the chat was shortened."""
        return self.transcript.record(self._visits.of(request), history)

    def recall(self, request: gr.Request, event: gr.EventData) -> Screen:
        """A conversation that the browser has kept takes the chat."""
        try:
            return self._fresh(request, reopened(getattr(event, "rows", None)))
        except SpecvizError as error:
            return Screen(status=strings.status_html(f"error: {error}"))

    def change_look(self, request: gr.Request, event: gr.EventData, history: list[Message]) -> Any:
        """Plain text or Markdown, thinking open or folded. What an answer in progress writes from now on has that look too."""
        visit = self._visits.of(request)
        visit.look = Look(plain=getattr(event, "plain", None) is True, thinking=getattr(event, "thinking", None) is True)
        if visit.chat is not None and len(visit.chat) >= len(history):       # the browser's may be a moment old
            history = visit.chat
        return gr.update(value=dressed(history, visit.look), render_markdown=not visit.look.plain)

    def leave(self, request: gr.Request) -> None:
        """The page was closed."""
        self.stop(request)
        self._visits.forget(request)

    def respond(self, request: gr.Request, history: list[Message], *values: Any) -> Iterator[Screen]:
        """Answer the last question, then measure plain decoding. values: see `Settings`."""
        visit, settings = self._visits.of(request), Settings(*values)
        settings = replace(settings, method=settings.method or self.service.default_method() or "plain")     # the menu is empty at first
        if not history or history[-1]["role"] != "user":
            return
        if visit.stopped.is_set():
            yield Screen(status=strings.status_html(self.resting_line()), prompt=gr.update(**IDLE))
            return
        visit.interrupted.clear()
        visit.busy, turn = True, visit.turn
        try:
            run = self.service.submit(self.transcript.fitted(visit, settings.request(conversation(history), str(request.session_hash))))
        except Exception as error:                   # a refusal is an answer too: the conversation goes on
            visit.busy = False
            yield self.transcript.dressed(visit, self._refusal(history, error))
            return
        visit.run, visit.slicer, visit.drafted = run, Slicer(archive=self.archive, clock=self._clock), []
        visit.live = True
        try:
            for screen in self._turn(visit, run, history, settings.measure_plain):
                yield self.transcript.dressed(visit, screen) if visit.turn == turn else screen.viewer_only()
        finally:                                     # also when the page was closed
            visit.busy = visit.busy and visit.turn != turn
            visit.live = False
            if not run.reason:
                run.cancel()

    def measure_more(self, request: gr.Request, history: list[Message]) -> Iterator[Screen]:
        """Continue the plain measurement of the last answer."""
        visit = self._visits.of(request)
        if visit.run is None or visit.busy or not history or history[-1]["role"] != "assistant":
            yield Screen(more=gr.update(visible=False))
            return
        visit.stopped.clear()
        visit.interrupted.clear()
        turn, visit.live = visit.turn, True
        try:
            for screen in self._comparison(visit, visit.run, history[:last_question(history) + 1]):
                yield self.transcript.dressed(visit, screen) if visit.turn == turn else screen.viewer_only()
        finally:
            visit.live = False

    def _turn(self, visit: Visit, run: Run, history: list[Message], measure: bool) -> Iterator[Screen]:
        yield from self._answer(visit, run, history)
        if run.reason == "error":
            return
        if measure and not visit.stopped.is_set():
            yield from self._comparison(visit, run, history)
        else:
            yield self._end(visit, run, history)

    def _comparison(self, visit: Visit, run: Run, history: list[Message]) -> Iterator[Screen]:
        try:
            yield from self._measure(visit, run, history)
            yield self._end(visit, run, history)
        except Exception as error:
            yield Screen(chat=[*history, *self.transcript.reply(visit, run)], bar=True, prompt=gr.update(**IDLE),
                         more=gr.update(visible=False),
                         status=strings.status_html(f"error: {sentence_of(error)}"))

    def _answer(self, visit: Visit, run: Run, history: list[Message]) -> Iterator[Screen]:
        slicer, chat = visit.slicer, Pace(CHAT_S, self._clock)
        short, line = self._lines(visit, run)
        for message in slicer.start(start_body(run.meta, short)):
            yield Screen(viewer=message, chat=[*history, *reply("", ended=False)], bar=history,
                         status=strings.status_html(line), prompt=gr.update(**WRITING),
                         more=gr.update(visible=False))
        chat.due()
        try:
            for step in run:
                if step.kind != "prefill":
                    visit.drafted.append(_num_drafted(step))
                due = chat.due()
                if due:
                    short, line = self._lines(visit, run, step.draft_stop)
                    slicer.status(short)
                *messages, last = slicer.step(step) or [SKIP]
                for message in messages:
                    yield Screen(viewer=message)
                if due:
                    written = reply(run.text, opened=bool(run.meta.get("opens_thinking")), ended=False)
                    yield Screen(viewer=last, chat=[*history, *written], status=strings.status_html(line))
                elif last is not SKIP:
                    yield Screen(viewer=last)
        except Exception as error:
            sentence = sentence_of(error)
            for message in slicer.error(type(error).__name__, sentence):
                yield Screen(viewer=message)
            broken = reply(run.text, opened=bool(run.meta.get("opens_thinking")), error=sentence)
            yield Screen(chat=[*history, *broken], bar=True, status=strings.status_html(f"error: {sentence}"), prompt=gr.update(**IDLE))
            return
        for message in slicer.flush():
            yield Screen(viewer=message)

    def _measure(self, visit: Visit, run: Run, history: list[Message]) -> Iterator[Screen]:
        """Messages leave as often as during the answer, so that on a small machine drawing disturbs both runs alike."""
        trace, slicer = run.trace(), visit.slicer
        num_done, num_tokens = len(trace.plain), (trace.stats or {}).get("num_tokens", 0)
        goal, pace = min(num_tokens, num_done + PLAIN_TOKENS), Pace(CHAT_S, self._clock)
        if num_done >= goal:
            return
        answer = self.transcript.reply(visit, run, still_measuring=True)
        yield Screen(chat=[*history, *answer], bar=True, prompt=gr.update(**MEASURING), more=gr.update(visible=False),
                     status=strings.status_html(strings.measuring(num_done, goal)))
        visit.busy = False                           # from here on a new question is welcome
        with closing(run.measure_plain(PLAIN_TOKENS)) as tokens:
            for token in tokens:
                num_done += 1
                line = strings.measuring(num_done, goal)
                slicer.status(line)
                *messages, last = slicer.plain(token) or [SKIP]
                for message in messages:
                    yield Screen(viewer=message)
                if pace.due():
                    yield Screen(viewer=last, status=strings.status_html(line))
                elif last is not SKIP:
                    yield Screen(viewer=last)
                if visit.stopped.is_set() or visit.interrupted.is_set():
                    break
        for message in slicer.flush():
            yield Screen(viewer=message)

    def _end(self, visit: Visit, run: Run, history: list[Message]) -> Screen:
        trace = run.trace()
        stats = trace.stats or {}
        num_plain, num_tokens = len(trace.plain), stats.get("num_tokens", 0)
        short, line = self._lines(visit, run, result=strings.outcome(stats))
        [message] = visit.slicer.end({"stats": trace.stats, "compare": trace.compare, "reason": run.reason, "status": short})
        more = 0 < num_plain < num_tokens and not visit.stopped.is_set()
        return Screen(viewer=message, chat=[*history, *self.transcript.reply(visit, run)], bar=True,
                      status=strings.status_html(line), prompt=gr.update(**IDLE),
                      more=gr.update(visible=more, value=strings.continue_label(num_plain, num_tokens)))

    def _refusal(self, history: list[Message], error: Exception) -> Screen:
        sentence = sentence_of(error)
        return Screen(chat=[*history, failed(sentence)], bar=True, status=strings.status_html(self.resting_line()),
                      prompt=gr.update(**IDLE), more=gr.update(visible=False))

    # ---- the public endpoint ----------------------------------------------------------------------------------------------------

    def generate(self, prompt: str, system_prompt: str = "", method: str = "", k: int = 5, temperature: float = 0.0, seed: int = 0,
                 max_new_tokens: int = 256, verification: str = "rejection") -> Iterator[dict[str, Any]]:
        """Answer one prompt; yields {text, stats, trace}, where stats and trace are null until the last one.

        Args:
            prompt: what to answer.
            system_prompt: instructions before it; empty for none.
            method: a drafting method's name; empty for the default one.
            k: draft length.
            temperature: 0 is greedy.
            seed: any whole number.
            max_new_tokens: length limit of the answer.
            verification: how drafts are judged: rejection, shared-noise, block or typical (lossy).
        """
        run = None
        try:
            if not prompt.strip():
                raise InputError("prompt is empty; expected a text.")
            settings = Settings(system_prompt, method or self.service.default_method() or "plain", k, temperature == 0, temperature,
                                top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=seed, max_new_tokens=max_new_tokens, stop="",
                                measure_plain=False, keep_probs=False, verification=verification)
            run = self.service.submit(settings.request([{"role": "user", "content": prompt}], uuid.uuid4().hex))
            pace = Pace(CHAT_S, self._clock)
            for _ in run:
                if pace.due():
                    yield {"text": run.text, "stats": None, "trace": None}
            trace = run.trace()
            yield {"text": run.text, "stats": trace.stats, "trace": json.loads(dumps(trace))}
        except SpecvizError as error:
            raise gr.Error(str(error), print_exception=False) from error
        finally:
            if run is not None:
                run.cancel()

    # ---- controls ---------------------------------------------------------------------------------------------------------------

    def load(self) -> Iterator[tuple[Any, Any, Any]]:
        """Follow the loading of the model; yields updates of the status line, the method menu and its note, until it ends."""
        shown = None
        while True:
            status = self.service.status()
            if status.state != "loading":
                break
            line = strings.loading(status.message, status.fraction)
            if line != shown:
                yield strings.status_html(line), SKIP, SKIP
                shown = line
            time.sleep(POLL_S)
        menu = self.method_menu()
        yield strings.status_html(self.resting_line()), gr.update(**menu), self.method_note(menu["value"])

    def method_menu(self, current: str | None = None) -> dict[str, Any]:
        """Choices and value of the method menu. current: the method to stay with, where it can run."""
        methods = self.service.methods()
        names = [method.name for method in methods]
        value = self._method if self._method in names else self.service.default_method() or (names[0] if names else None)
        if current in [method.name for method in methods if method.available]:
            value = current
        return {"choices": [(strings.method_choice(method.label, method.available), method.name) for method in methods], "value": value}

    def method_note(self, name: str | None) -> str:
        for method in self.service.methods():
            if method.name == name:
                return strings.method_note(method.summary, method.reason, method.note)
        return ""

    def show_recording(self, request: gr.Request, title: str | None) -> tuple[Any, Any]:
        """A bundled run for the viewer; not while a live run is being shown. Returns updates of the viewer and the status line."""
        path = titles(self._recordings).get(title or "")
        if path is None or self._visits.of(request).live:
            return SKIP, SKIP
        try:
            return trace_message(load(path)), SKIP
        except SpecvizError as error:
            return SKIP, strings.status_html(f"error: {error}")

    def resting_line(self) -> str:
        """The status line while nothing runs."""
        status = self.service.status()
        if status.state == "failed":
            return strings.load_failed(status.message)
        if status.state == "loading":
            return strings.loading(status.message, status.fraction)
        if status.state == "unloaded":
            return strings.unloaded(status.message)
        return strings.ready(self.service.config())

    # ---- helpers ----------------------------------------------------------------------------------------------------------------

    def _take(self, request: gr.Request, history: list[Message], asked: list[Message], **prompt: Any) -> tuple[Any, Any]:
        visit = self._visits.of(request)
        if visit.busy:
            return SKIP, SKIP
        visit.turn += 1
        visit.busy, visit.chat = True, None
        visit.stopped.clear()
        self._visits.interrupt()
        return gr.update(**prompt, **WRITING), dressed(asked, visit.look)

    def _settled(self, request: gr.Request, history: list[Message]) -> list[Message]:
        """The history with the last footer as final as it will get: a new question ends the measurement that it speaks of."""
        visit = self._visits.of(request)
        if visit.run is None or visit.busy or not history or history[-1]["role"] != "assistant" or len(history[-1]["content"]) < 2:
            return history
        answer = self.transcript.reply(visit, visit.run)
        if is_failed(history[-1]) or text_of(history[-1]) != text_of(answer[-1]):
            return history
        return [*history[:last_question(history) + 1], *answer]

    def _fresh(self, request: gr.Request, history: list[Message]) -> Screen:
        """Another conversation takes the chat; a run in progress is ended."""
        self.stop(request)
        visit = self._visits.of(request)
        visit.turn += 1
        visit.run, visit.chat, visit.num_dropped = None, None, 0
        return self.transcript.dressed(visit, Screen(chat=history, bar=True, status=strings.status_html(self.resting_line()),
                                           prompt=gr.update(**IDLE), more=gr.update(visible=False)))

    def _words(self, run: Run) -> list[str]:
        config = dict(run.meta.get("config") or {})
        k = config.get("k")
        method = str(run.meta.get("method_label") or run.meta.get("method") or "")
        return [method, f"K {k}" if k else "", *strings.configuration({"target": run.meta.get("target")} | config)]

    def _lines(self, visit: Visit, run: Run, draft_stop: str = "", result: Sequence[str] | None = None) -> tuple[str, str]:
        """The status line without and with the configuration: the viewer shows the configuration by itself."""
        state = strings.speculation_state(str(run.meta.get("method")), visit.drafted, draft_stop)
        if result is None:
            result = strings.progress(len(visit.drafted), run.trace().stats if visit.drafted else None)
        result = [strings.verification_word(run.meta), *result]
        return strings.status_line(state, result), strings.status_line(state, [*self._words(run), *result])


def sentence_of(error: Exception) -> str:
    """What the page says of an error. Errors that nobody foresaw also go to the terminal, with their origin."""
    if isinstance(error, SpecvizError):
        return str(error)
    traceback.print_exception(error, file=sys.stderr)
    return f"The engine met an unexpected error ({type(error).__name__}: {error}). The terminal shows where; the conversation can go on."


def _num_drafted(step: StepTrace) -> int:
    return len(step.nodes) if step.num_drafted is None else step.num_drafted
