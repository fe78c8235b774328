"""GGUF files: several families and packings, written by the gguf package; what is cut or strange is refused, nothing crashes."""
from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from test_loading import rotated_pairs, write_gguf
from tiny import CHAT_TEMPLATE, EOS, tiny_model, tiny_tokenizer

from specviz import loading
from specviz.check import check_pair
from specviz.catalog import Catalog
from specviz.errors import LoadError, NotEnoughMemory
from specviz.gguf_file import count_gguf_weights
from specviz.loading import load_target
from specviz.sources import describe

Q8, F16, F32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32
WIDE = {"qwen3": {"head_dim": 128}}         # transformers takes 128 for granted when it reads a Qwen3 file
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def write(path: Path, family: str, packing: gguf.GGMLQuantizationType, tied: bool) -> torch.nn.Module:
    """A tiny model of a family as a GGUF file; its matrices packed. Returns the model."""
    model, tokenizer = tiny_model(family, tie_word_embeddings=tied, **WIDE.get(family, {})), tiny_tokenizer()
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokenizer))])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(CHAT_TEMPLATE)

    def add(name: str, tensor: torch.Tensor) -> None:
        array = tensor.contiguous().numpy().astype(np.float32)
        kind = packing if array.ndim == 2 else F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)

    state = model.state_dict()
    add("token_embd.weight", state["model.embed_tokens.weight"])
    add("output_norm.weight", state["model.norm.weight"])
    if not tied:
        add("output.weight", state["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            for part in ("weight", "bias"):
                if (tensor := state.get(f"model.layers.{layer}.{ours}.{part}")) is not None:
                    if family == "llama" and theirs in ("attn_q", "attn_k"):
                        tensor = rotated_pairs(tensor, config.num_attention_heads if theirs == "attn_q" else config.num_key_value_heads)
                    add(f"blk.{layer}.{theirs}.{part}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("packing", [F32, F16, Q8], ids=["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_families_and_packings(tmp_path, family, packing, tied):
    """Unpacked logits are the original's, up to the packing; what it took on disk and takes in memory is told."""
    model = write(tmp_path / "my.gguf", family, packing, tied)
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
