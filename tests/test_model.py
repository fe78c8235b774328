"""The adapter on unmodified transformers models of every family: one line of tokens, trees, taps, early exit, refusals."""
from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from specviz.engine.model import FINAL, LanguageModel, Row
from specviz.errors import UnsupportedModel


def reference(model, tokens: list[int]) -> torch.Tensor:
    """The plain forward of the unmodified model over the whole text, [T, V]."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def text(length: int = 40) -> list[int]:
    return torch.randint(3, 384, (length,), generator=torch.Generator().manual_seed(5)).tolist()


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """float64 models still round to float32 inside (rotary tables, eager softmax), so equality is up to about 1e-5."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "packed"])
def test_rows_trees_and_rollback_equal_the_plain_forward(family, exact):
    """Two rows of different length, a tree over two forwards, unequal acceptance, then decoding, past sliding windows of 8 and 12."""
    tokens = text()
    model = tiny_model(family, dtype=torch.float64)
    expected = reference(model, tokens)
    target = LanguageModel(model, exact=exact)
    cache = target.new_cache(128)
    long, short = cache.allocate(), cache.allocate()
    first, second = target.forward([Row(long, tokens[:17]), Row(short, tokens[:11], num_logits=2)], cache)
    close(first.logits, expected[:17])
    close(second.logits, expected[9:11])
    cache.keep(long, range(17))
    cache.keep(short, range(11))
    for row, start, kept in ((long, 17, 3), (short, 11, 2)):
        true = tokens[start:start + 4]
        level = target.forward([Row(row, [true[0], 5, true[1]], [-1, 0, 0])], cache)[0].logits
        close(level[[0, 2]], expected[start:start + 2])
        level = target.forward([Row(row, [7, true[2], true[3]], [1, 2, 4])], cache)[0].logits
        close(level[1:], expected[start + 2:start + 4])
        cache.keep(row, (0, 2, 4)[:kept])
    outputs = target.forward([Row(long, tokens[20:24]), Row(short, tokens[13:15])], cache)
    close(outputs[0].logits, expected[20:24])
    close(outputs[1].logits, expected[13:15])


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("family, overrides", [
    ("qwen2", {}), ("qwen2", dict(use_sliding_window=True, sliding_window=12, max_window_layers=1)),
    ("gemma2", dict(head_dim=64, sliding_window=12, attn_logit_softcapping=5.0))], ids=["full", "sliding", "soft-capped"])
