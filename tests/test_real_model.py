"""Losslessness on the real default model, in both CPU precisions: the same tokens, and for chains the same bits."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from head_files import random_heads

from specviz.default_model import is_prepared
from specviz.drafters import DRAFTERS, Parts
from specviz.drafters.early_exit import EarlyExit
from specviz.engine.drafting import DraftSettings
from specviz.engine.engine import Engine
from specviz.engine.model import LanguageModel
from specviz.engine.record import Recorder
from specviz.engine.rules import RULES
from specviz.engine.sampling import SamplingParams
from specviz.engine.smooth import CALIBRATION_TEXT
from specviz.errors import LoadError
from specviz.loading import load_target
from specviz.local_run import AnswerText
from specviz.text import TextCodec

pytestmark = pytest.mark.long

PROMPTS = (
    "Copy the following text word for word:\n\nThe lighthouse stood at the end of the long stone pier. Every evening the keeper climbed the "
    "narrow stairs, lit the lamp and wrote the weather into his book.",
    "Explain in three sentences why the sky is blue.",
    "Add a docstring to this Python function and return the whole function.\n\ndef area(width, height):\n    if width < 0 or height < 0:\n"
    "        raise ValueError(\"negative size\")\n    return width * height",
    "Erkläre auf Deutsch, was ein Leuchtturm ist. 🙂",
    "Tell me a short story about a robot that learns to bake bread.",
)
NUM_TOKENS = 16


class KeepsLogits(Recorder):
    """Remembers the target's logits at every position of the emitted text."""

    def __init__(self, codec: TextCodec) -> None:
        super().__init__(codec.piece)
        self.rows: list[torch.Tensor] = []

    def record(self, work, times, num_rows):
        if work.verdict is not None:
            self.rows += [work.output.logits[i].clone() for i in (0, *(1 + node for node in work.verdict.path))]
        return super().record(work, times, num_rows)


class Bench:
    """The default model in one precision; every answer starts cold."""

    def __init__(self, precision: str) -> None:
        try:
            loaded = load_target("default")
        except LoadError as error:
            if is_prepared():
                raise
            pytest.skip(f"the default model is not cached and cannot be fetched: {error}")
        self.codec, self.eos_ids = TextCodec(loaded.tokenizer), frozenset(loaded.eos_ids)
        self.target = LanguageModel(loaded.model, num_tokens=len(loaded.tokenizer), precision=precision,
                                    calibration=self.codec.encode(CALIBRATION_TEXT))
        self.cache = self.target.new_cache(1024)
        self.parts = Parts(self.target, self.cache, marker_ids=self.eos_ids)
        self.drafters = {name: DRAFTERS[name].create(self.parts) for name in ("plain", "prompt_lookup")}
        self.drafters["early_exit"] = EarlyExit(self.parts, exit_layer=6)

    def answer(self, messages, method: str, k: int = 5, warm: Engine | None = None, *, rule: str = "rejection",
               **sampling) -> tuple[list[int], torch.Tensor, Engine]:
        """Tokens, logits [n, V] at their positions, and the engine with its parked rows."""
        engine = warm or Engine(self.target, self.cache, KeepsLogits(self.codec))
        engine.recorder.rows.clear()
        prompt = self.codec.render(messages)
        engine.add(prompt, SamplingParams(max_new_tokens=NUM_TOKENS, **sampling), self.drafters[method], DraftSettings(k),
                   AnswerText(self.codec, ()), eos_ids=self.eos_ids, rule=RULES[rule])
        [sequence] = engine._sequences.values()
        while not engine.idle:
            engine.step()
        tokens = sequence.tokens[len(prompt):]
        rows = torch.stack(engine.recorder.rows)[:len(tokens)]
        if warm is None:
            engine.forget()
        return tokens, rows, engine


@pytest.fixture(scope="module", params=["fp32", "int8"])
def bench(request):
    """One model per precision for all tests; the thread count is restored."""
    before = torch.get_num_threads()
    yield Bench(request.param)
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_drafted_answers_are_bitwise_the_plain_ones(bench, threads):
    """Prompt lookup and early exit on five prompts (one with two threads): same tokens, same bits in every logit that chose one."""
    torch.set_num_threads(threads)
    assert bench.target.linears["row_independent"] and bench.target.is_lean
    for prompt in PROMPTS[:5 if threads == 1 else 1]:
        messages = [{"role": "user", "content": prompt}]
        tokens, logits, _ = bench.answer(messages, "plain")
        for method, k in (("prompt_lookup", 7), ("early_exit", 2)):
            ours, rows, _ = bench.answer(messages, method, k)
            assert ours == tokens, (prompt, method)
            assert torch.equal(rows, logits), (prompt, method, (rows - logits).abs().max())


