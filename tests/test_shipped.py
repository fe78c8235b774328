"""The drafters that come with specviz for the default model: they load, guess as well as their card says, and change no token."""
from __future__ import annotations

import tomllib

import pytest
import torch
from engine_helpers import IdText

from specviz.catalog import MODELS_DIR
from specviz.default_model import is_prepared
from specviz.drafters import DRAFTERS, Parts
from specviz.drafters.self_check import measure
from specviz.engine.drafting import DraftSettings
from specviz.engine.engine import Engine
from specviz.engine.model import LanguageModel, Row
from specviz.engine.record import Recorder
from specviz.engine.sampling import SamplingParams
from specviz.errors import LoadError
from specviz.loading import load_target
from specviz.opening import language_model
from specviz.shipped import Shipped, find_shipped
from specviz.text import TextCodec
from specviz.train.generate import Writer

CARD = "smollm2-135m-instruct"
FOLDER = MODELS_DIR / CARD
PROMPTS = ("Explain in three sentences why the sky is blue.", "Write a Python function that checks whether a word is a palindrome.",
           "Give me a recipe for a simple tomato soup.", "Who was Marie Curie?", "Write a short story about a robot who learns to paint.",
           "List five ways to save water at home.", "What is 17 times 6? Show the steps.",
           "Repeat this text exactly:\n\nThe library opens at nine. Most visitors come in the morning, when the reading room is quiet.",
           "Summarize the following text:\n\nBees collect nectar from flowers and carry it to the hive, where it becomes honey. On their way they "
           "carry pollen from plant to plant, which many crops depend on.", "What should I see in Paris on a rainy day?")
METHODS = {"medusa": ("medusa",), "eagle": ("eagle", "eagle2"), "exit_adapter": ("exit_adapter",), "draft_model": ("draft_model",)}


def test_all_files_together_are_small():
    """A clone stays light: the drafters take less than 24 MB, the token ids kept for later less than 10 MB."""
    weights = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file() and "training" not in path.parts)
    tokens = sum(path.stat().st_size for path in (FOLDER / "training").rglob("*") if path.is_file())
    assert 1e6 < weights < 24e6 and tokens < 10e6


def test_the_list_names_what_is_there():
    """Every drafter of the list has a folder with a configuration that names the same target, and a floor; the card names the hashes."""
    table = tomllib.loads((FOLDER / "drafters.toml").read_text(encoding="utf-8"))
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(table["folders"]) == set(table["floors"])
    for name in table["folders"].values():
        assert (FOLDER / name / "model.safetensors").is_file()
        assert table["trained_on"]["weights_sha256"] in (FOLDER / name / "config.json").read_text(encoding="utf-8")
    assert all(value in card for value in table["trained_on"].values())


class Opened:
    """The default model as the app runs it, with everything that is shipped for it."""

    def __init__(self) -> None:
        try:
            loaded = load_target("default", quantization="int8")
        except LoadError as error:
            if is_prepared():
                raise
            pytest.skip(f"the default model is not cached and cannot be fetched: {error}")
        self.codec, self.ends = TextCodec(loaded.tokenizer), frozenset(loaded.eos_ids)
        self.target = language_model(loaded)
        shipped = find_shipped(CARD, loaded.facts)
        assert isinstance(shipped, Shipped) and not shipped.difference
        self.draft = shipped.draft_model(self.target, lambda model: LanguageModel(model, precision="fp32"))
        self.heads = shipped.heads(self.target, loaded.name)
        self.cache = self.target.new_cache(512)
        self.parts = Parts(self.target, self.cache, self.draft, marker_ids=self.ends, heads=self.heads)
        self.prompts = [self.codec.render([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
        self.answers = [tokens.tolist() for tokens, _ in Writer(self.target, self.codec, self.ends, limit=48).answers(
            self.prompts, [0.0] * len(PROMPTS), torch.Generator())]


@pytest.fixture(scope="module")
def opened() -> Opened:
    return Opened()


@pytest.mark.long
def test_first_guesses_are_right_as_often_as_the_card_says(opened: Opened):
    """On the target's own greedy answers to ten prompts, each drafter's first guess is right more often than the floor in its list."""
    floors = tomllib.loads((FOLDER / "drafters.toml").read_text(encoding="utf-8"))["floors"]
    for kind, floor in floors.items():
        right = places = 0
        for prompt, tokens in zip(opened.prompts, opened.answers):
            if kind == "draft_model":
                cache = opened.draft.new_cache(len(tokens))
                logits = opened.draft.forward([Row(cache.allocate(), tokens)], cache)[0].logits
                right += sum(int(guess) == token for guess, token in zip(logits[len(prompt) - 1:-1].argmax(-1), tokens[len(prompt):]))
                places += len(tokens) - len(prompt)
            else:
                agreement = measure(opened.heads[kind], opened.target, tokens[:len(prompt)], tokens[len(prompt):])
                right, places = right + agreement.num_agreeing, places + agreement.num_places
        assert right / places > floor, (kind, right / places)


@pytest.mark.long
def test_greedy_text_is_plain_decodings_with_each_of_them(opened: Opened):
    """Token for token, on a chat prompt and on one that copies."""
    def answer(method: str, prompt: list[int]) -> list[int]:
        engine = Engine(opened.target, opened.cache, Recorder(opened.codec.piece))
        engine.add(prompt, SamplingParams(max_new_tokens=24, temperature=0.0), DRAFTERS[method].create(opened.parts), DraftSettings(4), IdText(),
                   eos_ids=opened.ends)
        [sequence] = engine._sequences.values()
        while not engine.idle:
            engine.step()
        engine.forget()
        return sequence.tokens[len(prompt):]
    for at in (0, 7):
        plain = answer("plain", opened.prompts[at])
        for kind in METHODS:
            if kind in opened.heads or kind == "draft_model":
                for method in METHODS[kind]:
                    assert answer(method, opened.prompts[at]) == plain, method
