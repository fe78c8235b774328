"""A whole pass of an EAGLE head in the compiled kernel against the same head piece by piece."""
from __future__ import annotations

import head_files
import pytest
import torch
from tiny import tiny_model

from specviz.drafters.checkpoints import checked_heads
from specviz.drafters.compiled_eagle import CompiledEagle
from specviz.drafters.eagle_head import EagleHead
from specviz.engine.cache import KVCache
from specviz.engine.draft import ROOT
from specviz.engine.model import LanguageModel
from specviz.engine.native.kernel import find_kernel, why_not

pytestmark = pytest.mark.skipif(find_kernel() is None, reason=f"no compiled kernel: {why_not()}")


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    """Its rows of the LM head can be had, so the head's words are a product of their own."""
    return LanguageModel(tiny_model("llama", tie_word_embeddings=True), precision="int8")


def head(target: LanguageModel, *, own: bool, whole: bool, monkeypatch: pytest.MonkeyPatch) -> EagleHead:
    """Over every second token of the target. own: with an LM head of its own, or with the target's rows."""
    config, tensors = head_files.eagle(target)
    tensors["d2t"] = torch.arange(target.num_tokens // 2)
    if own:
        tensors["lm_head.weight"] = torch.randn(target.num_tokens // 2, 64, generator=torch.Generator().manual_seed(4)) / 8
    with monkeypatch.context() as patch:
        if not whole:
            patch.setattr(EagleHead, "_beside", lambda self: [])
        made = EagleHead(checked_heads(tensors, config, "heads", target, "tiny"), target)
    assert isinstance(made._whole, CompiledEagle) == whole
    return made


def grown(made: EagleHead, size: int, second: list[int], parents: list[int], wanted: list[int]):
    """A text in two pieces, of another row beside it the second time, then two levels of a tree."""
    generator = torch.Generator().manual_seed(3)
    states, tokens = torch.randn(90, size, generator=generator), torch.randint(300, (90,), generator=generator).tolist()
    cache = KVCache(128)
    row, other = cache.allocate(), cache.allocate()
    guesses = [made.guess([cache.stage(row, 70)], tokens[:70], states[:70], [69], 4)]
    cache.keep(row, range(70))
    guesses.append(made.guess([cache.stage(row, 2), cache.stage(other, 3)], tokens[70:75], states[70:75], [1, 4], 4))
    cache.keep(row, range(2))
    guesses.append(made.guess([cache.stage(row, 2, [ROOT, ROOT])], tokens[75:77], states[[75, 75]], [0, 1], 4))
    guesses.append(made.guess([cache.stage(row, len(second), parents)], [tokens[i] for i in second], states[[76 + i for i in parents]], wanted, 4))
    return guesses


@pytest.mark.parametrize("own", [True, False], ids=["own LM head", "the target's rows"])
@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_the_head_up_to_rounding(target, own, threads, monkeypatch):
    """Prompts longer than a block, rows beside each other and trees: states and logits are the plain ones within int8's rounding, and
    what is called best is what these logits say, in order, with their softmax."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        size = target.config.hidden_size
        plain, whole = (grown(head(target, own=own, whole=each, monkeypatch=monkeypatch), size, [80, 81, 82], [0, 1, 1], [2, 0])
                        for each in (False, True))
    finally:
        torch.set_num_threads(before)
    ids = torch.arange(target.num_tokens // 2) * 2
    for expected, found in zip(plain, whole):
        assert (found.carried - expected.carried).norm() < 0.05 * expected.carried.norm()
        assert (found.logits.log_softmax(-1) - expected.logits).norm() < 0.05 * expected.logits.norm()
        best = found.logits.log_softmax(-1).topk(4, -1)
        assert found.tokens == ids[best.indices].tolist()
        torch.testing.assert_close(torch.tensor(found.log_probs), best.values, rtol=0, atol=1e-4)


def test_a_node_does_not_depend_on_its_company(target, monkeypatch):
    """The same node alone and beside siblings, wanted among others or alone: the same bits."""
    size, made = target.config.hidden_size, head(target, own=True, whole=True, monkeypatch=monkeypatch)
    together, alone = grown(made, size, [80, 81, 82], [0, 1, 1], [0, 1, 2])[-1], grown(made, size, [81], [1], [0])[-1]
    assert torch.equal(together.carried[1], alone.carried[0]) and torch.equal(together.logits[1], alone.logits[0])
    assert together.tokens[1] == alone.tokens[0] and together.log_probs[1] == alone.log_probs[0]


def test_equal_words_come_in_order_and_few_words_are_few_guesses(target, monkeypatch):
    """With an LM head of three equal rows every guess lists all three, lowest first, at a third each; wanting none guesses nothing."""
    config, tensors = head_files.eagle(target)
    tensors |= {"d2t": torch.tensor([7, 7, 7]), "lm_head.weight": torch.ones(3, 64)}
    made = EagleHead(checked_heads(tensors, config, "heads", target, "tiny"), target)
    assert made._whole is not None
    cache = KVCache(16)
    guess = made.guess([cache.stage(cache.allocate(), 2)], [5, 6], torch.randn(2, 64), [1], 10)
    assert guess.tokens == [[7, 8, 9]] and guess.log_probs[0] == pytest.approx([-1.0986123] * 3, abs=1e-5)
    assert made.guess([cache.stage(cache.allocate(), 1)], [5], torch.randn(1, 64), [], 10).tokens == []


def test_what_the_call_does_not_know_stays_piece_by_piece(target, monkeypatch):
    """A head with norms before `fc` is not run whole; ids beyond the embeddings never reach the library."""
    config, tensors = head_files.eagle(target)
    tensors |= {"embedding_layernorm.weight": torch.ones(64), "hidden_states_layernorm.weight": torch.ones(64)}
    made = EagleHead(checked_heads(tensors, config | {"add_para_norm": True}, "heads", target, "tiny"), target)
    assert made._whole is None
    whole = head(target, own=True, whole=True, monkeypatch=monkeypatch)
    cache = KVCache(16)
    with pytest.raises(AssertionError):
        whole.guess([cache.stage(cache.allocate(), 1)], [1 << 40], torch.randn(1, 64), [0], 1)
