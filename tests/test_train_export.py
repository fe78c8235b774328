"""Trained drafters as files: they come back as they were, and decode in the engine exactly as was counted without it."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers import IdText
from tiny import tiny_model
from transformers import LlamaForCausalLM

from specviz.drafters import DRAFTERS, Parts
from specviz.drafters.checkpoints import load_heads
from specviz.drafters.eagle import Eagle
from specviz.drafters.medusa import Medusa
from specviz.drafters.static_tree import chain_tree
from specviz.engine.drafting import DraftSettings
from specviz.engine.engine import Engine
from specviz.engine.model import FINAL, LanguageModel
from specviz.engine.record import Recorder
from specviz.engine.sampling import SamplingParams
from specviz.errors import LoadError
from specviz.shipped import find_shipped, read_draft_model
from specviz.train.batched import read_texts
from specviz.train.evaluate import net_ranks
from specviz.train.export import export, read_exported
from specviz.train.fit import Batches, fit, read_recipe
from specviz.train.heads import NETS, Given, Net
from specviz.train.store import Text
from specviz.train.walk import chain, walk

PROMPTS = [[1, 10 + i, 40 + 3 * i, 7] for i in range(6)]
DEPTH = 3
RECIPES = {"eagle": {"depth": 2}, "medusa": {"depth": 3, "rate": 5e-3}, "exit_adapter": {"exit_layer": 2}, "draft_model": {
    "width": 32, "num_heads": 2, "inner": 48, "num_layers": 1, "rate": 1e-2}}


def model():
    return tiny_model("llama", tie_word_embeddings=True)


def answers(target: LanguageModel) -> list[Text]:
    """Greedy texts of the tiny target, one token at a time, with its states."""
    texts = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        inner = model()
        for _ in range(40):
            tokens.append(int(inner(torch.tensor([tokens])).logits[0, -1].argmax()))
        states, = read_texts(target, [tokens], (FINAL, 2))
        texts.append(Text(torch.tensor(tokens).numpy(), ((len(prompt), len(tokens)),), "chat", "tiny", 0.0, states.numpy()))
    return texts


def trained(kind: str, folder: Path) -> tuple[LanguageModel, list[Text], Net]:
    whole = model()
    embeddings = whole.get_input_embeddings().weight.detach().clone()
    given = Given(embeddings, embeddings, torch.arange(0, 384), whole.config)
    target = LanguageModel(whole)
    texts = answers(target)
    recipe = read_recipe(kind, {"steps": 12, "batch_tokens": 200, "mixed": False, "average": 0.5, "num_negatives": 0, **RECIPES[kind]})
    return target, texts, fit(recipe, given, texts, folder / "run", report=lambda *unused: None)


@pytest.mark.parametrize("kind", list(NETS))
def test_a_shipped_drafter_decodes_as_was_counted(kind: str, tmp_path: Path):
    """Written and read again, it accepts in the engine, step for step, what was counted on the stored text; the text is plain decoding's."""
    target, texts, net = trained(kind, tmp_path)
    export(net, tmp_path / kind, {"weights_sha256": "abc"}, dtype=torch.float32)
    cache = target.new_cache(128)
    if kind == "draft_model":
        parts = Parts(target, cache, LanguageModel(read_draft_model(tmp_path / kind, target)))
    else:
        parts = Parts(target, cache, heads={kind: load_heads(tmp_path / kind, kind, target, "the tiny target")})
    made = {"eagle": lambda: Eagle(parts, tree=chain_tree(DEPTH)), "medusa": lambda: Medusa(parts, tree=chain_tree(DEPTH))}
    drafter = made[kind]() if kind in made else DRAFTERS[kind].create(parts)
    engine = Engine(target, cache, Recorder(str))
    batches = Batches(texts, 1000, 0, 64, torch.device("cpu"))
    for text, ranked in zip(texts, net_ranks(net, texts, batches, DEPTH)):
        start, end = text.answers[0]
        request = engine.add(text.tokens[:start].tolist(), SamplingParams(max_new_tokens=end - start, temperature=0.0), drafter, DraftSettings(DEPTH),
                             IdText())
        sequence, accepted = engine._sequences[request], []
        while not engine.idle:
            accepted += [sum(token.origin == "draft" for token in stepped.trace.emitted) for stepped in engine.step()
                         if stepped.trace.kind != "prefill"]
        assert sequence.tokens == text.tokens.tolist()
        expected = walk(ranked, chain(DEPTH)).accepted
        assert accepted[:-1] == list(expected[:-1])            # the last step's draft is cut by the length asked for


@pytest.mark.parametrize("kind", list(NETS))
def test_files_hold_the_weights(kind: str, tmp_path: Path):
    """Read back into the network that learns, a drafter's weights are what they were, up to float16."""
    _, _, net = trained(kind, tmp_path)
    export(net, tmp_path / kind, {})
    again = NETS[kind](net.given, net.recipe)
    if kind == "eagle":
        again.pair_scale.copy_(net.pair_scale)
    tensors, ids = read_exported(tmp_path / kind)
    again.load_published(tensors)
    assert kind == "draft_model" or torch.equal(ids, net.given.draft_ids)
    for name, tensor in net.state_dict().items():
        assert torch.allclose(again.state_dict()[name], tensor, rtol=2e-3, atol=2e-3), name


def test_a_draft_model_written_in_full_is_an_ordinary_model(tmp_path: Path):
    """transformers opens it, and it says what the shipped form says."""
    target, texts, net = trained("draft_model", tmp_path)
    export(net, tmp_path / "full", {}, in_full=True, dtype=torch.float32)
    export(net, tmp_path / "small", {}, dtype=torch.float32)
    tokens = torch.tensor(texts[0].tokens)[None]
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "full")(tokens).logits
    ours = read_draft_model(tmp_path / "small", target)(tokens).logits
    assert torch.allclose(theirs, ours, atol=1e-4)


def test_other_weights_are_told_and_broken_lists_named(tmp_path: Path):
    """Drafters of another file of the same model say that fewer will be accepted; a list that cannot be read names its folder."""
    folder = tmp_path / "tiny-card"
    folder.mkdir()
    assert find_shipped("other-card", {}, tmp_path) is None
    (folder / "drafters.toml").write_text('name = "tiny"\ndefault_method = "eagle"\n[folders]\neagle = "eagle"\n[trained_on]\nweights_sha256 = "a"\n'
                                          'chat_template_sha256 = "b"\n')
    assert find_shipped("tiny-card", {"weights_sha256": "a", "chat_template_sha256": "b"}, tmp_path).difference == ""
    assert "fewer" in find_shipped("tiny-card", {"weights_sha256": "x", "chat_template_sha256": "b"}, tmp_path).difference
    (folder / "drafters.toml").write_text("name = 1")
    with pytest.raises(LoadError, match="tiny-card"):
        find_shipped("tiny-card", {}, tmp_path)
