"""Machines that are not here: what a card, several cards, mps or an idle NVIDIA driver would be told, and what is worked out for them."""
from __future__ import annotations

import pytest
import torch
from accelerate import dispatch_model
from fake_machine import pretend
from tiny import save_tiny, tiny_model
from transformers.integrations.accelerate import _get_device_map

from specviz import loading
from specviz.catalog import Catalog
from specviz.engine.model import LanguageModel, Row
from specviz.errors import NotEnoughMemory
from specviz.loading import load_target
from specviz.memory import card_budgets, estimate, skeleton
from specviz.opening import open_engine
from specviz.options import Options
from specviz.placement import choose_placement


def quiet(message: str, fraction: float | None = None) -> None:
    pass


@pytest.mark.parametrize(("cards", "mps", "device"), [((24,), False, "cuda"), ((24,), True, "cuda"), ((), True, "mps"), ((), False, "cpu")])
def test_auto_takes_cuda_then_mps_then_the_cpu(monkeypatch, cards, mps, device):
    """mps says that it is untested; a quantization that mps lacks goes to the CPU, where there is one."""
    pretend(monkeypatch, cards, mps=mps)
    chosen = choose_placement()
    assert chosen.device.type == device and any("untested" in note for note in chosen.notes) == (device == "mps")
    assert choose_placement("auto", "auto", "int8").device.type == ("cuda" if device == "cuda" else "cpu")


def test_mps_that_does_not_work_gives_way_to_the_cpu(tmp_path, monkeypatch):
    """This machine's PyTorch has no mps: chosen by itself it fails, the CPU answers, and a note has the reason. Asked for, it is an error."""
    folder = str(save_tiny(tmp_path / "model"))
    pretend(monkeypatch, mps=True)
    opened = open_engine(Options(target=folder, threads=1, cache_dir=tmp_path), quiet)
    assert opened.config["device"] == "cpu" and opened.config["notes"][0].startswith("The device mps did not work (")
    with pytest.raises(RuntimeError):
        open_engine(Options(target=folder, device="mps", cache_dir=tmp_path), quiet)


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 6), torch.bfloat16), ((12, 0), torch.bfloat16)])
def test_older_cards_compute_in_float16(monkeypatch, capability, dtype):
    pretend(monkeypatch, (12,), capability=capability)
    assert choose_placement().dtype == dtype


def place_of(name: str, placed: dict[str, int | str]) -> int | str:
    """Where a parameter lies; a map may name whole parts of the model."""
    parts = name.split(".")
    return next(placed[prefix] for end in range(len(parts), -1, -1) if (prefix := ".".join(parts[:end])) in placed)


@pytest.mark.parametrize("cards", [(24, 24), (48, 12), (8, 40), (16, 16, 16)])
def test_layers_are_shared_out_over_several_cards(monkeypatch, cards):
    """transformers' own arithmetic with our budgets: a 14B in 16 bits lies on the cards alone, and on each one its layers, their share of
    the cache and the working room fit into what is free."""
    pretend(monkeypatch, cards)
    card = Catalog().card("qwen3-14b")
    from transformers import AutoConfig
    config = AutoConfig.for_model("qwen3", vocab_size=151936, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40,
                                  num_attention_heads=40, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, dtype="bfloat16")
    needed = card.estimate("none", device="cuda")
    bare = skeleton(config).to(torch.bfloat16)
    free = [int(gigabytes * 1e9) for gigabytes in cards]
    placed = _get_device_map(bare, "sequential", card_budgets(needed, free), None)
    weights, layers = [0] * len(cards), [set() for _ in cards]
    for name, tensor in bare.named_parameters():
        where = place_of(name, placed)
        weights[where] += tensor.numel() * 2
        layers[where] |= {name.split(".")[2]} if ".layers." in name else set()
    assert sum(map(len, layers)) == 40 == len(set.union(*layers))
    for taken, held, room in zip(weights, layers, free):
        assert taken + needed.cache_bytes * len(held) / 40 + needed.workspace_bytes <= room


def test_a_drafter_keeps_its_room_on_the_first_card():
    """Its bytes are taken off the first card only, and nothing may go to the CPU."""
    large, small = tiny_model("llama").config, tiny_model("llama", num_hidden_layers=1).config
    alone, both = (estimate(large, device="cuda", drafter=drafter) for drafter in (None, small))
    free = [600_000_000, 600_000_000]
    before, after = card_budgets(alone, free), card_budgets(both, free)
    assert after["cpu"] == before["cpu"] == 0 and after[1] == before[1] and before[0] > after[0] >= before[0] - both.drafter_bytes


def test_what_several_cards_cannot_hold_is_refused_before_loading(tmp_path, monkeypatch):
    """The working room counts once for each card; the sentence tells how many there are."""
    pretend(monkeypatch, (0.4, 0.4))
    monkeypatch.setattr(loading, "load_folder", lambda *arguments: pytest.fail("weights were read"))
    with pytest.raises(NotEnoughMemory, match=r"needs about 1.0\d GB \(2 cards together, bfloat16"):
        load_target(str(save_tiny(tmp_path / "model")), device="cuda:all")


def test_several_cards_are_loaded_with_their_budgets(tmp_path, monkeypatch):
    """cuda:all hands transformers a map of its own making within the budgets; one card gets everything."""
    asked: list[dict] = []

    def from_pretrained(folder, **options):
        asked.append(options)
        raise ValueError("far enough")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    folder = str(save_tiny(tmp_path / "model"))
    for cards in ((8, 6), (8,)):
        pretend(monkeypatch, cards)
        with pytest.raises(Exception, match="far enough"):
            load_target(folder, device="cuda:all")
    assert asked[0]["device_map"] == "sequential" and set(asked[0]["max_memory"]) == {0, 1, "cpu"} and asked[0]["max_memory"]["cpu"] == 0
    assert 0 < asked[0]["max_memory"][1] < asked[0]["max_memory"][0] < 8e9
    assert asked[1]["device_map"] == {"": torch.device("cuda:0")} and "max_memory" not in asked[1]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_the_engine_runs_a_model_that_hooks_move_about(tmp_path, family):
    """Layers that accelerate fetches from elsewhere before they compute, as on several cards: a chain, a rollback and another step give the
    logits of the model in one place."""
    whole, parts = tiny_model(family), tiny_model(family)
    names = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", "model.layers.0": "cpu",
             "model.layers.1": "disk", "model.layers.2": "disk"}
    parts = dispatch_model(parts, names, main_device="cpu", offload_dir=str(tmp_path))
    results = []
    for model in (whole, parts):
        wrapped = LanguageModel(model, exact=False)
        cache = wrapped.new_cache()
        row = cache.allocate()
        first = wrapped.forward([Row(row, [5, 60, 100, 7, 33])], cache)[0].logits
        cache.keep(row, range(3))
        results.append((first, wrapped.forward([Row(row, [9, 8])], cache)[0].logits))
    for one, other in zip(*results):
        assert torch.allclose(one, other, atol=1e-5)
