"""A whole pass of an EAGLE head in one call of the compiled kernel: from tokens and the states before them to the best next tokens.

It knows nothing of trees. A pass of a small head is over so soon that separate calls would cost more than their sums.
"""
from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from ctypes import byref

import torch
from torch import Tensor

from ..engine.cache import Feed
from ..engine.linear import Int8Linear
from ..engine.model import LanguageModel
from ..engine.native.kernel import Guess, Head
from .compiled_layer import CompiledLayer
from .products import Product, product

__all__ = ["CompiledEagle", "halves"]


def halves(weight: Tensor, bias: Tensor | None, target: LanguageModel) -> list[Product]:
    """`fc` [H, 2 H] as two products, of the embedding, with the bias, and of the state: in one, the state's scale would leave nothing of an
    embedding in int8."""
    return [product(part.contiguous(), own, target) for part, own in zip(weight.chunk(2, 1), (bias, None))]


class CompiledEagle:
    """layer: the head's own. from_token, from_state: see `halves`. vocabulary: its LM head. embeddings: float32 [V, H], what ids stand for.

    All linears are compiled ones of one kernel; the layer was made with them beside it.
    """

    def __init__(self, layer: CompiledLayer, from_token: Int8Linear, from_state: Int8Linear, vocabulary: Int8Linear, embeddings: Tensor) -> None:
        self._stack, self._held = layer.stack, (layer, from_token, from_state, vocabulary)       # the library reads what they hold
        self._embeddings = embeddings.detach()
        size = self._stack.hidden_size
        assert self._embeddings.dtype == torch.float32 and self._embeddings.is_contiguous() and self._embeddings.shape[1] == size
        self._num_words = vocabulary.compiled.num_out
        products = [self._stack.product(linear, num_out, size) for linear, num_out in (
            (from_token, size), (from_state, size), (vocabulary, self._num_words))]
        self._head = Head(*products, self._embeddings.data_ptr())

    def __call__(self, feeds: Seq[Feed], token_ids: Seq[int], states: Tensor, wanted: Seq[int], width: int
                 ) -> tuple[Tensor, Tensor, list[list[int]], list[list[float]]]:
        """Read T tokens of all feeds in order, behind states float32 [T, H].

        Returns the guessed states [T, H]; and behind the wanted tokens the logits [n, D], the `width` best words, best first, and the logs
        of their probabilities.
        """
        num_tokens, states = len(token_ids), states.contiguous()
        ids, places = array("q", token_ids), array("i", [*wanted, 0])
        assert states.shape == (num_tokens, self._stack.hidden_size) and states.dtype == torch.float32
        assert all(0 <= token < len(self._embeddings) for token in ids) and all(0 <= place < num_tokens for place in places)
        width = min(width, self._num_words)
        hidden, carried = torch.empty_like(states), torch.empty_like(states)
        logits, sums = states.new_empty(len(wanted), self._num_words), array("f", bytes(4 * (len(wanted) + 1)))
        best = array("i", bytes(4 * (len(wanted) * width + 1)))
        guess = Guess(ids.buffer_info()[0], states.data_ptr(), places.buffer_info()[0], logits.data_ptr(), sums.buffer_info()[0],
                      best.buffer_info()[0], len(wanted), width)
        self._stack.call(self._stack.kernel.guess, hidden, feeds, 1, {}, carried, byref(self._head), byref(guess))
        words = [best[row * width:(row + 1) * width].tolist() for row in range(len(wanted))]
        values = logits.gather(1, torch.tensor(words)).tolist() if words else []
        return carried, logits, words, [[min(0.0, value - total) for value in row] for row, total in zip(values, sums)]