def test_drafted_trees_are_bitwise_the_plain_ones(bench):
    """Suffix trees, lookahead's windows and trees of a draft model (the target itself, so that deep paths are accepted), in long drafts."""
    torch.set_num_threads(1)
    parts = replace(bench.parts, draft=bench.target)
    for prompt in PROMPTS[::2]:
        messages = [{"role": "user", "content": prompt}]
        tokens, logits, _ = bench.answer(messages, "plain")
        for method in ("suffix", "lookahead", "draft_tree"):
            bench.drafters[method] = DRAFTERS[method].create(parts)
            ours, rows, _ = bench.answer(messages, method, 9)
            assert ours == tokens, (prompt, method)
            assert torch.equal(rows, logits), (prompt, method, (rows - logits).abs().max())


def test_heads_of_random_weights_give_plain_s_tokens(bench):
    """Every method that drafts with heads, here heads that know nothing: greedy text is plain's."""
    torch.set_num_threads(1)
    messages = [{"role": "user", "content": PROMPTS[1]}]
    tokens, logits, _ = bench.answer(messages, "plain")
    parts = replace(bench.parts, heads=random_heads(bench.target, lm_heads=False))
    for method in (method for method in DRAFTERS.values() if method.heads):
        bench.drafters[method.name] = method.create(parts)
        ours, rows, _ = bench.answer(messages, method.name, 8)
        assert ours == tokens and torch.equal(rows, logits), method.name


def test_shared_noise_gives_plain_samplings_own_tokens(bench):
    """Sampled chains, looked up and drawn: the tokens of plain sampling with the same seed, from the same bits, at any temperature."""
    torch.set_num_threads(1)
    for seed, (temperature, prompt) in enumerate(((0.5, PROMPTS[0]), (1.0, PROMPTS[4]), (1.5, PROMPTS[2]))):
        messages, case = [{"role": "user", "content": prompt}], dict(temperature=temperature, seed=seed)
        tokens, logits, _ = bench.answer(messages, "plain", **case)
        for method, k in (("prompt_lookup", 7), ("early_exit", 2)):
            ours, rows, _ = bench.answer(messages, method, k, rule="shared-noise", **case)
            assert ours == tokens and torch.equal(rows, logits), (prompt, method)


def test_a_warm_second_turn_is_bitwise_a_cold_one(bench):
    """Reusing the first turn's cache changes no bit of the second turn's logits, with drafts as without."""
    torch.set_num_threads(1)
    first = [{"role": "user", "content": PROMPTS[0]}]
    tokens, _, engine = bench.answer(first, "prompt_lookup", warm=Engine(bench.target, bench.cache, KeepsLogits(bench.codec)))
    answer = bench.codec.decode(tokens)
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "Now write it once more."}]
    warm, warm_rows, engine = bench.answer(second, "prompt_lookup", warm=engine)
    assert engine.scheduler.parked[-1].num_reused > 40
    engine.forget()
    cold, cold_rows, _ = bench.answer(second, "plain")
    assert warm == cold
    assert torch.equal(warm_rows, cold_rows)


def test_int8_is_the_same_model_every_time(bench):
    """Loaded anew under another thread count, the model gives the same bits: an answer does not depend on how the program was started."""
    if bench.target.linears["precision"] != "int8":
        pytest.skip("fp32 weights are what they are")
    torch.set_num_threads(2)
    again = Bench("int8")
    torch.set_num_threads(1)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    tokens, logits, _ = bench.answer(messages, "plain")
    ours, rows, _ = again.answer(messages, "plain")
    assert ours == tokens and torch.equal(rows, logits)


def test_the_lean_decoder_is_the_real_model():
    """fp32: our decoder's logits equal those of the unmodified transformers model up to rounding, and choose the same tokens."""
    torch.set_num_threads(1)
    loaded = load_target("default")
    codec = TextCodec(loaded.tokenizer)
    tokens = codec.render([{"role": "user", "content": PROMPTS[1]}])
    with torch.inference_mode():
        expected = loaded.model(torch.tensor([tokens]), use_cache=False).logits[0]
    target = LanguageModel(loaded.model, num_tokens=len(loaded.tokenizer), precision="fp32")
    from specviz.engine.model import Row
    cache = target.new_cache(256)
    ours = target.forward([Row(cache.allocate(), tokens)], cache)[0].logits
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-3)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_the_default_model_lies_where_it_should():
    """After any of these tests the converted model is complete, so later starts need no network."""
    load_target("default")
    assert is_prepared()
    assert Path(__file__).parent.parent.joinpath("models", "smollm2-135m-instruct.toml").is_file()
