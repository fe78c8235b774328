"""GGUF files: several families and packings, written by the gguf package; what is cut or strange is refused, nothing crashes."""
from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_gguf

from specviz import loading
from specviz.check import check_pair
from specviz.catalog import Catalog
from specviz.errors import LoadError, NotEnoughMemory
from specviz.gguf_file import count_gguf_weights
from specviz.loading import load_target
from specviz.sources import describe

Q8, F16, F32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("packing", [F32, F16, Q8], ids=["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_families_and_packings(tmp_path, family, packing, tied):
    """Unpacked logits are the original's, up to the packing; what it took on disk and takes in memory is told."""
    model = write_gguf(tmp_path / "my.gguf", family, packing, tied, pre_tokenizer="qwen2")
    loaded = load_target(str(tmp_path / "my.gguf"), device="cpu")
    ids = torch.tensor([[5, 60, 100, 7]])
    before, after = model(ids).logits, loaded.model(ids).logits
    limit = {F32: 1e-5, F16: 0.02, Q8: 0.3}[packing]
    assert (before - after).abs().max() < limit * before.abs().max()
    held = sum(parameter.numel() for parameter in loaded.model.parameters()) * 4
    note = next(note for note in loaded.notes if note.startswith("my.gguf was unpacked"))
    assert f"{held / 1e6:.1f} MB in memory as float32" in note and f"{(tmp_path / 'my.gguf').stat().st_size / 1e6:.1f} MB on disk" in note
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied
    assert count_gguf_weights(tmp_path / "my.gguf") * 4 == held


def test_described_without_its_weights(tmp_path):
    """Config and tokenizer come from the header; a GGUF file and a folder are judged as a pair like any two."""
    write_gguf(tmp_path / "my.gguf", pre_tokenizer="gpt-2")
    described = describe(str(tmp_path / "my.gguf"))
    assert (described.kind, described.name, described.config().num_hidden_layers, len(described.tokenizer())) == ("gguf", "my", 3, 384)
    report = check_pair(str(tmp_path / "my.gguf"), str(tmp_path / "my.gguf"), catalog=Catalog(offline=True))
    assert report.is_possible, report.text()
    described.config().num_hidden_layers = 7              # everybody has a config of his own, though the file is parsed once
    assert describe(str(tmp_path / "my.gguf")).config().num_hidden_layers == 3


def test_memory_for_unpacking_is_checked_first(tmp_path, monkeypatch):
    """A file that would not fit once unpacked is refused with its expanded size before a tensor is read."""
    write_gguf(tmp_path / "my.gguf")
    monkeypatch.setattr(loading, "read_gguf", lambda *arguments: pytest.fail("tensors were read"))
    monkeypatch.setattr(loading, "available", lambda device: 1_000_000)
    with pytest.raises(NotEnoughMemory, match="my needs about 0.15 GB"):
        load_target(str(tmp_path / "my.gguf"), device="cpu")


def test_a_file_cut_anywhere_is_refused(tmp_path):
    """Cut at any of many places, also within the last tensor, a file is called incomplete; damaged headers never crash."""
    write_gguf(tmp_path / "my.gguf")
    whole = (tmp_path / "my.gguf").read_bytes()
    for length in [0, 3, 8, 20, 30, 100, 5000, len(whole) // 3, len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(LoadError, match="cut.gguf is not a complete GGUF file"):
            load_target(str(tmp_path / "cut.gguf"), device="cpu")
    for place in (4, 8, 16, 30, 200):
        (tmp_path / "cut.gguf").write_bytes(whole[:place] + b"\xff" * 8 + whole[place + 8:])
        try:
            load_target(str(tmp_path / "cut.gguf"), device="cpu")
        except LoadError as error:
            assert "\n" not in str(error)


def test_an_unknown_architecture_is_refused(tmp_path):
    """A GGUF of a family that transformers cannot unpack says what to take instead."""
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "odd-family")
    writer.add_block_count(1)
    writer.add_tensor("x", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LoadError, match="odd.gguf could not be unpacked by transformers .* safetensors"):
        load_target(str(tmp_path / "odd.gguf"), device="cpu")
