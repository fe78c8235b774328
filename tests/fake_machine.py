"""A machine that is not there: graphics cards, a driver, Apple's mps, as PyTorch would describe them. Nothing computes on it.

It knows nothing of specviz but where the driver is looked for. Used to see what a machine with such hardware would be told and offered.
"""
from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from specviz import machine

__all__ = ["pretend"]


def pretend(patch: Any, cards: Sequence[float] = (), *, capability: tuple[int, int] = (8, 9), driver: bool | None = None, cuda_build: bool = True,
            mps: bool = False, platform: str | None = None) -> None:
    """cards: free gigabytes of each CUDA device. driver: an NVIDIA driver is installed, by default where there are cards. cuda_build: this
    PyTorch was built for CUDA. platform: as `sys.platform` says it. patch: a pytest.MonkeyPatch."""
    free = [int(gigabytes * 1e9) for gigabytes in cards]
    patch.setattr(torch.cuda, "is_available", lambda: bool(free))
    patch.setattr(torch.cuda, "device_count", lambda: len(free))
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    patch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card that is not there")
    patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free[torch.device(device or "cuda:0").index or 0], 10 ** 12))
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(torch.version, "cuda", "12.8" if cuda_build else None)
    patch.setattr(torch.backends.mps, "is_available", lambda: mps)
    patch.setattr(machine, "driver_present", lambda: bool(free) if driver is None else driver)
    if platform:
        patch.setattr(machine, "sys", SimpleNamespace(platform=platform))      # of that module alone
