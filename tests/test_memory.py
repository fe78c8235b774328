"""Memory worked out beforehand equals memory taken, for every family; what is short is said with numbers; failures give memory back."""
from __future__ import annotations

import gc
import json
import re
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, save_tiny, tiny_model

from specviz import loading, machine
from specviz.catalog import Catalog
from specviz.engine.model import LanguageModel, Row
from specviz.errors import LoadError, NotEnoughMemory
from specviz.loading import load_target
from specviz.memory import Shape, estimate, require_disk, shortage, sizes_of


def stored(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_counts_are_those_of_the_model(family, tied):
    """Number of weights and the cache of one token, from the config alone, are what the built model and its filled cache really have."""
    model = tiny_model(family, tie_word_embeddings=tied)
    sizes = sizes_of(model.config)
    assert sizes.num_parameters == stored(model)
    wrapped = LanguageModel(model)
    cache = wrapped.new_cache()
    row = cache.allocate()
    wrapped.forward([Row(row, [1, 2, 3])], cache)
    slots = cache._rows[row].keys[0].shape[1]
    assert cache.num_bytes == 4 * sizes.cache_per_token * slots


def test_a_shape_counts_like_its_model():
    """The formula for model cards agrees with the class, biases, head norms and tied tables included."""
    options_of = {"llama": {}, "qwen2": {"attention_bias": True}, "qwen3": {"head_norms": True}, "gemma2": {"num_norms": 4}}
    for family, options in options_of.items():
        for tied in (False, True):
            shape = Shape(384, 64, 128, 3, 8, 2, 8, tied, **options)
            assert sizes_of(shape) == sizes_of(tiny_model(family, tie_word_embeddings=tied).config), family


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("quantization", "precision"), [("none", "fp32"), ("int8", "int8")])
def test_weights_on_a_cpu_take_what_was_estimated(quantization, precision, tied):
    """The engine's own linears hold as many bytes as estimated, scales included (4 % is for what tiny layers add)."""
    model = tiny_model("llama", tie_word_embeddings=tied, hidden_size=256, intermediate_size=512, head_dim=32)
    needed = estimate(model.config, quantization, 512)
    wrapped = LanguageModel(model, precision=precision)
    decoder = wrapped._runner.decoder
    seen: dict[int, int] = {}
    for owner in [decoder, *decoder.modules()]:
        for value in [*vars(owner).values(), *owner._parameters.values(), *owner._buffers.values(), *_inside(owner)]:
            if isinstance(value, torch.Tensor) and value.dim() == 2 and value.numel() > 4096 and not value.shape[1] == 16:
                seen[id(value)] = value.numel() * value.element_size()
    assert abs(sum(seen.values()) - needed.weights_bytes) < 0.04 * needed.weights_bytes


def _inside(owner: object) -> list:
    """Tensors that a kernel's call closes over."""
    call = vars(owner).get("_call")
    cells = [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]
    parts = [*cells, *(vars(call).values() if hasattr(call, "__dict__") else ())]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def test_a_drafter_adds_its_weights_and_cache():
    """Target with drafter is target plus the drafter's weights and cache; both are unpacked on the way."""
    large, small = tiny_model("llama").config, tiny_model("llama", num_hidden_layers=1).config
    alone, second, both = estimate(large), estimate(small), estimate(large, drafter=small)
    assert both.drafter_bytes == second.weights_bytes + second.cache_bytes and both.total_bytes == alone.total_bytes + both.drafter_bytes
    assert both.loading_bytes == alone.loading_bytes + second.loading_bytes and "drafter" in both.parts()


def test_stronger_quantization_needs_less():
    """For a known 8B: 16 bits, 8 bits and 4 bits in that order, the head and the embedding staying in 16 bits."""
    shape = Catalog().card("qwen3-8b").shape
    weights = [estimate(shape, each, device="cuda").weights_bytes for each in ("none", "int8", "nf4")]
    assert weights == sorted(weights, reverse=True) and weights[0] == 2 * 8_190_735_360
    table = 2 * 2 * 151_936 * 4096
    assert weights[1] - table == pytest.approx(6_945_767_424 + 4 * 1_400_832 + 2 * 308_224)
    assert weights[2] - table == pytest.approx(6_945_767_424 * 0.5625 + 2 * 308_224)


