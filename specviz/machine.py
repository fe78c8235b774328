"""What this machine has: free memory, free disk, and an NVIDIA driver that PyTorch cannot use. It knows nothing of models."""
from __future__ import annotations

import ctypes.util
import shutil
import sys
from pathlib import Path

import torch

__all__ = ["available", "driver_present", "free_disk", "missing_cuda_note"]

_CGROUP = Path("/sys/fs/cgroup")


def available(device: torch.device | str) -> int:
    """Free bytes for a model on this device. On a CPU and on mps: memory that can be had without swapping, within a container's limit."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil
    free = int(psutil.virtual_memory().available)
    limit = _container_limit()
    return free if limit is None else min(free, limit)


def _container_limit() -> int | None:
    """What this process's container may still take; None without a limit (Linux, cgroup version 2)."""
    try:
        most = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        cached = next((int(line.split()[1]) for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
                       if line.startswith("inactive_file ")), 0)
        return None if most == "max" else max(0, int(most) - used + cached)      # file pages are given back when memory is needed
    except (OSError, ValueError, IndexError):
        return None


def free_disk(folder: Path) -> int:
    """Free bytes where `folder` is or would be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def driver_present() -> bool:
    """Whether an NVIDIA driver is installed, seen without PyTorch."""
    if sys.platform == "win32":
        return ctypes.util.find_library("nvcuda") is not None
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def missing_cuda_note() -> str:
    """The sentence for a machine whose NVIDIA card lies idle because of PyTorch, "" for all others."""
    if sys.platform == "darwin" or torch.cuda.is_available() or torch.version.hip is not None or not driver_present():
        return ""
    if torch.version.cuda is not None:
        return (f"This machine has an NVIDIA driver, but PyTorch {torch.__version__} cannot use it (it was built for CUDA "
                f"{torch.version.cuda}); update the driver, or the model runs on the CPU.")
    python = ".venv\\Scripts\\python" if sys.platform == "win32" else ".venv/bin/python"
    return (f"This machine has an NVIDIA driver, but PyTorch {torch.__version__} was built without CUDA, so the model runs on the CPU. "
            f'To use the card: {python} -m pip install --force-reinstall "torch>=2.8,<=2.13.0" --index-url '
            "https://download.pytorch.org/whl/cu128")
