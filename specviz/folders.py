"""Where files lie that can be made or fetched again. It knows nothing of what they are."""
from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["default_cache_dir"]


def default_cache_dir() -> Path:
    """The platform's folder for data that can be fetched again, with our name: it need not exist yet."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specviz"
