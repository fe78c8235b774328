"""A small engine around tiny random models, for tests. It knows nothing of tokenizers: text is token ids separated by spaces."""
from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field

import torch
from head_files import random_heads
from tiny import tiny_model

from specviz.drafters import DRAFTERS, Parts
from specviz.engine.drafting import Drafter, DraftSettings
from specviz.engine.engine import Engine
from specviz.engine.graphs import StaticSteps
from specviz.engine.model import LanguageModel
from specviz.engine.option import settled
from specviz.engine.record import Recorder
from specviz.engine.rules import RULES
from specviz.engine.sampling import SamplingParams
from specviz.engine.scheduler import Scheduler
from specviz.engine.sequence import Sequence
from specviz.trace import StepTrace

__all__ = ["IdText", "Lab", "Result", "repeating_prompt"]


class IdText:
    """A `TextSink` whose text is "12 7 9 ": each token's id and a space. Stop strings are looked for in that text."""

    def __init__(self, stops: Seq[str] = ()) -> None:
        self._stops, self.text = stops, ""

    def push(self, token: int) -> tuple[str, bool]:
        before = len(self.text)
        self.text += f"{token} "
        found = [at for stop in self._stops if (at := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[:min(found)]
        return self.text[before:], bool(found)

    def finish(self) -> None:
        pass


@dataclass
class Result:
    """What one request came to."""
    sequence: Sequence
    steps: list[StepTrace] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[self.sequence.num_prompt_tokens:]


class Lab:
    """An engine over a tiny target, with every registered drafter built for it.

    The draft model is the same family with another seed, blended towards the target so that some guesses are right.
    """

    def __init__(self, family: str = "llama", *, dtype: torch.dtype = torch.float64, capacity: int = 256, precision: str = "none",
                 max_rows: int = 8, token_budget: int = 256, max_parked: int = 4, max_tokens: int | None = None, likeness: float = 0.9, exact: bool = True,
                 static: StaticSteps | None = None) -> None:
        target, draft = tiny_model(family, dtype=dtype), tiny_model(family, seed=1, dtype=dtype)
        with torch.no_grad():
            for ours, theirs in zip(draft.parameters(), target.parameters()):
                ours.lerp_(theirs, likeness)
        self.target = LanguageModel(target, precision=precision, exact=exact, static=static)
        self.draft = LanguageModel(draft, precision=precision, exact=exact, static=static)
        self.cache = self.target.new_cache(capacity)
        self.parts = Parts(self.target, self.cache, self.draft, heads=random_heads(self.target))
        self.engine = Engine(self.target, self.cache, Recorder(str), Scheduler(self.cache, max_rows=max_rows, token_budget=token_budget,
                                                                             max_parked=max_parked, max_tokens=max_tokens))
        self.drafters: dict[str, Drafter] = {name: method.create(self.parts) for name, method in DRAFTERS.items()}
        self.results: dict[int, Result] = {}

    def add(self, prompt: Seq[int], method: str | Drafter = "plain", k: int = 4, *, eos: Seq[int] = (), scope: str = "",
            rule: str = "rejection", options: Mapping[str, object] | None = None, **params: object) -> Result:
        """Queue a request; parameters are those of `SamplingParams`. options: the method's, the others at their defaults."""
        drafter = self.drafters[method] if isinstance(method, str) else method
        sampling = SamplingParams(**{"max_new_tokens": 24, **params})
        settings = settled(DRAFTERS[drafter.name].options(self.parts), options, drafter.name) if options is not None else ()
        request = self.engine.add(prompt, sampling, drafter, DraftSettings(k, settings), IdText(sampling.stop), eos_ids=frozenset(eos), scope=scope,
                                  rule=RULES[rule])
        result = self.results[request] = Result(self.engine._sequences[request])
        return result

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        if self.engine.idle:
            return False
        for stepped in self.engine.step():
            self.results[stepped.sequence.id].steps.append(stepped.trace)
        return True

    def run(self, *args: object, **kwargs: object) -> Result:
        """`add`, then step until everyone is done."""
        result = self.add(*args, **kwargs)
        self.finish()
        return result

    def finish(self) -> None:
        while self.step():
            pass


def repeating_prompt(length: int, period: int = 7, seed: int = 0, vocabulary: int = 384) -> list[int]:
    """Tokens with a short period, so that lookup finds matches."""
    generator = torch.Generator().manual_seed(seed)
    piece = torch.randint(3, vocabulary, (period,), generator=generator).tolist()
    return [piece[i % period] for i in range(length)]
