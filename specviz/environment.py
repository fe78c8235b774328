"""What must be set before Python's libraries are loaded, and restarting the program once where that is the only way.

It knows nothing of models and imports nothing heavy.
"""
from __future__ import annotations

import os
import sys

__all__ = ["ENVIRONMENT", "settle"]

# Read by torch, Gradio and tqdm when they are imported. Spinning OpenMP workers would take the second core from the page's own thread.
# Tensors lie in huge pages where the system has them for those who ask, which matters most inside virtual machines. Progress has lines of
# our own, through which other libraries' bars would run.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1", "GRADIO_ANALYTICS_ENABLED": "False",
               "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "TQDM_DISABLE": "1"}

# Weights in huge pages: a decode step reads all of them, and fewer page table misses made it 10 to 20 % shorter (measured).
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


def settle() -> None:
    """Set the environment for what is imported later; on Linux start the program anew, once, with weights in huge pages.

    glibc reads that setting only when a process starts. Call it from `if __name__ == "__main__"` alone, before anything is done. A
    setting that is already there is kept, and a Space, which starts programs in its own way, is left alone.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ and "SPACE_ID" not in os.environ and sys.orig_argv[1:]:
        os.environ["GLIBC_TUNABLES"] = _HUGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
