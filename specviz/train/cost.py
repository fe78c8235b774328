"""What drafting costs beside a step of the target, in processor time, so that other work on the machine does not count.

It knows nothing of training: it runs the shipped drafters in the engine on a few prompts.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import process_time, thread_time

import torch

from ..drafters import DRAFTERS, Parts
from ..engine.drafting import Drafter, DraftSettings
from ..engine.engine import Engine
from ..engine.record import Recorder
from ..engine.sampling import SamplingParams
from ..engine.sequence import NoText

__all__ = ["Cost", "measure_costs"]


@dataclass(frozen=True, slots=True)
class Cost:
    """One method at one K. draft, verify, step: mean processor time per step, as shares of a plain step. tokens_per_step: as it decoded."""
    method: str
    k: int
    num_steps: int
    draft: float
    verify: float
    step: float
    tokens_per_step: float

    @property
    def speed_up(self) -> float:
        """Tokens per processor time, over plain decoding's."""
        return self.tokens_per_step / self.step


def measure_costs(parts: Parts, prompts: Sequence[Sequence[int]], methods: Sequence[str], ks: Sequence[int], *, num_tokens: int = 32,
                  eos_ids: frozenset[int] = frozenset()) -> Iterator[Cost]:
    """Decode greedily with every method and K, in turns with plain decoding, which is what everything is divided by."""
    clock = thread_time if torch.get_num_threads() == 1 else process_time
    engine = Engine(parts.target, parts.cache, Recorder(str), clock=clock)
    drafters: dict[str, Drafter] = {name: DRAFTERS[name].create(parts) for name in ("plain", *methods)}

    def run(method: str, k: int) -> tuple[list[tuple[float, float, float]], int]:
        times, tokens = [], 0
        for prompt in prompts:
            engine.add(list(prompt), SamplingParams(max_new_tokens=num_tokens, temperature=0.0), drafters[method], DraftSettings(k), NoText(),
                       eos_ids=eos_ids, keep_probs=False)
            while not engine.idle:
                for trace in (stepped.trace for stepped in engine.step()):
                    if trace.kind != "prefill":
                        times.append((trace.draft_ms, trace.verify_ms, trace.draft_ms + trace.verify_ms + trace.other_ms))
                        tokens += len(trace.emitted)
            engine.forget()
        return times, tokens
    run("plain", 1)                                          # first calls choose kernels
    for method in methods:
        for k in ks:
            plain, _ = run("plain", 1)
            times, tokens = run(method, k)
            unit = sum(step for *_, step in plain) / len(plain)
            draft, verify, step = (sum(column) / len(times) / unit for column in zip(*times))
            yield Cost(method, k, len(times), draft, verify, step, tokens / len(times))
