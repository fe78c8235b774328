"""Loads a model and its tokenizer from the default download, a folder, a GGUF file or the hub. It knows nothing of engines or drafters.

No code from a model repository is ever run and no pickled weights are read. Whether a model can be run and fits is found out from its
small files, before its weights are fetched or read.
"""
from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .checkpoint import check_vocabulary_size, check_weight_files, eos_ids, packed_as, read_config, read_tokenizer
from .default_model import Progress, default_cache_dir, file_sha256, prepare_default, silent
from .errors import InputError, LoadError, NotEnoughMemory, SpecvizError
from .gguf_file import brief, count_gguf_weights, read_gguf
from .machine import available
from .memory import MAX_CONTEXT, Sizes, card_budgets, estimate, gigabytes, require_memory, sizes_of
from .placement import (QUANTIZATIONS, Placement, bitsandbytes_config, can_read_packed, choose_placement, precision_name,
                        quantizes_while_loading)
from .sources import Described, describe, fetch

__all__ = ["Loaded", "Placement", "QUANTIZATIONS", "choose_placement", "default_cache_dir", "load_target", "prepare_default"]

transformers_logging.disable_progress_bar()      # `progress` tells how far it is; bars of other programs would run through its lines
INSIDE_THE_MODEL = re.compile(r"(model\.|transformer\.)?(layers|h|embed_tokens|norm|lm_head)\.")
# Files that are not what their config says; transformers and its loaders raise whatever comes first
MISFITS = (ValueError, LookupError, OSError, RuntimeError, ImportError, TypeError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready for the engine: eval mode, no gradients, on its device.

    eos_ids: every id that ends an answer, sorted. facts: what identifies the weights: "revision" (hub commit), "weights_sha256" (the GGUF),
    "chat_template_sha256"; only those that are known. notes: sentences the user should see.
    """
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    source: str
    placement: Placement
    eos_ids: tuple[int, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def load_target(source: str = "default", *, device: str = "auto", dtype: str = "auto", quantization: str = "none",
                context: int = MAX_CONTEXT, drafter: Sizes | None = None, cache_dir: Path | None = None, offline: bool = False,
                progress: Progress | None = None) -> Loaded:
    """Load a causal language model.

    source: "default", a local folder, a local .gguf file, or a hub id such as "owner/name" or "owner/name@revision". context: tokens for
    which there must be room. drafter: a draft model that will be loaded next and must fit as well. cache_dir holds the default model
    only; hub models lie in the hub's own cache, shared with other programs. Raises InputError for a setting, LoadError or NotEnoughMemory
    for the rest; whatever is raised, the memory that was taken is free again.
    """
    placement, progress = choose_placement(device, dtype, quantization), progress or silent
    with released_on_failure(placement):
        described = describe(source, cache_dir=cache_dir, offline=offline, progress=progress)
        config = described.config()
        asked, placement = placement, checked_packing(described, config, placement)
        budgets = check_memory(described, config, placement, context, drafter, asked.quantization)
        described = fetch(described, offline=offline, progress=progress)
        progress(f"Unpacking {described.path.name}" if described.kind == "gguf" else f"Loading {described.name}", None)
        if described.kind == "gguf":
            model, tokenizer, notes = load_gguf(described, placement)
        else:
            model, tokenizer, notes = load_folder(described, placement, budgets)
        return finished(model, tokenizer, described, placement, notes)


@contextmanager
def released_on_failure(placement: Placement) -> Iterator[None]:
    """Let go of half a model when loading fails: an error keeps every frame alive that it went through, and those hold tensors."""
    try:
        yield
    except BaseException as error:
        is_memory = out_of_memory(error)
        link: BaseException | None = error
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        gc.collect()
        if placement.device.type == "cuda":
            torch.cuda.empty_cache()
        if is_memory and not isinstance(error, NotEnoughMemory):
            raise NotEnoughMemory(f"The memory of {placement.device} ran out while loading as {precision_name(placement)}; choose a "
                                  "smaller model or a stronger quantization, or close other programs.") from error
        raise


def out_of_memory(error: BaseException | None) -> bool:
    """Whether this, or what it was raised from, is a lack of memory; the CPU allocator says so in words only."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError, NotEnoughMemory)):
            return True
        if isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "not enough memory" in str(error)):
            return True
        error = error.__cause__
    return False


def checked_packing(described: Described, config: PretrainedConfig, placement: Placement) -> Placement:
    """The placement as it will be: a checkpoint that is packed already decides its quantization."""
    if described.kind == "gguf" and quantizes_while_loading(placement):
        raise InputError(f"A GGUF file is unpacked while loading and cannot be quantized to {placement.quantization} on the way; use "
                         "quantization none, or a folder with safetensors weights.")
    packing = packed_as(config)
    if not packing:
        return placement
    if not can_read_packed(placement):
        raise LoadError(f"{described.name} is packed as {packing} by bitsandbytes, which needs a CUDA device, and this is "
                        f"{placement.device.type}; choose the unpacked model.")
    if placement.quantization not in ("none", packing):
        raise InputError(f"{described.name} is packed as {packing} already and cannot become {placement.quantization}; use quantization "
                         "none.")
    return replace(placement, quantization=packing)


