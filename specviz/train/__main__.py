"""`python -m specviz.train`: settles the environment before anything heavy is imported. It knows nothing of the commands."""
from __future__ import annotations

import sys

from ..environment import settle

if __name__ == "__main__":
    settle()
    from .command import main
    sys.exit(main())