def test_sentences_have_the_numbers():
    """Short memory and short disk name what is needed, what there is and what to do; enough is no sentence."""
    needed = estimate(Catalog().card("qwen3-8b").shape, "nf4", device="cuda")
    sentence = shortage("Qwen3-8B", needed, 6_000_000_000, "cuda:0, nf4")
    assert sentence.startswith("Qwen3-8B needs about 8.10 GB (cuda:0, nf4: weights 6.40 GB, cache 1.21 GB, working room 0.50 GB), and "
                               "6.00 GB are free.")
    assert shortage("Qwen3-8B", needed, 9_000_000_000, "cuda:0, nf4") == ""
    with pytest.raises(NotEnoughMemory, match="Fetching x needs 2.00 GB in /tmp, but only 1.00 GB are free; do this"):
        require_disk("x", 2_000_000_000, 1_000_000_000, "/tmp", "do this")


def test_loading_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    """Too little memory for the target, or for the drafter beside it, is said before a weight file is opened."""
    folder, draft = save_tiny(tmp_path / "large"), save_tiny(tmp_path / "small")
    monkeypatch.setattr(loading, "load_folder", lambda *arguments: pytest.fail("weights were read"))
    monkeypatch.setattr(loading, "available", lambda device: 1_000_000)
    with pytest.raises(NotEnoughMemory, match="large needs about 0.15 GB"):
        load_target(str(folder), device="cpu")
    just_enough = estimate(tiny_model("llama").config, "none", 512).peak_bytes
    monkeypatch.setattr(loading, "available", lambda device: just_enough)
    with pytest.raises(NotEnoughMemory, match="large needs about .* drafter"):
        Catalog(offline=True).open_target(str(folder), device="cpu", draft=str(draft))


def test_a_failed_load_gives_its_memory_back(tmp_path, monkeypatch):
    """A load that fails after the model was built holds nothing of it, even while somebody keeps the error; cancelling does the same."""
    folder = save_tiny(tmp_path / "large")
    for failure, expected in ((LoadError("broken"), LoadError), (KeyboardInterrupt(), KeyboardInterrupt),
                              (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), NotEnoughMemory)):
        built: list[weakref.ref] = []

        def fail(model, tokenizer, name, failure=failure, built=built):
            built.append(weakref.ref(model.get_input_embeddings().weight))
            raise failure

        monkeypatch.setattr(loading, "check_vocabulary_size", fail)
        with pytest.raises(expected) as caught:
            load_target(str(folder), device="cpu")
        gc.collect()
        assert caught.value is not None and len(built) == 1 and built[0]() is None


def test_running_out_while_loading_is_not_called_a_broken_file(tmp_path, monkeypatch):
    """A lack of memory inside transformers is told as such, not as weights that do not fit their config."""
    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(NotEnoughMemory, match="ran out while loading as float32"):
        load_target(str(save_tiny(tmp_path / "large")), device="cpu")


@pytest.mark.parametrize("change", [dict(num_attention_heads=7), dict(num_key_value_heads=4), dict(num_key_value_heads=3),
                                    dict(num_key_value_heads=1, num_attention_heads=4), dict(num_attention_heads=0), dict(head_dim=16)])
