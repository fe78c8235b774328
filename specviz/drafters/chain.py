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
from ..engine.option import Option
from ..engine.sampling import distribution
from ..engine.sequence import Sequence

__all__ = ["CONFIDENCE", "Chain", "fitted", "grow"]

CONFIDENCE = Option("confidence", "Stop when unsure", "number", 0.0, "Drafting stops where the drafter's best guess has less than this "
                    "probability; 0 never stops.", 0, 0.99)


def fitted(logits: Tensor, num_tokens: int) -> Tensor:
    """A drafter's logits [..., V'] for the target's V tokens: a padded tail is cut off, tokens that the drafter lacks get none."""
    missing = num_tokens - logits.shape[-1]
    return logits[..., :num_tokens] if missing <= 0 else functional.pad(logits, (0, missing), value=float("-inf"))


@dataclass(slots=True)
class Chain:
    """A chain in the making: at most `length` tokens, chosen (greedy) or drawn so far, and what they came from.

    row: the cache row that reads it. pending: tokens to read before the first guess. num_tokens: V, the target's vocabulary; a drafter
    that knows fewer tokens gives the others no probability. confidence: it ends where the most probable token has less than this; a
    look at the distribution, never at what was drawn from it, so the text's law stays the target's.
    """
    sequence: Sequence
    length: int
    row: int
    pending: list[int]
    num_tokens: int
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)          # [V] each: what was drawn from, or, greedy, temperature 1 for the eye
    confidence: float = 0.0
    stop: str = "length"

    def __post_init__(self) -> None:
        self.confidence = self.sequence.settings.option("confidence", 0.0)
        if self.length <= 0:
            self.stop = "budget"

    def add(self, logits: Tensor) -> None:
        """Choose or draw the next token from [V] logits, under the request's own sampling settings."""
        sequence = self.sequence
        logits = fitted(logits, self.num_tokens)
        if self.confidence and float((logits.max() - logits.logsumexp(-1)).exp()) < self.confidence:
            self.length, self.stop = len(self.tokens), "confidence"
            return
        probs = distribution(logits[None], sequence.params, [sequence.tokens + self.tokens])[0]
        position = len(sequence.tokens) + len(self.tokens)
        self.tokens.append(sequence.noise.draw_draft(probs, position, sequence.num_steps))
        if not sequence.params.greedy:
            self.probs.append(probs)
        elif sequence.keep_probs:
            self.probs.append(logits.float().softmax(-1))

    def add_unread(self, logits: Tensor, position: int) -> Tensor:
        """As `add`, where nothing but the token depends on it: returns it as int64 [1] on its device, unread. `tokens` are set at the end."""
        sequence = self.sequence
        logits = fitted(logits, self.num_tokens)
        if sequence.params.greedy:
            if sequence.keep_probs:
                self.probs.append(logits.float().softmax(-1))
            return logits.argmax()[None]
        self.probs.append(distribution(logits[None], sequence.params)[0])
        return sequence.noise.queue_draft(self.probs[-1], position, sequence.num_steps)

    @property
    def looks(self) -> bool:
        """Whether the next token cannot be chosen before the last one is known here: to stop when unsure, or to penalize repetition."""
        return bool(self.confidence) or self.sequence.params.repetition_penalty != 1

    def draft(self) -> Draft:
        """The finished draft: drawn with its distributions, or chosen when greedy."""
        rows = torch.stack(self.probs) if self.probs else None
        if self.sequence.params.greedy:
            return Draft(tuple(self.tokens), tuple(range(-1, len(self.tokens) - 1)), shown_probs=rows, stop=self.stop)
        return Draft.chain(self.tokens, rows, stop=self.stop)


def grow(chains: Seq[Chain], model: LanguageModel, cache: KVCache, num_layers: int | None = None) -> None:
    """Grow all chains to their lengths, one forward per depth for all of them together; entries stay staged in the cache."""
    going = [chain for chain in chains if chain.length > 0]
    if model.runs_ahead and going and not any(chain.looks for chain in going):
        return _grow_unread(going, model, cache, num_layers)
    while going:
        rows = [Row(chain.row, chain.tokens[-1:] or chain.pending, num_logits=1) for chain in going]
        for chain, output in zip(going, model.forward(rows, cache, num_layers=num_layers), strict=True):
            chain.add(output.logits[-1])
        going = [chain for chain in going if len(chain.tokens) < chain.length]


def _grow_unread(chains: Seq[Chain], model: LanguageModel, cache: KVCache, num_layers: int | None) -> None:
    """Queue all forwards, each with the tokens that the one before leaves on the device, then wait once for all tokens."""
    unread: list[list[Tensor]] = [[] for _ in chains]
    for depth in range(max(chain.length for chain in chains)):
        going = [i for i, chain in enumerate(chains) if depth < chain.length]
        rows = [Row(chains[i].row, unread[i][-1] if unread[i] else chains[i].pending, num_logits=1) for i in going]
        for i, output in zip(going, model.forward(rows, cache, num_layers=num_layers), strict=True):
            unread[i].append(chains[i].add_unread(output.logits[-1], len(chains[i].sequence.tokens) + depth))
    known = torch.cat([token for tokens in unread for token in tokens]).tolist()
    for chain, tokens in zip(chains, unread):
        chain.tokens, known = known[:len(tokens)], known[len(tokens):]
