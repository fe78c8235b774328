"""Training drafters on a toy target: losses fall, guesses become right, interruptions change nothing, simulated steps follow the rule."""
from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specviz.errors import InputError
from specviz.train.evaluate import chains, lookup_ranks, measure, net_ranks
from specviz.train.fit import Batches, draft_vocabulary, fit, likely_tokens, read_recipe
from specviz.train.heads import _Scores, NETS, Given, distance
from specviz.train.store import Text
from specviz.train.walk import MISS, Ranked, chain, hybrid, interval, tree, walk

VOCABULARY, SIZE = 64, 64
CONFIG = SimpleNamespace(hidden_size=SIZE, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5,
                         rope_parameters={"rope_theta": 10000.0}, vocab_size=VOCABULARY, max_position_embeddings=256, bos_token_id=1,
                         eos_token_id=2, pad_token_id=2)
SMALL = {"eagle": {"depth": 2, "steps": 40, "rate": 3e-3}, "medusa": {"depth": 2, "steps": 150, "rate": 1e-2, "num_layers": 2},
         "exit_adapter": {"steps": 80, "rate": 5e-3}, "draft_model": {"width": 32, "num_heads": 2, "inner": 64, "steps": 150, "rate": 1e-2,
                                                                     "num_negatives": 4}}
COMMON = {"batch_tokens": 400, "mixed": False, "average": 0.9, "warm_up": 0.1, "start_texts": 40}


def toy(num_texts: int = 60, length: int = 40) -> tuple[Given, list[Text]]:
    """A target that repeats itself: every token is always followed by the same one. Its state after a token points at the next one's row."""
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(VOCABULARY, SIZE, generator=generator)
    follows = {token: 3 + (7 * (token - 3) + 5) % (VOCABULARY - 3) for token in range(3, VOCABULARY)}
    chance, texts = random.Random(0), []
    for i in range(num_texts):
        tokens = [1, 2, chance.randrange(3, VOCABULARY)]
        while len(tokens) < length:
            tokens.append(follows[tokens[-1]])
        ids = torch.tensor([*tokens[1:], follows[tokens[-1]]])
        states = torch.cat([2 * embeddings[ids], embeddings[torch.tensor(tokens)]], -1)
        texts.append(Text(np.array(tokens), ((3, length),), ("chat", "code")[i % 2], "toy", 0.0, states.numpy().astype(np.float16)))
    return Given(embeddings, embeddings, torch.arange(VOCABULARY), CONFIG), texts


def recipe(kind: str, **changes: object) -> dict[str, object]:
    return read_recipe(kind, COMMON | SMALL[kind] | changes)


@pytest.mark.parametrize("kind", list(NETS))
def test_a_drafter_learns_a_target_that_repeats_itself(kind: str, tmp_path: Path):
    """The loss falls, and on texts that it was not trained on more than nine of ten first guesses are right."""
    given, texts = toy()
    losses: list[float] = []
    net = fit(recipe(kind, seed=1), given, texts[:50], tmp_path, report=lambda step, loss, agreement: losses.append(loss))
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10]) or losses[-1] < 0.05
    ranked = net_ranks(net, texts[50:], Batches(texts[50:], 400, 0, SIZE, torch.device("cpu")), 3)
    first = np.concatenate([each.ranks[1:, 0] for each in ranked])
    assert (first == 0).mean() > 0.9
    row = measure(kind, ranked, {"K=3": chain(3)}, [text.category for text in texts[50:]], 3)[0]
    assert row.category == "all" and row.tokens_per_step > 1.7


@pytest.mark.parametrize("kind", ["eagle", "draft_model"])
def test_an_interrupted_training_ends_with_the_same_weights(kind: str, tmp_path: Path):
    """Bit for bit, drawn negatives and averaged weights included."""
    given, texts = toy(30)
    settings = recipe(kind, steps=9)

    def run(name: str, stop_at: int | None = None) -> dict[str, torch.Tensor]:
        return fit(settings, given, texts, tmp_path / name, report=lambda *unused: None, stop_at=stop_at).state_dict()
    once = run("once")
    run("parts", stop_at=4)
    parts = run("parts")
    assert all(torch.equal(once[name], parts[name]) for name in once)
    with pytest.raises(InputError, match="another recipe"):
        fit(recipe(kind, steps=10), given, texts, tmp_path / "parts", report=lambda *unused: None)


