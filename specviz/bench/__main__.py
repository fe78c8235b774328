"""`python -m specviz.bench [report | precision | load | soak | gpu-check] ...`: chooses the measurement. It knows nothing of what any of them does."""
from __future__ import annotations

import sys
from importlib import import_module

from ..environment import settle

_PARTS = {"precision": "precision", "load": "load", "soak": "soak", "gpu-check": "gpu_check"}


def main() -> int:
    name = _PARTS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    module = import_module(f"specviz.bench.{name or 'suite'}")
    return module.main(sys.argv[2:] if name else sys.argv[1:]) or 0


if __name__ == "__main__":
    settle()
    sys.exit(main())
