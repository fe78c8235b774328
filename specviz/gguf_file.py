"""Reads a GGUF file into an ordinary transformers model and tokenizer, weights unpacked. It knows nothing of where files come from.

Written against transformers 5.24, which unpacks the weights but leaves a model that cannot be saved and, for some vocabularies, a
tokenizer that splits text unlike the one the model was trained with; both are put right here.
"""
from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from .errors import LoadError

UNREADABLE = (ValueError, LookupError, OSError, RuntimeError, AttributeError, ImportError, TypeError, ArithmeticError)

__all__ = ["count_gguf_weights", "read_gguf", "read_gguf_config", "read_gguf_tokenizer"]

# Vocabularies (key "tokenizer.ggml.pre") whose merges were learned with every digit cut off on its own. Without the cut "\n\n1" becomes
# three tokens where training had two.
DIGIT_SPLITTING = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})


def read_gguf(path: Path, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (on the CPU, eval mode) and tokenizer of one GGUF file.

    Takes about 15 s for 135 million weights, and the memory of the unpacked weights. Raises LoadError if the file is damaged or its
    architecture is not one that transformers can unpack.
    """
    tokenizer = read_gguf_tokenizer(path)
    try:
        source = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype, local_files_only=True)
    except UNREADABLE as error:
        raise unpackable(path, error) from error
    return without_gguf_traces(source, dtype), tokenizer


def read_gguf_config(path: Path) -> PretrainedConfig:
    """The config alone; a copy that the caller may change. Raises LoadError as `read_gguf` does."""
    read_header(path)
    try:
        return deepcopy(parse_config(path, *_state(path)))
    except UNREADABLE as error:
        raise unpackable(path, error) from error


def read_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer alone. Raises LoadError as `read_gguf` does."""
    header = read_header(path)
    try:
        return parse_tokenizer(path, *_state(path), header)
    except UNREADABLE as error:
        raise unpackable(path, error) from error


@lru_cache(maxsize=8)
def parse_config(path: Path, num_bytes: int, changed_ns: int) -> PretrainedConfig:
    """As `parse_header`: transformers reads the whole vocabulary for it, in Python."""
    return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False)


@lru_cache(maxsize=2)
def parse_tokenizer(path: Path, num_bytes: int, changed_ns: int, header: Header) -> PreTrainedTokenizerBase:
    """Likewise; nothing in this program changes a tokenizer that it was given."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    if header.pre_tokenizer in DIGIT_SPLITTING:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    return tokenizer


def count_gguf_weights(path: Path) -> int:
    """Numbers in all tensors of the file: unpacked, each takes the bytes of the dtype. Raises LoadError."""
    return read_header(path).num_weights


def unpackable(path: Path, error: BaseException) -> LoadError:
    return LoadError(f"{path.name} could not be unpacked by transformers ({brief(error)}); give a folder with safetensors weights of the "
                     "same model instead.")


def without_gguf_traces(source: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights in a model built from the config alone, which `save_pretrained` accepts."""
    config = type(source.config).from_dict({key: value for key, value in source.config.to_dict().items() if key != "quantization_config"})
    with no_init_weights():
        model = type(source)._from_config(config, dtype=dtype)
    model.load_state_dict(source.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = source.generation_config
    return model.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True)
class Header:
    """What is wanted of a file's header. pre_tokenizer: "" if the file does not say."""
    pre_tokenizer: str
    num_weights: int


def read_header(path: Path) -> Header:
    """Raises LoadError for a file that is no GGUF or is cut short."""
    try:
        return parse_header(path, *_state(path))
    except UNREADABLE as error:
        raise LoadError(f"{path.name} is not a complete GGUF file ({brief(error)}); download it again.") from error


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=8)
def parse_header(path: Path, num_bytes: int, changed_ns: int) -> Header:
    """Parsing takes seconds where the vocabulary is large, so it is done once for each state of a file."""
    from gguf import GGUFReader
    reader = GGUFReader(path)
    if any(tensor.data_offset + tensor.n_bytes > num_bytes for tensor in reader.tensors):
        raise ValueError("it ends before its last tensor")
    field = reader.get_field("tokenizer.ggml.pre")
    return Header("" if field is None else str(field.contents()), sum(int(tensor.n_elements) for tensor in reader.tensors))


def brief(error: BaseException) -> str:
    """The first line of an error, and the second where the first only announces it; short enough for a sentence."""
    lines = str(error).strip().splitlines()
    line = lines[0].strip() if lines else ""
    line = f"{line} {lines[1].strip()}" if line.endswith(":") and len(lines) > 1 else line
    return (line[:157] + "...") if len(line) > 160 else line or type(error).__name__
