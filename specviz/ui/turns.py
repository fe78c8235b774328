"""One turn of the chat as screen updates: its place in the queue, the answer step by step, then plain decoding for comparison.

It knows nothing of events or components, decides nothing about who may ask, and never times anything itself.
"""
from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import gradio as gr

from ..errors import SpecvizError
from ..trace import PlainToken, StepTrace
from . import strings
from .messages import Message, failed, reply
from .transcript import Transcript
from .viewer import start_body, trace_body
from .visits import SKIP, Pace, Screen, Visit

if TYPE_CHECKING:                # the service imports torch; the page opens without waiting for it
    from ..service import Run

__all__ = ["CHAT_S", "IDLE", "POLL_S", "Turns", "WRITING", "sentence_of"]

PLAIN_TOKENS = 128
CHAT_S = 0.25                    # the chat parses its Markdown anew at every update; faster costs more than it shows
POLL_S = 0.4
FIRST_S = 0.15
PATIENCE_S = 300.0               # how long a plain measurement waits for its turn; a button goes on with it later
WRITING = {"submit_btn": False, "stop_btn": True}
MEASURING = {"submit_btn": True, "stop_btn": True}
IDLE = {"submit_btn": True, "stop_btn": False}


class Turns:
    """Generators of updates; what belongs to a visitor is in the `Visit`."""

    def __init__(self, transcript: Transcript, clock: Callable[[], float], resting_line: Callable[[], str]) -> None:
        """resting_line: the status line while nothing runs."""
        self.transcript, self._clock, self._resting_line = transcript, clock, resting_line

    def turn(self, visit: Visit, run: Run, history: list[Message], measure: bool) -> Iterator[Screen]:
        """The place in the queue, the answer, and, if `measure`, plain decoding."""
        shown = 0
        while not run.wait(POLL_S if shown else FIRST_S):
            if not run.place:                        # nobody is before it: a long prompt is being read
                break
            if run.place != shown:
                shown = run.place
                yield Screen(status=strings.status_html(strings.waiting(shown)), prompt=gr.update(**WRITING), more=gr.update(visible=False))
        if shown and run.reason == "cancelled":      # nothing was begun
            yield Screen(chat=[*history, failed(strings.GAVE_UP)], bar=True, status=strings.status_html(self._resting_line()),
                         prompt=gr.update(**IDLE))
            return
        yield from self._answer(visit, run, history)
        if run.reason == "error":
            return
        if measure and not visit.stopped.is_set():
            yield from self.comparison(visit, run, history)
        else:
            yield self._end(visit, run, history)

    def comparison(self, visit: Visit, run: Run, history: list[Message]) -> Iterator[Screen]:
        """Plain decoding, measured or gone on with, and the end of the turn."""
        try:
            yield from self._measure(visit, run, history)
            yield self._end(visit, run, history, measured=True)
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
        visit.busy, waiting_since_s = False, None    # from here on a new question is welcome
        with closing(run.measure_plain(PLAIN_TOKENS)) as tokens:
            for token in tokens:
                if isinstance(token, PlainToken):
                    num_done, waiting_since_s = num_done + 1, None
                    line = strings.measuring(num_done, goal)
                    slicer.status(line)
                    *messages, last = slicer.plain(token) or [SKIP]
                    for message in messages:
                        yield Screen(viewer=message)
                    if pace.due():
                        yield Screen(viewer=last, status=strings.status_html(line))
                    elif last is not SKIP:
                        yield Screen(viewer=last)
                else:
                    line, waiting_since_s = strings.waiting_alone(token.num_answers, num_done, goal), waiting_since_s or self._clock()
                    yield Screen(status=strings.status_html(line))
                if visit.stopped.is_set() or visit.interrupted.is_set() or waiting_since_s and self._clock() - waiting_since_s > PATIENCE_S:
                    break
        for message in slicer.flush():
            yield Screen(viewer=message)

    def _end(self, visit: Visit, run: Run, history: list[Message], measured: bool = False) -> Screen:
        """measured: plain decoding was to be measured, so that what is missing of it can be asked for."""
        trace = run.trace()
        stats = trace.stats or {}
        num_plain, num_tokens = len(trace.plain), stats.get("num_tokens", 0)
        short, line = self._lines(visit, run, result=strings.outcome(stats))
        if "remote" in trace.meta:                   # the last event told more of the earlier steps
            notes = " ".join([trace.meta["remote"]["unknown"], *trace.meta["remote"].get("notes", ())])
            [message] = visit.slicer.trace(trace_body(trace, short, note=notes))
        else:
            [message] = visit.slicer.end({"stats": trace.stats, "compare": trace.compare, "reason": run.reason, "status": short})
        more = (0 < num_plain or measured) and num_plain < num_tokens and not visit.stopped.is_set() and "remote" not in trace.meta
        return Screen(viewer=message, chat=[*history, *self.transcript.reply(visit, run)], bar=True,
                      status=strings.status_html(line), prompt=gr.update(**IDLE),
                      more=gr.update(visible=more, value=strings.continue_label(num_plain, num_tokens)))

    def refusal(self, history: list[Message], error: Exception) -> Screen:
        """A question that is not answered; the conversation goes on."""
        sentence = sentence_of(error)
        return Screen(chat=[*history, failed(sentence)], bar=True, status=strings.status_html(self._resting_line()),
                      prompt=gr.update(**IDLE), more=gr.update(visible=False))

    def _words(self, run: Run) -> list[str]:
        config = dict(run.meta.get("config") or {})
        k = config.get("k")
        method = str(run.meta.get("method_label") or run.meta.get("method") or "")
        length = strings.AUTO_K_WORD if config.get("auto_k") else f"K {k}" if k else ""
        return [method, length, strings.option_words(config), *strings.configuration({"target": run.meta.get("target")} | config)]

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
