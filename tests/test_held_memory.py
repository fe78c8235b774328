"""The bytes that a loaded model is said to hold, against the tensors it was made of and the cache it fills."""
from __future__ import annotations

import pytest
from head_files import random_heads
from tiny import save_tiny, tiny_model

from specviz.engine.model import LanguageModel, Row
from specviz.held_memory import cache_bytes_per_token, held, tensor_bytes
from specviz.opening import open_engine
from specviz.options import Options


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi"])
def test_bytes_are_those_of_the_tensors(family):
    """Unpacked, a model holds its parameters and next to nothing besides; in int8, where no parameter is left to be seen, less than half
    of that; and a cached token takes what the cache really grows by."""
    model = tiny_model(family)
    parameters = sum({tensor.data_ptr(): tensor.nbytes for tensor in model.parameters()}.values())
    plain = LanguageModel(model)
    assert parameters <= tensor_bytes(plain) < parameters + 200
    packed = LanguageModel(tiny_model(family), precision="int8")
    linears = parameters - packed.embeddings.weight.nbytes
    spare = (1 << 21) + (1 << 18) if "compiled" in packed.linears["kernel"] else 0        # weights begin at a large page; and scratch
    assert linears / 8 < tensor_bytes(packed) - packed.embeddings.weight.nbytes < linears / 2 + spare
    cache = plain.new_cache(256)                 # a row begins with 256 slots
    plain.forward([Row(cache.allocate(), [1, 2, 3], num_logits=1)], cache)
    assert cache.num_bytes == 256 * cache_bytes_per_token(plain)
    assert held(plain, packed) == {"target_bytes": tensor_bytes(plain), "drafter_bytes": tensor_bytes(packed),
                                   "cache_bytes_per_token": cache_bytes_per_token(plain), "drafter_cache_bytes_per_token": cache_bytes_per_token(packed)}


def test_an_opened_engine_tells_what_it_holds(tmp_path):
    """The bytes stand ready for every trace; trained heads count as the drafter, tensor by tensor."""
    opened = open_engine(Options(target=str(save_tiny(tmp_path / "tiny")), quantization="none", threads=1, cache_dir=tmp_path), lambda *_: None)
    target = opened.parts.target
    assert opened.memory["cache_bytes_per_token"] == cache_bytes_per_token(target) and "drafter_bytes" not in opened.memory
    assert opened.memory["target_bytes"] == pytest.approx(tensor_bytes(target), rel=0.2), "tables of positions may have been made since"
    heads = random_heads(target)
    stored = sum(tensor.nbytes for each in heads.values() for tensor in each.tensors.values())
    assert 0 < held(target, heads=heads)["drafter_bytes"] <= stored
