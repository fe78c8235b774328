"""Writes the tiny models of `tiny` as GGUF files, with the gguf package. It knows nothing of specviz."""
from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from tiny import CHAT_TEMPLATE, EOS, tiny_model, tiny_tokenizer
from transformers import PreTrainedModel

__all__ = ["write_gguf"]

F32 = gguf.GGMLQuantizationType.F32
WIDE = {"qwen3": {"head_dim": 128}}         # transformers takes 128 for granted when it reads a Qwen3 file
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def write_gguf(path: Path, family: str = "llama", packing: gguf.GGMLQuantizationType = F32, tied: bool = True,
               pre_tokenizer: str = "smollm") -> PreTrainedModel:
    """`tiny_model(family)` and `tiny_tokenizer()` as one file, the matrices packed. Returns the model."""
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
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokenizer))])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(EOS)
    writer.add_unk_token_id(0)
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


def rotated_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q and k as GGUF stores them for Llama: the two halves of a head interleaved."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)
