"""A head's products and its layer: as its weights are, or rounded where the target runs through the compiled kernel."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from specviz.drafters.decoder_layer import DecoderLayer
from specviz.drafters.products import products
from specviz.engine.cache import KVCache
from specviz.engine.draft import ROOT
from specviz.engine.linear import Int8Linear
from specviz.engine.native.kernel import find_kernel, why_not


def weights(num_out: int = 96, num_in: int = 64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in (
        ("layers.0.mlp.up_proj.weight", (num_out, num_in)), ("layers.0.mlp.up_proj.bias", (num_out,)), ("fc.weight", (num_out, 2 * num_in)),
        ("norm.weight", (num_in,)), ("embed_tokens.weight", (10, num_in)))}


def target(kernel: str) -> SimpleNamespace:
    return SimpleNamespace(linears={"kernel": kernel})


def test_elsewhere_they_are_the_weights_own():
    """Without the compiled kernel every matrix, and nothing else, multiplies as torch does, bias included."""
    given = weights()
    made = products(given, target("onednn int8"))
    assert set(made) == {"layers.0.mlp.up_proj", "fc"}
    x = torch.randn(3, 64)
    assert torch.equal(made["layers.0.mlp.up_proj"](x), F.linear(x, given["layers.0.mlp.up_proj.weight"], given["layers.0.mlp.up_proj.bias"]))


@pytest.mark.skipif(find_kernel() is None, reason=f"no compiled kernel: {why_not()}")
def test_beside_a_compiled_target_all_but_fc_are_rounded():
    """Rounded ones are near the exact product; `fc`, whose input joins two sizes, and shapes that the kernel does not take stay exact."""
    given = weights()
    made = products(given, target("compiled, AVX2"))
    x = torch.randn(3, 64)
    exact = F.linear(x, given["layers.0.mlp.up_proj.weight"], given["layers.0.mlp.up_proj.bias"])
    rounded = made["layers.0.mlp.up_proj"](x)
    assert isinstance(made["layers.0.mlp.up_proj"], Int8Linear) and not torch.equal(rounded, exact)
    assert (rounded - exact).norm() < 0.02 * exact.norm()
    wide = torch.randn(3, 128)
    assert torch.equal(made["fc"](wide), F.linear(wide, given["fc.weight"]))
    odd = weights(num_in=66)
    narrow = torch.randn(3, 66)
    assert torch.equal(products(odd, target("compiled, AVX2"))["layers.0.mlp.up_proj"](narrow),
                       F.linear(narrow, odd["layers.0.mlp.up_proj.weight"], odd["layers.0.mlp.up_proj.bias"]))


LAYER = "layers.0."
WIDE, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 32, 96
FACTS = {"head_dim": HEAD_DIM, "epsilon": 1e-5, "rope": {"rope_theta": 10000.0, "rope_type": "default"}}


def layer_weights(*, input_norm: bool, biases: bool, head_norms: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"self_attn.q_proj": (HEADS * HEAD_DIM, WIDE), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDE),
              "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDE), "self_attn.o_proj": (WIDE, HEADS * HEAD_DIM), "mlp.gate_proj": (INNER, WIDE),
              "mlp.up_proj": (INNER, WIDE), "mlp.down_proj": (WIDE, INNER), "post_attention_layernorm": (WIDE,)}
    shapes |= {"input_layernorm": (WIDE,)} if input_norm else {}
    shapes |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)} if head_norms else {}
    made = {f"{LAYER}{name}.weight": torch.randn(shape, generator=generator) / WIDE ** 0.5 if len(shape) == 2
            else 1 + 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if biases:
        made |= {f"{LAYER}self_attn.{name}_proj.bias": torch.randn(len(made[f"{LAYER}self_attn.{name}_proj.weight"]), generator=generator) for name in "qv"}
    return made


@pytest.mark.skipif(find_kernel() is None, reason=f"no compiled kernel: {why_not()}")
@pytest.mark.parametrize("input_norm, biases, head_norms", [(True, False, False), (False, False, False), (False, True, True)])
def test_a_compiled_layer_is_the_layer_up_to_rounding(input_norm, biases, head_norms):
    """A text, then a tree grown level by level behind it: the kernel's states are the plain layer's within int8's rounding, and what a
    node gets does not depend on its siblings."""
    weights = layer_weights(input_norm=input_norm, biases=biases, head_norms=head_norms)
    states = torch.randn(12, WIDE, generator=torch.Generator().manual_seed(2))

    def run(kernel: str, second: list[int], parents: list[int]) -> torch.Tensor:
        bare = SimpleNamespace(linears={"kernel": kernel}, device=torch.device("cpu"))
        layer, cache = DecoderLayer(weights, FACTS, bare), KVCache(64)
        row = cache.allocate()
        with torch.inference_mode():
            parts = [layer.forward([cache.stage(row, 7)], states[:7])]
            cache.keep(row, range(7))
            parts.append(layer.forward([cache.stage(row, 2, [ROOT, ROOT])], states[7:9]))
            parts.append(layer.forward([cache.stage(row, len(second), parents)], states[second]))
        return torch.cat(parts)
    plain, compiled = (run(kernel, [9, 10, 11], [0, 1, 1]) for kernel in ("onednn int8", "compiled, AVX2"))
    assert not torch.equal(plain, compiled) and (plain - compiled).norm() < 0.02 * plain.norm()
    assert torch.equal(run("compiled, AVX2", [10], [1])[-1], compiled[-2])
