"""A causal language model behind one call: tokens of many rows in, logits out. The only file that knows transformers' internals.

It knows nothing of drafts, sampling or requests. Checked with transformers 5.24: the models run unmodified; one attention function,
registered under a name of its own, writes the cache and owns the mask, so no mask is ever built by transformers and no rows are padded.
On a CPU, linears may be replaced by faster ones, and the Llama family runs through a lean decoder of our own (`lean.py`).
"""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ..errors import InputError, UnsupportedModel
from .attention import capped_attention, one_query_attention, packed_attention
from .cache import Branch, Feed, KVCache
from .graphs import Graphs, StaticSteps
from .lean import LeanDecoder
from .linear import describe, replace_linears

__all__ = ["FINAL", "LanguageModel", "Output", "Row"]

FINAL = -1                       # the hidden state after the last norm, as the LM head reads it
_ATTENTION = "specviz"
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Row:
    """What one sequence feeds to a forward.

    row: its cache row. tokens: T token ids; as int64 [T] where they were computed on the model's device and nobody has read them yet. parents: see `KVCache.stage`; None is a chain. num_logits: logits are wanted for this many
    of the last tokens; None means for all.
    """
    row: int
    tokens: Sequence[int] | Tensor
    parents: Sequence[int] | None = None
    num_logits: int | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """logits: [num_logits, V]. hidden: [T, sum of H], the wanted layers side by side, or None."""
    logits: Tensor
    hidden: Tensor | None


