"""Streams with one chunk per engine step: vLLM, SGLang, TensorRT-LLM and our own server. It knows no network.

A chunk of n tokens is a step that accepted n - 1 drafts; a chunk of one may be a plain step or a draft rejected whole, which only the
end of the stream can tell. The rules are those of the engines' own counting (vLLM's scheduler counts before a cut at a stop).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..trace import StepTrace
from .reading import Ending, RemoteError, Tokens, aggregated, emitted, error_text, text_of

__all__ = ["ChunkReader", "reconciled"]

REASONS = {"stop": "eos", "length": "length", "abort": "cancelled", "tool_calls": "eos", "content_filter": "stop"}


@dataclass(frozen=True, slots=True)
class _Chunk:
    tokens: Tokens
    arrival_s: float


class ChunkReader:
    """See `reading.Reader`. always_drafts: this server drafts in every step, so that a chunk of one token is a draft rejected whole."""

    def __init__(self, *, always_drafts: bool = False) -> None:
        self._always_drafts = always_drafts
        self._chunks: list[_Chunk] = []
        self._used = 0
        self._reason, self._stop_reason = "eos", None
        self._prompt: int | None = None
        self._server: dict[str, Any] = {}
        self.text = ""
        self._counted = True                    # every chunk told how many tokens it holds

    def feed(self, event: Mapping[str, Any], arrival_s: float) -> list[StepTrace]:
        if message := error_text(event):
            raise RemoteError("server", f"The server ended the answer with an error: {message}")
        usage = event.get("usage")
        if isinstance(usage, Mapping) and isinstance(usage.get("prompt_tokens"), int):
            self._prompt = usage["prompt_tokens"]
        for key in ("metrics", "sglext", "timings", "stats"):
            if isinstance(event.get(key), Mapping):
                self._server[key] = dict(event[key])
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else None
        if choice is None:
            return []
        if reason := choice.get("finish_reason"):
            self._reason = REASONS.get(reason, "eos")
            if reason == "stop" and isinstance(choice.get("stop_reason"), str):
                self._reason = "stop"
        for key in ("speculative_decoding", "avg_decoded_tokens_per_iter"):
            if choice.get(key) is not None:
                self._server[key] = choice[key]
        self.text += text_of(choice)
        tokens = self._tokens(choice, usage)
        if not tokens.count:
            return []
        self._chunks.append(_Chunk(tokens, arrival_s))
        return [self._step(len(self._chunks) - 1)]

    def _tokens(self, choice: Mapping[str, Any], usage: Any) -> Tokens:
        text, ids = text_of(choice), choice.get("token_ids") or ()
        ids = tuple(ids) if isinstance(ids, list) and all(isinstance(number, int) for number in ids) else ()
        entries = (choice.get("logprobs") or {}).get("content") if isinstance(choice.get("logprobs"), Mapping) else None
        entries = [entry for entry in entries or () if isinstance(entry, Mapping)]
        used = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
        grown = used - self._used if isinstance(used, int) else None
        self._used = used if isinstance(used, int) else self._used
        count = len(ids) or (grown if grown is not None else len(entries))
        if not count and text and grown is None:
            count, self._counted = 1, False      # a server that counts nothing: a chunk is all that is known
        texts = choice.get("token_texts")          # our own server tells them beside the ids
        if isinstance(texts, list) and len(texts) == count:
            return Tokens(count, tuple(map(_text, texts)), ids)
        names = tuple(_text(entry.get("token")) for entry in entries)
        pieces = names if len(names) == count and "".join(names).startswith(text) and text else (text,)
        if len(pieces) > 1 and "".join(pieces) != text:          # the end token has a name and adds no text
            pieces = (*pieces[:-1], text[len("".join(pieces[:-1])):])
        return Tokens(max(0, count), pieces, ids)

    def _step(self, index: int) -> StepTrace:
        chunk, first = self._chunks[index], self._chunks[0]
        if index == 0:
            return StepTrace("prefill", -1000 * chunk.arrival_s, 0.0, 1000 * chunk.arrival_s, 0.0, source="inferred",
                             emitted=emitted(chunk.tokens, 0, 0), num_prompt_tokens=self._prompt or 0)
        before = self._chunks[index - 1]
        count = chunk.tokens.count
        accepted = count - 1 if count > 1 or self._always_drafts else None
        return StepTrace("spec" if accepted is not None else "unknown", 1000 * (before.arrival_s - first.arrival_s), 0.0,
                         1000 * max(0.0, chunk.arrival_s - before.arrival_s), 0.0, source="inferred",
                         emitted=emitted(chunk.tokens, accepted, None), num_accepted=None)

    def finish(self) -> Ending:
        steps = [self._step(index) for index in range(len(self._chunks))]
        record, notes = self._record(), []
        if not self._counted:
            notes.append("This server does not say how many tokens a chunk holds, so there is no step view.")
            return Ending(aggregated(steps, *_totals(record or {})), self._reason, self._prompt, self._server, tuple(notes))
        final: Sequence[StepTrace] = steps
        counted: tuple[tuple[int, int], ...] = ()
        if record:
            accepted = record.get("all_steps_accepted", record.get("per_step_accepted"))       # our own server also tells plain steps
            drafted = record.get("all_steps_drafted", record.get("per_step_drafted"))
            if _are_counts(accepted) and _are_counts(drafted):
                counted = tuple((size, hits) for size, hits in zip(drafted, accepted) if size)
                known = reconciled(steps[1:], [chunk.tokens for chunk in self._chunks[1:]], accepted, drafted)
                if known is None:
                    notes.append("Chunks were merged on the way, so the borders of the steps are lost; totals are the server's own.")
                    final = aggregated(steps, sum(drafted), sum(accepted))
                else:
                    final = [*steps[:1], *known]
                    if any(step.kind == "unknown" for step in known):
                        notes.append("Some steps of one token had a draft that was rejected whole; which ones is not told. Totals are the "
                                     "server's own.")
            else:
                largest = _first(record, "num_spec_tokens")
                merged = largest is not None and any(chunk.tokens.count > largest + 1 for chunk in self._chunks[1:])
                notes.append("This server tells totals, not the order of its steps; accepted tokens of a step are taken from its chunk."
                             if not merged else "Chunks were merged on the way; totals are the server's own.")
                if merged:
                    final = aggregated(steps, *_totals(record))
        elif len(self._chunks) > 1:
            notes.append("This server does not tell how many tokens were drafted.")
        return Ending(tuple(final), self._reason, self._prompt, self._server, tuple(notes), counted)

    def _record(self) -> Mapping[str, Any] | None:
        """The server's account of its speculation, wherever it puts it."""
        for place in (self._server.get("metrics", {}).get("speculative_decoding"), self._server.get("speculative_decoding"),
                      self._server.get("sglext", {}).get("spec_tokens_details"), self._server.get("stats")):
            if isinstance(place, Mapping):
                return place
        return None


