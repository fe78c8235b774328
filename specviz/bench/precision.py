"""`python -m specviz.bench.precision`: what each CPU precision costs in quality and saves in time, beside transformers' own `generate`.

It knows nothing of drafts. Quality is measured against fp32 on answers that fp32 wrote, time on a text of 300 tokens, all candidates in
turns, so that a busy moment of the machine hits every candidate. Compare ratios of one run, not times of two.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor

from ..engine.attention import one_query_attention, view_length
from ..engine.cache import KVCache
from ..engine.lean import LeanDecoder
from ..engine.linear import describe_machine
from ..engine.smooth import CALIBRATION_TEXT
from ..loading import load_target

__all__ = ["Quality", "main", "quality"]

CANDIDATES = {                   # name: precision, precision of the LM head, calibrated on text
    "fp32": ("fp32", "fp32", False),
    "int8, fp32 head": ("int8", "fp32", True),
    "int8": ("int8", "int8", True),
    "int8, random calib.": ("int8", "int8", False),
    "bf16": ("bf16", "bf16", False),
}
PROMPTS = ("Explain in three sentences why the sky is blue.", "Write a Python function that checks whether a word is a palindrome.",
           "Give me a recipe for a simple tomato soup.", "Who was Marie Curie?", "Translate to French: The train leaves at nine in the morning.",
           "Write a short story about a robot who learns to paint.", "List five ways to save water at home.",
           "What is 17 times 6? Show the steps.")
SIZES = (1, 2, 4, 6, 8)
CONTEXT = 300
NUM_STEPS = 12                   # in a row, after one that brings the weights back into the caches, as in real decoding


@dataclass(frozen=True, slots=True)
class Quality:
    """Against fp32, over positions: mean and 95 % quantile of KL(fp32 || candidate) in nats, share of equal top tokens."""
    mean_kl: float
    p95_kl: float
    top_share: float


class Runner:
    """A decoder with the simplest cache there is: one sequence, written in place, rolled back by resetting `length`.

    Compiled layers read and write a row of the engine's cache instead.
    """

    def __init__(self, decoder: LeanDecoder, config: Any, capacity: int = 1024) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, capacity, head_dim)
        self.decoder, self.length = decoder, 0
        self.store = torch.zeros(shape) if decoder.stack is None else None
        self.cache = KVCache(capacity)
        self.row = self.cache.allocate()

    def _compiled(self, tokens: Tensor) -> Tensor:
        """The states after the last norm, [T, H]; the row is brought back to `length` first."""
        self.cache.truncate(self.row, self.length)
        hidden = self.decoder.read(tokens, [self.cache.stage(self.row, len(tokens))]).hidden
        self.length = self.cache.keep(self.row, range(len(tokens))).after
        return hidden

    @torch.inference_mode()
    def feed(self, tokens: Tensor, num_logits: int | None = None) -> Tensor:
        if self.decoder.stack is not None:
            hidden = self._compiled(tokens)
            return self.decoder.logits(hidden if num_logits is None else hidden[-num_logits:])
        start, end = self.length, self.length + len(tokens)
        view = view_length(end)
        positions = torch.arange(start, end)
        visible = torch.zeros(len(tokens), view).masked_fill_(torch.arange(view) > positions[:, None], float("-inf"))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
            keys, values = self.store[layer]
            keys[:, start:end], values[:, start:end] = key.transpose(0, 1), value.transpose(0, 1)
            mask = visible
            if window is not None:
                mask = visible.masked_fill(torch.arange(view) <= positions[:, None] - window, float("-inf"))
            return one_query_attention(query, keys[:, :view], values[:, :view], mask, scaling, end)

        hidden = self.decoder(tokens, positions, attend).hidden
        self.length = end
        return self.decoder.logits(hidden if num_logits is None else hidden[-num_logits:])


def answer(runner: Runner, prompt: Tensor, count: int) -> Tensor:
    """Prompt and the greedy answer of `count` tokens; an end of turn does not end it, so that every prompt weighs the same."""
    runner.length = 0
    tokens = [int(runner.feed(prompt, 1).argmax())]
    while len(tokens) < count:
        tokens.append(int(runner.feed(torch.tensor(tokens[-1:])).argmax()))
    return torch.cat([prompt, torch.tensor(tokens)])


def quality(reference: Sequence[Tensor], candidate: Sequence[Tensor]) -> Quality:
    """Both are logits [positions, V] per text, computed on the same tokens."""
    divergences, equal = [], []
    for expected, got in zip(reference, candidate):
        expected_log, got_log = expected.double().log_softmax(-1), got.double().log_softmax(-1)
        divergences.append((expected_log.exp() * (expected_log - got_log)).sum(-1))
        equal.append((expected.argmax(-1) == got.argmax(-1)).double())
    kl = torch.cat(divergences)
    return Quality(float(kl.mean()), float(kl.quantile(0.95)), float(torch.cat(equal).mean()))


def _interleaved(trials: dict[Any, Callable[[], None]], rounds: int, clock: Callable[[], float]) -> dict[Any, list[float]]:
    """Milliseconds of each trial, one per round; the first round is not counted."""
    times: dict[Any, list[float]] = {name: [] for name in trials}
    for number in range(rounds + 1):
        for name, trial in trials.items():
            start = clock()
            trial()
            if number:
                times[name].append((clock() - start) * 1e3)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specviz.bench.precision", description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="default", help="a Llama-like model: default, a folder or a hub id")
    parser.add_argument("--tokens", type=int, default=72, help="answer tokens per prompt")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the time measurement")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time, not wall time: for one thread on a busy machine")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    loaded = load_target(options.target, device="cpu", dtype="float32")
    model, tokenizer = loaded.model, loaded.tokenizer
    if not LeanDecoder.supports(model):
        parser.error(f"{loaded.name} is not of the Llama family; this measures the lean decoder only")
    calibration = torch.tensor(tokenizer(CALIBRATION_TEXT)["input_ids"])
    decoders = {name: LeanDecoder(model, body, head, calibration=calibration if on_text else None)
                for name, (body, head, on_text) in CANDIDATES.items()}
    runners = {name: Runner(decoder, model.config) for name, decoder in decoders.items()}

    prompts = [torch.tensor(tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True)
                            ["input_ids"]) for text in PROMPTS]
    texts = [answer(runners["fp32"], prompt, options.tokens) for prompt in prompts]
    logits: dict[str, list[Tensor]] = {}
    for name, runner in runners.items():
        logits[name] = []
        for text in texts:
            runner.length = 0
            logits[name].append(runner.feed(text[:-1], options.tokens))
    qualities = {name: quality(logits["fp32"], got) for name, got in logits.items()}

    generator = torch.Generator().manual_seed(0)
    context = torch.randint(len(tokenizer), (CONTEXT,), generator=generator)
    trials: dict[Any, Callable[[], None]] = {}
    for name, runner in runners.items():
        runner.length = 0
        runner.feed(context, 1)
        for size in SIZES:
            for count in (1, NUM_STEPS + 1):
                def steps(runner: Runner = runner, tokens: Tensor = context[:size], count: int = count) -> None:
                    for _ in range(count):
                        runner.feed(tokens).argmax(-1).tolist()
                        runner.length = CONTEXT
                trials[name, size, count] = steps
    for count in (1, NUM_STEPS + 1):
        def generate(count: int = count) -> None:
            model.generate(context[None], attention_mask=torch.ones(1, CONTEXT, dtype=torch.long), max_new_tokens=count, min_new_tokens=count,
                           do_sample=False)
        trials["generate", count] = generate
    times = _interleaved(trials, options.rounds, process_time if options.cpu_time else perf_counter)
    per_step = {key[:-1]: median(long - short for long, short in zip(times[*key[:-1], NUM_STEPS + 1], times[key])) / NUM_STEPS
                for key in times if key[-1] == 1}
    per_token = per_step["generate",]

    print(f"{loaded.name}, {describe_machine()['isa']}, {torch.get_num_threads()} thread(s), torch {torch.__version__}; "
          f"{sum(map(len, logits['fp32']))} positions; context {CONTEXT}, medians of {options.rounds}, {'processor' if options.cpu_time else 'wall'} time")
    print(f"transformers generate: {per_token:.1f} ms per token, {1e3 / per_token:.1f} tokens/s")
    print(f"{'candidate':20s} {'mean KL':>8s} {'95 % KL':>8s} {'top':>7s}  " + " ".join(f"{f'T={size}':>7s}" for size in SIZES)
          + "  tokens/s  vs generate  T=6/T=1  kernel")
    for name in runners:
        q, ms = qualities[name], {size: per_step[name, size] for size in SIZES}
        facts = decoders[name].describe()
        print(f"{name:20s} {q.mean_kl:8.4f} {q.p95_kl:8.4f} {q.top_share:7.1%}  " + " ".join(f"{ms[size]:7.1f}" for size in SIZES)
              + f"  {1e3 / ms[1]:8.1f}  {per_token / ms[1]:10.2f}x  {ms[6] / ms[1]:7.2f}  {facts['kernel']}"
              + ("" if facts["row_independent"] else " (rows depend on each other)"))


if __name__ == "__main__":
    main()
