"""Runs a target over many texts at once: padded prompts, then one token per text and step. It knows nothing of drafts or of training.

The engine's cache and attention keep every text bitwise alone, which decoding a chat needs and making training texts does not: here one
matrix product serves all texts. It works with whatever `LanguageModel` runs, so with CPU precisions and with CUDA.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine.model import FINAL, LanguageModel

__all__ = ["Batch", "read_texts"]

_CHUNK_TOKENS = 2048           # tokens of prompts read at once, padding included
_GROWTH = 32                   # room is added for so many tokens at a time: products over all of it need no copies, over a part of it they do


class _Padded:
    """Attention of B prompts of T tokens, padded on the right, that read nothing from before. store: called with every layer's keys."""

    def __init__(self, num_rows: int, num_tokens: int, store: Callable[[int, Tensor, Tensor], None] | None) -> None:
        self._shape, self._store = (num_rows, num_tokens), store

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None = None,
               softcap: float | None = None) -> Tensor:
        _refuse(window, softcap)
        query, key, value = (each.unflatten(0, self._shape).transpose(1, 2) for each in (query, key, value))      # [B, heads, T, D]
        if self._store is not None:
            self._store(layer, key, value)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
        return out.transpose(1, 2).reshape(len(query) * query.shape[2], -1)


class _Single:
    """Attention of one new token for each of B texts over what is stored."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        lengths = batch.lengths
        self._rows = torch.arange(len(lengths), device=lengths.device)
        hidden = torch.arange(batch.keys[0].shape[2], device=lengths.device) > lengths[:, None]
        self._mask = torch.zeros(hidden.shape, device=lengths.device).masked_fill_(hidden, float("-inf"))[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None = None,
               softcap: float | None = None) -> Tensor:
        _refuse(window, softcap)
        batch, num_rows = self._batch, len(query)
        keys, values = batch.keys[layer], batch.values[layer]                     # [B, Hkv, S, D]
        keys[self._rows, :, batch.lengths] = key.to(keys.dtype)
        values[self._rows, :, batch.lengths] = value.to(values.dtype)
        num_kv = keys.shape[1]
        grouped = query.view(num_rows, num_kv, -1, query.shape[-1]).to(keys.dtype)
        scores = (keys @ grouped.transpose(2, 3)).transpose(2, 3)          # [B, Hkv, group, S]
        weights = (scores.float() * scaling + self._mask).softmax(-1).to(values.dtype)
        return (weights @ values).to(query.dtype).reshape(num_rows, -1)


def _refuse(window: int | None, softcap: float | None) -> None:
    if window is not None or softcap is not None:
        raise NotImplementedError("training texts are made for targets with plain attention only")


class Batch:
    """Texts that grow together. keys, values: per layer [B, Hkv, room, D]; lengths: int64 [B], tokens read of each.

    taps: layers whose input is kept beside the final state, see `LanguageModel.forward`. dtype: of keys and values.
    """

    def __init__(self, target: LanguageModel, prompts: Sequence[Sequence[int]], taps: Sequence[int] = (FINAL,), dtype: torch.dtype | None = None
                 ) -> None:
        self.target, self.taps = target, tuple(taps)
        config = target.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (len(prompts), config.num_key_value_heads, _room(max(map(len, prompts)) + 1), head_dim)
        # zeros: what the mask hides must still be a number
        self.keys = [torch.zeros(shape, dtype=dtype or target.dtype, device=target.device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros_like(each) for each in self.keys]
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)

    @torch.inference_mode()
    def read(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
        """Read all prompts. Returns the logits after each, [B, V], and each one's states, [T, sum of H]."""
        last, states, start = [], [], 0
        while start < len(prompts):
            end = start + 1
            longest = len(prompts[start])
            while end < len(prompts) and max(longest, len(prompts[end])) * (end + 1 - start) <= _CHUNK_TOKENS:
                longest = max(longest, len(prompts[end]))
                end += 1
            here = slice(start, end)

            def store(layer: int, key: Tensor, value: Tensor) -> None:
                self.keys[layer][here, :, :key.shape[2]] = key
                self.values[layer][here, :, :key.shape[2]] = value
            logits, tapped = _read_padded(self.target, prompts[start:end], self.taps, store)
            last.append(logits)
            states.extend(tapped)
            start = end
        return torch.cat(last), states

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Read one more token of each text, int64 [B]. Returns logits [B, V] and states [B, sum of H]."""
        if (needed := int(self.lengths.max()) + 1) > self.keys[0].shape[2]:
            for store in (self.keys, self.values):
                store[:] = [F.pad(each, (0, 0, 0, _room(needed) - each.shape[2])) for each in store]
        logits, states = self.target.run(tokens, self.lengths, _Single(self), list(range(len(tokens))), self.taps)
        self.lengths = self.lengths + 1
        return logits, states

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these texts only."""
        index = torch.tensor(rows, device=self.lengths.device)
        self.lengths = self.lengths[index]
        room = _room(int(self.lengths.max()) + 1)
        for store in (self.keys, self.values):
            for layer, each in enumerate(store):              # layer by layer: a copy of all at once would double the memory
                store[layer] = each[index, :, :room].contiguous()


def _room(num_tokens: int) -> int:
    return -(-num_tokens // _GROWTH) * _GROWTH


def read_texts(target: LanguageModel, texts: Sequence[Sequence[int]], taps: Sequence[int] = (FINAL,)) -> list[Tensor]:
    """The states of every token of whole texts, each [T, sum of H], in the order given."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found: dict[int, Tensor] = {}
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and len(texts[order[end]]) * (end + 1 - start) <= _CHUNK_TOKENS:
            end += 1
        rows = order[start:end]
        found.update(zip(rows, _read_padded(target, [texts[i] for i in rows], tuple(taps), None)[1]))
        start = end
    return [found[i] for i in range(len(texts))]


@torch.inference_mode()
def _read_padded(target: LanguageModel, texts: Sequence[Sequence[int]], taps: tuple[int, ...],
                 store: Callable[[int, Tensor, Tensor], None] | None) -> tuple[Tensor, list[Tensor]]:
    longest = max(map(len, texts))
    tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=target.device)
    positions = torch.arange(longest, device=target.device).repeat(len(texts))
    wanted = [row * longest + len(text) - 1 for row, text in enumerate(texts)]
    logits, states = target.run(tokens.flatten(), positions, _Padded(len(texts), longest, store), wanted, taps)
    return logits, [states[row * longest:row * longest + len(text)] for row, text in enumerate(texts)]
