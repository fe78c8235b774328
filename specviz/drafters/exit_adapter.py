"""Early exit with a trained adapter: the target's first layers and one small layer of its own guess a chain; all layers check it.

Kangaroo (arXiv 2404.18911), self-speculation with a trained exit. The first layers share the target's cache, and their entries are
dropped before the target verifies; the adapter has a cache of its own, in which entry i is the target's state of token i at the exit. What
it read while drafting is dropped too: whatever the target commits is read again with the target's own states.
"""
from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ..engine.cache import Feed, KVCache
from ..engine.draft import Draft
from ..engine.drafting import Budget, Outcome
from ..engine.model import LanguageModel, Row
from ..engine.option import Option
from ..engine.sequence import Sequence
from .chain import CONFIDENCE, Chain
from .decoder_layer import DecoderLayer
from .parts import Heads, Parts
from .target_states import HeardStates, hear
from .vocabulary import Vocabulary

__all__ = ["Adapter", "ExitAdapter", "missing", "options"]

_CHUNK = 256                   # states of a long prompt read at a time


def missing(parts: Parts) -> str:
    """Why this method cannot run."""
    sentence = "no exit adapter is loaded; choose one trained for this target as drafter under Models, or start with --draft"
    return "" if "exit_adapter" in parts.heads else sentence


def options(parts: Parts) -> tuple[Option, ...]:
    """What can be set; the exit layer is the one that the adapter was trained for."""
    return (CONFIDENCE,)


class Adapter:
    """One decoder layer between the target's first layers and an LM head.

    x = h + attention(norm(h)), then the MLP where there is one (Kangaroo's own has none), then the last norm and the LM head,
    before which specviz's own has a square matrix.
    exit_layer: N, the target's layers before it; it reads their output, the input of layer N.
    """

    def __init__(self, heads: Heads, target: LanguageModel) -> None:
        self.exit_layer: int = heads.facts["exit_layer"]
        self._weights = {name: tensor.to(target.device, target.dtype) for name, tensor in heads.tensors.items()
                         if tensor.is_floating_point() and name != "lm_head.weight"}
        self._layer = DecoderLayer(self._weights, heads.facts, target)
        self._vocabulary = Vocabulary(heads.tensors, target)

    def forward(self, feeds: Seq[Feed], states: Tensor) -> Tensor:
        """Read T states of all feeds in order, [T, H] -> [T, H], what the LM head reads: entry i guesses token i + 1."""
        layer = self._layer
        read = layer.norm(layer.forward(feeds, states), "norm")
        return layer.linear(read, "projection") if layer.has("projection") else read

    def logits(self, read: Tensor) -> Tensor:
        """[n, H] -> [n, V] over the target's tokens."""
        return self._vocabulary.spread(self._vocabulary.logits(read))


class ExitAdapter:
    """Drafts chains, drawn when sampling, as the draft model does."""
    name = "exit_adapter"

    def __init__(self, parts: Parts) -> None:
        self._adapter = Adapter(parts.heads["exit_adapter"], parts.target)
        self._target, self._target_cache = parts.target, parts.cache
        self._cache = KVCache(parts.cache.capacity, parts.target.device)
        self.needs: tuple[int, ...] = (self._adapter.exit_layer,)

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        chains = []
        for sequence, budget in zip(sequences, budgets):
            sequence.draft_kv = None
            pending = sequence.tokens[self._target_cache.length(sequence.row):]
            chains.append(Chain(sequence, min(budget.nodes, budget.depth), sequence.row, pending, self._target.num_tokens))
        begun = going = [chain for chain in chains if chain.length > 0]
        while going:
            for chain, logits in zip(going, self._read(going), strict=True):
                chain.add(logits)
            going = [chain for chain in going if len(chain.tokens) < chain.length]
        for chain in begun:
            state: HeardStates = chain.sequence.drafting
            self._target_cache.keep(chain.row, ())
            chain.sequence.draft_kv = self._cache.keep(state.row, range(sum(map(len, state.states))))
            state.states.clear()
        return [chain.draft() for chain in chains]

    def _read(self, chains: list[Chain]) -> Tensor:
        """Read each chain's last token, or at first everything that is known and not read yet; [chains, V] logits of what follows."""
        rows = [Row(chain.row, chain.tokens[-1:] or chain.pending, num_logits=0) for chain in chains]
        depth = self._adapter.exit_layer
        outputs = self._target.forward(rows, self._target_cache, hidden=(depth,), num_layers=depth)
        parts = [output.hidden if chain.tokens else self._catch_up(chain.sequence.drafting, output.hidden)
                 for chain, output in zip(chains, outputs)]
        feeds = [self._cache.stage(chain.sequence.drafting.row, len(part)) for chain, part in zip(chains, parts)]
        ends = torch.tensor([len(part) for part in parts]).cumsum(0) - 1
        return self._adapter.logits(self._adapter.forward(feeds, torch.cat(parts))[ends])

    def _catch_up(self, state: HeardStates, pending: Tensor) -> Tensor:
        """The states to read now, [m, H]: those of the text since the last proposal, and the pending tokens' behind them. Of a long text
        all but the last chunk are read here and committed."""
        committed = torch.cat(state.states) if state.states else pending[:0]
        while len(committed) > _CHUNK:
            self._adapter.forward([self._cache.stage(state.row, _CHUNK)], committed[:_CHUNK])
            self._cache.keep(state.row, range(_CHUNK))
            committed = committed[_CHUNK:]
        state.states = [committed]
        return torch.cat([committed, pending])

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """Store the target's states of all tokens that it committed."""
        hear(outcomes, self._cache, self._target_cache)

    def fork(self, source: Sequence, target: Sequence, length: int) -> int:
        """Copy the row and the states that it has not read. Another drafter's text has none: it is read anew."""
        if source.drafter is not self or source.drafting is None:
            return 0
        state: HeardStates = source.drafting
        read = min(length, self._cache.length(state.row))
        states = [torch.cat(state.states)[:length - read].clone()] if length > read else []
        target.drafting = HeardStates(self._cache.fork(state.row, read), length, states)
        return length

    def release(self, sequence: Sequence) -> None:
        if sequence.drafting is not None:
            self._cache.free(sequence.drafting.row)
            sequence.drafting = None