class LanguageModel:
    """A loaded transformers model that reads one line of tokens for all rows, [1, sum of T], without padding.

    model: a causal LM in eval mode; it is taken over (attention implementation set, linears possibly replaced).
    num_tokens: ids below this are real tokens; logits beyond (padded vocabularies) are cut off.
    precision, head_precision: "none", or "fp32" / "int8" for the CPU linears of `linear.py`. lean: use the lean decoder where it fits.
    calibration: token ids of a text by which int8 layers are made ready for their activations.
    exact: attention treats every token as its own problem, so that a token's result does not depend on what is fed beside it.
    static: how steps of a few tokens run at fixed addresses and are captured (`graphs.py`); None, an exact or a lean model: they are not.

    Raises UnsupportedModel for layers that cannot be rolled back.
    """

    def __init__(self, model: PreTrainedModel, *, num_tokens: int | None = None, precision: str = "none", head_precision: str | None = None,
                 lean: bool = True, exact: bool = True, calibration: Sequence[int] | None = None, static: StaticSteps | None = None) -> None:
        _refuse_unsupported(model)
        self.config = model.config.get_text_config()
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.get_input_embeddings().weight.dtype
        self.num_layers: int = self.config.num_hidden_layers
        head = model.get_output_embeddings()             # packed weights have no rows to count
        self.num_tokens = min(num_tokens or self.config.vocab_size, getattr(head, "out_features", None) or head.weight.shape[0])
        self.context = int(getattr(self.config, "max_position_embeddings", None) or 1 << 20)
        self.exact = exact
        head_precision = head_precision or precision
        self.embeddings: nn.Embedding = model.get_input_embeddings()
        if precision != "none" and lean and LeanDecoder.supports(model):
            self._runner: _Lean | _Transformers = _Lean(LeanDecoder(
                model, precision, head_precision, consume=True, calibration=None if calibration is None else torch.tensor(calibration)))
            self.linears = self._runner.decoder.describe()
        else:
            if precision != "none":
                replace_linears(model, precision, head_precision)
            self._runner = _Transformers(model)
            self.linears = describe(model) if precision != "none" else {"precision": str(self.dtype).removeprefix("torch."), "row_independent": False}

        self.runs_ahead = self.device.type == "cuda"     # the host may queue the next forward before it knows what this one gives
        runner = self._runner
        self.graphs: Graphs | None = None
        if static is not None and not exact and isinstance(runner, _Transformers):
            self.graphs = Graphs(lambda ids, positions, step, taps, count: runner.run(ids, positions, step, None, taps, count), static, self.num_layers)

    @property
    def is_lean(self) -> bool:
        return isinstance(self._runner, _Lean)

    def new_cache(self, capacity: int | None = None) -> KVCache:
        """A cache for this model; capacity defaults to its context length, in tokens per row."""
        return KVCache(min(capacity or self.context, self.context), self.device)

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """The input embeddings of token ids int64 [T], [T, H], for heads that read them."""
        return self.embeddings(token_ids)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """The LM head on states as they are after the last norm (`FINAL`), [n, H] -> [n, V], with the model's scaling or cap of logits."""
        return self._runner.head(hidden)[:, :self.num_tokens]

    @torch.inference_mode()
    def head_rows(self, token_ids: Tensor) -> Tensor | None:
        """The LM head's rows of some tokens int64 [D], [D, H], where the head is the embedding table and its logits are used as they are;
        None elsewhere."""
        changed = any(getattr(self.config, name, None) for name in ("logits_scaling", "logit_scale", "final_logit_softcapping"))
        return None if changed or not getattr(self.config, "tie_word_embeddings", False) else self.embeddings.weight[token_ids]

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], cache: KVCache, *, hidden: Sequence[int] = (), num_layers: int | None = None) -> list[Output]:
        """Read every row's tokens in one pass and stage their keys and values.

        hidden: layers whose input is wanted for all tokens (0: embeddings, L: output of the last layer before its norm, `FINAL`: after
        it). num_layers: stop after this many layers, then final norm and LM head (early exit). Returns one `Output` per row.
        """
        feeds = [cache.stage(row.row, len(row.tokens), row.parents) for row in rows]
        if self.graphs and (found := self.graphs.forward([row.tokens for row in rows], feeds, tuple(hidden), num_layers or self.num_layers)):
            return [Output(logits[len(row.tokens) - _num_logits(row):, :self.num_tokens], states) for row, (logits, states) in zip(rows, found)]
        step = _Step(feeds, self.exact)
        if any(isinstance(row.tokens, Tensor) for row in rows):
            tokens = torch.cat([torch.as_tensor(row.tokens, dtype=torch.long, device=self.device) for row in rows])
        else:
            tokens = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.long, device=self.device)
        positions = torch.tensor([p for feed in step.feeds for p in feed.positions], dtype=torch.long, device=self.device)
        wanted, end = [], 0
        for row in rows:
            end += len(row.tokens)
            wanted.extend(range(end - _num_logits(row), end))
        logits, states = self._runner.run(tokens, positions, step, wanted, tuple(hidden), num_layers or self.num_layers)
        logits = logits[:, :self.num_tokens]
        outputs, first, start = [], 0, 0
        for row in rows:
            count = _num_logits(row)
            outputs.append(Output(logits[first:first + count], None if states is None else states[start:start + len(row.tokens)]))
            first += count
            start += len(row.tokens)
        return outputs

    @torch.inference_mode()
    def run(self, tokens: Tensor, positions: Tensor, step: Any, wanted: list[int], taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """The layers alone, for those who attend in their own way: no cache, no rows.

        tokens, positions: int64 [S]. step: its `attend` is called once per layer as `_Step.attend` is. wanted: tokens whose logits are
        returned, [n, V]. taps: as `hidden` of `forward`; their states are [S, sum of H].
        """
        logits, states = self._runner.run(tokens, positions, step, wanted, tuple(taps), self.num_layers)
        return logits[:, :self.num_tokens], states


def _num_logits(row: Row) -> int:
    return len(row.tokens) if row.num_logits is None else row.num_logits


class _Step:
    """One forward's feeds, shared by all layers: writes keys and values and attends, row by row."""

    def __init__(self, feeds: list[Feed], exact: bool) -> None:
        self.feeds = feeds
        self._exact = exact

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None = None,
               softcap: float | None = None) -> Tensor:
        """query [S, Hq, D], key and value [S, Hkv, D], S the tokens of all rows in order; returns [S, Hq * D]."""
        parts, start = [], 0
        for feed in self.feeds:
            end = start + feed.num_tokens
            keys, values = feed.write(layer, key[start:end], value[start:end])
            parts.append(self._attend_row(feed, query[start:end], key[start:end], value[start:end], keys, values, scaling, window, softcap))
            start = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_row(self, feed: Feed, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scaling: float,
                    window: int | None, softcap: float | None) -> Tensor:
        """One row's fed tokens, [T, heads, D], over the views [heads, L, D] of its cache, in the form that the row and the layer ask for."""
        if self._exact and (branches := feed.branches(window, query.dtype)):
            return _branch_by_branch(query, key, value, keys, values, branches, scaling, feed.start, softcap)
        mask = feed.mask(window, query.dtype).to(query.device)            # the cache's device, but for models spread over several cards
        if self._exact:
            return one_query_attention(query, keys, values, mask, scaling, feed.end, softcap)
        if softcap is not None:
            return capped_attention(query, keys, values, mask, scaling, softcap)
        return packed_attention(query, keys, values, mask, scaling)


