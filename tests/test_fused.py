"""Joined projections and quantized heads on a CPU, where bitsandbytes computes as on a GPU up to rounding: joining changes no bit."""
from __future__ import annotations

import pytest
import torch
from tiny import tiny_model
from torch import nn

from specviz.bench.random_model import _linear
from specviz.engine.fused import fuse_projections, quantize_head
from specviz.engine.model import LanguageModel, Row

PRECISIONS = ("bf16", "int8", "nf4", "fp4")          # "bf16" stands for weights as they are


@pytest.fixture(autouse=True)
def one_cpu_path(monkeypatch):
    """bitsandbytes unpacks and multiplies, as on any processor: its own layout for AVX512-BF16 wants larger layers."""
    from bitsandbytes.nn import modules
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)


def packed(family: str, precision: str, **overrides: object) -> nn.Module:
    """A tiny model whose layers are packed as the program packs them on a GPU; the same bits at every call."""
    model = tiny_model(family, dtype=torch.float32, num_hidden_layers=2, **overrides)
    if precision != "bf16":
        for parent in list(model.get_decoder().modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    new = _linear(child.weight.detach().clone(), precision)
                    new.bias = child.bias
                    setattr(parent, name, new)
    return model.eval().requires_grad_(False)


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(3, 380, (1, 9), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_joining_changes_no_bit(family, precision):
    """With and without biases and head norms: every group is joined, the logits are those of the unjoined model bit for bit where weights are
    packed (a larger float product may round otherwise), and the weights are held once."""
    plain, joined = packed(family, precision), packed(family, precision)
    before = sum(parameter.nbytes for parameter in joined.parameters())
    assert fuse_projections(joined) == 4
    ours, theirs = logits(joined), logits(plain)
    assert torch.equal(ours, theirs) if precision != "bf16" else torch.allclose(ours, theirs, atol=1e-5)
    assert sum(parameter.nbytes for parameter in joined.parameters()) == before
    attention = joined.model.layers[0].self_attn
    assert attention.q_proj.shared is attention.v_proj.shared and (attention.q_proj.shared.linear.bias is not None) is (family == "qwen2")
    assert fuse_projections(joined) == 0             # nothing is left to join


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_joined_bytes_are_the_quantized_whole(quant_type):
    """Packed bytes and scales side by side are what quantizing the joined weight gives."""
    from bitsandbytes import functional
    model, original = packed("llama", quant_type), tiny_model("llama", num_hidden_layers=2)
    fuse_projections(model)
    mlp = original.model.layers[1].mlp
    expected, state = functional.quantize_4bit(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), blocksize=64, quant_type=quant_type)
    weight = model.model.layers[1].mlp.up_proj.shared.linear.weight
    assert torch.equal(weight.data, expected) and torch.equal(weight.quant_state.absmax, state.absmax) and weight.quant_state.shape == state.shape


def test_what_cannot_be_joined_stays():
    """Unknown families, double quantized scales, and groups of different kinds keep their linears, and the model its numbers."""
    import bitsandbytes as bnb
    assert fuse_projections(tiny_model("gemma2")) == 0
    model = packed("llama", "nf4")
    expected = logits(model)
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = bnb.nn.Linear4bit(64, 128, bias=False, compute_dtype=torch.float32, compress_statistics=True, quant_type="nf4")
    mlp.gate_proj.weight = bnb.nn.Params4bit(tiny_model("llama").model.layers[0].mlp.gate_proj.weight.data, requires_grad=False, quant_type="nf4",
                                             compress_statistics=True, module=mlp.gate_proj).to("cpu")
    model.model.layers[1].mlp.up_proj = tiny_model("llama").model.layers[1].mlp.up_proj
    mixed = logits(model)
    assert fuse_projections(model) == 2 and type(mlp.gate_proj) is bnb.nn.Linear4bit
    assert torch.equal(logits(model), mixed) and not torch.equal(mixed, expected)


def test_a_joined_model_decodes():
    """In the engine's forward, with early exit and taps, a joined model is the model."""
    plain, joined = packed("mistral", "nf4"), packed("mistral", "nf4")
    fuse_projections(joined)
    found = []
    for model in (plain, joined):
        target = LanguageModel(model, exact=False)
        cache = target.new_cache(64)
        row = cache.allocate()
        outputs = target.forward([Row(row, list(range(5, 25)))], cache, hidden=(1,))
        cache.keep(row, range(20))
        outputs += target.forward([Row(row, [7, 8, 9], (-1, 0, 0))], cache, num_layers=1)
        found.append([outputs[0].logits, outputs[0].hidden, outputs[1].logits])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("precision", ["int8", "nf4", "fp4"])
def test_a_quantized_head(precision):
    """The head alone changes, by what its precision rounds; a tied embedding stays, and tokens are still counted by the head's rows."""
    model, plain = (tiny_model("llama", tie_word_embeddings=True, num_hidden_layers=2) for _ in range(2))
    quantize_head(model, precision, torch.float32)
    assert torch.equal(model.get_input_embeddings().weight, plain.get_input_embeddings().weight)
    ours, theirs = logits(model), logits(plain)
    error = float((ours - theirs).std() / theirs.std())
    assert 0.001 < error < {"int8": 0.03, "nf4": 0.15, "fp4": 0.2}[precision]
    target = LanguageModel(model, exact=False)
    assert target.num_tokens == 384
    states = torch.randn(3, 64)
    assert torch.equal(target.head(states), model.get_output_embeddings()(states))
