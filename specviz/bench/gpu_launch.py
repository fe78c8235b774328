"""What launching kernels from Python costs on a device, for `gpu_check`: one forward as transformers runs it, and captured in a graph.

It knows nothing of the engine.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

__all__ = ["launch_overhead"]


def launch_overhead(model: Any, device: str, repeats: int = 15) -> dict[str, Any]:
    """One forward of T tokens without a cache: wall time, the device's own time, and, on CUDA, the same captured in a graph.

    The gap between wall and graph is what launching kernels from Python costs. graph_difference: largest difference of the logits.
    """
    found: dict[str, Any] = {}
    for num_tokens in (1, 6):
        ids = torch.full((1, num_tokens), 7, device=device)

        @torch.inference_mode()
        def run(ids: Tensor = ids) -> Tensor:
            return model(input_ids=ids, use_cache=False).logits
        times = {"eager_ms": _median_ms(run, device, repeats)}
        if torch.device(device).type == "cuda":
            try:
                times |= _graphed(run, repeats, device)
            except Exception as error:           # a kernel that cannot be captured is a result as well
                times["graph_error"] = f"{type(error).__name__}: {str(error)[:300]}"
                torch.cuda.synchronize(device)
        found[str(num_tokens)] = times
    return found


def _graphed(run: Callable[[], Tensor], repeats: int, device: str) -> dict[str, Any]:
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            eager = run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.cuda.synchronize(device)
    difference = float((captured.float() - eager.float()).abs().max())
    return {"graph_difference": difference, "graph_ms": _median_ms(graph.replay, device, repeats)}


def _median_ms(run: Callable[[], Any], device: str, repeats: int) -> float:
    times = []
    for number in range(repeats + 3):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        if number >= 3:
            times.append(1e3 * (time.perf_counter() - start))
    return round(median(times), 4)


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
