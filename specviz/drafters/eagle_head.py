"""The one-layer decoder that EAGLE methods draft with: from a token and the state before it to a guess of the state there.

It knows nothing of requests, trees or files: it reads what `checkpoints.py` has named and checked.
"""
from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine.cache import Feed
from ..engine.linear import Int8Linear
from ..engine.model import FINAL, LanguageModel
from .compiled_eagle import CompiledEagle, halves
from .decoder_layer import LAYER, DecoderLayer, rms
from .parts import Heads
from .vocabulary import Vocabulary

__all__ = ["EagleHead", "Guess"]


@dataclass(frozen=True, slots=True)
class Guess:
    """carried: [T, H], the state that a child of each token is read with. Behind the wanted tokens: logits [n, D]; the target's ids of the
    best next tokens, best first, and the logs of their probabilities.
    """
    carried: Tensor
    logits: Tensor
    tokens: list[list[int]]
    log_probs: list[list[float]]


class EagleHead:
    """Weights of one head on the target's device and in its dtype.

    EAGLE (arXiv 2401.15077): x = fc([embedding of token t + 1, feature f_t]) goes through one decoder layer without an input norm and
    becomes the guess of f_{t + 1}, which the target's own LM head reads; f is the state after the target's last norm.
    EAGLE-3 (arXiv 2503.01840): f is three of the target's states joined by fc; the layer attends over [norm(embedding), norm(f)], twice
    as wide, and has an LM head of its own over fewer tokens. What is guessed is fed back in place of f in both.

    needs: the target's layers whose states it reads, see `LanguageModel.forward`. token_ids: [D] the target's id of each of its own
    tokens, None if they are the same.
    """

    def __init__(self, heads: Heads, target: LanguageModel) -> None:
        facts = heads.facts
        self._target, self._facts = target, facts
        self._fused = heads.kind == "eagle3"
        self.needs: tuple[int, ...] = tuple(facts["taps"]) if self._fused else (FINAL,)
        self._weights = {name: tensor.to(target.device, target.dtype) for name, tensor in heads.tensors.items()
                         if tensor.is_floating_point() and name != "lm_head.weight"}
        self._vocabulary = Vocabulary(heads.tensors, target)
        self.token_ids = self._vocabulary.token_ids
        self._ids = None if self.token_ids is None else self.token_ids.tolist()
        own = self._weights.get("embed_tokens.weight")
        self._embeddings = target.embeddings.weight if own is None else own
        beside = self._beside()
        self._layer = DecoderLayer(self._weights, facts, target, beside)
        self._whole = CompiledEagle(self._layer.compiled, *beside, self._embeddings) if beside and self._layer.compiled else None

    def _beside(self) -> list[Int8Linear]:
        """The products around the layer, where a pass can be one call of the compiled kernel; none elsewhere."""
        others = ("embedding_layernorm.weight", "pre_lm_head_layernorm.weight")
        table, vocabulary = self._embeddings, self._vocabulary.compiled
        if (self._fused or vocabulary is None or self._facts.get("normalize_embeddings") or any(name in self._weights for name in others)
                or table.dtype != torch.float32 or not table.is_contiguous() or table.device.type != "cpu"):
            return []
        made = halves(self._weights["fc.weight"], self._weights.get("fc.bias"), self._target)
        return [*made, vocabulary] if all(isinstance(each, Int8Linear) for each in made) else []

    def fuse(self, states: Tensor) -> Tensor:
        """The target's states for `needs`, [T, H'] -> what the layer takes for f, [T, H]."""
        if not self._fused:
            return states
        if self._facts.get("norm_before_fc"):
            states = self._layer.norm(states, "input_norm")
        if self._facts.get("fc_norm"):
            parts = states.chunk(len(self.needs), -1)
            states = torch.cat([self._layer.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return self._layer.linear(states, "fc")

    def guess(self, feeds: Seq[Feed], token_ids: Seq[int], states: Tensor, wanted: Seq[int], width: int = 1) -> Guess:
        """Read T tokens of all feeds in order and guess what follows the wanted ones, by their places among the T.

        states: [T, H], f of the token before each: fused or carried. width: how many guesses behind each, fewer where there are fewer.
        """
        if self._whole is not None:
            carried, logits, tokens, log_probs = self._whole(feeds, token_ids, states, wanted, width)
            if self._ids is not None:
                tokens = [[self._ids[word] for word in row] for row in tokens]
            return Guess(carried, logits, tokens, log_probs)
        carried, read = self.read(feeds, torch.tensor(token_ids, dtype=torch.long, device=states.device), states)
        if not wanted:
            return Guess(carried, read.new_empty(0, 0), [], [])
        log_probs = self._vocabulary.log_probs(read if len(wanted) == len(read) else read[torch.tensor(wanted, device=read.device)])
        top = log_probs.topk(min(width, log_probs.shape[-1]), -1)
        ids = top.indices if self.token_ids is None else self.token_ids[top.indices]
        return Guess(carried, log_probs, ids.tolist(), top.values.tolist())

    def read(self, feeds: Seq[Feed], token_ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The states that are carried on, and those that the LM head reads, [T, H] each."""
        layer, embedded = self._layer, self._embed(token_ids)
        if self._fused:
            normed = layer.norm(states, LAYER + "hidden_norm")
            kept = normed if self._facts.get("norm_before_residual") else states
            mixed = torch.cat([layer.norm(embedded, LAYER + "input_layernorm"), normed], -1)
            hidden = layer.mlp(kept + layer.attend(feeds, mixed))
            read = layer.norm(hidden, "norm")
            return read if self._facts.get("norm_output") else hidden, read
        if layer.has("embedding_layernorm"):
            embedded, states = layer.norm(embedded, "embedding_layernorm"), layer.norm(states, "hidden_states_layernorm")
        hidden = layer.forward(feeds, layer.linear(torch.cat([embedded, states], -1), "fc"))
        return hidden, layer.norm(hidden, "pre_lm_head_layernorm") if layer.has("pre_lm_head_layernorm") else hidden

    def _embed(self, token_ids: Tensor) -> Tensor:
        embedded = self._target.embed(token_ids) if "embed_tokens.weight" not in self._weights else F.embedding(token_ids, self._embeddings)
        return rms(embedded, self._facts["epsilon"]) if self._facts.get("normalize_embeddings") else embedded
