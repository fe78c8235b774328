"""bitsandbytes INT8, NF4 and FP4 through the real loading code. Its kernels for the CPU run here; the product offers it on CUDA only."""
from __future__ import annotations

import json

import pytest
import torch
from tiny import save_tiny, tiny_model

from specviz import placement
from specviz.engine.model import LanguageModel, Row
from specviz.errors import InputError, LoadError
from specviz.loading import choose_placement, load_target
from specviz.memory import estimate

bitsandbytes = pytest.importorskip("bitsandbytes")
SIZE = dict(hidden_size=256, intermediate_size=512, head_dim=32)
CLASSES = {"int8": "Linear8bitLt", "nf4": "Linear4bit", "fp4": "Linear4bit", "nf4-double": "Linear4bit"}


@pytest.fixture
def anywhere(monkeypatch):
    """Lets bitsandbytes run on this CPU, as it would on CUDA."""
    monkeypatch.setattr(placement, "_BITSANDBYTES_DEVICES", ("cuda", "cpu"))
    monkeypatch.setitem(placement.QUANTIZATIONS, "cpu", ("none", "int8", "nf4", "fp4", "nf4-double", "fp4-double"))


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[5, 60, 100, 7, 33]])).logits.float()


def test_the_product_does_not_offer_it_on_a_cpu():
    """On a CPU there is none and int8, our own; 4 bits are refused with what is possible."""
    assert placement.QUANTIZATIONS["cpu"] == ("none", "int8")
    for name in ("nf4", "fp4"):
        with pytest.raises(InputError, match=f"'{name}' needs a CUDA device, and this is cpu; on cpu there is none, int8"):
            choose_placement("cpu", "auto", name)
    assert not placement.quantizes_while_loading(choose_placement("cpu", "auto", "int8"))


