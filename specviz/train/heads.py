"""The drafters while they learn: small networks on the target's stored states, with the loss of one batch. Nothing of files or schedules.

Every network keeps the names and the arithmetic of the published checkpoints that `specviz/drafters` reads. Positions: `states[t]` is the
target's state after token t, so it holds the target's distribution of token t + 1; `weights[t]` is what guessing token t counts.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Batch", "DraftModelNet", "EagleNet", "ExitNet", "Given", "MedusaNet", "Loss", "NETS", "Net", "distance"]


@dataclass(frozen=True, slots=True)
class Given:
    """What a drafter takes from the target and from counting: embeddings, head [V, H]; draft_ids [D], the tokens that it may guess."""
    embeddings: Tensor
    head: Tensor
    draft_ids: Tensor
    config: Any                                # the target's configuration

    @property
    def rows(self) -> Tensor:
        """The target's LM head for the draft's tokens, [D, H]."""
        return self.head[self.draft_ids]


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side. tokens: int64 [B, T]. states, exits: [B, T, H], after the last norm and at the exit layer. weights: [B, T].

    likely, probs: [B, T, k], the target's most probable next tokens at each place, as places in the draft's vocabulary, and their
    probabilities, which add up to 1. Of a batch that is only measured they are None.
    """
    tokens: Tensor
    states: Tensor
    exits: Tensor | None
    weights: Tensor
    likely: Tensor | None = None
    probs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """value: to be minimised. agreement: per depth, the share of guesses that are the target's choice."""
    value: Tensor
    agreement: tuple[float, ...]


class _Scores(torch.autograd.Function):
    """Of the logits x W', their log-sum-exp, those of a few tokens and the best token, without ever holding all of them.

    x: [n, H]. table: [D, H]. picks: int64 [n, k]. Blocks of rows stay in the processor's cache and are computed again on the way back.
    """
    rows = 256

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, picks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sums, picked, best = x.new_empty(len(x), dtype=torch.float32), x.new_empty(picks.shape, dtype=torch.float32), picks.new_empty(len(x))
        for start in range(0, len(x), _Scores.rows):
            here = slice(start, start + _Scores.rows)
            logits = F.linear(x[here], table).float()
            largest, best[here] = logits.max(-1)
            picked[here] = logits.gather(1, picks[here])
            sums[here] = logits.sub_(largest[:, None]).exp_().sum(-1).log_() + largest
        ctx.save_for_backward(x, table, picks, sums)
        ctx.mark_non_differentiable(best)
        return sums, picked, best

    @staticmethod
    def backward(ctx: Any, grad_sums: Tensor, grad_picked: Tensor, _: Any) -> tuple[Tensor, Tensor | None, None]:
        x, table, picks, sums = ctx.saved_tensors
        grad_x, grad_table = torch.empty_like(x), torch.zeros_like(table) if ctx.needs_input_grad[1] else None
        for start in range(0, len(x), _Scores.rows):
            here = slice(start, start + _Scores.rows)
            slope = F.linear(x[here], table).float().sub_(sums[here, None]).exp_().mul_(grad_sums[here, None])
            slope.scatter_add_(1, picks[here], grad_picked[here])
            slope = slope.to(x.dtype)
            grad_x[here] = slope @ table
            if grad_table is not None:
                grad_table += slope.T @ x[here]
        return grad_x, grad_table, None


def distance(log_draft: Tensor, probs: Tensor, kind: str) -> Tensor:
    """How far the guess is from the target's distribution, per row, where the target has all its mass on k tokens. Both [n, k].

    "kl": forward KL. "tv": half the sum of |p - q|, which is the chance of a rejection. "lk": both, KL as long as little is accepted and TV
    later (arXiv 2602.23881).
    """
    divergence = (probs * (probs.clamp_min(1e-9).log() - log_draft)).sum(-1)
    if kind == "kl":
        return divergence
    variation = 1 - torch.minimum(probs, log_draft.exp()).sum(-1)
    if kind == "tv":
        return variation
    share = torch.exp(-3 * (1 - variation.detach())).clamp(max=1)
    return share * divergence + (1 - share) * variation


