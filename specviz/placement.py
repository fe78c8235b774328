"""Where a model runs and in which numbers: the three settings device, dtype and quantization, checked against this machine.

It knows nothing of models or files.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from transformers import BitsAndBytesConfig

from .errors import InputError
from .machine import missing_cuda_note

__all__ = ["DTYPES", "Placement", "QUANTIZATIONS", "automatic_dtype", "bitsandbytes_config", "can_read_packed", "choose_placement",
           "precision_name", "quantizes_while_loading"]

QUANTIZATIONS = {"cpu": ("none", "int8"), "cuda": ("none", "int8", "nf4", "fp4", "nf4-double", "fp4-double"), "mps": ("none",)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BITSANDBYTES_DEVICES = ("cuda",)  # on a CPU bitsandbytes runs, but slower than the weights as they are


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and in which numbers a model runs. quantization on a CPU is applied by the engine, on CUDA while loading.

    spread: the layers are shared out over all CUDA devices; `device` has the first of them. Written, not tested: no machine with two
    cards was at hand.
    """
    device: torch.device
    dtype: torch.dtype
    quantization: str
    notes: tuple[str, ...] = ()
    spread: bool = False


def choose_placement(device: str = "auto", dtype: str = "auto", quantization: str = "none") -> Placement:
    """Check the three settings against each other and this machine. Raises InputError with what is possible.

    device: auto (CUDA if there is one, else mps, else the CPU), cpu, mps, cuda, cuda:N, or cuda:all for several cards together.
    """
    notes: list[str] = []
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() and quantization == "none" else "cpu"
        notes.extend(filter(None, [missing_cuda_note()]))
    kind = device.partition(":")[0]
    if kind not in QUANTIZATIONS or not re.fullmatch(r"(cpu|mps|cuda(:\d+|:all)?)", device):
        raise InputError(f"The device {device!r} is not known; use auto, cpu, cuda, cuda:1, cuda:all or mps.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("The device cuda was asked for, but this PyTorch sees no CUDA device; use --device cpu or a PyTorch with CUDA."
                         + (f" {note}" if (note := missing_cuda_note()) else ""))
    spread = device == "cuda:all" and torch.cuda.device_count() > 1
    chosen = torch.device("cuda:0" if device == "cuda:all" else device)
    if kind == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InputError(f"The device {device} was asked for, but there are only {torch.cuda.device_count()} CUDA devices, counted from 0.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise InputError("The device mps was asked for, but this machine has none; use --device cpu.")
    if quantization not in QUANTIZATIONS[kind]:
        known = any(quantization in names for names in QUANTIZATIONS.values())
        reason = f"needs a CUDA device, and this is {kind}" if known else "is not known"
        raise InputError(f"The quantization {quantization!r} {reason}; on {kind} there is {', '.join(QUANTIZATIONS[kind])}.")
    if kind == "cuda" and quantization != "none" and find_spec("bitsandbytes") is None:
        raise InputError(f"The quantization {quantization!r} on CUDA needs the package bitsandbytes, which is not installed; install "
                         "requirements.txt, or use quantization none.")
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"The dtype {dtype!r} is not known; use auto, {', '.join(DTYPES)}.")
    if kind == "mps":
        notes.append("The device mps is untested. --device cpu is tested, and on it drafted text is bitwise plain text.")
    if spread:
        notes.append("The model is spread over several cards, which is untested.")
    return Placement(chosen, DTYPES.get(dtype) or automatic_dtype(chosen), quantization, tuple(notes), spread)


def automatic_dtype(device: torch.device) -> torch.dtype:
    """float32 on a CPU; on CUDA bfloat16 where the card computes in it, float16 on older cards, which only emulate it."""
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def quantizes_while_loading(placement: Placement) -> bool:
    """Whether bitsandbytes packs the weights as they are read."""
    return placement.quantization != "none" and can_read_packed(placement)


def can_read_packed(placement: Placement) -> bool:
    """Whether checkpoints that bitsandbytes has packed can run there."""
    return placement.device.type in _BITSANDBYTES_DEVICES


def precision_name(placement: Placement) -> str:
    """The quantization, or the dtype where there is none."""
    return str(placement.dtype).removeprefix("torch.") if placement.quantization == "none" else placement.quantization


def bitsandbytes_config(placement: Placement) -> BitsAndBytesConfig:
    """Threshold 0.0: no host synchronisation, and no row depends on the others. 16-bit compute: float32 leaves the tensor cores idle.

    "-double" packs the scales of 4-bit weights once more: some less memory, but projections cannot be joined then (`engine/fused.py`).
    """
    if placement.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    compute_dtype = automatic_dtype(placement.device) if placement.dtype == torch.float32 else placement.dtype
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=placement.quantization.removesuffix("-double"),
                              bnb_4bit_use_double_quant=placement.quantization.endswith("-double"), bnb_4bit_compute_dtype=compute_dtype)