def test_trees_are_bitwise_equal_to_single_tokens(precision, family, overrides):
    """Every node of a fed tree gets the very bits that its path gets token by token, also where the view grows inside the tree and behind
    a sliding window; what is kept of it as well. Rounded INT8 activations would make a last bit's difference a large one."""
    model = tiny_model(family, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, **overrides)
    target = LanguageModel(model, precision=precision)
    if not target.linears["row_independent"]:
        pytest.skip("no row-independent kernel on this processor")
    cache = target.new_cache(256)
    generator = torch.Generator().manual_seed(1)
    for length in (40, 61, 64):
        prompt = torch.randint(3, 384, (length,), generator=generator).tolist()
        base = cache.allocate()
        target.forward([Row(base, prompt, num_logits=0)], cache)
        cache.keep(base, range(length))
        nodes = torch.randint(3, 384, (12,), generator=generator).tolist()
        parents = [-1, 0] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(2, 12)]       # two pending tokens, then a tree
        row = cache.fork(base, length)
        together = target.forward([Row(row, nodes, parents)], cache)[0].logits
        paths = {}
        for node, parent in enumerate(parents):
            paths[node] = (*paths.get(parent, ()), node)
            single = cache.fork(base, length)
            for index in paths[node]:
                alone = target.forward([Row(single, [nodes[index]])], cache)[0].logits[0]
                cache.keep(single, (0,))
            assert torch.equal(together[node], alone), (length, node)
            cache.free(single)
        longest = max(paths.values(), key=len)
        cache.keep(row, longest)
        single = cache.fork(base, length)
        target.forward([Row(single, [nodes[index] for index in longest], num_logits=0)], cache)
        cache.keep(single, range(len(longest)))
        assert torch.equal(*(output.logits for output in target.forward([Row(row, [9]), Row(single, [9])], cache)))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_hidden_states_and_early_exit(family):
    """Taps are the layers' inputs; exiting after E layers equals a model that has only these; the full model is whole afterwards."""
    tokens = text(20)
    model = tiny_model(family, dtype=torch.float64)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    expected = reference(model, tokens)
    inside: list[torch.Tensor] = []
    hook = model.get_decoder().layers[2].register_forward_hook(lambda module, args, output: inside.append(output[0]))
    reference(model, tokens)
    hook.remove()
    target = LanguageModel(model)
    cache = target.new_cache(64)
    row = cache.allocate()
    output = target.forward([Row(row, tokens)], cache, hidden=(2, 0, 1, 3, FINAL))[0]
    parts = output.hidden.chunk(5, -1)
    for part, state in zip(parts, (states[2][0], states[0][0], states[1][0], inside[0], states[3][0])):
        close(part, state)
    cache.keep(row, ())
    early = target.forward([Row(row, tokens)], cache, num_layers=2)[0].logits
    norm = next(getattr(model.get_decoder(), name) for name in ("norm", "final_layernorm") if hasattr(model.get_decoder(), name))
    close(early, head(model, norm(states[2]))[0])
    cache.keep(row, ())
    close(target.forward([Row(row, tokens)], cache)[0].logits, expected)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("precision", ["none", "fp32"])
def test_embeddings_and_head_for_drafting_heads(family, precision):
    """What heads read: the input embeddings, and the LM head on final states with the family's scaling or cap, equal to a whole forward's logits."""
    model = tiny_model(family, dtype=torch.float32)
    embedded = model.get_input_embeddings()(torch.tensor([5, 9]))
    target = LanguageModel(model, num_tokens=300, precision=precision)
    cache = target.new_cache(64)
    output = target.forward([Row(cache.allocate(), text(12))], cache, hidden=(FINAL,))[0]
    torch.testing.assert_close(target.head(output.hidden), output.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(target.embed(torch.tensor([5, 9])), embedded)


def head(model, hidden: torch.Tensor) -> torch.Tensor:
    """LM head with the family's own scaling or cap, taken from its config."""
    with torch.inference_mode():
        logits = model.get_output_embeddings()(hidden)
    logits = logits / getattr(model.config, "logits_scaling", 1.0)
    if cap := getattr(model.config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


def test_padded_vocabularies_are_cut():
    """Ids beyond the tokenizer never appear, however large their logits."""
    target = LanguageModel(tiny_model("llama"), num_tokens=300)
    cache = target.new_cache(64)
    assert target.forward([Row(cache.allocate(), [3, 4])], cache)[0].logits.shape == (2, 300)


RECURRENT = {
    "mamba": (dict(hidden_size=32, num_hidden_layers=2, vocab_size=99, state_size=4), "[Mm]amba"),
    "qwen3_next": (dict(hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, vocab_size=99,
                        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
                        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8), "linear_attention"),
    "lfm2": (dict(hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, vocab_size=99,
                  full_attn_idxs=[1]), "conv"),
    "gpt_oss": (dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                     vocab_size=99, num_local_experts=2, num_experts_per_tok=1), "sinks"),
}


@pytest.mark.parametrize("family", list(RECURRENT))
def test_what_cannot_be_rolled_back_is_refused_by_name(family):
    """Recurrent, hybrid and sink models are refused at load; the sentence names the kind of layer and says what to choose."""
    settings, named = RECURRENT[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    with pytest.raises(UnsupportedModel, match=named) as error:
        LanguageModel(model)
    assert "Choose" in str(error.value)
