"""Writing training texts: batches equal single texts, loops are cut, parts stay apart, interrupted runs go on."""
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import EOS, tiny_model, tiny_tokenizer

from specviz.engine.model import FINAL, LanguageModel
from specviz.errors import InputError
from specviz.text import TextCodec
from specviz.train.batched import Batch, read_texts
from specviz.train.generate import Writer, fill, restore
from specviz.train.prompts import CATEGORIES, PARTS, Prompts, document_prompts, part_of
from specviz.train.store import Store, Text

TAPS = (FINAL, 1)
GIVEN = [("chat", f"Tell me story number {i}.", "test") for i in range(60)]
SMALL = {"chat": 0.6, "magpie": 0.4}


def writer(precision: str = "none", limit: int = 24) -> Writer:
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), dtype=torch.float32)
    return Writer(LanguageModel(model, precision=precision), TextCodec(tokenizer), frozenset({EOS}), taps=TAPS, limit=limit)


@pytest.mark.parametrize("precision", ["none", "fp32"])
def test_a_batch_reads_each_text_as_if_it_were_alone(precision: str):
    """Prompts of several lengths, single steps, and a batch that shrinks: the states of every text are those of the whole text read at once."""
    target = LanguageModel(tiny_model("llama"), precision=precision)
    texts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [40] * 40]
    batch = Batch(target, texts, TAPS)
    _, states = batch.read(texts)
    seen = [[state] for state in states]
    rows = [0, 1, 2]
    for step in range(6):
        if step == 3:
            batch.keep([0, 2])
            rows = [0, 2]
        token = 11 + step
        _, state = batch.step(torch.full((len(rows),), token))
        for place, row in enumerate(rows):
            texts[row] = [*texts[row], token]
            seen[row].append(state[place:place + 1])
    for whole, parts in zip(read_texts(target, texts, TAPS), seen):
        assert torch.allclose(torch.cat(parts), whole, atol=2e-4)


def test_greedy_answers_are_the_targets_choices():
    """Every token of a greedy answer is the most probable one after the tokens before it, as transformers computes it."""
    tool = writer()
    prompts = [[1, 5, 9], [1, 7, 30, 12, 40]]
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer()))
    for prompt, (tokens, states) in zip(prompts, tool.answers(prompts, [0.0, 0.0], torch.Generator())):
        logits = model(torch.tensor(tokens)[None]).logits[0]
        assert tokens[:len(prompt)].tolist() == prompt
        assert logits[len(prompt) - 1:-1].argmax(-1).tolist() == tokens[len(prompt):].tolist()
        assert states.shape == (len(tokens), 2 * 64)


def test_a_text_that_goes_round_in_circles_is_cut():
    """No run of eight tokens stands in an answer more than three times."""
    tool = writer(limit=200)
    for tokens, _ in tool.answers([[1, token] for token in range(20, 40)], [0.0] * 20, torch.Generator()):
        answer = tokens[2:].tolist()
        counts = Counter(tuple(answer[i:i + 8]) for i in range(len(answer) - 7))
        assert max(counts.values(), default=0) <= 3


def test_an_interrupted_run_ends_with_the_same_files(tmp_path: Path):
    """Two workers, one of them interrupted, write what one run writes, byte for byte."""
    tool = writer()
    facts = {"vocab_size": 384}

    def run(name: str, tokens: int, **options: int) -> Store:
        store = Store(tmp_path / name, facts)
        fill(store, tool, Prompts(GIVEN, "train", 3, SMALL), seed=3, size=8, num_tokens=tokens, report=lambda number, total: None, **options)
        return store
    once = run("once", 600)
    run("parts", 1)                              # ends after one shard
    run("parts", 300, worker=1, num_workers=2)
    parts = run("parts", 600)
    assert len(once.numbers()) > 2
    for number in once.numbers():
        ours, theirs = once.read(number), parts.read(number)
        assert [text.tokens.tolist() for text in ours] == [text.tokens.tolist() for text in theirs]
        assert all(np.array_equal(a.states, b.states) for a, b in zip(ours, theirs))


def test_a_store_keeps_texts_and_refuses_another_purpose(tmp_path: Path):
    """What is written is read, states included; a folder made for something else is named in the error."""
    store = Store(tmp_path / "data", {"vocab_size": 384, "seed": 1})
    text = Text(np.array([1, 2, 3, 380]), ((2, 4),), "math", "test", 0.8, np.ones((4, 6), np.float16))
    store.write(7, [text, text])
    found = Store(tmp_path / "data").texts()
    assert store.numbers() == [7] and len(found) == 2
    assert found[1].tokens.tolist() == [1, 2, 3, 380] and found[1].answers == ((2, 4),) and found[1].num_answer_tokens == 2
    assert np.array_equal(found[1].states, text.states)
    with pytest.raises(InputError, match="seed = 1"):
        Store(tmp_path / "data", {"vocab_size": 384, "seed": 2})
    with pytest.raises(InputError, match="generate"):
        Store(tmp_path / "nothing")


def test_states_come_back_from_token_ids(tmp_path: Path):
    """A folder without states is read by the target once more; the states are those of the first time, up to rounding to half precision."""
    tool = writer()
    facts = {"vocab_size": 384}
    first, again = Store(tmp_path / "first", facts), Store(tmp_path / "again", facts)
    texts = tool.conversations(Prompts(GIVEN, "train", 3, SMALL).batch(0, 6), 5, "train")
    first.write(0, [Text(text.tokens, text.answers, text.category, text.source, text.temperature) for text in texts])
    assert first.texts()[0].states is None
    restore(first, again, tool, lambda done, total: None)
    for text, ours in zip(texts, again.texts()):
        assert np.allclose(ours.states[:-1], text.states[:-1], atol=2e-2)


def test_parts_share_no_prompt():
    """Every prompt belongs to one part; each part has prompts of every category that documents give."""
    seen = {part: {prompt for pool in Prompts(GIVEN, part, 1)._pools.values() for prompt, _ in pool} for part in PARTS}
    assert not seen["train"] & seen["test"] and not seen["train"] & seen["validation"] and not seen["test"] & seen["validation"]
    assert {category for category, _, _ in document_prompts()} == {"summarise", "rewrite", "code"} < set(CATEGORIES)
    assert all(part_of(prompt, category) == "train" for category, prompt in [(job.category, job.prompt) for job in Prompts(GIVEN, "train", 1).batch(0, 40)
                                                                            if not job.invents])
