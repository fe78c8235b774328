"""One system under test in a process of its own: requests come as JSON lines, answers leave as JSON lines.

It knows nothing of prompts or reports. Whatever libraries print goes to the error stream.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SpecvizError
from .sample import Sample, System

__all__ = ["Worker", "WorkerError"]

ROOT = Path(__file__).resolve().parents[2]


class WorkerError(SpecvizError):
    """A system could not be started, or gave up; the message says which and why."""


class Worker:
    """The parent's end. name: for the report. python: the interpreter to run it with. settings: what `_system` reads."""

    def __init__(self, name: str, settings: Mapping[str, Any], python: str = sys.executable, log: Path | None = None) -> None:
        self.name = name
        self._log = open(log, "wb") if log else None
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen([python, "-m", "specviz.bench.worker", json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._log or subprocess.DEVNULL, cwd=ROOT, env=environment, text=True)
        ready = self._read()
        self.arms: tuple[str, ...] = tuple(ready["arms"])
        self.facts: dict[str, Any] = ready["facts"]

    def encode(self, text: str) -> list[int]:
        return self._ask({"do": "encode", "text": text})["ids"]

    def run(self, arm: str, prompt: Sequence[int], num_tokens: int) -> Sample:
        return Sample.from_dict(self._ask({"do": "run", "arm": arm, "prompt": list(prompt), "num_tokens": num_tokens})["sample"])

    def memory_bytes(self) -> int:
        """The process's memory now."""
        return self._ask({"do": "memory"})["bytes"]

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        if self._log:
            self._log.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended with status {self._process.wait()}"}
        if "error" in answer:
            raise WorkerError(f"{self.name} cannot be measured: {answer['error']}.")
        return answer


def _system(settings: Mapping[str, Any]) -> System:
    """Only what is asked for is imported."""
    if settings["kind"] == "llama.cpp":
        from .peer_llama import Llama
        return Llama(Path(settings["gguf"]), Path(settings["gguf_draft"]) if settings.get("gguf_draft") else None, settings["threads"])
    if settings["kind"] == "transformers":
        from .peer_transformers import Transformers
        return Transformers(settings["target"], settings["draft"], settings["device"], settings["dtype"], settings["threads"])
    from ..options import Options
    from .ours import Ours
    return Ours(Options(target=settings["target"], draft=settings["draft"], device=settings["device"], dtype=settings["dtype"],
                        quantization=settings["quantization"], threads=settings["threads"], browser=False), settings["arms"])


def _memory() -> int:
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    import psutil
    return psutil.Process().memory_info().rss


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                                # C libraries print to the first stream as well

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    try:
        system = _system(json.loads(sys.argv[1]))
    except Exception as error:                   # told to the parent, which goes on with the others
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"arms": system.arms, "facts": system.facts()})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "encode":
                say({"ids": system.encode(request["text"])})
            elif request["do"] == "memory":
                say({"bytes": _memory()})
            else:
                say({"sample": system.run(request["arm"], request["prompt"], request["num_tokens"]).to_dict()})
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    from ..environment import settle
    settle()
    main()