def check_memory(described: Described, config: PretrainedConfig, placement: Placement, context: int, drafter: Sizes | None,
                 asked: str = "none") -> dict[int | str, int] | None:
    """Raise NotEnoughMemory with the numbers if the model, its cache and its drafter cannot fit. Returns what each of several cards may
    take, None for a single device. asked: the quantization that was asked for, and that the drafter will have, though a target that is
    packed already has its own."""
    try:
        sizes = sizes_of(config)
    except SpecvizError:
        raise
    except MISFITS as error:
        raise LoadError(f"The config.json of {described.name} describes no model that can be built ({brief(error)}).") from error
    context = min(context, int(getattr(config.get_text_config(), "max_position_embeddings", None) or context))
    quantization = placement.quantization if quantizes_while_loading(placement) or placement.dtype == torch.float32 else "none"
    needed = estimate(sizes, quantization, context, device=placement.device.type, dtype=placement.dtype, drafter=drafter,
                      drafter_quantization="none" if asked == "none" else quantization)
    if described.kind == "gguf":                  # unpacked to float32 first, on the CPU
        width = 4 + (0 if placement.dtype == torch.float32 else placement.dtype.itemsize)
        unpacked = count_gguf_weights(described.path) * width
        require_memory(described.name, replace(needed, loading_bytes=unpacked), available("cpu"), f"cpu, {precision_name(placement)}")
    if not placement.spread:
        require_memory(described.name, needed, available(placement.device), f"{placement.device}, {precision_name(placement)}")
        return None
    free = [available(f"cuda:{index}") for index in range(torch.cuda.device_count())]
    each = replace(needed, workspace_bytes=len(free) * needed.workspace_bytes)
    require_memory(described.name, each, sum(free), f"{len(free)} cards together, {precision_name(placement)}")
    return card_budgets(needed, free)


def load_gguf(described: Described, placement: Placement) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, tuple[str, ...]]:
    """Model and tokenizer of a GGUF file, unpacked."""
    path = described.path
    model, tokenizer = read_gguf(path, placement.dtype)
    check_vocabulary_size(model, tokenizer, described.name)
    unpacked = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    note = (f"{path.name} was unpacked: {gigabytes(path.stat().st_size)} on disk, {gigabytes(unpacked)} in memory as "
            f"{str(placement.dtype).removeprefix('torch.')}.")
    return model.to(placement.device), tokenizer, (note,)


def load_folder(described: Described, placement: Placement, budgets: Mapping[int | str, int] | None = None
                ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, tuple[str, ...]]:
    """Model and tokenizer of a local folder, checked against each other. budgets: see `check_memory`."""
    folder, name = described.path, described.name
    config = read_config(folder, name)
    check_weight_files(folder, name)
    tokenizer = read_tokenizer(folder, name)
    options: dict[str, Any] = {}
    if placement.device.type == "cuda" or quantizes_while_loading(placement):
        options["device_map"] = {"": placement.device}
    if budgets:                                   # "auto" would give each card as much as any other, and cards differ
        options |= {"device_map": "sequential", "max_memory": dict(budgets)}
    if quantizes_while_loading(placement) and not packed_as(config):
        options["quantization_config"] = bitsandbytes_config(placement)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=placement.dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True, ignore_mismatched_sizes=True, **options)        # it would raise without naming a tensor
    except MISFITS as error:
        raise LoadError(f"The weights of {name} do not fit its config.json, or cannot be read ({brief(error)}).") from error
    wrong = sorted([*map(str, report["missing_keys"]), *(f"{tensor}, {list(held)} in the files and {list(told)} by the config"
                                                         for tensor, held, told in report["mismatched_keys"])])
    if wrong:
        raise LoadError(f"The weights of {name} contradict its config.json: {len(wrong)} tensors are missing or have another shape, first "
                        f"{wrong[0]}.")
    unread = sorted(map(str, report["unexpected_keys"]))
    unread_layers = [key for key in unread if INSIDE_THE_MODEL.match(key)]
    if unread_layers:
        raise LoadError(f"The weights of {name} contradict its config.json: {len(unread_layers)} tensors have no place in the model, first "
                        f"{unread_layers[0]}.")
    if placement.spread:
        elsewhere = {str(place) for place in getattr(model, "hf_device_map", {}).values()} & {"cpu", "disk"}
        if elsewhere:
            raise NotEnoughMemory(f"{name} does not fit into the memory of all CUDA devices together as {precision_name(placement)}; "
                                  "choose a stronger quantization.")
    check_vocabulary_size(model, tokenizer, name)
    notes = (f"{len(unread)} tensors of {name} are not part of the language model and were left out, first {unread[0]}.",) if unread else ()
    return model.to(placement.device) if placement.device.type == "mps" else model, tokenizer, notes


def finished(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, described: Described, placement: Placement,
             notes: tuple[str, ...]) -> Loaded:
    facts = dict(described.facts)
    if described.kind == "gguf":
        facts["weights_sha256"] = file_sha256(described.path)
    if isinstance(tokenizer.chat_template, str):
        facts["chat_template_sha256"] = sha256(tokenizer.chat_template.encode()).hexdigest()
    model.eval().requires_grad_(False)
    ends = eos_ids(model.config, model.generation_config, tokenizer)
    return Loaded(model, tokenizer, described.name, described.source, placement, ends, facts, placement.notes + notes)
