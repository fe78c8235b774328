"""From a head's states to guesses: with an LM head of its own over all or some tokens, or with the target's.

It knows nothing of layers, files and requests.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..engine.linear import Int8Linear
from ..engine.model import LanguageModel
from .products import product

__all__ = ["Vocabulary"]


class Vocabulary:
    """tensors: a head's. "lm_head.weight" [D, H] is its LM head, and "d2t" [D] makes its tokens the target's (id = i + d2t[i]); without an
    LM head the target's own is read, of these tokens only where "d2t" is there.

    token_ids: [D] the target's id of each of its tokens, None if they are the same.
    """

    def __init__(self, tensors: Mapping[str, Tensor], target: LanguageModel) -> None:
        self._target = target
        self.token_ids: Tensor | None = None
        self._unknown: Tensor | None = None                    # own tokens that the target does not have
        weight = tensors.get("lm_head.weight")
        weight = None if weight is None else weight.to(target.device, target.dtype)
        self._is_part = False                                  # the target's LM head is read as a whole, and these tokens are taken out
        if (offsets := tensors.get("d2t")) is not None:
            self.token_ids = (torch.arange(len(offsets)) + offsets).to(target.device)
            unknown = self.token_ids >= target.num_tokens
            self._unknown = unknown if unknown.any() else None
            self.token_ids = self.token_ids.clamp(max=target.num_tokens - 1)
            if weight is None:
                weight = target.head_rows(self.token_ids)
                self._is_part = weight is None
        self._product = None if weight is None else product(weight, None, target)

    @property
    def compiled(self) -> Int8Linear | None:
        """The LM head where it is a compiled product whose outputs are its logits as they are."""
        is_whole = isinstance(self._product, Int8Linear) and self._unknown is None
        return self._product if is_whole and (self.token_ids is not None or self._product.compiled.num_out <= self._target.num_tokens) else None

    def logits(self, read: Tensor) -> Tensor:
        """[n, H] -> [n, D]; -inf for tokens that the target does not have."""
        if self._product is None:
            logits = self._target.head(read)
            logits = logits[:, self.token_ids] if self._is_part else logits
        else:
            logits = self._product(read)
            logits = logits if self.token_ids is not None else logits[:, :self._target.num_tokens]
        return logits if self._unknown is None else logits.masked_fill(self._unknown, float("-inf"))

    def log_probs(self, read: Tensor) -> Tensor:
        """The guess of the next token, [n, H] -> [n, D], float32 or better."""
        logits = self.logits(read)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).clamp(max=0)

    def spread(self, logits: Tensor) -> Tensor:
        """Logits over its own tokens as logits over the target's, [n, D] -> [n, V]; the others get -inf."""
        if self.token_ids is None:
            return logits
        ids = self.token_ids if self._unknown is None else self.token_ids[~self._unknown]
        values = logits if self._unknown is None else logits[:, ~self._unknown]
        return logits.new_full((len(logits), self._target.num_tokens), float("-inf")).index_copy_(1, ids, values)
