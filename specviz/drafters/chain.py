"""Growing chains token by token with any language model, for several sequences at once. Shared by the methods that do."""
from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from ..engine.cache import KVCache
from ..engine.draft import Draft
from ..engine.model import LanguageModel, Row
from ..engine.sampling import distribution
from ..engine.sequence import Sequence

__all__ = ["Chain", "fitted", "grow"]


def fitted(logits: Tensor, num_tokens: int) -> Tensor:
    """A drafter's logits [..., V'] for the target's V tokens: a padded tail is cut off, tokens that the drafter lacks get none."""
    missing = num_tokens - logits.shape[-1]
    return logits[..., :num_tokens] if missing <= 0 else functional.pad(logits, (0, missing), value=float("-inf"))


@dataclass(slots=True)
class Chain:
    """A chain in the making: at most `length` tokens, chosen (greedy) or drawn so far, and what they came from.

    row: the cache row that reads it. pending: tokens to read before the first guess. num_tokens: V, the target's vocabulary; a drafter
    that knows fewer tokens gives the others no probability.
    """
    sequence: Sequence
    length: int
    row: int
    pending: list[int]
    num_tokens: int
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)          # [V] each: what was drawn from, or, greedy, temperature 1 for the eye

    def add(self, logits: Tensor) -> None:
        """Choose or draw the next token from [V] logits, under the request's own sampling settings."""
        sequence = self.sequence
        logits = fitted(logits, self.num_tokens)
        probs = distribution(logits[None], sequence.params, [sequence.tokens + self.tokens])[0]
        position = len(sequence.tokens) + len(self.tokens)
        self.tokens.append(sequence.noise.draw_draft(probs, position, sequence.num_steps))
        if not sequence.params.greedy:
            self.probs.append(probs)
        elif sequence.keep_probs:
            self.probs.append(logits.float().softmax(-1))

    def draft(self) -> Draft:
        """The finished draft: drawn with its distributions, or chosen when greedy."""
        rows = torch.stack(self.probs) if self.probs else None
        if self.sequence.params.greedy:
            return Draft(tuple(self.tokens), tuple(range(-1, len(self.tokens) - 1)), shown_probs=rows, stop="length")
        return Draft.chain(self.tokens, rows, stop="length")


def grow(chains: Seq[Chain], model: LanguageModel, cache: KVCache, num_layers: int | None = None) -> None:
    """Grow all chains to their lengths, one forward per depth for all of them together; entries stay staged in the cache."""
    going = [chain for chain in chains if chain.length > 0]
    while going:
        rows = [Row(chain.row, chain.tokens[-1:] or chain.pending, num_logits=1) for chain in going]
        for chain, output in zip(going, model.forward(rows, cache, num_layers=num_layers), strict=True):
            chain.add(output.logits[-1])
        going = [chain for chain in going if len(chain.tokens) < chain.length]