@pytest.mark.parametrize("kind", list(NETS))
def test_a_batch_without_anything_to_learn_is_passed_over(kind: str, tmp_path: Path):
    """Texts whose answer lies behind the longest text that is read leave the weights as they are and end no training."""
    given, texts = toy(12)
    [long] = toy(1, 530)[1]
    steps: list[int] = []
    fit(recipe(kind, steps=13, batch_tokens=40), given, [*texts, replace(long, answers=((515, 530),))], tmp_path,
        report=lambda step, loss, agreement: steps.append(len(agreement)))
    assert len(steps) == 13 and steps.count(0) == 1


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_training_goes_on_from_an_earlier_run(kind: str, tmp_path: Path):
    """It begins with exactly those weights, its own schedule moves them on, and weights of another kind are refused."""
    given, texts = toy()

    def run(name: str, **more: object) -> dict:
        return fit(recipe(kind, steps=5), given, texts, tmp_path / name, report=lambda *unused: None, **more).state_dict()
    weights = run("first")
    unmoved, moved = run("second", begin_with=weights, stop_at=0), run("third", begin_with=weights)
    assert all(torch.equal(unmoved[name], weights[name]) for name in weights)
    assert any(not torch.equal(moved[name], weights[name]) for name in weights)
    with pytest.raises(InputError, match=f"no {kind} of this shape"):
        fit(recipe(kind, steps=3), given, texts, tmp_path / "other", report=lambda *unused: None, begin_with={"x": torch.zeros(1)})


def test_eagle_begins_as_the_closed_form_solution():
    """Before any step the head is its ridge solution, which on a target whose state is linear in the token is right already."""
    given, texts = toy()
    net = NETS["eagle"](given, recipe("eagle"))
    batches = Batches(texts, 400, 0, SIZE, torch.device("cpu"), teacher=likely_tokens(texts, given))
    net.start([batches.at(i) for i in range(len(batches))])
    assert net.loss(batches.at(0)).agreement[0] > 0.95


def test_distances_are_least_for_equal_distributions_and_tv_is_the_rejection_rate():
    """TV of two distributions is 1 - sum min(p, q); all kinds are least where both are the same."""
    generator = torch.Generator().manual_seed(1)
    mine, theirs = torch.randn(5, 9, generator=generator).log_softmax(-1), torch.randn(5, 9, generator=generator).softmax(-1)
    assert torch.allclose(distance(mine, theirs, "tv"), 1 - torch.minimum(mine.exp(), theirs).sum(-1), atol=1e-6)
    for kind in ("kl", "tv", "lk"):
        assert (distance(theirs.log(), theirs, kind) < distance(mine, theirs, kind)).all()


def test_scores_in_blocks_equal_scores_at_once():
    """Values and both gradients of the log-sum-exp and of picked logits, for more rows than one block holds."""
    generator = torch.Generator().manual_seed(2)
    x, table = torch.randn(600, 16, generator=generator), torch.randn(50, 16, generator=generator)
    picks = torch.randint(50, (600, 4), generator=generator)
    outcomes = []
    for blocks in (True, False):
        a, b = x.clone().requires_grad_(), table.clone().requires_grad_()
        sums, picked = _Scores.apply(a, b, picks)[:2] if blocks else ((a @ b.T).logsumexp(-1), (a @ b.T).gather(1, picks))
        (sums.square().sum() + (picked * picked.detach().sin()).sum()).backward()
        outcomes.append((sums, picked, a.grad, b.grad))
    for ours, theirs in zip(*outcomes):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-3)


def test_the_draft_vocabulary_holds_what_is_written_most():
    """Answers count more than prompts, forced ids are in, and the result is sorted."""
    texts = [Text(np.array([20, 20, 20, 30, 30, 40]), ((3, 6),), "chat", "", 0.0)]
    ids = draft_vocabulary(texts, 5, 64, always=(0, 1))
    assert ids.tolist() == sorted(ids.tolist()) and {0, 1, 30, 40, 20} == set(ids.tolist())


def test_steps_are_counted_as_decoding_would():
    """A chain accepts up to its first wrong guess, a tree along its paths, and every step emits one token more, up to the end."""
    ranks = np.full((6, 2), MISS, np.uint8)
    ranks[1] = (0, 1)                            # place 1: first guess right, second one on rank 1
    ranks[3] = (1, 0)
    ranked = Ranked(10, ranks)
    assert walk(ranked, chain(2)).accepted == (1, 0, 0, 0)       # places 1, 3, 4, 5: five tokens
    assert walk(ranked, chain(2)).emitted == 5
    assert walk(ranked, tree([(0,), (0, 1), (1,)])).accepted == (2, 0, 0)
    found = Ranked(10, np.zeros((6, 2), np.uint8), np.array([0, 0, 0, 2, 0, 0], np.uint8))
    assert walk(ranked, hybrid(found, chain(2), chain(2))).accepted == (1, 2)
    assert interval([walk(ranked, chain(2))] * 3)[0] == 1.25


def test_lookup_finds_what_stands_in_the_prompt():
    """On a text that copies its prompt, prompt lookup drafts right once two tokens match."""
    from specviz.drafters.prompt_lookup import PromptLookup
    piece = list(range(10, 30))
    text = Text(np.array([*piece, 5, *piece]), ((21, 41),), "rewrite", "", 0.0)
    ranked, = lookup_ranks(PromptLookup(), [text], 4)
    assert (ranked.ranks[2:-4, 0] == 0).all() and ranked.drafted[0] == 0
    assert measure("lookup", [ranked], chains(False, False, 4), ["rewrite"])[0].tokens_per_step > 1.5
