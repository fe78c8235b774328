"""The target writes its own training texts: batches of conversations, with token ids and states kept. It knows nothing of drafters.

Shard k depends on the seed and k alone, so an interrupted run goes on where it stopped and ends with the same files.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..engine.model import FINAL, LanguageModel
from ..text import TextCodec
from .batched import Batch, read_texts
from .prompts import Job, Prompts, part_of
from .store import Store, Text

__all__ = ["Writer", "fill", "restore"]

_MAX_PROMPT = 700              # tokens
_INVENTED = 80                 # tokens of a question that the target invents
_LOOP, _REPEATS = 8, 3         # a text ends at the first n-gram of this length that stands in it so many times


@dataclass(slots=True)
class _Row:
    """One answer being written. states: of every token so far, the last excepted."""
    tokens: list[int]
    start: int
    temperature: float
    index: int
    states: list[Tensor] = field(default_factory=list)
    grams: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def loops(self) -> bool:
        if len(self.tokens) - self.start < _LOOP:
            return False
        gram = tuple(self.tokens[-_LOOP:])
        self.grams[gram] += 1
        return self.grams[gram] >= _REPEATS


class Writer:
    """Writes answers with one target. ends: ids that end an answer. taps: whose states are kept, see `LanguageModel.forward`.

    limit: tokens of an answer. dtype: of the cache of keys and values while writing.
    """

    def __init__(self, target: LanguageModel, codec: TextCodec, ends: frozenset[int], *, taps: Sequence[int] = (FINAL,), limit: int = 256,
                 dtype: torch.dtype | None = None) -> None:
        self.target, self.codec, self.ends, self.taps, self.limit, self.dtype = target, codec, ends, tuple(taps), limit, dtype

    def conversations(self, jobs: Sequence[Job], seed: int, part: str) -> list[Text]:
        """Write all of them: questions that are invented, answers, second answers. part: invented questions of other parts are dropped."""
        generator = torch.Generator(self.target.device).manual_seed(seed)
        jobs = self._with_questions(jobs, generator, part)
        prompts = [self.codec.render([{"role": "user", "content": job.prompt}]) for job in jobs]
        going = [i for i, prompt in enumerate(prompts) if len(prompt) <= _MAX_PROMPT]
        first = self.answers([prompts[i] for i in going], [jobs[i].temperature for i in going], generator)
        texts, again = {}, []
        for i, (tokens, states) in zip(going, first):
            job = jobs[i]
            texts[i] = Text(tokens, ((len(prompts[i]), len(tokens)),), job.category, job.source, job.temperature, states)
            if job.follow_up and int(tokens[-1]) in self.ends:
                again.append(i)
        follow = []
        for i in again:
            question = self.codec.render([{"role": "user", "content": jobs[i].prompt}, {"role": "assistant", "content": "x"},
                                          {"role": "user", "content": jobs[i].follow_up}])
            shared = self.codec.render([{"role": "user", "content": jobs[i].prompt}])
            rest = question[len(shared):]
            rest = rest[next(at for at, token in enumerate(rest) if token in self.ends) + 1:]
            follow.append([*texts[i].tokens.tolist(), *rest])
        kept = [at for at, prompt in enumerate(follow) if len(prompt) <= _MAX_PROMPT]
        second = self.answers([follow[at] for at in kept], [jobs[again[at]].temperature for at in kept], generator)
        for at, (tokens, states) in zip(kept, second):
            i = again[at]
            texts[i] = replace(texts[i], tokens=tokens, answers=(*texts[i].answers, (len(follow[at]), len(tokens))),
                               category=jobs[i].follow_up_category, states=states)
        return [texts[i] for i in sorted(texts)]

    def _with_questions(self, jobs: Sequence[Job], generator: torch.Generator, part: str) -> list[Job]:
        """Let the target write the questions that are not there yet; without those that are too short, too long, unfinished or double."""
        asked = [i for i, job in enumerate(jobs) if job.invents]
        opening = self.codec.render([{"role": "user", "content": "x"}])
        mark = self.codec.encode("x")[0]
        opening = opening[:len(opening) - 1 - opening[::-1].index(mark)]
        prompts = [[*opening, *self.codec.encode(jobs[i].prompt)] for i in asked]
        written = self.answers(prompts, [1.0] * len(asked), generator, limit=_INVENTED, floor=0.02)
        known, found = set(), {}
        for i, prompt, (tokens, _) in zip(asked, prompts, written):
            question = self.codec.decode(tokens[len(opening):].tolist()).strip()
            grams = {question[at:at + 40] for at in range(0, max(1, len(question) - 40))}
            good = int(tokens[-1]) in self.ends and 12 <= len(question) <= 400 and not grams & known
            if good and part_of(question, jobs[i].category) == part:
                known |= grams
                found[i] = replace(jobs[i], prompt=question)
        return [found.get(i, job) for i, job in enumerate(jobs) if i in found or not job.invents]

    def answers(self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], generator: torch.Generator, *, limit: int | None = None,
                floor: float = 0.0) -> list[tuple[np.ndarray, np.ndarray]]:
        """(tokens, states) of every prompt with its answer. floor: tokens less probable than this share of the best one are never drawn."""
        if not prompts:
            return []
        limit = limit or self.limit
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        rows = [_Row(list(prompts[i]), len(prompts[i]), temperatures[i], i) for i in order]
        batch = Batch(self.target, [row.tokens for row in rows], self.taps, self.dtype)
        logits, states = batch.read([row.tokens for row in rows])
        for row, state in zip(rows, states):
            row.states.append(state.half())
        done: list[_Row] = []
        for _ in range(limit):
            chosen = _choose(logits, torch.tensor([row.temperature for row in rows], device=logits.device), generator, floor)
            running = []
            for place, (row, token) in enumerate(zip(rows, chosen.tolist())):
                row.tokens.append(token)
                if token in self.ends or row.loops() or len(row.tokens) - row.start >= limit:
                    if row.temperature >= 0:     # once only: a finished text stays in the batch until the next clearing
                        done.append(row)
                        row.temperature = -1.0
                elif row.temperature >= 0:
                    running.append(place)
            if not running:
                break
            if len(running) < 0.8 * len(rows):
                batch.keep(running)
                rows, chosen = [rows[place] for place in running], chosen[running]
            else:
                for place in set(range(len(rows))) - set(running):
                    if rows[place].temperature < 0:
                        rows[place] = _Row([0], 0, -2.0, -1)       # a place that nobody reads
            logits, states = batch.step(chosen)
            kept = states.half()
            for place, row in enumerate(rows):
                if row.index >= 0:
                    row.states.append(kept[place:place + 1])
        out: list[tuple[np.ndarray, np.ndarray]] = [None] * len(prompts)        # type: ignore[list-item]
        for row in done:
            states = torch.cat([*row.states, row.states[0].new_zeros(1, row.states[0].shape[1])])[:len(row.tokens)]
            out[row.index] = (np.array(row.tokens), states.cpu().numpy())
        return out


def _choose(logits: Tensor, temperatures: Tensor, generator: torch.Generator, floor: float) -> Tensor:
    """The next token of every row, int64 [B]: the best where the temperature is 0 or less, drawn otherwise."""
    drawn, best = (temperatures > 0).nonzero()[:, 0], (temperatures <= 0).nonzero()[:, 0]
    chosen = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    if len(best):
        chosen[best] = logits[best].argmax(-1)
    if len(drawn):
        probs = (logits[drawn].float() / temperatures[drawn, None]).softmax(-1)
        if floor:
            probs = probs * (probs >= floor * probs.amax(-1, keepdim=True))
        sums = probs.cumsum(-1)
        places = torch.rand(len(drawn), 1, generator=generator, device=logits.device) * sums[:, -1:]
        chosen[drawn] = torch.searchsorted(sums, places).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return chosen


def fill(store: Store, writer: Writer, prompts: Prompts, *, seed: int, size: int, num_tokens: int, report: Callable[[int, int], None],
         worker: int = 0, num_workers: int = 1) -> None:
    """Write training shards until the folder holds so many answer tokens. report: called with a shard's number and the answer tokens so far.

    worker, num_workers: of several processes, each takes every num_workers-th shard.
    """
    number, counted = worker, {}
    while True:
        counted |= {each: sum(text.num_answer_tokens for text in store.read(each)) for each in store.numbers() if each not in counted}
        if sum(counted.values()) >= num_tokens:
            return
        if not store.has(number):
            store.write(number, writer.conversations(prompts.batch(number, size), seed * 100_003 + number, "train"))
        report(number, sum(counted.values()))
        number += num_workers


def restore(tokens: Store, store: Store, writer: Writer, report: Callable[[int, int], None]) -> None:
    """Write the shards of a folder that holds token ids only once more, with the states that the target has there when it reads them."""
    numbers = tokens.numbers()
    for done, number in enumerate(numbers, 1):
        if not store.has(number):
            texts = tokens.read(number)
            states = read_texts(writer.target, [text.tokens.tolist() for text in texts], writer.taps)
            store.write(number, [replace(text, states=each.half().cpu().numpy()) for text, each in zip(texts, states)])
        report(done, len(numbers))
