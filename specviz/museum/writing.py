"""Greedy text by a tiny random network through the real engine, with and without drafts, and with one of the faults that spoil it.

It knows nothing of screens. The network has random weights and 64 syllables for a vocabulary, so nothing is downloaded and the text means
nothing; the cache, the scheduler, the verifier and the cut at the end are the engine's own.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..drafters.plain import Plain, Stateless
from ..engine.cache import KVCache
from ..engine.draft import Draft
from ..engine.drafting import Budget, DraftSettings
from ..engine.engine import Engine
from ..engine.model import LanguageModel
from ..engine.record import Recorder
from ..engine.sampling import SamplingParams
from ..engine.sequence import NoText, Sequence
from ..errors import InputError
from ..trace import CacheTrace, EmittedToken
from .faults import TEXT_FAULTS

__all__ = ["END", "NUM_TOKENS", "SYLLABLES", "ForgetfulCache", "LateSequence", "write"]

SYLLABLES = [first + second for first in ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "st", "br")
             for second in "aeio"]
NUM_TOKENS = 36
END = 22                         # the answer's token of this number (from 0) is taken for the end of the text
_DRAFTED, _WRONG_EVERY = 4, 7
_PROMPT = (3, 41, 17, 8, 60, 22, 35)


class ForgetfulCache(KVCache):
    """Forgets the rollback: rejected entries stay, and later tokens attend to them and stand too far back.

    What it says of its length is right, so that the engine goes on as if nothing were wrong.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stale: dict[int, int] = {}

    def length(self, row: int) -> int:
        return super().length(row) - self._stale.get(row, 0)

    def keep(self, row: int, fed: Seq[int]) -> CacheTrace:
        num_fed = self.fed(row)
        self._stale[row] = self._stale.get(row, 0) + num_fed - len(fed)
        return super().keep(row, range(num_fed))


class LateSequence(Sequence):
    """Looks for the end of the text only at the last token of a block, so that it runs on past an end inside one."""

    def extend(self, tokens: Seq[int], origins: Seq[str], room: int) -> list[EmittedToken]:
        ends, self._eos_ids = self._eos_ids, frozenset()
        emitted = super().extend(tokens, origins, room)
        self._eos_ids = ends
        if emitted[-1].id in ends:
            self.finish("eos")
        return emitted


class RunOnEngine(Engine):
    sequence_type = LateSequence


class Parrot(Stateless):
    """Knows the answer and repeats it, with a mistake at every seventh place, so that drafts are accepted and rejected."""
    name = "parrot"

    def __init__(self, text: Seq[int]) -> None:
        self._text = text

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets)]

    def _propose(self, sequence: Sequence, budget: Budget) -> Draft:
        start = len(sequence.tokens)
        ahead = self._text[start:start + min(budget.nodes, budget.depth)]
        return Draft.chain([token if (start + i) % _WRONG_EVERY else (token + 1) % len(SYLLABLES) for i, token in enumerate(ahead)])


def write(fault: str = "") -> Iterator[dict[str, Any]]:
    """Write the text plainly, then with drafts and the fault; yields JSON-ready states, one a step.

    fault: "" or one of `TEXT_FAULTS`. plain, tokens: syllables of both texts; steps: for each step of the second how many tokens it wrote
    and how many of its drafts were rejected; index: the first place where they differ, None if they do not; done. Raises InputError.
    """
    if fault and fault not in TEXT_FAULTS:
        raise InputError(f"fault is {fault!r}; expected one of {', '.join(TEXT_FAULTS)}.")
    target = LanguageModel(_network())
    whole = _plain(target, frozenset())
    end = frozenset(whole[len(_PROMPT) + END:][:1])
    plain = _plain(target, end)[len(_PROMPT):]
    cache = (ForgetfulCache if fault == "no_rollback" else KVCache)(256)
    engine = (RunOnEngine if fault == "run_on" else Engine)(target, cache, Recorder(str))
    engine.add(_PROMPT, SamplingParams(max_new_tokens=NUM_TOKENS), Parrot(whole), DraftSettings(_DRAFTED), NoText(), eos_ids=end)
    tokens: list[int] = []
    steps: list[tuple[int, int]] = []
    while not engine.idle:
        for stepped in engine.step():
            tokens += [token.id for token in stepped.trace.emitted]
            steps.append((len(stepped.trace.emitted), sum(node.state == "rejected" for node in stepped.trace.nodes)))
        yield _state(fault, plain, tokens, steps, end, done=False)
    yield _state(fault, plain, tokens, steps, end, done=True)


def _state(fault: str, plain: list[int], tokens: list[int], steps: list[tuple[int, int]], end: frozenset[int], done: bool) -> dict[str, Any]:
    index = next((i for i, (ours, theirs) in enumerate(zip(tokens, plain)) if ours != theirs), None)
    if index is None and done and len(tokens) != len(plain):
        index = min(len(tokens), len(plain))
    return {"kind": "text", "fault": fault, "plain": _pieces(plain, end), "tokens": _pieces(tokens, end), "steps": steps, "index": index,
            "done": done}


def _pieces(tokens: Seq[int], end: frozenset[int]) -> list[str]:
    """The end of the text is an empty piece."""
    return ["" if token in end else SYLLABLES[token] for token in tokens]


def _plain(target: LanguageModel, end: frozenset[int]) -> list[int]:
    """Prompt and answer without drafts."""
    engine = Engine(target, KVCache(256), Recorder(str))
    tokens = list(_PROMPT)
    engine.add(_PROMPT, SamplingParams(max_new_tokens=NUM_TOKENS), Plain(), DraftSettings(1), NoText(), eos_ids=end)
    while not engine.idle:
        tokens += [token.id for stepped in engine.step() for token in stepped.trace.emitted]
    return tokens


def _network() -> Any:
    """Two layers with random weights from a fixed seed, in double precision; the global random state is left as it was."""
    config = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                  num_key_value_heads=2, vocab_size=len(SYLLABLES), max_position_embeddings=256)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        for parameter in model.parameters():       # the default weights are so small that every token looks alike
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    return model.eval().requires_grad_(False)
