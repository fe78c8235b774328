"""What happens when someone writes, stops, retries, undoes or edits: generators over `service.submit()` that yield screen updates.

It knows nothing of layout, models or drafting methods, and never times anything itself: steps carry the engine's own times.
"""
from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from ..errors import InputError, SpecvizError
from ..limits import Limits, Turnstile
from ..trace import dumps, load
from . import strings
from .comparison import Wanted, compare
from .conversations import reopened
from .messages import Look, Message, conversation, dressed, is_failed, last_question, question, text_of
from .method_options import MethodOptions
from .recordings import TRACES, titles
from .settings import Settings
from .slicer import Archive, Slicer, encode
from .transcript import Transcript
from .turns import CHAT_S, IDLE, POLL_S, WRITING, Turns
from .viewer import trace_message
from .visits import SKIP, Pace, Screen, Visits

if TYPE_CHECKING:                # the service imports torch; the page opens without waiting for it
    from ..service import Service

__all__ = ["Handlers"]

QUIET_S = 3.0


class Handlers:
    """The page's event functions. Their first parameter is what Gradio passes in by type, the others are component values."""

    def __init__(self, service: Service, *, archive: Archive | None = None, method: str | None = None, recordings: Path = TRACES,
                 options: Sequence[tuple[str, str]] = (), clock: Callable[[], float] = time.monotonic, limits: Limits = Limits(),
                 one_at_a_time: bool = False) -> None:
        """method: the one to begin with, where the service has it; None is the service's own default. options: its own, to begin with.
        recordings: their folder. limits: what one visitor may take. one_at_a_time: the page's queue lets one visitor's turn, plain
        measurement included, begin when that of the one before has ended."""
        self.service, self.archive, self._method, self._recordings = service, archive or Archive(limits.runs_kept), method, recordings
        self._clock, self._one_at_a_time = clock, one_at_a_time
        self._visits, self._turnstile = Visits(forget_s=60 * limits.forget_minutes), Turnstile(limits.per_minute)
        self.transcript = Transcript(service, limits.prompt_tokens)
        self.turns = Turns(self.transcript, clock, self.resting_line)
        self.options = MethodOptions(service, options, lambda: self._method or service.default_method())

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
        self._forget(str(request.session_hash))
        self._sweep()

    def _sweep(self) -> None:
        """Forget who has been silent for too long."""
        for visitor in self._visits.expired():
            self._forget(visitor)

    def _forget(self, visitor: str) -> None:
        """Nothing of a visitor stays: neither the records of runs nor what the engine has read."""
        self.archive.forget(visitor)
        self.service.forget(visitor)

    def respond(self, request: gr.Request, history: list[Message], *values: Any) -> Iterator[Screen]:
        """Answer the last question, then measure plain decoding. values: see `Settings`; behind them what `MethodOptions.read` takes."""
        visit, settings = self._visits.of(request), Settings(*values[:Settings.num_controls()])
        method = settings.method or self.service.default_method() or "plain"     # the menu is empty at first
        settings = replace(settings, method=method, options=self.options.read(method, values[Settings.num_controls():]))
        if not history or history[-1]["role"] != "user":
            return
        if visit.stopped.is_set():
            yield Screen(status=strings.status_html(self.resting_line()), prompt=gr.update(**IDLE))
            return
        visit.quiet.wait(QUIET_S)                    # the turn before lets go of the viewer as soon as it notices
        visit.interrupted.clear()
        visit.busy, turn = True, visit.turn
        try:
            self._turnstile.enter(str(request.session_hash))
            run = self.service.submit(self.transcript.fitted(visit, settings.request(conversation(history), str(request.session_hash))))
        except Exception as error:                   # a refusal is an answer too: the conversation goes on
            visit.busy = False
            yield self.transcript.dressed(visit, self.turns.refusal(history, error))
            return
        visit.run, visit.drafted = run, []
        visit.slicer = Slicer(archive=self.archive, clock=self._clock, owner=str(request.session_hash))
        visit.quiet.clear()
        try:
            for screen in self.turns.turn(visit, run, history, settings.measure_plain):
                yield self.transcript.dressed(visit, screen) if visit.turn == turn else screen.viewer_only()
        finally:                                     # also when the page was closed
            visit.busy = visit.busy and visit.turn != turn
            visit.quiet.set()
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
        turn = visit.turn
        visit.quiet.clear()
        try:
            for screen in self.turns.comparison(visit, visit.run, history[:last_question(history) + 1]):
                yield self.transcript.dressed(visit, screen) if visit.turn == turn else screen.viewer_only()
        finally:
            visit.quiet.set()

    # ---- several methods ------------------------------------------------------------------------------------------------------------

    def compare(self, request: gr.Request, event: gr.EventData, *values: Any) -> Iterator[Screen]:
        """One prompt through several methods, in the settings of the page but for the prompt and the length."""
        visit, ticket = self._visits.of(request), getattr(event, "ticket", 0)

        def told(body: dict[str, Any]) -> Screen:
            return Screen(viewer=encode({"v": 1, "type": "compare", "ticket": ticket} | body))
        try:
            wanted = Wanted.read(event, self.service.methods())
            self._turnstile.enter(str(request.session_hash))
            settings = Settings(*values[:Settings.num_controls()])
            requests = [replace(settings, method=method.name, max_new_tokens=wanted.num_tokens,
                                options=self.options.read(method.name, values[Settings.num_controls():]))
                        .request([{"role": "user", "content": wanted.prompt}], "") for method in wanted.methods]
        except SpecvizError as error:
            yield told({"state": "failed", "message": str(error)})
            return
        with closing(compare(self.service, wanted, requests, lambda: ticket in visit.halted, self._clock)) as bodies:
            for body in bodies:
                yield told(body)

    def halt(self, request: gr.Request, event: gr.EventData) -> None:
        """End a comparison, whether it has begun or waits for its turn."""
        if isinstance(ticket := getattr(event, "ticket", None), int):
            self._visits.of(request).halted.add(ticket)

    # ---- the public endpoint ----------------------------------------------------------------------------------------------------

    def generate(self, request: gr.Request, prompt: str, system_prompt: str = "", method: str = "", k: int = 5, temperature: float = 0.0,
                 seed: int = 0, max_new_tokens: int = 256, verification: str = "rejection", options: dict[str, Any] | None = None
                 ) -> Iterator[dict[str, Any]]:
        """Answer one prompt; yields {text, stats, trace}, where stats and trace are null until the last one.

        Args:
            prompt: what to answer.
            system_prompt: instructions before it; empty for none.
            method: a drafting method's name; empty for the default one.
            k: draft length; 0 lets the engine choose it step by step.
            temperature: 0 is greedy.
            seed: any whole number.
            max_new_tokens: length limit of the answer.
            verification: how drafts are judged: rejection, shared-noise, block or typical (lossy).
            options: the method's own, by name; null for its defaults. A wrong name is answered by a list.
        """
        run, conversation = None, uuid.uuid4().hex
        try:
            if not prompt.strip():
                raise InputError("prompt is empty; expected a text.")
            self._turnstile.enter(str(request.session_hash))
            settings = Settings(system_prompt, method or self.service.default_method() or "plain", k or 5, temperature == 0, temperature,
                                top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=seed, max_new_tokens=max_new_tokens, stop="",
                                measure_plain=False, keep_probs=False, verification=verification, options=_pairs(options), auto_k=k == 0)
            run = self.service.submit(settings.request([{"role": "user", "content": prompt}], conversation))
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
                self.service.forget(conversation)

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

    def refreshed(self, request: gr.Request, current: str | None) -> tuple[Any, Any, Any]:
        """Updates of the method menu, its note and the status line, for a page that was open while another one changed the model."""
        visit, number = self._visits.of(request), self.service.status().number
        if visit.pair == number or not self.service.methods():
            return SKIP, SKIP, SKIP
        is_first, visit.pair = visit.pair is None, number
        menu = self.method_menu(current)
        line = SKIP if is_first or visit.busy or visit.live else strings.status_html(self.resting_line())
        return gr.update(**menu), self.method_note(menu["value"]), line

    def method_note(self, name: str | None) -> str:
        for method in self.service.methods():
            if method.name == name:
                return strings.method_note(method.summary, method.reason, method.note)
        return ""

    def is_decided_here(self, name: str | None) -> bool:
        """Whether the page's draft length, options and verification mean anything to a method."""
        return not any(method.fixed for method in self.service.methods() if method.name == name)

    def is_comparable(self, name: str | None) -> bool:
        """Whether plain decoding can be measured beside a method; yes while it is not known."""
        return all(method.comparable for method in self.service.methods() if method.name == name)

    def show_recording(self, request: gr.Request, title: str | None) -> tuple[Any, Any]:
        """A bundled run for the viewer; not while a live run is being shown. Returns updates of the viewer and the status line."""
        path = titles(self._recordings).get(title or "")
        if path is None or self._visits.of(request).live:
            return SKIP, SKIP
        try:
            return trace_message(load(path), name=path.stem), SKIP
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
        measuring = status.message.removeprefix("Ready. ") if status.message.startswith("Ready. ") else ""
        return " · ".join(filter(None, [strings.ready(self.service.config()), measuring.rstrip(".")]))

    # ---- helpers ----------------------------------------------------------------------------------------------------------------

    def _take(self, request: gr.Request, history: list[Message], asked: list[Message], **prompt: Any) -> tuple[Any, Any]:
        visit = self._visits.of(request)
        if visit.busy:
            return SKIP, SKIP
        visit.turn += 1
        visit.busy, visit.chat = True, None
        visit.stopped.clear()
        visit.interrupted.set()
        if self._one_at_a_time:
            self._visits.interrupt()
        self._sweep()
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



def _pairs(options: Any) -> tuple[tuple[str, Any], ...]:
    if options is not None and not isinstance(options, dict):
        raise InputError(f"options is {options!r}; expected an object of names and values.")
    return tuple((options or {}).items())