class Net(nn.Module):
    """A drafter that learns. depth: how many tokens ahead its loss looks. needs_exits: whether it reads the exit layer's states."""
    kind = ""
    needs_exits = False
    is_drawn = False                           # whether it draws its guesses when sampling

    @property
    def ids(self) -> Tensor:
        """The tokens that `logits` speaks of now, int64 [D]."""
        return self.given.draft_ids

    def __init__(self, given: Given, recipe: Mapping[str, Any]) -> None:
        super().__init__()
        self.given, self.recipe = given, recipe
        self.depth = int(recipe.get("depth", 1))
        self._rows = given.rows
        self._is_draft_id = torch.zeros(len(given.head), dtype=torch.bool, device=given.head.device)
        self._is_draft_id[given.draft_ids] = True

    def guesses(self, batch: Batch) -> list[tuple[int, Tensor]]:
        """(shift, states [B, T, width]) per depth: place t guesses token t + shift."""
        raise NotImplementedError

    def rows(self) -> Tensor:
        """What the LM head multiplies states with, [D, width]: `draft_ids` first."""
        return self._rows

    def logits(self, read: Tensor) -> Tensor:
        """[n, width] -> [n, D]."""
        return F.linear(read, self.rows())

    def start(self, batches: list[Batch]) -> None:
        """Find a good beginning in closed form, where there is one."""

    def loss(self, batch: Batch) -> Loss:
        """The average over depths, weighted 0.8 ** depth, of the distance at all places that count."""
        total, weight_sum, agreement = batch.states.new_zeros(()), 0.0, []
        for depth, (shift, read) in enumerate(self.guesses(batch)):
            chosen = batch.weights[:, shift:] > 0
            weights = batch.weights[:, shift:][chosen]
            if not len(weights):
                continue
            likely, probs = batch.likely[:, shift - 1:-1][chosen], batch.probs[:, shift - 1:-1][chosen]
            x, rows = read[:, :read.shape[1] - shift][chosen], self.rows()
            if torch.is_autocast_enabled(x.device.type):
                x, rows = x.to(torch.bfloat16), rows.to(torch.bfloat16)
            sums, picked, best = _Scores.apply(x, rows, likely)
            agreement.append((best == likely[:, 0]).float().mean().item())
            share = 0.8 ** depth
            total = total + share * (distance(picked - sums[:, None], probs, self.recipe.get("loss", "kl")) * weights).sum() / weights.sum()
            weight_sum += share
        return Loss(total / max(weight_sum, 1e-9) + self.extra(batch), tuple(agreement))

    def extra(self, batch: Batch) -> Tensor:
        return batch.states.new_zeros(())

    def published(self) -> dict[str, Tensor]:
        """Its tensors as a checkpoint names and scales them."""
        return dict(self.state_dict())

    @torch.no_grad()
    def load_published(self, tensors: Mapping[str, Tensor]) -> None:
        """The reverse of `published`."""
        self.load_state_dict(tensors)

    def config(self) -> dict[str, Any]:
        """What its config.json says, beside the tensors of `published`."""
        raise NotImplementedError


class _Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self._epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._epsilon) * self.weight