def reconciled(steps: Sequence[StepTrace], tokens: Sequence[Tokens], accepted: list[int], drafted: list[int]) -> list[StepTrace] | None:
    """The steps after the prefill with the server's own counts per drafting step, or None where chunks and counts do not fit.

    Equal lengths match one to one. Otherwise steps without a draft are missing in the arrays: chunks of several tokens take the entries
    above zero in order. Between two of these, chunks of one token are known only where all of them were drafts, or none.
    """
    if len(accepted) != len(drafted) or len(accepted) > len(steps):
        return None
    counts = [each.count for each in tokens]
    if len(accepted) == len(steps):
        fits = all(count == hits + 1 or i == len(steps) - 1 and count <= hits + 1 for i, (count, hits) in enumerate(zip(counts, accepted)))
        return [_exact(*entry) for entry in zip(steps, tokens, accepted, drafted)] if fits else None
    entries = [i for i, hits in enumerate(accepted) if hits > 0]
    chunks = [i for i, count in enumerate(counts) if count > 1]
    if len(entries) == len(chunks) + 1 and counts[-1] == 1:            # the last one was cut down to one token
        chunks.append(len(counts) - 1)
    if len(entries) != len(chunks) or any(counts[at] != accepted[i] + 1 and not (at == len(counts) - 1 and counts[at] <= accepted[i] + 1)
                                          for i, at in zip(entries, chunks)):
        return None
    done = list(steps)
    for i, at in zip(entries, chunks):
        done[at] = _exact(steps[at], tokens[at], accepted[i], drafted[i])
    for (i, at), (next_i, next_at) in pairwise([(-1, -1), *zip(entries, chunks), (len(accepted), len(steps))]):
        singles, sizes = range(at + 1, next_at), drafted[i + 1:next_i]
        if len(sizes) > len(singles):
            return None
        if not sizes or len(sizes) == len(singles):
            for place, size in zip(singles, sizes or [0] * len(singles)):
                done[place] = _exact(steps[place], tokens[place], 0, size)
    return done


def _exact(step: StepTrace, tokens: Tokens, num_accepted: int, num_drafted: int) -> StepTrace:
    return replace(step, kind="spec" if num_drafted else "plain", source="exact", num_accepted=num_accepted, num_drafted=num_drafted,
                   emitted=emitted(tokens, num_accepted, num_drafted))


def _totals(record: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """(drafted, accepted) of a whole answer under the names of vLLM, TensorRT-LLM, SGLang and LM Studio."""
    return (_first(record, "num_draft_tokens", "total_draft_tokens", "spec_num_proposed_drafts", "total_draft_tokens_count"),
            _first(record, "num_accepted_draft_tokens", "total_accepted_draft_tokens", "spec_num_correct_drafts",
                   "accepted_draft_tokens_count"))


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and each >= 0 for each in value)


def _first(record: Mapping[str, Any], *names: str) -> int | None:
    return next((record[name] for name in names if isinstance(record.get(name), int)), None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
