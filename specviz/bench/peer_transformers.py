"""transformers' own `generate` as a system under test: plain, with prompt lookup, and with an assistant model.

It knows nothing of our engine; the model is loaded as ours is, and left as it was made. Checked with transformers 5.24.
"""
from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import transformers

from ..engine.threads import choose_threads
from ..loading import load_target
from ..text import TextCodec
from .sample import Sample

__all__ = ["Transformers"]

_LOOKUP = 10                     # prompt_lookup_num_tokens, the value that transformers' documentation uses


class _Clock:
    """A streamer that notes when tokens come, and how many. The prompt is put first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: Any) -> None:
        self.times.append(perf_counter())
        self.sizes.append(value.numel())

    def end(self) -> None:
        pass


class Transformers:
    """draft: the assistant model, or None. threads: None chooses by trying."""

    def __init__(self, target: str, draft: str | None, device: str, dtype: str, threads: int | None, quantization: str = "none") -> None:
        loaded = load_target(target, device=device, dtype=dtype, quantization=quantization)
        self._model, self._codec, self._name = loaded.model, TextCodec(loaded.tokenizer), loaded.name
        self._assistant = load_target(draft, device=device, dtype=dtype).model if draft else None
        for model in filter(None, (self._model, self._assistant)):
            model.generation_config.eos_token_id = None          # the same number of tokens for everyone, and the same ones
        self.arms = ("plain", "prompt lookup", *(["assistant model"] if draft else []))
        self._quantization = loaded.placement.quantization
        if self._model.device.type == "cpu":
            choose_threads(self._trial, [threads] if threads else None)

    @torch.inference_mode()
    def _trial(self, num_tokens: int) -> None:
        self._model(torch.ones(1, num_tokens, dtype=torch.long))

    def facts(self) -> dict[str, Any]:
        return {"name": "transformers", "version": transformers.__version__, "target": self._name, "device": str(self._model.device),
                "dtype": str(self._model.dtype).removeprefix("torch."), "quantization": self._quantization, "threads": torch.get_num_threads()}

    def encode(self, text: str) -> list[int]:
        return self._codec.render([{"role": "user", "content": text}])

    @torch.inference_mode()
    def run(self, arm: str, prompt: Sequence[int], num_tokens: int) -> Sample:
        ids = torch.tensor([list(prompt)], device=self._model.device)
        extra: dict[str, Any] = {"prompt lookup": {"prompt_lookup_num_tokens": _LOOKUP}, "assistant model": {"assistant_model": self._assistant}}.get(arm, {})
        clock, begun = _Clock(), perf_counter()
        out = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, streamer=clock, **extra)
        ended = perf_counter()
        tokens = tuple(out[0, ids.shape[1]:].tolist())
        first = clock.times[1]                   # with drafts the prompt's own pass may give several tokens
        return Sample(num_decoded=len(tokens) - clock.sizes[1], decode_s=ended - first, prefill_s=first - begun, num_steps=len(clock.times) - 2,
                      tokens=tokens)