def _branch_by_branch(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, branches: list[Branch], scaling: float,
                      first: int, softcap: float | None) -> Tensor:
    """Attention of a fed tree in which every token gets the bits that it would get without the other branches, [T, Hq * D].

    query, key, value: of the fed tokens. keys, values: views of the cache, where those lie from slot `first` on; while this runs each
    branch lies where it would lie alone. A mask alone would not do: keys in other slots make the product with the values add in another
    order, and INT8 activations, rounded, make much of the last bit.
    """
    out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
    for branch in branches:
        keys[:, branch.start:branch.end] = key[branch.tokens].transpose(0, 1)
        values[:, branch.start:branch.end] = value[branch.tokens].transpose(0, 1)
        view = branch.mask.shape[1]
        out[branch.tokens] = one_query_attention(query[branch.tokens], keys[:, :view], values[:, :view], branch.mask, scaling, branch.end, softcap)
    keys[:, first:first + len(key)] = key.transpose(0, 1)
    values[:, first:first + len(value)] = value.transpose(0, 1)
    return out


class _Lean:
    """Runs our own decoder."""

    def __init__(self, decoder: LeanDecoder) -> None:
        self.decoder = decoder

    def run(self, tokens: Tensor, positions: Tensor, step: _Step, wanted: list[int], taps: tuple[int, ...], num_layers: int
            ) -> tuple[Tensor, Tensor | None]:
        layers = tuple(tap for tap in taps if tap != FINAL)
        if self.decoder.stack is not None and isinstance(step, _Step):
            output = self.decoder.read(tokens, step.feeds, num_layers, layers)
        else:
            output = self.decoder.forward(tokens, positions, step.attend, num_layers=num_layers, taps=layers)
        hidden = output.hidden
        states = torch.cat([hidden if tap == FINAL else output.taps[tap] for tap in taps], -1) if taps else None
        if not wanted:                           # a chunk in the middle of a prompt
            return hidden.new_empty(0, self.decoder.embed.num_embeddings), states
        return self.decoder.logits(hidden if len(wanted) == len(tokens) else hidden[wanted]), states

    def head(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


class _Transformers:
    """Runs an unmodified transformers model; attention is ours. wanted None: the logits of all tokens, and nothing but them is made."""

    def __init__(self, model: PreTrainedModel) -> None:
        model.set_attn_implementation(_ATTENTION)
        self._model = model
        self._decoder = model.get_decoder()
        self._layers: nn.ModuleList = self._decoder.layers
        self._norm: nn.Module = next(module for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f")
                                     if (module := getattr(self._decoder, name, None)) is not None)

    def run(self, tokens: Tensor, positions: Tensor, step: Any, wanted: list[int] | None, taps: tuple[int, ...], num_layers: int
            ) -> tuple[Tensor, Tensor | None]:
        seen: dict[int, Tensor] = {}

        def tap(index: int, after: bool = False) -> Any:
            def hook(_module: nn.Module, args: tuple, kwargs: dict, output: Any = None) -> None:
                state = output if after else args[0] if args else kwargs["hidden_states"]
                seen[index] = state[0]
            return hook

        with ExitStack() as stack:
            for index in set(taps):
                if index == FINAL:
                    handle = self._norm.register_forward_hook(tap(FINAL, after=True), with_kwargs=True)
                else:
                    module = self._layers[index] if index < num_layers else self._norm
                    handle = module.register_forward_pre_hook(tap(index), with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(self._only(num_layers))
            keep = 0 if wanted is None else torch.tensor(wanted or [len(tokens) - 1], dtype=torch.long, device=tokens.device)
            logits = self._model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep,
                                 specviz_step=step).logits[0]
        return logits if wanted is None else logits[:len(wanted)], torch.cat([seen[index].to(tokens.device) for index in taps], -1) if taps else None

    def head(self, hidden: Tensor) -> Tensor:
        config, logits = self._model.config.get_text_config(), self._model.get_output_embeddings()(hidden)
        if divisor := getattr(config, "logits_scaling", None):          # Granite
            logits = logits / divisor
        if factor := getattr(config, "logit_scale", None):              # Cohere
            logits = logits * factor
        if cap := getattr(config, "final_logit_softcapping", None):     # Gemma 2
            logits = torch.tanh(logits / cap) * cap
        return logits

    @contextmanager
    def _only(self, num_layers: int) -> Any:
        """Run with the first layers only."""
        if num_layers == len(self._layers):
            yield
            return
        self._decoder.layers = self._layers[:num_layers]
        try:
            yield
        finally:
            self._decoder.layers = self._layers


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
               sliding_window: int | None = None, softcap: float | None = None, specviz_step: _Step | None = None, **_: Any
               ) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, S, D], key and value [1, Hkv, S, D]; returns [1, S, Hq, D]."""
    assert specviz_step is not None, "this attention runs under LanguageModel.forward only"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = specviz_step.attend(module.layer_idx, query[0].transpose(0, 1).contiguous(), key[0].transpose(0, 1), value[0].transpose(0, 1), scaling,
                              sliding_window, softcap)
    return out.view(1, query.shape[2], query.shape[1], -1), None


AttentionInterface.register(_ATTENTION, _attention)


def _refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise for models whose state cannot be rolled back by length, or whose attention needs more than ours gives."""
    config = model.config.get_text_config()
    name = config.model_type
    if model.training:
        raise InputError(f"The {name} model is in training mode; call eval() first.")
    types = getattr(config, "layer_types", None) or ()
    if strange := sorted(set(types) - _KNOWN_LAYERS):
        raise UnsupportedModel(f"{name} has layers of type {', '.join(strange)}. Their state cannot be rolled back when draft tokens are "
                               "rejected, so speculation would change the text. Choose a model that has attention layers only.")
    for path, module in model.named_modules():
        kind = type(module).__name__
        if any(word in kind.lower() for word in ("mamba", "deltanet", "shortconv", "rwkv", "recurrent", "linearattention", "lightning")):
            raise UnsupportedModel(f"{name} has a {kind} layer ({path}). Its state cannot be rolled back when draft tokens are rejected, so "
                                   "speculation would change the text. Choose a model that has attention layers only.")
        if hasattr(module, "sinks") or getattr(module, "is_kv_shared_layer", False):
            raise UnsupportedModel(f"{name} has attention of a kind this engine does not have ({path}: attention sinks or shared keys and values). "
                                   "Choose another model.")
    if not hasattr(model.get_decoder(), "layers"):
        raise UnsupportedModel(f"{name} is built in a way this engine does not know: its decoder has no list of layers. Choose another model.")