@pytest.mark.parametrize("quantization", CLASSES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_packed_while_loading(tmp_path, anywhere, quantization, family):
    """All linears of the layers are packed, head and embedding are not; logits stay near the original's; the size is the estimated one."""
    tied = family == "gemma2"
    folder = save_tiny(tmp_path / "model", family, dtype=torch.bfloat16, tie_word_embeddings=tied, **SIZE)
    loaded = load_target(str(folder), device="cpu", dtype="bfloat16", quantization=quantization)
    assert any(module.weight.quant_state.nested for module in loaded.model.modules() if type(module).__name__ == "Linear4bit") is ("double" in quantization)
    linears = {name: type(module).__name__ for name, module in loaded.model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linears.pop("lm_head") == "Linear" and set(linears.values()) == {CLASSES[quantization]} and len(linears) == 3 * 7
    before, after = logits_of(tiny_model(family, dtype=torch.bfloat16, tie_word_embeddings=tied, **SIZE)), logits_of(loaded.model)
    likeness = torch.nn.functional.cosine_similarity(before.flatten(), after.flatten(), 0)
    assert likeness > (0.99 if quantization == "int8" else 0.8)
    assert likeness < 0.999999                                  # something was quantized
    held = sum(parameter.numel() * parameter.element_size() for parameter in loaded.model.parameters())
    for module in loaded.model.modules():
        if type(module).__name__ == "Linear4bit":
            held += module.weight.quant_state.absmax.numel() * (4 if "double" not in quantization else 1 + 4 / 256)
        elif type(module).__name__ == "Linear8bitLt":
            scales = module.state.SCB if module.weight.SCB is None else module.weight.SCB       # the first call moves them
            held += scales.numel() * 4
    needed = estimate(loaded.model.config, quantization, device="cuda", dtype=torch.bfloat16)
    assert abs(held - needed.weights_bytes) < 0.01 * needed.weights_bytes


@pytest.mark.parametrize("quantization", CLASSES)
def test_the_engine_runs_it(tmp_path, anywhere, quantization):
    """A packed model goes through the engine's adapter: a chain in one forward gives the tokens that single steps give."""
    folder = save_tiny(tmp_path / "model", dtype=torch.bfloat16, **SIZE)
    model = LanguageModel(load_target(str(folder), device="cpu", dtype="bfloat16", quantization=quantization).model)
    text = [5, 60, 100, 7, 33, 8]
    cache = model.new_cache()
    row = cache.allocate()
    together = model.forward([Row(row, text)], cache)[0].logits.float()
    single = model.new_cache()
    row = single.allocate()
    for index, token in enumerate(text):
        logits = model.forward([Row(row, [token])], single)[0].logits.float()
        single.keep(row, range(1))
        assert torch.nn.functional.cosine_similarity(logits[0], together[index], 0) > 0.99


def test_numbers_that_the_settings_stand_for():
    """threshold 0, 16-bit compute, the asked 4-bit type, nested scales only where asked for: bitsandbytes' defaults are others."""
    chosen = placement.Placement(torch.device("cpu"), torch.bfloat16, "int8")
    assert placement.bitsandbytes_config(chosen).llm_int8_threshold == 0.0
    for name, double in (("nf4", False), ("fp4", False), ("nf4", True), ("fp4", True)):
        config = placement.bitsandbytes_config(placement.Placement(torch.device("cpu"), torch.float16, f"{name}-double" if double else name))
        assert (config.bnb_4bit_quant_type, config.bnb_4bit_compute_dtype, config.bnb_4bit_use_double_quant) == (name, torch.float16, double)


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_checkpoints_that_are_packed_already(tmp_path, anywhere, monkeypatch, quantization):
    """A saved packed model loads as it is and says its quantization; it cannot become another, and not on a CPU in the product."""
    plain = save_tiny(tmp_path / "plain", dtype=torch.bfloat16, **SIZE)
    source = load_target(str(plain), device="cpu", dtype="bfloat16", quantization=quantization)
    source.model.save_pretrained(tmp_path / "packed")
    source.tokenizer.save_pretrained(tmp_path / "packed")
    loaded = load_target(str(tmp_path / "packed"), device="cpu", dtype="bfloat16")
    assert loaded.placement.quantization == quantization and torch.allclose(logits_of(loaded.model), logits_of(source.model), atol=0.05)
    with pytest.raises(InputError, match=f"packed is packed as {quantization} already and cannot become fp4"):
        load_target(str(tmp_path / "packed"), device="cpu", dtype="bfloat16", quantization="fp4")
    monkeypatch.setattr(placement, "_BITSANDBYTES_DEVICES", ("cuda",))
    with pytest.raises(LoadError, match=f"packed is packed as {quantization} by bitsandbytes, which needs a CUDA device, and this is cpu"):
        load_target(str(tmp_path / "packed"), device="cpu")


def test_other_packings_are_refused_by_name(tmp_path):
    """Checkpoints packed by something else are refused before any weight is read, with what to take instead."""
    folder = save_tiny(tmp_path / "packed")
    content = json.loads((folder / "config.json").read_text())
    for method in ("awq", "gptq", "fp8", "mxfp4", 7):
        (folder / "config.json").write_text(json.dumps({**content, "quantization_config": {"quant_method": method}}))
        with pytest.raises(LoadError, match=f"packed are packed as {method}, which specviz does not read; choose the unpacked model"):
            load_target(str(folder), device="cpu")


def test_several_cards_together(monkeypatch):
    """cuda:all spreads the target over the cards if there are several, and says that this is untested; with one it is that one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for count, spread in ((1, False), (2, True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        chosen = choose_placement("cuda:all", "auto", "nf4")
        assert (str(chosen.device), chosen.spread, any("untested" in note for note in chosen.notes)) == ("cuda:0", spread, spread)


def test_a_missing_package_is_named(monkeypatch):
    """Without bitsandbytes, quantization on CUDA says what to install; weights as they are need nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(placement, "find_spec", lambda name: None)
    assert choose_placement("cuda").quantization == "none"
    with pytest.raises(InputError, match="'nf4' on CUDA needs the package bitsandbytes"):
        choose_placement("cuda", "auto", "nf4")