def test_a_config_that_lies_about_its_heads_is_refused(tmp_path, change):
    """A head count that the weights contradict is one sentence, never a crash, and no model comes of it."""
    folder = save_tiny(tmp_path / "liar")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(LoadError, match="liar|llama") as caught:
        load_target(str(folder), device="cpu")
    named = re.search(r"tensors .* first model\.layers\.0\.\S+, \[\d+, 64\] in the files and \[\d+, \d+\] by the config", str(caught.value))
    assert named or change in (dict(num_attention_heads=7), dict(num_attention_heads=0), dict(num_key_value_heads=3))
    assert "\n" not in str(caught.value) and "ignore_mismatched" not in str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_several_files(tmp_path, tied):
    """A checkpoint in shards gives the same logits, tied or not; a shard cut short is named."""
    model = tiny_model("llama", tie_word_embeddings=tied)
    folder = save_tiny(tmp_path / "whole", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "parts", max_shard_size="200KB")
    for path in folder.glob("tok*"):
        (tmp_path / "parts" / path.name).write_bytes(path.read_bytes())
    shards = sorted((tmp_path / "parts").glob("*.safetensors"))
    loaded = load_target(str(tmp_path / "parts"), device="cpu")
    ids = torch.tensor([[5, 60, 100, 7]])
    assert len(shards) > 1 and torch.equal(loaded.model(ids).logits, model(ids).logits)
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied
    shards[1].write_bytes(shards[1].read_bytes()[:-50])
    with pytest.raises(LoadError, match=f"{shards[1].name} of parts is damaged or cut short"):
        load_target(str(tmp_path / "parts"), device="cpu")


def test_an_untied_head_that_is_missing_is_noticed(tmp_path):
    """A checkpoint without a head, whose config does not tie it, is refused by the head's name."""
    folder = save_tiny(tmp_path / "headless")
    weights = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match="first lm_head.weight"):
        load_target(str(folder), device="cpu")


def test_an_idle_nvidia_card_is_noticed(monkeypatch):
    """Driver there, PyTorch without CUDA: the sentence has the command. No driver, or a working PyTorch: no sentence."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "driver_present", lambda: False)
    assert machine.missing_cuda_note() == ""
    monkeypatch.setattr(machine, "driver_present", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    for platform, python in (("linux", ".venv/bin/python -m pip install"), ("win32", ".venv\\Scripts\\python -m pip install")):
        monkeypatch.setattr(machine.sys, "platform", platform)
        note = machine.missing_cuda_note()
        assert "built without CUDA" in note and python in note and "--index-url https://download.pytorch.org/whl/cu" in note
        assert note in loading.choose_placement("auto").notes
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "update the driver" in machine.missing_cuda_note()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.missing_cuda_note() == ""


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    """Free memory is the smaller of the machine's and the container's; without a limit it is the machine's."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    everything = machine.available("cpu")
    for name, text in (("memory.max", "3000\n"), ("memory.current", "2000\n"), ("memory.stat", "anon 1\ninactive_file 500\n")):
        (tmp_path / name).write_text(text)
    assert machine.available("cpu") == 1500 < everything
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available("cpu") > 1500
    assert machine.free_disk(tmp_path / "not" / "there") > 0


def test_missing_operators_are_told(monkeypatch):
    """Where the packed CPU operators fail, the answer still comes, and a sentence names what that costs; where they work there is none."""
    from specviz.engine import linear
    from specviz.engine.native.kernel import why_not
    from specviz.opening import _operator_notes
    notes = _operator_notes(LanguageModel(tiny_model("llama"), precision="int8"))
    assert notes == ([f"INT8 runs without the compiled kernel, which is slower: {why_not()}."] if why_not() else [])

    def fail(*arguments, **options):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(linear.Int8Linear, "__init__", fail)
    monkeypatch.setattr(linear.PackedLinear, "__init__", fail)
    model = LanguageModel(tiny_model("llama"), precision="int8")
    assert "slower, and equal to plain decoding up to rounding only" in _operator_notes(model)[0]
    cache = model.new_cache()
    assert model.forward([Row(cache.allocate(), [1, 2, 3])], cache)[0].logits.isfinite().all()


def test_judging_a_model_touches_nothing_global():
    """While a model is built without storage, another thread makes its tensors as ever: no default is changed, not for a moment."""
    import threading

    from specviz.memory import skeleton
    config = tiny_model("llama", num_hidden_layers=40, dtype=torch.bfloat16).config
    config.dtype = torch.bfloat16
    done, seen = threading.Event(), set()

    def watch() -> None:
        while not done.is_set():
            layer = torch.nn.Linear(2, 2)
            seen.add((torch.get_default_dtype(), layer.weight.device.type, bool(layer.weight.abs().sum() > 0)))

    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(3):
        assert next(skeleton(config).parameters()).device.type == "meta"
    done.set()
    thread.join(20)
    assert seen == {(torch.float32, "cpu", True)}
