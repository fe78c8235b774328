"""The trained exit: its layer against a plain implementation, its states against the target's own, its files, and its honesty."""
from __future__ import annotations

import math

import head_files
import pytest
import torch
from engine_helpers import Lab, repeating_prompt
from tiny import tiny_model
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from specviz.drafters import DRAFTERS, Parts
from specviz.drafters.checkpoints import checked_heads, head_kind, load_heads
from specviz.drafters.exit_adapter import Adapter, ExitAdapter
from specviz.drafters.self_check import checked, measure
from specviz.engine.cache import KVCache
from specviz.engine.model import LanguageModel, Row
from specviz.errors import LoadError


def plain_adapter(tensors, config, target: LanguageModel, states: torch.Tensor) -> torch.Tensor:
    """The published forward over a whole text without cache or batch: log-probabilities over the target's tokens."""
    t = {name: tensor.double() for name, tensor in tensors.items()}

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * t[name + ".weight"]
    inner, num_tokens = norm(states, "layers.0.input_layernorm"), len(states)
    query, key, value = ((inner @ t[f"layers.0.self_attn.{x}_proj.weight"].T).view(1, num_tokens, -1, head_files.HEAD_DIM).transpose(1, 2) for x in "qkv")
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=head_files.HEAD_DIM, rope_theta=config["rope_theta"]))
    query, key = apply_rotary_pos_emb(query, key, *rotary(query, torch.arange(num_tokens)[None]))
    key, value = (x.repeat_interleave(head_files.NUM_HEADS // head_files.NUM_KV_HEADS, 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2) / math.sqrt(head_files.HEAD_DIM)).masked_fill(torch.ones(num_tokens, num_tokens).triu(1).bool(), float("-inf"))
    hidden = states + (scores.softmax(-1) @ value).transpose(1, 2).reshape(num_tokens, -1) @ t["layers.0.self_attn.o_proj.weight"].T
    if "layers.0.mlp.gate_proj.weight" in t:
        x = norm(hidden, "layers.0.post_attention_layernorm")
        gate, up, down = (t[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        hidden = hidden + (F.silu(x @ gate) * (x @ up)) @ down
    logits = target.head(norm(hidden, "norm"))
    if "d2t" in tensors:
        kept = torch.full_like(logits, float("-inf"))
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        kept[:, ids] = logits[:, ids]
        logits = kept
    return logits.log_softmax(-1)


CASES = {"as specviz trains it": {}, "as Kangaroo's": dict(mlp=False), "fewer tokens": dict(num_own=90)}


@pytest.mark.parametrize("tied", [False, True], ids=["own LM head", "tied embeddings"])
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_computes_what_its_paper_says(case, tied):
    """Two forwards through the cache equal the plain implementation over the whole text; of a reduced vocabulary only those tokens are guessed."""
    target = LanguageModel(tiny_model("llama", dtype=torch.float64, tie_word_embeddings=tied))
    config, tensors = head_files.exit_adapter(target, **CASES[case])
    adapter = Adapter(checked_heads(tensors, config, "adapter", target, "target"), target)
    text = repeating_prompt(14, period=14)
    cache = target.new_cache(64)
    states = target.forward([Row(cache.allocate(), text)], cache, hidden=(1,))[0].hidden
    expected, own = plain_adapter(tensors, config, target, states), KVCache(64)
    row = own.allocate()
    for start, end in ((0, 8), (8, 14)):
        ours = adapter.logits(adapter.forward([own.stage(row, end - start)], states[start:end])).log_softmax(-1)
        torch.testing.assert_close(ours, expected[start:end], rtol=0, atol=1e-6)          # the rotary angles are float32 in both
        own.keep(row, range(end - start))


def knowing(lab: Lab, wrong: bool = False) -> Parts:
    """An adapter that passes the states of the last layer but one on: with a target whose last layer does nothing, it is always right."""
    layer = lab.target._runner._model.model.layers[-1]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    config, tensors = head_files.exit_adapter(lab.target, exit_layer=1 if wrong else 2)
    tensors["layers.0.self_attn.o_proj.weight"].zero_()
    tensors["layers.0.mlp.down_proj.weight"].zero_()
    tensors["norm.weight"] = lab.target._runner._norm.weight.detach().clone()
    config["rms_norm_eps"] = lab.target.config.rms_norm_eps
    return Parts(lab.target, lab.cache, heads={"exit_adapter": checked_heads(tensors, config, "adapter", lab.target, "target")})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_perfect_adapter_is_always_accepted(temperature):
    """Its states stay in step with the target's over many steps, chunks of the prompt, batches and a second turn: not one guess is rejected."""
    lab = Lab(token_budget=7, max_rows=2)
    parts = knowing(lab)
    drafter = ExitAdapter(parts)
    prompts = [repeating_prompt(23, seed=1), repeating_prompt(11, seed=2)]
    first = [lab.add(prompt, drafter, 5, max_new_tokens=26, temperature=temperature, scope=str(i)) for i, prompt in enumerate(prompts)]
    lab.finish()
    second = lab.run(prompts[0] + first[0].tokens + [7, 8, 9], drafter, 5, max_new_tokens=16, temperature=temperature, scope="0")
    for result in (*first, second):
        nodes = [node for step in result.steps for node in step.nodes]
        assert len(nodes) > 8 and {node.state for node in nodes} == {"accepted"}
        state = result.sequence.drafting
        assert drafter._cache.length(state.row) + sum(map(len, state.states)) == state.known == lab.cache.length(result.sequence.row)
    assert second.sequence.num_reused == len(prompts[0]) + len(first[0].tokens) - 1
    lab.engine.forget()
    assert len(drafter._cache) == len(lab.cache) == 0


def test_the_self_check_tells_a_good_adapter_from_a_bad_one():
    """Right everywhere, or read one layer too early: the difference shows, and the second gets a warning in the menu."""
    lab = Lab()
    answer = repeating_prompt(60, period=60)
    good, bad = (knowing(lab, wrong).heads["exit_adapter"] for wrong in (False, True))
    assert measure(good, lab.target, [1, 2], answer).share == 1
    warned = checked(bad, lab.target, [1, 2], answer)
    assert "one layer off" in warned.warning and not checked(good, lab.target, [1, 2], answer).warning
    assert DRAFTERS["exit_adapter"].note(Parts(lab.target, lab.cache, heads={"exit_adapter": warned})) == warned.warning


def test_files_are_told_by_their_tensors(tmp_path):
    """Kangaroo's names in any file; a model of one layer is none; the exit of published adapters follows from the target's depth."""
    lab = Lab()
    for number, options in enumerate((dict(), dict(mlp=False), dict(num_own=50))):
        checkpoint = head_files.exit_adapter(lab.target, **options)
        folder = head_files.write(tmp_path / str(number), checkpoint, "pytorch_model.bin" if number == 1 else "model.safetensors")
        assert head_kind(folder, "heads") == "exit_adapter"
        assert load_heads(folder, "heads", lab.target, "tiny").facts["exit_layer"] == 1
    model = LanguageModel(tiny_model("llama", num_hidden_layers=32))
    config, tensors = head_files.exit_adapter(model, mlp=False, exit_layer=None)
    assert checked_heads(tensors, config, "kangaroo", model, "seven billion").facts["exit_layer"] == 2
    bare = {key: value for key, value in config.items() if "head" not in key and "rope" not in key} | {"exit_layer": 5}
    own = {name: tensor[:16] if "k_proj" in name or "v_proj" in name else tensor for name, tensor in tensors.items()}
    facts = checked_heads(own, bare, "bare", model, "target").facts
    assert (facts["exit_layer"], facts["head_dim"]) == (5, 8) and facts["rope"]["rope_theta"] == model.config.rope_parameters["rope_theta"]


def test_cancelling_frees_what_was_stored():
    """Reading its prompt or decoding: a cancelled request leaves no row in the adapter's cache, and the others go on unchanged."""
    lab = Lab(max_rows=2, token_budget=8, max_parked=0)
    prompts = [repeating_prompt(20, seed=i) for i in range(3)]
    expected = Lab().run(prompts[0], max_new_tokens=24).tokens
    survivor, decoding = (lab.add(prompt, "exit_adapter") for prompt in prompts[:2])
    while len(decoding.tokens) < 3:
        lab.step()
    lab.engine.cancel(decoding.sequence.id)
    reading = lab.add(prompts[2], "exit_adapter")
    lab.step()
    assert len(lab.drafters["exit_adapter"]._cache) == 2
    lab.engine.cancel(reading.sequence.id)
    lab.finish()
    assert survivor.tokens == expected and len(lab.drafters["exit_adapter"]._cache) == 0 and reading.sequence.drafting is None


@pytest.mark.parametrize("change, sentence", [
    (dict(specviz={}), r"exit_layer = None, expected a layer from 1 to 2"), (dict(specviz={"exit_layer": 3}), "exit_layer = 3"),
    (dict(specviz={"exit_layer": "1"}), "exit_layer = '1'"), (dict(hidden_act="gelu"), "'gelu'; expected silu")])
def test_settings_that_do_not_fit_are_refused(change, sentence):
    """One sentence with what was found and what was expected."""
    lab = Lab()
    config, tensors = head_files.exit_adapter(lab.target)
    with pytest.raises(LoadError, match=sentence):
        checked_heads(tensors, config | change, "heads", lab.target, "tiny")


@pytest.mark.parametrize("name, tensor", [("norm.weight", torch.ones(3)), ("layers.0.mlp.up_proj.weight", torch.ones(2, 2)),
                                          ("layers.1.mlp.up_proj.weight", torch.ones(2)), ("layers.0.self_attn.o_proj.weight", torch.ones(64, 2))])
def test_tensors_that_do_not_fit_are_refused(name, tensor):
    """The sentence names the tensor."""
    lab = Lab()
    config, tensors = head_files.exit_adapter(lab.target)
    with pytest.raises(LoadError, match=name):
        checked_heads({**tensors, name: tensor}, config, "heads", lab.target, "tiny")
