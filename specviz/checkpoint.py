"""Reads and checks the folder of a transformers model: config, tokenizer, weight files. It knows nothing of devices or of the hub.

Everything is checked before memory is spent, and what is wrong is said in one sentence that names the file.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .errors import LoadError
from .gguf_file import brief
from .text import end_of_turn_id

__all__ = ["check_vocabulary_size", "check_weight_files", "eos_ids", "packed_as", "read_config", "read_tokenizer", "weight_files"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
_READABLE_PACKING = "bitsandbytes"     # checkpoints whose weights are packed already: the only kind that is read, on CUDA


def read_config(folder: Path, name: str) -> PretrainedConfig:
    """The folder's config if it describes a causal language model."""
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError(f"{name} has no config.json, so it is not the folder of a transformers model; name the folder that holds it "
                        "and the *.safetensors files.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        model_type = str(content["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"The config.json of {name} cannot be read or names no model_type ({brief(error)}).") from error
    parts = [part for part in ("vision", "audio") if f"{part}_config" in content]
    if parts:
        raise LoadError(f"{name} ({model_type}) reads {parts[0]} input; choose the text-only model of its family.")
    architectures = [str(architecture) for architecture in content.get("architectures") or ()]
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    is_known = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if content.get("is_encoder_decoder") or not is_known or (architectures and not causal & set(architectures)):
        kind = architectures[0] if architectures else model_type
        has_code = "auto_map" in content and not is_known
        reason = "brings its own code, which specviz never runs" if has_code else "is not a model that writes text token by token"
        raise LoadError(f"{name} ({kind}) {reason}; choose a causal language model that transformers knows.")
    packing = content.get("quantization_config") or {}
    if packing and packing.get("quant_method") != _READABLE_PACKING:
        raise LoadError(f"The weights of {name} are packed as {packing.get('quant_method')}, which specviz does not read; choose the "
                        "unpacked model and a --quantization, or a checkpoint packed by bitsandbytes.")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:   # config classes validate in their own ways, with exceptions of many kinds
        raise LoadError(f"The config.json of {name} is not valid for a {model_type} model ({brief(error)}).") from error


def weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors files of a folder, none opened. Raises LoadError where there are none or one is missing."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not single.is_file() and not index.is_file():
        other = next((path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))), None)
        found = f"only {other}, a format that can run code when read" if other else "no weights"
        raise LoadError(f"{name} has {found}; expected model.safetensors.")
    try:
        parts = [single.name] if single.is_file() else json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [folder / part for part in sorted(set(parts))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise LoadError(f"{index.name} of {name} cannot be read ({brief(error)}); download it again.") from error
    for path in files:
        if not path.is_file() or path.parent != folder:
            raise LoadError(f"The weight file {path.name} of {name} is missing; download it again.")
    return files


def check_weight_files(folder: Path, name: str) -> None:
    """Open every weight file: a file cut short, a missing part or a pointer instead of a file is found before memory is spent."""
    for path in weight_files(folder, name):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise LoadError(f"The weight file {path.name} of {name} is damaged or cut short ({brief(error)}); fetch it again.") from error


def read_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase:
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise LoadError(f"{name} has no tokenizer; copy tokenizer.json and tokenizer_config.json of the model into its folder.")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:   # the Rust library raises bare Exception
        raise LoadError(f"The tokenizer of {name} cannot be read ({brief(error)}); copy tokenizer.json and tokenizer_config.json "
                        "again.") from error


def check_vocabulary_size(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    num_rows = model.get_input_embeddings().num_embeddings
    if tokenizer.vocab_size > num_rows:
        raise LoadError(f"The tokenizer of {name} has {tokenizer.vocab_size:,} tokens, but the model knows only {num_rows:,}: they do not "
                        "belong together; copy the model's own tokenizer.json.")


def packed_as(config: PretrainedConfig) -> str:
    """What bitsandbytes has made of the weights in the files: "int8", "nf4", "fp4", or these with "-double"; "" for plain weights."""
    packing = getattr(config, "quantization_config", None)
    if packing is None:
        return ""
    packing = packing if isinstance(packing, dict) else packing.to_dict()
    double = "-double" if packing.get("bnb_4bit_use_double_quant") else ""
    return "int8" if packing.get("load_in_8bit") else str(packing.get("bnb_4bit_quant_type", "fp4")) + double


def eos_ids(config: Any, generation_config: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end an answer, from all places where models keep them: generation config (may be None), config, tokenizer, chat template."""
    found: set[int] = set()
    for value in (getattr(generation_config, "eos_token_id", None), getattr(config, "eos_token_id", None),
                  tokenizer.eos_token_id, end_of_turn_id(tokenizer)):
        found.update(value if isinstance(value, (list, tuple)) else () if value is None else (value,))
    return tuple(sorted(found))
