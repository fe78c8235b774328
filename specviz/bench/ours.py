"""Our own engine as a system under test, driven step by step in the calling thread. It knows nothing of other systems."""
from __future__ import annotations

import platform
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import transformers

from ..drafters import DRAFTERS
from ..engine.drafting import DraftSettings
from ..engine.option import settled
from ..engine.sampling import SamplingParams
from ..engine.sequence import NoText
from ..errors import InputError
from ..opening import open_engine
from ..options import Options
from .sample import Sample

__all__ = ["Ours", "parse_arm"]


def parse_arm(arm: str) -> tuple[str, int | None]:
    """Method and draft length of "method:5" or "method:auto" (None); "plain" alone. Raises InputError."""
    method, _, length = arm.partition(":")
    if method not in DRAFTERS:
        raise InputError(f"There is no drafting method {method!r}; expected one of {', '.join(DRAFTERS)}.")
    if length in ("", "auto"):
        return method, 0 if method == "plain" else None if length else 5
    if not length.isdigit() or not 1 <= int(length) <= 64:
        raise InputError(f"{arm!r} has no draft length; expected METHOD:K with K from 1 to 64, or METHOD:auto.")
    return method, int(length)


class Ours:
    """Opens the engine as the program does, and measures what steps cost before the first run."""

    def __init__(self, options: Options, arms: Sequence[str]) -> None:
        self._opened = open_engine(options, lambda message, fraction: None)
        while self._opened.measure_piece() is not None:
            pass
        self.arms = ("plain", *(arm for arm in arms if parse_arm(arm)[0] != "plain" and not DRAFTERS[parse_arm(arm)[0]].missing(self._opened.parts)))

    def facts(self) -> dict[str, Any]:
        config, costs = self._opened.config, self._opened.costs
        return {"name": "specviz", "target": config["target"], "drafter": config.get("drafter"), "device": config["device"], "dtype": config["dtype"],
                "quantization": config["quantization"], "threads": config["threads"], "linears": config["linears"], "machine": self._opened.machine,
                "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
                "cost": costs.to_json() if costs else None}

    def encode(self, text: str) -> list[int]:
        return self._opened.codec.render([{"role": "user", "content": text}])

    def run(self, arm: str, prompt: Sequence[int], num_tokens: int) -> Sample:
        method, length = parse_arm(arm)
        engine = self._opened.engine
        drafter = self._opened.drafter(method)
        settings = DraftSettings(length or 5, settled(self._opened.options(method), {}, method))         # options as a user has them
        engine.add(prompt, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True), drafter, settings, NoText(),
                   keep_probs=False, pilot=self._opened.pilot(drafter, settings) if length is None else None)
        steps, begun, first = [], perf_counter(), None
        while not engine.idle:
            steps += [stepped.trace for stepped in engine.step()]
            if first is None and steps:
                first = perf_counter()
        ended = perf_counter()
        engine.forget()
        decode = [step for step in steps if step.kind != "prefill"]
        nodes = [node for step in decode for node in step.nodes if node.state != "window"]
        return Sample(
            num_decoded=sum(len(step.emitted) for step in decode), decode_s=ended - first, prefill_s=first - begun, num_steps=len(decode),
            num_drafted=len(nodes), num_accepted=sum(node.state == "accepted" for node in nodes),
            draft_s=sum(step.draft_ms for step in decode) / 1e3, verify_s=sum(step.verify_ms for step in decode) / 1e3,
            other_s=sum(step.other_ms + step.record_ms for step in decode) / 1e3,
            tokens=tuple(token.id for step in steps for token in step.emitted))