class _Attention(nn.Module):
    """Grouped attention with rotary positions over the halves of a head, as the target's."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._num_heads, self._num_kv = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, self._num_heads * self._head_dim, bias=False)
        self.k_proj = nn.Linear(width, self._num_kv * self._head_dim, bias=False)
        self.v_proj = nn.Linear(width, self._num_kv * self._head_dim, bias=False)
        self.o_proj = nn.Linear(self._num_heads * self._head_dim, config.hidden_size, bias=False)
        base = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
        frequencies = base ** -(torch.arange(0, self._head_dim, 2, dtype=torch.float32) / self._head_dim)
        self.register_buffer("_frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor, offset: int, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x: [B, T, width] at positions offset, offset + 1, ... memory: (keys, values) [B, T, heads, D] of each pass so far; grows.

        The first pass is the text: a place sees all places before it and itself. Later passes are a place's own guesses, which no other
        place sees, since in drafting each begins anew from the text.
        """
        num_texts, length, _ = x.shape
        angles = torch.arange(offset, offset + length, device=x.device)[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        group = self._num_heads // self._num_kv
        query = _rotated(self.q_proj(x).float().view(num_texts, length, self._num_heads, self._head_dim), cos, sin)
        key = _rotated(self.k_proj(x).float().view(num_texts, length, self._num_kv, self._head_dim), cos, sin).repeat_interleave(group, 2)
        value = self.v_proj(x).float().view(num_texts, length, self._num_kv, self._head_dim).repeat_interleave(group, 2)
        memory.append((key, value))
        (keys, values), guesses = memory[0], memory[1:]
        if not guesses:
            out = F.scaled_dot_product_attention(query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True)
            return self.o_proj(out.transpose(1, 2).reshape(num_texts, length, -1))
        scale = self._head_dim ** -0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (query.transpose(1, 2) @ keys.permute(0, 2, 3, 1) * scale).masked_fill(hidden, float("-inf"))        # [B, heads, T, T]
        own = [(query * each).sum(-1).transpose(1, 2)[..., None] * scale for each, _ in guesses]
        shares = torch.cat([scores, *own], -1).softmax(-1)
        out = (shares[..., :length] @ values.transpose(1, 2)).transpose(1, 2)
        for i, (_, each) in enumerate(guesses):
            out = out + shares[..., length + i].transpose(1, 2)[..., None] * each
        return self.o_proj(out.reshape(num_texts, length, -1))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class _Mlp(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    """One decoder layer; `input_layernorm` is there only where the checkpoint's kind has it."""

    def __init__(self, config: Any, inner: int, input_norm: bool) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        if input_norm:
            self.input_layernorm = _Norm(size, epsilon)
        self._has_input_norm = input_norm
        self.self_attn = _Attention(config, size)
        if inner:
            self.post_attention_layernorm = _Norm(size, epsilon)
            self.mlp = _Mlp(size, inner)
        self._has_mlp = bool(inner)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        nn.init.zeros_(self.self_attn.o_proj.weight)           # the layer begins as nothing
        if inner:
            nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(self, x: Tensor, offset: int, memory: list[tuple[Tensor, Tensor]], scale: Tensor | None = None) -> Tensor:
        """scale: [H], what the input of an attention without a norm is divided by."""
        read = self.input_layernorm(x) if self._has_input_norm else x if scale is None else x / scale
        x = x + self.self_attn(read, offset, memory).float()
        return x + self.mlp(self.post_attention_layernorm(x)).float() if self._has_mlp else x


def _layer_config(config: Any, inner: int) -> dict[str, Any]:
    return {"hidden_size": config.hidden_size, "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads, "intermediate_size": inner,
            "rms_norm_eps": config.rms_norm_eps, "hidden_act": "silu", "vocab_size": config.vocab_size, "num_hidden_layers": 1,
            "rope_theta": (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0),
            "max_position_embeddings": config.max_position_embeddings}


class EagleNet(Net):
    """EAGLE (arXiv 2401.15077): fc([embedding of token t + 1, state t]), one layer, the state at t + 1; learns on its own guesses too.

    Recipe: start "ridge" or "random", input_norm, normalize_embeddings (not part of the published form), depth (passes), inner,
    feature_weight (of a smooth L1 distance to the true state).
    """
    kind = "eagle"

    def __init__(self, given: Given, recipe: Mapping[str, Any]) -> None:
        super().__init__(given, recipe)
        size = given.config.hidden_size
        self._inner = int(recipe.get("inner", given.config.intermediate_size))
        self.fc = nn.Linear(2 * size, size)
        self.layers = nn.ModuleList([_Layer(given.config, self._inner, bool(recipe.get("input_norm", False)))])
        # Inputs of very different size would learn at very different speed: each channel is divided by its size, `published` takes that back.
        self.register_buffer("pair_scale", torch.ones(2 * size))
        if recipe.get("start", "ridge") == "random":
            nn.init.normal_(self.layers[0].self_attn.o_proj.weight, std=0.02)
            nn.init.normal_(self.layers[0].mlp.down_proj.weight, std=0.02)
        self._guessed: list[Tensor] = []

    def _embedded(self, tokens: Tensor) -> Tensor:
        embedded = F.embedding(tokens, self.given.embeddings)
        if self.recipe.get("normalize_embeddings"):
            embedded = embedded * torch.rsqrt(embedded.square().mean(-1, keepdim=True) + self.given.config.rms_norm_eps)
        return embedded

    @torch.no_grad()
    def start(self, batches: list[Batch]) -> None:
        def inputs(batch: Batch) -> Tensor:
            return torch.cat([self._embedded(batch.tokens[:, 1:-1]), batch.states[:, :-2]], -1)[batch.weights[:, 2:] > 0]
        squares = sum(inputs(batch).square().sum(0) for batch in batches)
        self.pair_scale.copy_((squares / sum(int((batch.weights[:, 2:] > 0).sum()) for batch in batches)).sqrt().clamp_min(1e-3))
        if self.recipe.get("start", "ridge") != "ridge":
            return
        pairs = ((inputs(batch) / self.pair_scale, batch.states[:, 1:-1][batch.weights[:, 2:] > 0]) for batch in batches)
        weight, bias = _ridge(pairs, float(self.recipe.get("damping", 1e-3)))
        self.fc.weight.copy_(weight)
        self.fc.bias.copy_(bias)

    def _scales(self) -> dict[str, Tensor]:
        size = len(self.pair_scale) // 2
        attention = {f"layers.0.self_attn.{name}_proj.weight": self.pair_scale[size:] for name in "qkv"}
        return {"fc.weight": self.pair_scale, **({} if self.recipe.get("input_norm") else attention)}

    def published(self) -> dict[str, Tensor]:
        state, scales = dict(self.state_dict()), self._scales()
        state.pop("pair_scale")
        return {name: tensor / scales[name] if name in scales else tensor for name, tensor in state.items()}

    @torch.no_grad()
    def load_published(self, tensors: Mapping[str, Tensor]) -> None:
        scales = self._scales()
        self.load_state_dict({"pair_scale": self.pair_scale} | {name: tensor * scales[name] if name in scales else tensor
                                                                for name, tensor in tensors.items()})

    def guesses(self, batch: Batch) -> list[tuple[int, Tensor]]:
        memory: list[tuple[Tensor, Tensor]] = []
        states, found = batch.states, []
        for i in range(self.depth):
            tokens = F.pad(batch.tokens, (0, 1 + i))[:, 1 + i:]
            mixed = self.fc(torch.cat([self._embedded(tokens), states], -1) / self.pair_scale).float()
            states = self.layers[0](mixed, i, memory, self.pair_scale[len(self.pair_scale) // 2:])
            found.append((2 + i, states))
        self._guessed = [states for _, states in found]
        return found

    def extra(self, batch: Batch) -> Tensor:
        weight = float(self.recipe.get("feature_weight", 0.0))
        if not weight:
            return batch.states.new_zeros(())
        chosen = batch.weights[:, 2:] > 0
        return weight * F.smooth_l1_loss(self._guessed[0][:, :-2][chosen], batch.states[:, 1:-1][chosen])

    def config(self) -> dict[str, Any]:
        return {"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama", "bias": True, **_layer_config(self.given.config, self._inner)}


class MedusaNet(Net):
    """Medusa (arXiv 2401.10774): head k guesses token t + 2 + k from state t, h + SiLU(W h + b), before an LM head of its own.

    That LM head is the target's with a learned square matrix in front, so it is small to store and can begin in closed form: with W at zero
    the head is the linear map with the least error from the state at t to that at t + 1 + k. Written in full it is an ordinary LM head.
    Recipe: depth (heads), num_layers (residual blocks of each), start "ridge" or "zero" (the target's own LM head).
    """
    kind = "medusa"

    def __init__(self, given: Given, recipe: Mapping[str, Any]) -> None:
        super().__init__(given, recipe)
        size, self._num_layers = given.config.hidden_size, int(recipe.get("num_layers", 1))
        self.blocks = nn.ModuleList(nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(size, size) for _ in range(self._num_layers)),
                                                   "projection": nn.Linear(size, size, bias=False)}) for _ in range(self.depth))
        for block in self.blocks:
            nn.init.eye_(block["projection"].weight)
            for layer in block["layers"]:
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

    @torch.no_grad()
    def start(self, batches: list[Batch]) -> None:
        if self.recipe.get("start", "ridge") != "ridge":
            return
        for k, block in enumerate(self.blocks):
            pairs = ((batch.states[:, :-2 - k][(chosen := batch.weights[:, 2 + k:] > 0)], batch.states[:, 1 + k:-1][chosen]) for batch in batches)
            block["projection"].weight.copy_(_ridge(pairs, float(self.recipe.get("damping", 1e-3)), bias=False)[0])

    def guesses(self, batch: Batch) -> list[tuple[int, Tensor]]:
        found = []
        for k, block in enumerate(self.blocks):
            state = batch.states
            for layer in block["layers"]:
                state = state + F.silu(layer(state)).float()
            found.append((2 + k, block["projection"](state)))
        return found

    def config(self) -> dict[str, Any]:
        return {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": self.given.config.hidden_size,
                "vocab_size": self.given.config.vocab_size, "num_heads": self.depth, "num_hidden_layers": self._num_layers, "max_paths": 64,
                "topk": 10, "medusa_fc_bias": True, "truncated_vocab_size": len(self.given.draft_ids)}


class ExitNet(Net):
    """A trained early exit (Kangaroo, arXiv 2404.18911): one layer on the states at the exit layer, with a norm of its own.

    Recipe: exit_layer, inner (0: no MLP, as published).
    """
    kind = "exit_adapter"
    needs_exits = True
    is_drawn = True

    def __init__(self, given: Given, recipe: Mapping[str, Any]) -> None:
        super().__init__(given, recipe)
        self._inner = int(recipe.get("inner", given.config.intermediate_size))
        self.layers = nn.ModuleList([_Layer(given.config, self._inner, True)])
        self.norm = _Norm(given.config.hidden_size, given.config.rms_norm_eps)
        self.projection = nn.Linear(given.config.hidden_size, given.config.hidden_size, bias=False)

    @torch.no_grad()
    def start(self, batches: list[Batch]) -> None:
        """Norms begin as the inverse of each channel's size, so that a few large channels do not drown the rest; the matrix before the
        target's LM head as the closed-form map to the target's last state."""
        chosen = torch.cat([batch.exits[:, :-1][batch.weights[:, 1:] > 0] for batch in batches])
        size = chosen.square().mean(0).sqrt().clamp_min(1e-3)
        for norm in (self.layers[0].input_layernorm, self.norm):
            norm.weight.copy_(size.square().mean().sqrt() / size)
        pairs = ((self.norm(batch.exits[:, :-1][(where := batch.weights[:, 1:] > 0)]), batch.states[:, :-1][where]) for batch in batches)
        self.projection.weight.copy_(_ridge(pairs, float(self.recipe.get("damping", 1e-3)), bias=False)[0])

    def guesses(self, batch: Batch) -> list[tuple[int, Tensor]]:
        return [(1, self.projection(self.norm(self.layers[0](batch.exits, 0, []))))]

    def config(self) -> dict[str, Any]:
        return {"architectures": ["ExitAdapter"], "model_type": "llama", **_layer_config(self.given.config, self._inner),
                "specviz": {"kind": "exit_adapter", "exit_layer": int(self.recipe["exit_layer"])}}


class DraftModelNet(Net):
    """A tiny language model with the target's tokenizer, distilled; embeddings and LM head are the target's through learned projections.

    It begins as a bigram model: its layers add nothing, and the LM head's projection is the closed-form map to the target's last state.

    Recipe: width, num_layers, num_heads, inner, num_negatives (tokens beyond the draft's, drawn for each batch, that it learns not to say).
    """
    kind = "draft_model"
    is_drawn = True

    def __init__(self, given: Given, recipe: Mapping[str, Any]) -> None:
        super().__init__(given, recipe)
        from transformers import LlamaConfig, LlamaModel
        ours, width, num_heads = given.config, int(recipe["width"]), int(recipe["num_heads"])
        self._config = LlamaConfig(
            vocab_size=ours.vocab_size, hidden_size=width, intermediate_size=int(recipe["inner"]), num_hidden_layers=int(recipe["num_layers"]),
            num_attention_heads=num_heads, num_key_value_heads=num_heads, max_position_embeddings=ours.max_position_embeddings, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=False, bos_token_id=ours.bos_token_id,
            eos_token_id=ours.eos_token_id, pad_token_id=ours.pad_token_id)
        self.model = LlamaModel(self._config)
        self.model.embed_tokens = nn.Identity()
        values = given.embeddings[given.draft_ids]
        _, vectors = torch.linalg.eigh((values.T @ values).double())
        projection = vectors[:, -width:].float()                     # where the embeddings of frequent tokens have most of their length
        scale = (values @ projection).std()
        self.projection = nn.Parameter(projection / scale)
        self.head_projection = nn.Parameter(torch.zeros_like(projection))
        for layer in self.model.layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
        self._ids = given.draft_ids

    @torch.no_grad()
    def start(self, batches: list[Batch]) -> None:
        def pairs() -> Iterable[tuple[Tensor, Tensor]]:
            for batch in batches:
                chosen = batch.weights[:, 1:] > 0
                yield self.guesses(batch)[0][1][:, :-1][chosen], batch.states[:, :-1][chosen]
        self.head_projection.copy_(_ridge(pairs(), float(self.recipe.get("damping", 1e-3)), bias=False)[0])

    @property
    def ids(self) -> Tensor:
        return self._ids

    def guesses(self, batch: Batch) -> list[tuple[int, Tensor]]:
        if self.training and (count := int(self.recipe.get("num_negatives", 0))):
            drawn = torch.randint(len(self.given.head), (count,), device=self._ids.device)
            self._ids = torch.cat([self.given.draft_ids, drawn[~self._is_draft_id[drawn]].unique()])
        else:
            self._ids = torch.arange(len(self.given.head), device=self._ids.device)      # it can say every token
        embedded = F.embedding(batch.tokens, self.given.embeddings) @ self.projection
        return [(1, self.model(inputs_embeds=embedded, use_cache=False).last_hidden_state)]

    def rows(self) -> Tensor:
        return F.embedding(self._ids, self.given.head) @ self.head_projection

    def config(self) -> dict[str, Any]:
        return {**self._config.to_diff_dict(), "architectures": ["LlamaForCausalLM"]}


def _ridge(pairs: Iterable[tuple[Tensor, Tensor]], damping: float, bias: bool = True) -> tuple[Tensor, Tensor]:
    """Weight [n, m] and bias [n] of the linear map with the least squared error; damping: as a share of the inputs' mean square."""
    gram = cross = None
    for x, y in pairs:
        x = torch.cat([x, x.new_full((len(x), 1), float(bias))], -1)
        if gram is None:
            gram, cross = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float64), x.new_zeros(x.shape[1], y.shape[1], dtype=torch.float64)
        gram += (x.T @ x).double()
        cross += (x.T @ y).double()
    solution = torch.linalg.solve(gram + damping * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64, device=gram.device), cross)
    return solution[:-1].T.float(), solution[-1].float()


NETS: dict[str, type[Net]] = {net.kind: net for net in (EagleNet, MedusaNet, ExitNet, DraftModelNet)}
