"""`python -m specviz.bench`: methods, precisions and other programs on the same prompts, in turns, in one run.

    python -m specviz.bench --limit 2 --minutes 10 --out assets/benchmarks/cpu
    python -m specviz.bench --target MODEL --draft MODEL --methods draft_model:5,draft_model:auto --prompts FILE
    python -m specviz.bench report FILE.json         # Markdown and HTML of a saved run again

Each system runs in a process of its own. Every prompt is answered by all systems and decodings one after the other, in changing order, so that
what is compared stands side by side in time. It knows nothing of what happens inside a system.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..errors import InputError, SpecvizError
from . import report
from .analysis import Run, from_json
from .prompts import BUNDLED, BenchPrompt, read, some
from .worker import Worker

__all__ = ["Bench", "main", "write"]

SYSTEMS = {"int8": report.OURS[1], "none": report.OURS[0], "transformers": report.REFERENCE, "llama": "llama.cpp"}
_WARM_UP = 8                     # tokens of the run before the first that counts


class Bench:
    """Workers, prompts and what was measured so far. say: where progress goes."""

    def __init__(self, workers: Sequence[Worker], prompts: Sequence[BenchPrompt], num_tokens: int, say: Any = print) -> None:
        self.workers, self.prompts, self.num_tokens, self._say = list(workers), list(prompts), num_tokens, say
        self.runs: list[Run] = []
        tokenizing = next((worker for worker in workers if worker.name != SYSTEMS["llama"]), None)
        if tokenizing is None:
            raise InputError("llama.cpp alone cannot be measured here: our engine or transformers turns the prompts into tokens. Name one of them too.")
        self._ids = [tokenizing.encode(prompt.text) for prompt in prompts]

    def warm_up(self) -> None:
        for worker in self.workers:
            for arm in worker.arms:
                worker.run(arm, self._ids[0], _WARM_UP)

    def measure(self, num_rounds: int, until: float, clock: Any = time.monotonic) -> int:
        """Run everything; no new prompt is begun after `until`. Returns how many prompts were measured, over all rounds."""
        pairs = [(worker, arm) for worker in self.workers for arm in worker.arms]
        done = 0
        for round_ in range(num_rounds):
            for number in sorted(range(len(self.prompts)), key=lambda i: self.prompts[i].number):     # one of each category first
                if clock() >= until:
                    self._say(f"The time is over after {done} prompts.")
                    return done
                prompt = self.prompts[number]
                turn = done % len(pairs)
                for worker, arm in (pairs[turn:] + pairs[:turn])[::-1 if done % 2 else 1]:
                    sample = worker.run(arm, self._ids[number], self.num_tokens)
                    self.runs.append(Run(round_, number, prompt.category, worker.name, arm, sample))
                done += 1
                mine = self.runs[-len(pairs):]
                self._say(f"{prompt.category} {prompt.number + 1}: " + ", ".join(f"{run.system} {run.arm} {run.tokens_per_s:.1f}" for run in mine))
        return done

    def to_json(self, **facts: Any) -> dict[str, Any]:
        """Everything, with the raw samples, so that a report can be made again."""
        return {"format": "specviz-benchmark", "version": 1, "created": datetime.now(timezone.utc).isoformat(timespec="seconds"), **facts,
                "num_tokens": self.num_tokens, "num_prompts": len({run.prompt for run in self.runs}),
                "num_rounds": 1 + max((run.round for run in self.runs), default=0),
                "systems": {worker.name: worker.facts | {"memory_bytes": worker.memory_bytes()} for worker in self.workers},
                "prompts": [{"category": prompt.category, "number": prompt.number} for prompt in self.prompts],
                "runs": [{"round": run.round, "prompt": run.prompt, "category": run.category, "system": run.system, "arm": run.arm,
                          "sample": run.sample.to_dict()} for run in self.runs]}


def write(data: dict[str, Any], out: Path) -> list[Path]:
    """The three files of a benchmark: data, table, page."""
    out.parent.mkdir(parents=True, exist_ok=True)
    runs = from_json(data)
    files = [out.with_suffix(".json"), out.with_suffix(".md"), out.with_suffix(".html")]
    files[0].write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    files[1].write_text(report.markdown(data, runs), encoding="utf-8")
    files[2].write_text(report.page(data, runs), encoding="utf-8")
    return files


def _can_import(module: str, python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(module) is not None
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def _start(given: argparse.Namespace, say: Any) -> tuple[list[Worker], list[str]]:
    """The systems that can run here, and why others cannot."""
    workers, skipped = [], []
    for system in given.systems.split(","):
        if system not in SYSTEMS:
            raise InputError(f"There is no system {system!r}; --systems takes {', '.join(SYSTEMS)}.")
        settings = {"kind": "ours", "target": given.target, "draft": given.draft, "device": given.device, "dtype": given.dtype, "threads": given.threads}
        python = sys.executable
        if system == "llama":
            python = given.llama_python or sys.executable
            if given.gguf is None or not _can_import("xllamacpp", python):
                skipped.append("llama.cpp (needs --gguf FILE and the package xllamacpp, here or in --llama-python)")
                continue
            settings |= {"kind": "llama.cpp", "gguf": str(given.gguf.resolve()), "gguf_draft": str(given.gguf_draft.resolve()) if given.gguf_draft else None}
        elif system == "transformers":
            settings |= {"kind": "transformers"}
        else:
            settings |= {"quantization": system, "arms": given.methods.split(",") if system == given.best else [given.methods.split(",")[-1]]}
        say(f"Starting {SYSTEMS[system]} …")
        try:
            workers.append(Worker(SYSTEMS[system], settings, python, given.log))
        except SpecvizError as error:
            skipped.append(str(error))
    return workers, skipped


def _without_folders(argument: str) -> str:
    """A report is for others: it names files and programs, not where they lie on this machine."""
    return Path(argument).name if "/" in argument and Path(argument).is_absolute() else argument


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m specviz.bench", description="Measure decoding, in turns, on one set of prompts.",
                                     epilog="Others: bench report FILE, bench precision, bench load, bench gpu-check; each has --help.")
    parser.add_argument("--target", default="default", help="the model that answers (default: the default model)")
    parser.add_argument("--draft", help="a draft model or heads")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="for all systems; otherwise each takes what is fastest for it")
    parser.add_argument("--methods", default="prompt_lookup:5,suffix:8,suffix:auto", metavar="LIST",
                        help="our decodings besides plain, METHOD:K or METHOD:auto (default: %(default)s); the unquantized system gets the last one only")
    parser.add_argument("--systems", default="int8,none,transformers,llama", metavar="LIST",
                        help="int8 and none are ours with that quantization (default: %(default)s)")
    parser.add_argument("--best", default="int8", help="the system that gets all methods (default: %(default)s)")
    parser.add_argument("--gguf", type=Path, help="the target's GGUF file, for llama.cpp")
    parser.add_argument("--gguf-draft", type=Path, help="a draft model's GGUF file, for llama.cpp")
    parser.add_argument("--llama-python", help="a Python that has xllamacpp, if this one has not")
    parser.add_argument("--prompts", type=Path, default=BUNDLED, help="a JSONL file (default: the bundled set, 8 categories of 10)")
    parser.add_argument("--categories", default="", metavar="LIST", help="only these")
    parser.add_argument("--limit", type=int, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no new prompt after this time, loading included")
    parser.add_argument("--out", type=Path, default=Path("benchmark"), metavar="NAME", help="writes NAME.json, NAME.md, NAME.html")
    parser.add_argument("--log", type=Path, help="a file for what the systems print")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["report"]:
        for name in argv[1:]:
            write(json.loads(Path(name).read_text(encoding="utf-8")), Path(name))
        return 0
    given, begun = _parser().parse_args(argv), time.monotonic()

    def say(line: str) -> None:
        print(line, flush=True)
    workers: list[Worker] = []
    try:
        prompts = some(read(given.prompts), given.limit, [name for name in given.categories.split(",") if name])
        workers, skipped = _start(given, say)
        bench = Bench(workers, prompts, given.tokens, say)
        bench.warm_up()
        bench.measure(given.rounds, begun + 60 * given.minutes)
        if not bench.runs:
            raise InputError("The time was over before the first prompt; give more --minutes.")
        data = bench.to_json(title=f"Decoding {given.target if given.target != 'default' else 'the default model'}",
                             command=shlex.join(["python", "-m", "specviz.bench", *map(_without_folders, argv)]), skipped=skipped)
        for file in write(data, given.out):
            say(f"Wrote {file}")
        say(report.markdown(data, bench.runs))
        return 0
    except SpecvizError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        for worker in workers:
            worker.close()
