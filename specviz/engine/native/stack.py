"""All layers of a lean decoder in one call of the compiled library, over the rows of the engine's own cache.

It knows nothing of drafts or logits. It holds no weights: the decoder's int8 layers keep them. The cache keeps its entries; this hands out
where they lie. Bits are the same however tokens are fed: one by one, in chunks, as trees, beside other rows, on any number of threads.
"""
from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_void_p
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..cache import Feed, KVCache
from .kernel import CompiledProduct, Kernel, Layer, Model, Product, Step

__all__ = ["CompiledStack", "Misfit", "proven"]

_MOST_HEAD_DIM = 256
_TRIAL_TOKENS, _TRIAL_LAYERS = 9, 2
_CLOSE = 0.02                    # of the norm: int8 rounding tips over where torch's and our floats differ in the last bit


class Misfit(Exception):
    """This decoder cannot run as a compiled stack; the message says why, without a full stop."""


class CompiledStack:
    """The layers of a `LeanDecoder` for the library, or those of a drafting head (`drafters/compiled_layer.py`), whose first and last norm
    may be None. Raises Misfit unless every layer is a compiled int8 one of one shape.
    """

    def __init__(self, decoder: Any) -> None:
        layers, norm = decoder.layers, decoder.norm
        first = layers[0]
        told = first.mlp_norm if norm is None else norm
        if not hasattr(told, "weight") or not hasattr(told, "epsilon") or told.weight.dtype != torch.float32:
            raise Misfit("its floats are not float32")
        self._hidden, self._heads, self._head_dim = len(told.weight), first.num_heads, first.head_dim
        self._kv_heads = first.num_rotated - first.num_heads
        self._intermediate = first.intermediate
        self._rotary = decoder.rotary
        if self._head_dim > _MOST_HEAD_DIM or self._head_dim % 2 or self._heads % self._kv_heads:
            raise Misfit(f"heads of {self._head_dim} are not among those that the compiled kernel knows")
        self._held: list[Tensor] = []
        self._kernel = _gather([linear for layer in layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)],
                               [decoder.head, *getattr(decoder, "beside", ())])
        self._layers = (Layer * len(layers))(*(self._layer(layer, told.epsilon) for layer in layers))
        widest = max(self._hidden, self._heads * self._head_dim, self._intermediate)
        self._model = Model(self._layers, self._kept(norm), told.epsilon, len(layers), self._hidden, self._heads, self._kv_heads,
                            self._head_dim, self._intermediate, widest)
        self._like = torch.empty(1, self._kv_heads, self._head_dim)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._busy = Lock()

    def run(self, hidden: Tensor, feeds: Sequence[Feed], num_layers: int, taps: Sequence[int] = ()) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Write the fed tokens' keys and values and return their states after the last norm, [T, H], and the wanted layers' inputs.

        hidden: float32 [T, H], the embeddings of all feeds' tokens in order; it is overwritten. num_layers, taps: as `LeanDecoder.forward`.
        """
        assert 0 <= num_layers <= len(self._layers)
        normed = torch.empty_like(hidden)
        if not len(hidden):
            return normed, {layer: hidden for layer in taps}
        tapped = {layer: torch.empty_like(hidden) for layer in taps if 0 <= layer <= num_layers}
        self.call(self._kernel.step, hidden, feeds, num_layers, tapped, normed)
        return normed, tapped

    @property
    def kernel(self) -> Kernel:
        return self._kernel

    @property
    def hidden_size(self) -> int:
        return self._hidden

    def call(self, function: Callable[..., None], hidden: Tensor, feeds: Sequence[Feed], num_layers: int, tapped: Mapping[int, Tensor],
             normed: Tensor, *more: Any) -> None:
        """Call a function of the library with this model, a step over these feeds, `more` and the number of threads."""
        num_tokens = sum(feed.num_tokens for feed in feeds)
        assert num_tokens and hidden.shape == (num_tokens, self._hidden) and hidden.dtype == torch.float32 and hidden.is_contiguous()
        positions, rows, slots, prefixes, extras_from, extras = (array("i") for _ in range(6))
        for row, feed in enumerate(feeds):
            positions.extend(feed.positions)
            rows.extend([row] * feed.num_tokens)
            slots.extend(range(feed.start, feed.end))
            for straight, others in feed.lineages():
                prefixes.append(straight)
                extras_from.append(len(extras))
                extras.extend(others)
        extras.append(0)                                  # never an empty array: its address would be none
        longest = max(positions) + 1
        cos, sin = self._rotary.reaching(longest)
        keys, values, capacities = self._entries(feeds, num_layers)
        with self._busy:
            threads = torch.get_num_threads()
            needed = self._kernel.scratch_bytes(byref(self._model), longest, threads)
            if len(self._scratch) < needed:
                self._scratch = torch.empty(needed + needed // 4, dtype=torch.uint8)
            places = (c_void_p * (num_layers + 1))()
            for layer, state in tapped.items():
                places[layer] = state.data_ptr()
            arrays = [each.buffer_info()[0] for each in (positions, rows, slots, prefixes, extras_from, extras)]
            step = Step(hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), *arrays, ctypes.addressof(keys), ctypes.addressof(values),
                        capacities.buffer_info()[0], ctypes.addressof(places), normed.data_ptr(), num_tokens, num_layers, longest,
                        self._scratch.data_ptr())
            function(byref(self._model), byref(step), *more, threads)

    def _entries(self, feeds: Sequence[Feed], num_layers: int) -> tuple[Any, Any, array]:
        """Where every row's keys and values of every layer lie, and how many slots each has."""
        keys, values, capacities = [], [], array("i")
        for feed in feeds:
            for layer in range(num_layers):
                key, value = feed.reserve(layer, self._like)
                shape = key.shape
                assert shape == value.shape and (shape[0], shape[2]) == (self._kv_heads, self._head_dim) and shape[1] >= feed.end
                keys.append(key.data_ptr())
                values.append(value.data_ptr())
                capacities.append(shape[1])
        capacities.append(0)
        return (c_void_p * (len(keys) + 1))(*keys), (c_void_p * (len(values) + 1))(*values), capacities

    def _layer(self, layer: Any, epsilon: float) -> Layer:
        heads = self._heads * self._head_dim
        norms = [layer.input_norm, layer.mlp_norm, *(layer.head_norms or ())]
        if any(norm is not None and getattr(norm, "epsilon", None) != epsilon for norm in norms):
            raise Misfit("its norms are of several kinds")
        if (layer.num_heads, layer.head_dim, layer.num_rotated, layer.intermediate) != (
                self._heads, self._head_dim, self._heads + self._kv_heads, self._intermediate):
            raise Misfit("its layers are of several shapes")
        wide = heads + 2 * self._kv_heads * self._head_dim
        products = [self.product(linear, num_out, num_in) for linear, num_out, num_in in (
            (layer.qkv, wide, self._hidden), (layer.out, self._hidden, heads), (layer.gate_up, 2 * self._intermediate, self._hidden),
            (layer.down, self._hidden, self._intermediate))]
        sizes = [self._hidden, self._hidden, *[self._head_dim] * len(layer.head_norms or ())]
        if any(norm is not None and norm.weight.shape != (size,) for norm, size in zip(norms, sizes)):
            raise Misfit("its norms do not fit its layers")
        addresses = [self._kept(norm) for norm in norms]
        return Layer(*products, *addresses, *[None] * (4 - len(addresses)), layer.scaling, layer.window or 0)

    def product(self, linear: Any, num_out: int, num_in: int) -> Product:
        """A compiled linear of this shape as the library reads it. Its bias is kept alive, its weights are not. Raises Misfit for another."""
        compiled: CompiledProduct = linear.compiled
        if (compiled.num_out, compiled.num_in) != (num_out, num_in):
            raise Misfit("its layers are of several shapes")
        bias = linear.padded_bias()
        if bias is not None:
            self._held.append(bias)
        return compiled.fields(bias)

    def _kept(self, norm: Any) -> int | None:
        """The address of a norm's weights, float32 and contiguous, kept alive."""
        if norm is None:
            return None
        weight = norm.weight.detach().float().contiguous()
        self._held.append(weight)
        return weight.data_ptr()


