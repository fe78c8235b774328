"""Measures once, after loading, whether drafting heads guess what the target would say, and says so if they do not.

It knows nothing of drafting: the heads are fed the target's true states of a short text, and their first guesses are compared with the
target's own choices. Wrong settings never change the text, they only make every draft fail; this is how that is noticed.
"""
from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..engine.cache import KVCache
from ..engine.model import FINAL, LanguageModel, Row
from .eagle_head import EagleHead
from .exit_adapter import Adapter
from .medusa import MedusaHeads
from .parts import Heads

__all__ = ["ANSWER", "Agreement", "EXPECTED", "QUESTION", "checked", "measure"]

QUESTION = "Why is the sky blue, and why is it red in the evening?"
ANSWER = """The sky is blue because of a process called Rayleigh scattering. Sunlight is made up of all the colors of the rainbow, and each \
color has a different wavelength. When sunlight enters the atmosphere, it collides with molecules of nitrogen and oxygen. Shorter \
wavelengths, such as blue and violet, are scattered much more than longer wavelengths, such as red and orange. As a result, blue light reaches our eyes from \
every part of the sky.

In the evening, the sun is low on the horizon, so its light has to travel through much more of the atmosphere. Most of the blue light is \
scattered away before it reaches us, and the remaining light is mostly red and orange."""
EXPECTED = 0.5                 # what full-size published heads are expected to reach (an estimate, not a measurement)
_ALARM = 0.5                   # warn below this share of it


@dataclass(frozen=True, slots=True)
class Agreement:
    """At how many of the text's places the heads' first guess was the target's most probable token."""
    num_agreeing: int
    num_places: int

    @property
    def share(self) -> float:
        return self.num_agreeing / max(1, self.num_places)


def checked(heads: Heads, target: LanguageModel, prompt: Seq[int], answer: Seq[int]) -> Heads:
    """The heads, with a warning if they agree far less than expected. prompt, answer: `QUESTION` and `ANSWER` as the target reads them."""
    agreement = measure(heads, target, prompt, answer)
    expected = float(heads.facts.get("expected_agreement", EXPECTED))
    if agreement.share >= _ALARM * expected:
        return heads
    return replace(heads, warning=(
        f"few accepted: of {agreement.num_places} first guesses {agreement.share:.0%} are the target's choice, about {expected:.0%} were "
        "expected. Usual causes: heads for another model or chat template, states taken one layer off, a wrong norm setting, another rope base"))


@torch.inference_mode()
def measure(heads: Heads, target: LanguageModel, prompt: Seq[int], answer: Seq[int]) -> Agreement:
    """Feed the true states of the answer's tokens and compare; one forward of the target and one of the heads."""
    tokens = [*prompt, *answer]
    if heads.kind == "exit_adapter":
        return _measure_adapter(Adapter(heads, target), target, tokens, max(0, len(prompt) - 1))
    eagle = None if heads.kind == "medusa" else EagleHead(heads, target)
    cache = KVCache(len(tokens), target.device)
    output = target.forward([Row(cache.allocate(), tokens)], cache, hidden=(FINAL,) if eagle is None else eagle.needs)[0]
    first = max(0, len(prompt) - 2)                          # the guess behind states i is about token i + 2
    choices = output.logits[first + 1:-1].argmax(-1)
    guesses = _medusa(heads, target, output.hidden[:-1]) if eagle is None else _eagle(eagle, target, output.hidden[:-1], tokens[1:])
    return Agreement(int((guesses[first:-1] == choices).sum()), len(choices))


def _measure_adapter(adapter: Adapter, target: LanguageModel, tokens: Seq[int], first: int) -> Agreement:
    """Its guess behind state i is about the same token as the target's own choice there."""
    cache, own = KVCache(len(tokens), target.device), KVCache(len(tokens), target.device)
    output = target.forward([Row(cache.allocate(), tokens)], cache, hidden=(adapter.exit_layer,))[0]
    guesses = adapter.logits(adapter.forward([own.stage(own.allocate(), len(tokens))], output.hidden)).argmax(-1)
    return Agreement(int((guesses[first:] == output.logits[first:].argmax(-1)).sum()), len(tokens) - first)


def _medusa(heads: Heads, target: LanguageModel, states: Tensor) -> Tensor:
    medusa = MedusaHeads(heads, target)
    best = medusa.log_probs(states, 1)[:, 0].argmax(-1)
    return best if medusa.token_ids is None else medusa.token_ids[best]


def _eagle(eagle: EagleHead, target: LanguageModel, states: Tensor, tokens: Seq[int]) -> Tensor:
    cache = KVCache(len(tokens), target.device)
    feed = cache.stage(cache.allocate(), len(tokens))
    guess = eagle.guess([feed], tokens, eagle.fuse(states), range(len(tokens)))
    return torch.tensor([best[0] for best in guess.tokens], device=target.device)
