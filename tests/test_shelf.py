"""What the list of models says of this machine, and the report on one choice, with memory and devices as the test wants them."""
from __future__ import annotations

import json
import re

import pytest
import torch
from fake_machine import pretend
from tiny import save_tiny, swap_tokens

from specviz import shelf as module
from specviz.errors import LoadError
from specviz.options import Options
from specviz.service import Choice
from specviz.shelf import Shelf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two that belong together, one whose tokenizer swaps two tokens."""
    folder = tmp_path_factory.mktemp("models")
    for name, settings in {"target": {}, "draft": {"seed": 1, "num_hidden_layers": 1}, "stranger": {"seed": 2}}.items():
        save_tiny(folder / name, **settings)
    swap_tokens(folder / "stranger")
    return folder


@pytest.fixture
def shelf(tmp_path):
    return Shelf(Options(cache_dir=tmp_path, device="cpu"))


def have(monkeypatch, gigabytes: float) -> None:
    monkeypatch.setattr(module, "available", lambda device: int(gigabytes * 1e9))


def levels(inspection, level: str) -> str:
    return "\n".join(line.text for line in inspection.lines if line.level == level)


def test_every_card_is_offered_with_its_fit(shelf, monkeypatch):
    """With 8 GB the default comes first and fits, small ones fit, large ones say what they would need; none of them is here."""
    have(monkeypatch, 8)
    offers = shelf.offers()
    assert len(offers) >= 11 and offers[0].source == "default" and not offers[0].fit
    assert [bool(offer.fit) for offer in offers] == sorted(bool(offer.fit) for offer in offers)
    for offer in offers:
        assert offer.licence and offer.context_length > 1000 and offer.download_bytes > 0 and offer.memory_bytes > 0
        assert offer.fit == "" or "8.00 GB free" in offer.fit
    large = next(offer for offer in offers if offer.num_parameters > 30e9)
    assert large.fit.startswith("needs CUDA with 24 GB")
    have(monkeypatch, 500)
    assert not any(offer.fit for offer in shelf.offers())


def test_memory_that_unloading_would_give_back_counts(shelf, monkeypatch):
    """What does not fit beside the pair in use, but in its place, fits this machine."""
    have(monkeypatch, 0.2)
    assert shelf.offers()[0].fit and not shelf.offers(held_bytes=int(2e9))[0].fit


@pytest.mark.parametrize(("gigabytes", "quantizations"), [(24, "none"), (10, "nf4"), (4, "")])
def test_on_a_graphics_card(tmp_path, monkeypatch, gigabytes, quantizations):
    """Weights as they are where there is room, 4 bits where there is not; the suggestion is the largest that fits and has no gate."""
    have(monkeypatch, gigabytes)
    monkeypatch.setattr(Shelf, "_device", lambda self: torch.device("cuda:0"))
    shelf = Shelf(Options(cache_dir=tmp_path))
    offer = next(offer for offer in shelf.offers() if offer.source == "Qwen/Qwen3-8B")
    assert offer.fit == "" if quantizations else offer.fit.startswith("does not fit: needs")
    assert not quantizations or offer.quantizations[0] == quantizations
    best, fitting = shelf.suggestion(), [offer for offer in shelf.offers() if not offer.fit and not offer.gated]
    assert best.num_parameters == max(offer.num_parameters for offer in fitting) and not best.gated and best.download_bytes
    packed = [offer for offer in shelf.offers() if "packed as" in offer.name]
    wholes = [offer for offer in shelf.offers() if offer.quantizations[0] == "nf4" and not offer.fit]
    assert {offer.name for offer in packed} <= {f"{offer.name}, packed as nf4" for offer in wholes} and bool(packed) == bool(wholes)
    for each in packed:                          # on the list beside the model it is, with the same drafters and a third of its download
        whole = next(offer for offer in wholes if each.name == f"{offer.name}, packed as nf4")
        assert each.quantizations == ("none",) and each.drafts == whole.drafts and each.download_bytes < whole.download_bytes / 2
        assert each.memory_bytes == whole.memory_bytes and each.download_bytes < each.memory_bytes
    assert gigabytes == 4 or best in packed


def test_without_cuda_nothing_is_suggested(shelf):
    assert shelf.suggestion() is None


def test_the_report_on_a_good_pair(shelf, folder):
    """Vocabulary, cache, methods and memory, from configurations and tokenizers; nothing to download; no word is bad."""
    inspection = shelf.inspect(Choice(str(folder / "target"), str(folder / "draft"), device="cpu"))
    assert inspection.is_possible and inspection.download_bytes == 0 and inspection.fits_beside
    good = levels(inspection, "good")
    assert "same text by every token" in good and "Draft model" in good and "cpu, int8" in good and "drafter" in good


def test_the_report_on_a_foreign_tokenizer(shelf, folder):
    inspection = shelf.inspect(Choice(str(folder / "target"), str(folder / "stranger"), device="cpu"))
    assert not inspection.is_possible and "token 40" in levels(inspection, "bad")
    assert "Draft model, Draft tree (the draft model has another vocabulary)" in levels(inspection, "note")
    assert "Prompt lookup" in levels(inspection, "good") and "Draft model" not in levels(inspection, "good")


def test_too_little_memory(shelf, folder, monkeypatch):
    """Not beside the pair in use, but in its place: to be agreed to. Not even then: impossible, with the numbers."""
    choice = Choice(str(folder / "target"), device="cpu")
    have(monkeypatch, 0.1)
    tight = shelf.inspect(choice, held_bytes=int(1e9))
    assert tight.is_possible and not tight.fits_beside and "once the model in use is unloaded" in levels(tight, "note")
    impossible = shelf.inspect(choice)
    assert not impossible.is_possible and "are free" in levels(impossible, "bad")


@pytest.mark.parametrize(("changes", "words"), [({"target": "/no/such/folder"}, "no file or folder"), ({"device": "tpu"}, "tpu"),
                                                ({"quantization": "nf4"}, "nf4"), ({"target": "owner/never-fetched"}, "offline")])
def test_what_cannot_be_is_a_line_not_an_error(tmp_path, folder, changes, words):
    shelf = Shelf(Options(cache_dir=tmp_path, offline=True))
    inspection = shelf.inspect(Choice(**{"target": str(folder / "target"), "device": "cpu"} | changes))
    assert not inspection.is_possible and words in levels(inspection, "bad")


@pytest.mark.parametrize("packing", ["nf4", "nf4-double", "int8"])
def test_files_that_are_packed_already_take_what_they_take(tmp_path, monkeypatch, packing):
    """A packed checkpoint is judged and counted by its own quantization, though none was chosen, and a drafter beside it by its own."""
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": packing == "nf4-double"}
    for name in ("whole", "packed"):
        save_tiny(tmp_path / name, hidden_size=512, intermediate_size=1024, head_dim=64)
    config = tmp_path / "packed" / "config.json"
    how = {"quant_method": "bitsandbytes", **({"load_in_8bit": True} if packing == "int8" else four)}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": how}))
    pretend(monkeypatch, (8,))
    shelf, whole, packed = Shelf(Options(cache_dir=tmp_path)), str(tmp_path / "whole"), str(tmp_path / "packed")
    assert shelf.held_bytes(Choice(packed)) == shelf.held_bytes(Choice(whole, quantization=packing)) < shelf.held_bytes(Choice(whole)) * 0.7
    beside = shelf.held_bytes(Choice(packed, whole, quantization="none")) - shelf.held_bytes(Choice(packed))
    assert beside > shelf.held_bytes(Choice(whole))                           # and its cache
    report = levels(shelf.inspect(Choice(packed)), "good")
    assert f"packed as {packing}" in report and f"cuda, {packing}" in report
    told = re.search(r"memory: .*", report)[0]
    assert told == re.search(r"memory: .*", levels(shelf.inspect(Choice(whole, quantization=packing)), "good"))[0]


def test_damaged_weights_are_told_before_loading(shelf, folder, tmp_path):
    """A file cut short is a bad line of the report, of target and drafter alike; without any weights only the small files are judged."""
    broken = save_tiny(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4000])
    for choice in (Choice(str(broken), device="cpu"), Choice(str(folder / "target"), str(broken), device="cpu")):
        assert re.search("weights? .*of broken .*(damaged|cannot be read)", levels(shelf.inspect(choice), "bad"))


def test_the_default_model_before_it_is_fetched(shelf, monkeypatch):
    """Judged by its card; its download is told, so that it can be agreed to."""
    have(monkeypatch, 8)
    inspection = shelf.inspect(Choice(device="cpu"))
    assert inspection.is_possible and inspection.download_bytes == shelf.offers()[0].download_bytes > 0


def test_what_a_pair_holds(shelf, folder):
    """Target and drafter together hold more than the target alone; what cannot be told is nothing."""
    alone, both = (shelf.held_bytes(Choice(str(folder / "target"), draft, device="cpu")) for draft in (None, str(folder / "draft")))
    assert 0 < alone < both and shelf.held_bytes(Choice("/no/such/folder")) == 0


def test_check_here(shelf, folder):
    """A folder and the default pass; a hub model that was never fetched and a damaged folder do not."""
    shelf.check_here(Choice(str(folder / "target"), "default"))
    with pytest.raises(LoadError, match="not on this machine any more"):
        shelf.check_here(Choice("owner/never-fetched"))
    with pytest.raises(LoadError, match="not on this machine any more"):
        shelf.check_here(Choice("default", str(folder)))
