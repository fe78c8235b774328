"""llama.cpp's stream: one event per token, with cumulative timings that change exactly once per verification step.

It knows no network. Needs the request field `timings_per_token`; without it, tokens that arrive together are taken as one step.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..trace import StepTrace
from .reading import Ending, RemoteError, Tokens, aggregated, emitted, error_text, text_of

__all__ = ["TimingsReader"]

BURST_S = 0.004               # without timings: tokens closer than this, or than a fifth of the longest gap, came from one step


class TimingsReader:
    """See `reading.Reader`. Steps are exact where the server sends timings with each token."""

    def __init__(self) -> None:
        self._steps: list[StepTrace] = []
        self._open: tuple[tuple[float, int], Mapping[str, Any], float, list[str]] | None = None     # the step being read
        self._before = (0, 0, 0, 0.0)            # predicted_n, draft_n, draft_n_accepted, predicted_ms of the last closed step
        self._pieces: list[tuple[str, float]] = []
        self._reason, self._prompt, self._first_s = "eos", None, 0.0
        self._last: Mapping[str, Any] = {}
        self.text = ""

    def feed(self, event: Mapping[str, Any], arrival_s: float) -> list[StepTrace]:
        if message := error_text(event):
            raise RemoteError("server", f"The server ended the answer with an error: {message}")
        self._note(event)
        text = self._text(event)
        self.text += text
        if text:
            self._pieces.append((text, arrival_s))
        timings = event.get("timings")
        if not isinstance(timings, Mapping) or not timings.get("predicted_n"):
            return []
        is_live = bool(event.get("choices")) or "content" in event and not event.get("stop")
        if not self._steps and self._open is None and not is_live:      # only the end has timings: totals, no steps
            self._last = timings
            return []
        self._last = timings
        key = (timings["predicted_ms"], timings.get("draft_n", 0))
        done = []
        if self._open and key != self._open[0]:
            done = self._close()
        if self._open is None:
            self._open = (key, timings, arrival_s, [])
        self._open = (key, timings, self._open[2], [*self._open[3], text] if text else self._open[3])
        return done

    def finish(self) -> Ending:
        if self._open:
            self._close()
        if self._steps:
            return Ending(tuple(self._steps), self._reason, self._prompt, {"timings": dict(self._last)})
        return self._from_bursts()

    def _note(self, event: Mapping[str, Any]) -> None:
        usage = event.get("usage")
        if isinstance(usage, Mapping) and isinstance(usage.get("prompt_tokens"), int):
            self._prompt = usage["prompt_tokens"]
        if isinstance(event.get("tokens_evaluated"), int):
            self._prompt = event["tokens_evaluated"]
        choices = event.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) and choices[0].get("finish_reason"):
            self._reason = "length" if choices[0]["finish_reason"] == "length" else "eos"
        if event.get("stop_type"):
            self._reason = {"limit": "length", "word": "stop"}.get(event["stop_type"], "eos")

    @staticmethod
    def _text(event: Mapping[str, Any]) -> str:
        choices = event.get("choices")
        if isinstance(choices, list):
            return text_of(choices[0]) if choices and isinstance(choices[0], Mapping) else ""
        return event["content"] if isinstance(event.get("content"), str) else ""

    def _close(self) -> list[StepTrace]:
        """End the step being read; two records where held-back UTF-8 merged the prefill's token into the first step."""
        (key, timings, arrival_s, pieces), self._open = self._open, None
        count, drafts = timings["predicted_n"], timings.get("draft_n", 0)
        accepted, took_ms = timings.get("draft_n_accepted", 0), timings["predicted_ms"]
        num_new, num_drafted, num_accepted = count - self._before[0], drafts - self._before[1], accepted - self._before[2]
        if num_new <= 0 and num_drafted <= 0:
            return []
        done = []
        if not self._steps:
            self._first_s = arrival_s
            prompt_ms = float(timings.get("prompt_ms", 1000 * arrival_s))
            merged = num_drafted > 0
            tokens = Tokens(1, ("",) if merged else tuple(pieces) or ("",))
            done.append(StepTrace("prefill", -prompt_ms, 0.0, prompt_ms, 0.0, emitted=emitted(tokens, 0, 0), server_ms=prompt_ms,
                                  num_prompt_tokens=int(timings.get("prompt_n", 0)), num_reused=int(timings.get("cache_n", 0))))
            if merged:
                num_new -= 1
        if self._steps or num_drafted > 0:
            tokens = Tokens(num_new, tuple(pieces) if len(pieces) == num_new else ("".join(pieces),))
            done.append(StepTrace("spec" if num_drafted else "plain", self._before[3], 0.0, max(0.0, took_ms - self._before[3]), 0.0,
                                  emitted=emitted(tokens, num_accepted, num_drafted), server_ms=max(0.0, took_ms - self._before[3]),
                                  num_drafted=num_drafted, num_accepted=num_accepted))
        self._before = (count, drafts, accepted, took_ms)
        self._steps += done
        return done

    def _from_bursts(self) -> Ending:
        """No timings per token: the totals are the server's, the borders a guess from the moments of arrival."""
        gaps = [later - earlier for (_, earlier), (_, later) in zip(self._pieces, self._pieces[1:])]
        border = max(BURST_S, 0.2 * max(gaps, default=0.0))
        groups: list[list[tuple[str, float]]] = []
        for index, piece in enumerate(self._pieces):
            if index < 2 or gaps[index - 1] >= border:           # the first token is the prefill's
                groups.append([])
            groups[-1].append(piece)
        steps, first_s = [], self._pieces[0][1] if self._pieces else 0.0
        for index, group in enumerate(groups):
            tokens, at_s = Tokens(len(group), tuple(text for text, _ in group)), group[0][1]
            before_s = groups[index - 1][0][1] if index else 0.0
            steps.append(StepTrace("spec" if index and len(group) > 1 else "unknown" if index else "prefill",
                                   1000 * (before_s - first_s), 0.0, 1000 * (at_s - before_s), 0.0, source="inferred",
                                   emitted=emitted(tokens, len(group) - 1 if len(group) > 1 else None, None if index else 0)))
        notes = ["Steps are guessed from the moments at which tokens arrived (timings_per_token was not honoured)."]
        timings = dict(self._last)
        if "draft_n" in timings:
            notes.append(f"The server's own totals: {timings.get('draft_n_accepted', 0)} of {timings['draft_n']} drafted tokens accepted.")
        return Ending(tuple(steps), self._reason, self._prompt, {"timings": timings}, tuple(notes))