def _gather(linears: Sequence[Any], others: Sequence[Any]) -> Kernel:
    """Move the layers' packed weights, and those of what else is compiled, into one piece of memory, in the order in which a step reads
    them. Raises Misfit."""
    products: list[CompiledProduct | None] = [getattr(linear, "compiled", None) for linear in linears]
    if not all(products):
        raise Misfit("not all of its layers are compiled int8 ones")
    kernel = products[0].kernel
    products.extend(filter(None, (getattr(other, "compiled", None) for other in others)))
    memory, start = kernel.memory(sum(product.num_bytes for product in products)), 0
    for product in products:                 # one after the other, so that two copies of all weights never exist
        product.move(memory[start:start + product.num_bytes])
        start += product.num_bytes
    return kernel


@torch.inference_mode()
def proven(stack: CompiledStack, decoder: Any) -> bool:
    """Whether the stack computes what the decoder's Python form does, up to rounding, and a token's bits do not depend on its company."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(decoder.embed.num_embeddings, (_TRIAL_TOKENS,), generator=generator)
    num_layers = min(_TRIAL_LAYERS, len(decoder.layers))
    positions = torch.arange(_TRIAL_TOKENS)
    distance = positions[:, None] - positions

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        seen = (distance >= 0) & (distance < (window or _TRIAL_TOKENS))
        query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)
    expected = decoder.forward(tokens, positions, attend, num_layers).hidden

    cache = KVCache(_TRIAL_TOKENS)
    row = cache.allocate()

    def feed(part: Tensor) -> Tensor:
        return stack.run(F.embedding(part, decoder.embed.weight), [cache.stage(row, len(part))], num_layers)[0]
    together = feed(tokens)
    cache.keep(row, ())
    alone = torch.cat([feed(part) for part in tokens.split([1, 2, 1, 5])])
    return bool((together - expected).norm() <= _CLOSE * expected.norm()) and torch.equal(alone, together)
