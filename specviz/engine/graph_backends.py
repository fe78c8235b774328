"""Two ways to capture and replay what a function computes: CUDA graphs, and a tape of operators that needs no GPU.

They know nothing of models. The tape keeps to the rules of a graph: Python is not run again, tensors keep their addresses, and whatever
would have to ask the device for a number, or bring one there, is refused while it records.
"""
from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["CudaBackend", "TapeBackend"]

Function = Callable[[], Any]


class CudaBackend:
    """Graphs of `torch.cuda` on one device, in one pool, captured on a stream of their own. Written and not tried: no GPU was at hand."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> _PinnedBuffer:
        return _PinnedBuffer(shape, dtype, self._device)

    def warm(self, function: Function) -> Any:
        """Libraries keep workspace per stream, so it is run on the one that captures."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = function()
        current.wait_stream(self._stream)
        for tensor in outputs:
            if tensor is not None:
                tensor.record_stream(current)
        return outputs

    def capture(self, function: Function) -> Function:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.collect()
        gc.disable()                                         # a pinned tensor that is freed meanwhile would ask CUDA what no capture allows
        try:
            # thread_local: other threads (another engine, the page) may call CUDA meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = function()
        finally:
            if collects:
                gc.enable()

        def replay() -> Any:
            graph.replay()
            return outputs
        return replay


class _PinnedBuffer:
    """A host tensor that the device reads by itself, and where it goes."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.host = torch.zeros(*shape, dtype=dtype, pin_memory=True)
        self.device = torch.zeros(*shape, dtype=dtype, device=device)
        self._sent: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        self.device.copy_(self.host, non_blocking=True)
        self._sent = torch.cuda.Event()
        self._sent.record()


class TapeBackend:
    """Records the operators that a function calls and calls them again, on any device."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> _CopiedBuffer:
        return _CopiedBuffer(shape, dtype)

    def warm(self, function: Function) -> Any:
        return function()

    def capture(self, function: Function) -> Function:
        tape = _Tape()
        with tape:
            outputs = function()
        return lambda: tape.replay(outputs)


class _CopiedBuffer:
    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.host, self.device = torch.zeros(*shape, dtype=dtype), torch.zeros(*shape, dtype=dtype)

    def wait(self) -> None:
        pass

    def send(self) -> None:
        self.device.copy_(self.host)


class _Tape(TorchDispatchMode):
    _REFUSED = {torch.ops.aten._local_scalar_dense.default: "a number was read back from the device",
                torch.ops.aten.lift_fresh.default: "a tensor was made from numbers of the host",
                **{operator: "the size of a result was read back from the device" for operator in (
                    torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default, torch.ops.aten._unique2.default)}}

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in self._REFUSED:
            raise RuntimeError(f"operation not permitted while a step is recorded: {self._REFUSED[func]}")
        output = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, output))
        return output

    def replay(self, outputs: Any) -> Any:
        """Every recorded operator again: on what the operators before gave this time, and on the same tensors otherwise."""
        present: dict[int, Tensor] = {}

        def now(value: Any) -> Any:
            return tree_map_only(Tensor, lambda tensor: present.get(id(tensor), tensor), value)

        for func, args, kwargs, recorded in self._calls:
            _remember(present, recorded, func(*now(args), **now(kwargs)))
        return now(outputs)


def _remember(present: dict[int, Tensor], recorded: Any, new: Any) -> None:
    if isinstance(recorded, Tensor):
        present[id(recorded)] = new
    elif isinstance(recorded, (tuple, list)):
        for old, each in zip(recorded, new):
            _remember(present, old, each)
