"""`python -m specviz.museum [FILE]`: runs every proof and every fault and writes the results for pages that have no server.

It knows nothing of how they are shown.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .desk import RECORDED
from .faults import LAW_FAULTS, TEXT_FAULTS
from .worker import experiment

__all__ = ["CASES"]

CASES: dict[str, dict[str, Any]] = {
    **{f"{rule} {shape}": {"rule": rule, "shape": shape} for rule in ("rejection", "block", "shared-noise")
       for shape in ("chain", "chosen", "siblings", "tree") if rule != "block" or shape in ("chain", "chosen")},
    "text": {"kind": "text"},
    **{name: {"fault": name} for name in (*LAW_FAULTS, *TEXT_FAULTS)},
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specviz.museum", description=__doc__.partition(":")[2].split("\n")[0].strip())
    parser.add_argument("file", nargs="?", type=Path, default=RECORDED, help="where to write (default: the bundled file)")
    file = parser.parse_args(argv).file
    results = {}
    for name, request in CASES.items():
        *_, results[name] = experiment(request)
        print(f"{name}: {_line(results[name])}", flush=True)
    file.write_text(json.dumps(results, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"written: {file} ({file.stat().st_size} bytes)")
    return 0


def _line(state: dict[str, Any]) -> str:
    if state["kind"] == "text":
        return "identical" if state["index"] is None else f"differs at token {state['index'] + 1}"
    reading = state["reading"]
    return (f"chi-square {reading['chi_square']:.1f}, {reading['freedom']} degrees of freedom, p {reading['p_value']:.2g}, "
            f"{'fits' if reading['fits'] else 'DOES NOT FIT'}")


if __name__ == "__main__":
    sys.exit(main())
