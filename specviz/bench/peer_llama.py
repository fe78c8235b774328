"""llama.cpp as a system under test, through the xllamacpp wheel: plain, with n-grams of its own text, and with a draft model.

It knows nothing of our engine or of torch: this file must run in an environment that has the wheel and nothing else. Checked with
xllamacpp 2026.10.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from .sample import Sample

__all__ = ["Llama", "available"]

_CONTEXT = 2048
_MOST_THREADS = 8


def available() -> bool:
    try:
        import xllamacpp  # noqa: F401
    except ImportError:
        return False
    return True


class Llama:
    """One server per arm, each with the same weights. threads: None tries 1 to the number of cores and keeps the fastest."""

    def __init__(self, gguf: Path, draft: Path | None, threads: int | None, num_draft: int = 5) -> None:
        import xllamacpp
        self._library, self._gguf, self._draft, self._num_draft = xllamacpp, gguf, draft, num_draft
        self.arms = ("plain", "n-gram", *(["draft model"] if draft else []))
        self._threads = threads or self._best_threads()
        self._servers = {arm: self._server(arm, self._threads) for arm in self.arms}

    def facts(self) -> dict[str, Any]:
        from importlib.metadata import version
        return {"name": "llama.cpp", "version": f"xllamacpp {version('xllamacpp')}", "target": self._gguf.name, "device": "cpu",
                "quantization": self._gguf.stem.rpartition(".")[2], "threads": self._threads}

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError("prompts come as token ids")

    def run(self, arm: str, prompt: Sequence[int], num_tokens: int) -> Sample:
        begun = perf_counter()
        answer = self._servers[arm].handle_completions({
            "prompt": list(prompt), "n_predict": num_tokens, "temperature": 0, "top_k": 1, "cache_prompt": False, "ignore_eos": True})
        took_s, timings = perf_counter() - begun, answer["timings"]
        return Sample(num_decoded=timings["predicted_n"] - 1, decode_s=timings["predicted_ms"] / 1e3,
                      prefill_s=took_s - timings["predicted_ms"] / 1e3, num_drafted=timings.get("draft_n"), num_accepted=timings.get("draft_n_accepted"))

    def _server(self, arm: str, threads: int) -> Any:
        params = self._library.CommonParams()
        params.model.path = str(self._gguf)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_ctx, params.n_parallel, params.port, params.verbosity = _CONTEXT, 1, 0, -1
        kinds = self._library.common_speculative_type
        if arm == "n-gram":
            params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        elif arm == "draft model":
            params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            params.speculative.draft.mparams.path = str(self._draft)
            params.speculative.draft.n_max = self._num_draft
        return self._library.Server(params)

    def _best_threads(self) -> int:
        most = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MOST_THREADS)
        speeds = {}
        for threads in range(1, most + 1):
            server = self._server("plain", threads)
            answers = [server.handle_completions({"prompt": list(range(100, 164)), "n_predict": 16, "temperature": 0, "ignore_eos": True})
                       for _ in range(2)]
            speeds[threads] = answers[-1]["timings"]["predicted_per_second"]
            del server
        return max(speeds, key=lambda threads: speeds[threads])
