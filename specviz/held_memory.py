"""The memory that a loaded model really holds: its tensors' bytes, and what one cached token takes.

It knows nothing of estimates made before loading (`memory.py`) or of requests.
"""
from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from .engine.model import LanguageModel

__all__ = ["cache_bytes_per_token", "held", "tensor_bytes"]

_LEAVES = (str, bytes, int, float, complex, type, ModuleType, torch.dtype, torch.device, torch.Generator)


def held(target: LanguageModel, draft: LanguageModel | None = None, heads: Any = None) -> dict[str, int]:
    """For `meta["memory"]`: target_bytes and cache_bytes_per_token, and the same of the drafter where it is a model of its own.

    heads: trained heads in its place, whatever holds their tensors."""
    sizes = {"target_bytes": _weight_bytes(target), "cache_bytes_per_token": cache_bytes_per_token(target)}
    if draft is not None:
        sizes |= {"drafter_bytes": _weight_bytes(draft), "drafter_cache_bytes_per_token": cache_bytes_per_token(draft)}
    elif heads:
        sizes["drafter_bytes"] = tensor_bytes(heads)
    return sizes


def _weight_bytes(model: LanguageModel) -> int:
    """Of a model alone: places where cached rows live while steps are captured belong to the cache."""
    return tensor_bytes(model) - (0 if model.graphs is None else model.graphs.places.num_bytes)


def tensor_bytes(owner: Any) -> int:
    """Bytes of all tensors that can be reached from an object, each storage once.

    Packed weights live in attributes and closures where `parameters()` does not see them, hence the walk.
    """
    sizes: dict[Any, int] = {}
    for tensor in _tensors(owner):
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            sizes[tensor.device, storage.data_ptr()] = storage.nbytes()
        else:                                     # oneDNN's own layout: it shares nothing and tells no storage
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def cache_bytes_per_token(model: LanguageModel) -> int:
    """Keys and values of one token in all layers."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * model.num_layers * heads * width * model.dtype.itemsize


def _tensors(owner: Any) -> Iterator[Tensor]:
    seen: set[int] = set()
    waiting = [owner]
    while waiting:
        item = waiting.pop()
        if item is None or isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.device.type != "meta":
                yield item
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting.extend(item)
        elif isinstance(item, MethodType):
            waiting += [item.__self__, item.__func__]
        elif isinstance(item, FunctionType):
            waiting += [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
        elif type(item).__module__.startswith(("specviz.", "torch.nn.", "transformers.", "functools", "bitsandbytes")):
            waiting.extend(vars(item).values() if hasattr(item, "__dict__") else ())
            waiting += [getattr(item, name) for name in getattr(type(item), "__slots__", ()) if hasattr(item, name)]
            waiting += [getattr(item, name) for name in ("func", "args", "keywords") if type(item).__module__ == "functools" and hasattr(item, name)]


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True
