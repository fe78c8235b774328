"""Reads published drafting heads: Medusa, EAGLE, EAGLE-3, exit adapters, in the spellings that are in use. It runs nothing.

It knows nothing of the hub and of drafting. What a checkpoint is, is read from its config.json and its tensors' names and shapes, never
from file or folder names; what does not fit the target is refused with tensor, found and expected shape.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engine.model import LanguageModel
from ..errors import LoadError
from .checkpoint_files import HOT_TOKENS, PICKLED, Files, clean, read_config
from .decoder_layer import LAYER
from .parts import Heads

__all__ = ["PICKLED", "checked_heads", "head_kind", "load_heads"]

_KNOWN = "Medusa, EAGLE, EAGLE-3 and exit adapters"
_ROPE_NEEDS = {"default": (), "linear": ("factor",),
               "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
               "yarn": ("factor", "original_max_position_embeddings")}
_KANGAROO_EXITS = {32: 2, 40: 3}         # layers of the target -> exit of the published adapters (7B and 13B), whose files do not say it
_MEDUSA = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
_MEDUSA_BLOCKS = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_PART_OF_MEDUSA = re.compile(r"(medusa_head\.)?\d+\.\d+\..*|blocks\..*|lm_heads\..*|lm_head\.weight|token_map")
_OTHERS = {"DFlash or DSpark": r"hidden_norm\.weight|markov_w1.*", "P-EAGLE": r"mask_hidden",
           "Hydra": r"hydra_mlp\..*|prefix_embeding_layer\..*", "ReDrafter": r"rnn_[uw].*", "MLP speculator": r"speculator\.(emb|proj|head|ln)\..*"}


def head_kind(folder: Path, name: str) -> str | None:
    """What heads a folder holds: "medusa", "eagle", "eagle3", "exit_adapter", or None for anything else, such as an ordinary model.

    Raises LoadError for heads of a method that specviz does not have, and for files that cannot be read.
    """
    return _kind(set(Files(folder, name)), name)


def load_heads(folder: Path, name: str, target: LanguageModel, target_name: str) -> Heads:
    """Read a folder's heads and check them against the target. name, target_name: for the eye. Raises LoadError."""
    return checked_heads(Files(folder, name), read_config(folder, name), name, target, target_name)


def checked_heads(tensors: Mapping[str, Tensor], config: Mapping[str, Any], name: str, target: LanguageModel, target_name: str) -> Heads:
    """Heads from tensors under their published names and a config.json's content. Raises LoadError where they do not fit the target."""
    tensors = tensors if isinstance(tensors, Files) else {clean(key): tensor for key, tensor in tensors.items()}
    kind = _kind(set(tensors), name)
    if kind is None:
        raise LoadError(f"{name} holds no drafting heads that specviz knows: expected tensors of {_KNOWN}, found "
                        f"{', '.join(sorted(tensors)[:3]) or 'none'}.")
    check = _Check(name, target, target_name)
    if kind == "medusa":                                     # of a whole model with heads, the heads alone are read
        return _medusa({key: tensors[key] for key in tensors if _PART_OF_MEDUSA.fullmatch(key)}, config, check)
    found = {key: tensors[key] for key in tensors if not key.endswith("rotary_emb.inv_freq")}
    return _exit_adapter(found, config, check) if kind == "exit_adapter" else _eagle(kind, found, config, check)


# ---- kinds ------------------------------------------------------------------------------------------------------------
def _kind(names: set[str], name: str) -> str | None:
    if any(_MEDUSA_BLOCKS.fullmatch(key) or ((found := _MEDUSA.fullmatch(key)) and found[3]) for key in names):
        return "medusa"
    telling = "|".join(_OTHERS[other] for other in ("Hydra", "ReDrafter", "MLP speculator"))
    if _is_exit_adapter(names):
        return "exit_adapter"
    if "fc.weight" not in names and not any(re.fullmatch(telling, key) for key in names):
        return None
    for other, pattern in _OTHERS.items():
        if any(re.fullmatch(pattern, key) for key in names):
            raise LoadError(f"{name} holds {other} heads, a method that specviz does not have; it reads {_KNOWN}.")
    if LAYER + "hidden_norm.weight" in names:
        return "eagle3"
    return "eagle" if LAYER + "self_attn.q_proj.weight" in names else None


def _is_exit_adapter(names: set[str]) -> bool:
    """A decoder layer and a last norm, and nothing that turns tokens into states: no ordinary model of one layer, no EAGLE head."""
    return {LAYER + "self_attn.q_proj.weight", LAYER + "input_layernorm.weight", "norm.weight"} <= names and not any(
        key.startswith(("embed_tokens", "fc.")) for key in names)


# ---- checks -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Check:
    """Says what does not fit."""
    name: str
    target: LanguageModel
    target_name: str

    @property
    def hidden_size(self) -> int:
        return self.target.config.hidden_size

    def refuse(self, problem: str) -> LoadError:
        return LoadError(f"{self.name} does not fit {self.target_name}: {problem}. Choose heads that were trained for this target.")

    def shape(self, tensors: Mapping[str, Tensor], key: str, *expected: int) -> None:
        """Raise unless the tensor is there with this shape."""
        if key not in tensors:
            raise self.refuse(f"the tensor {key} is missing, expected {list(expected)}")
        if tuple(tensors[key].shape) != expected:
            raise self.refuse(f"the tensor {key} is {list(tensors[key].shape)}, expected {list(expected)} (the target's hidden size is "
                              f"{self.hidden_size}, its vocabulary {self.target.num_tokens})")

    def linear(self, tensors: Mapping[str, Tensor], name: str, num_out: int, num_in: int) -> set[str]:
        """Check a weight and, where there is one, its bias; returns the names."""
        self.shape(tensors, name + ".weight", num_out, num_in)
        if name + ".bias" not in tensors:
            return {name + ".weight"}
        self.shape(tensors, name + ".bias", num_out)
        return {name + ".weight", name + ".bias"}

    def nothing_left(self, tensors: Mapping[str, Tensor], known: set[str], what: str) -> None:
        """Raise for tensors that nobody would read: leaving them out would make other heads of them."""
        if unread := sorted(set(tensors) - known):
            raise LoadError(f"{self.name} has {len(unread)} tensors that have no place in {what}, first {unread[0]} "
                            f"{list(tensors[unread[0]].shape)}; specviz reads heads of one layer.")

    def number(self, config: Mapping[str, Any], key: str, default: Any = None, kind: type = int) -> Any:
        """A positive number of the configuration."""
        value = config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise LoadError(f"The config.json of {self.name} says {key} = {value!r}; expected a positive number.")
        return kind(value)


# ---- Medusa -----------------------------------------------------------------------------------------------------------
def _medusa(tensors: Mapping[str, Tensor], config: Mapping[str, Any], check: _Check) -> Heads:
    """Heads are counted from the keys: published configurations give wrong numbers."""
    layers: dict[tuple[int, int], dict[str, Tensor]] = {}
    lm_heads: dict[int, Tensor] = {}
    for key, tensor in tensors.items():
        if found := _MEDUSA_BLOCKS.fullmatch(key):
            layers.setdefault((int(found[1]), int(found[2])), {})[found[3]] = tensor
        elif (found := _MEDUSA.fullmatch(key)) and found[3]:
            layers.setdefault((int(found[1]), int(found[2])), {})[found[4]] = tensor
        elif found or (found := re.fullmatch(r"lm_heads\.(\d+)\.weight", key)):
            lm_heads[int(found[1])] = tensor
    num_heads, num_layers = 1 + max(i for i, _ in layers), 1 + max(j for _, j in layers)
    if not lm_heads and "lm_head.weight" in tensors and "blocks.0.layers.0.weight" in tensors:      # one LM head for all
        lm_heads = dict.fromkeys(range(num_heads), tensors["lm_head.weight"])
    named: dict[str, Tensor] = {}
    for i in range(num_heads):
        for j in range(num_layers):
            for part, tensor in layers.get((i, j), {}).items():
                named[f"heads.{i}.layers.{j}.{part}"] = tensor
            check.linear(named, f"heads.{i}.layers.{j}", check.hidden_size, check.hidden_size)
        if lm_heads:
            if i not in lm_heads:
                raise check.refuse(f"head {i} of {num_heads} has no LM head, the others have")
            named[f"heads.{i}.lm_head.weight"] = lm_heads[i]
            rows = len(tensors["token_map"]) if "token_map" in tensors else max(check.target.num_tokens, len(lm_heads[i]))
            check.shape(named, f"heads.{i}.lm_head.weight", rows, check.hidden_size)
        if (key := f"blocks.{i}.projection.weight") in tensors:      # what specviz's own heads put before the target's LM head
            check.shape(tensors, key, check.hidden_size, check.hidden_size)
            named[f"heads.{i}.projection.weight"] = tensors[key]
    if "token_map" in tensors:                               # without LM heads of its own: rows of the target's
        named["token_map"] = _token_map(tensors["token_map"].long(), check)
    return Heads("medusa", check.name, named, {"num_heads": num_heads, "num_layers": num_layers, **_own_facts(config)})


def _token_map(ids: Tensor, check: _Check) -> Tensor:
    if ids.dim() != 1 or ids.min() < 0 or ids.max() >= check.target.embeddings.num_embeddings:
        raise check.refuse(f"its own vocabulary names token {int(ids.max())}, the target has {check.target.embeddings.num_embeddings}")
    return ids


def _own_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What heads trained by specviz say of themselves in a block of their own: expected_agreement, normalize_embeddings."""
    own = config.get("specviz")
    return {key: own[key] for key in ("expected_agreement", "normalize_embeddings") if key in own} if isinstance(own, dict) else {}


# ---- EAGLE ------------------------------------------------------------------------------------------------------------
def _eagle(kind: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], check: _Check) -> Heads:
    nested = config.get("transformer_layer_config") or config.get("model")
    layer = nested if isinstance(nested, dict) else config
    fused = kind == "eagle3"
    size = check.number(layer, "hidden_size", len(tensors["fc.weight"]))
    facts, num_query, num_kv = _layer_facts(layer, size, check)
    facts |= _own_facts(config)
    tensors = _with_hot_tokens(tensors, check)
    known: set[str] = {"t2d", "embed_tokens.weight"}
    if fused:
        facts |= _fused_facts(tensors, config, layer, check)
        width, num_in = 2 * size, len(facts["taps"]) * check.hidden_size
        for norm in (LAYER + "input_layernorm", LAYER + "hidden_norm", "norm"):
            check.shape(tensors, norm + ".weight", size)
            known.add(norm + ".weight")
        if facts["norm_before_fc"]:
            check.shape(tensors, "input_norm.weight", num_in)
        if facts["fc_norm"]:
            for i in range(len(facts["taps"])):
                check.shape(tensors, f"fc_norm.{i}.weight", check.hidden_size)
                known.add(f"fc_norm.{i}.weight")
        known.add("input_norm.weight")
    else:
        width, num_in = check.hidden_size, 2 * check.hidden_size
        size = check.hidden_size
        for norm in (LAYER + "input_layernorm", "embedding_layernorm", "hidden_states_layernorm", "pre_lm_head_layernorm"):
            if norm + ".weight" in tensors:
                check.shape(tensors, norm + ".weight", size)
                known.add(norm + ".weight")
        if ("embedding_layernorm.weight" in tensors) != ("hidden_states_layernorm.weight" in tensors):
            raise check.refuse("of the norms embedding_layernorm and hidden_states_layernorm only one is there; expected both or none")
    known |= check.linear(tensors, "fc", size, num_in)
    if config.get("bias") is True and "fc.bias" not in tensors and not fused:
        raise check.refuse(f"config.json says that fc has a bias, but the tensor fc.bias is missing, expected [{size}]")
    known |= _attention_shapes(tensors, size, width, num_query, num_kv, facts["head_dim"], check) | _mlp_shapes(tensors, size, check)
    known |= _vocabulary(tensors, config, size, check)
    check.nothing_left(tensors, known, f"a one-layer {'EAGLE-3' if fused else 'EAGLE'} head")
    used = {key: tensor for key, tensor in tensors.items() if key in known and key != "t2d"}
    if size == check.hidden_size and not config.get("embed_requires_grad"):
        used.pop("embed_tokens.weight", None)                # a copy of the target's
    return Heads(kind, check.name, used, facts)


def _fused_facts(tensors: Mapping[str, Tensor], config: Mapping[str, Any], layer: Mapping[str, Any], check: _Check) -> dict[str, Any]:
    """Taps and norm flags of an EAGLE-3 head."""
    def flag(key: str, default: bool = False) -> bool:
        value = config.get(key, layer.get(key))
        return default if value is None else bool(value)
    own = config.get("eagle_config")
    ids = (own if isinstance(own, dict) else {}).get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    num_layers = check.target.num_layers
    if ids is None:
        taps = (2, num_layers // 2, num_layers - 3)          # the reference's: low, middle, high
    else:
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise LoadError(f"The config.json of {check.name} says eagle_aux_hidden_state_layer_ids = {ids!r}; expected a list of layer "
                            "numbers.")
        taps = tuple(i + (ids[0] == 1) for i in ids)         # ids that begin with 1 count outputs of layers, others inputs
    if not taps or not all(0 <= tap <= num_layers for tap in taps):
        raise check.refuse(f"it reads the target's layers {', '.join(map(str, taps))}, and the target has {num_layers}")
    return {"taps": taps, "norm_before_residual": flag("norm_before_residual"), "norm_output": flag("norm_output"),
            "norm_before_fc": flag("norm_before_fc", "input_norm.weight" in tensors),
            "fc_norm": flag("fc_norm", "fc_norm.0.weight" in tensors)}


def _layer_facts(layer: Mapping[str, Any], size: int, check: _Check) -> tuple[dict[str, Any], int, int]:
    """What a decoder layer's settings say, and the widths of its queries and keys."""
    num_heads = check.number(layer, "num_attention_heads")
    num_kv_heads = check.number(layer, "num_key_value_heads", num_heads)
    head_dim = check.number(layer, "head_dim", max(1, size // num_heads))
    if (act := layer.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise LoadError(f"The config.json of {check.name} names the activation {act!r}; expected silu.")
    facts = {"head_dim": head_dim, "epsilon": check.number(layer, "rms_norm_eps", 1e-6, float), "rope": _rope(layer, check)}
    return facts, num_heads * head_dim, num_kv_heads * head_dim


def _attention_shapes(tensors: Mapping[str, Tensor], size: int, width: int, num_query: int, num_kv: int, head_dim: int, check: _Check
                      ) -> set[str]:
    """Check a layer's attention; returns the names of its tensors."""
    shapes = {"q_proj": (num_query, width), "k_proj": (num_kv, width), "v_proj": (num_kv, width), "o_proj": (size, num_query)}
    names: set[str] = set()
    for name, (num_out, num_in) in shapes.items():
        names |= check.linear(tensors, f"{LAYER}self_attn.{name}", num_out, num_in)
    for norm in (LAYER + "self_attn.q_norm.weight", LAYER + "self_attn.k_norm.weight"):
        if norm in tensors:
            check.shape(tensors, norm, head_dim)
            names.add(norm)
    return names


def _mlp_shapes(tensors: Mapping[str, Tensor], size: int, check: _Check) -> set[str]:
    """Check a layer's MLP and the norm before it; returns the names of its tensors."""
    gate = tensors.get(LAYER + "mlp.gate_proj.weight")
    inner = len(gate) if gate is not None else 0
    check.shape(tensors, LAYER + "post_attention_layernorm.weight", size)
    names = {LAYER + "post_attention_layernorm.weight"}
    for name, (num_out, num_in) in {"gate_proj": (inner, size), "up_proj": (inner, size), "down_proj": (size, inner)}.items():
        names |= check.linear(tensors, f"{LAYER}mlp.{name}", num_out, num_in)
    return names


def _with_hot_tokens(tensors: Mapping[str, Tensor], check: _Check) -> dict[str, Tensor]:
    """Tensors with a list of tokens turned into offsets: the head guesses among these, and the target's LM head is read for them alone."""
    tensors = dict(tensors)
    if (ids := tensors.pop(HOT_TOKENS, None)) is not None and "d2t" not in tensors:
        tensors["d2t"] = _token_map(ids.long(), check) - torch.arange(len(ids))
    return tensors


def _exit_adapter(tensors: Mapping[str, Tensor], config: Mapping[str, Any], check: _Check) -> Heads:
    """One decoder layer, with or without MLP, behind the target's first layers (Kangaroo, arXiv 2404.18911). What its configuration does
    not say of attention is as the target's."""
    size, num_layers, own = check.hidden_size, check.target.num_layers, config.get("specviz")
    said = {**(own if isinstance(own, dict) else {}), **{key: config[key] for key in ("exit_layer", "early_exit_layer") if key in config}}
    exit_layer = said.get("exit_layer", said.get("early_exit_layer", _KANGAROO_EXITS.get(num_layers)))
    if type(exit_layer) is not int or not 0 < exit_layer < num_layers:
        raise check.refuse(f"its config.json says exit_layer = {exit_layer!r}, expected a layer from 1 to {num_layers - 1}")
    ours = check.target.config
    rope = getattr(ours, "rope_parameters", None)
    theirs = {"num_attention_heads": ours.num_attention_heads, "num_key_value_heads": getattr(ours, "num_key_value_heads", None),
              "head_dim": getattr(ours, "head_dim", None), "rms_norm_eps": getattr(ours, "rms_norm_eps", None)}
    if not {"rope_parameters", "rope_theta", "rope_scaling"} & config.keys() and isinstance(rope, dict) and "rope_theta" in rope:
        theirs["rope_parameters"] = rope
    facts, num_query, num_kv = _layer_facts({**theirs, **config}, size, check)
    tensors = _with_hot_tokens(tensors, check)
    known = {LAYER + "input_layernorm.weight", "norm.weight", "t2d"}
    for norm in (LAYER + "input_layernorm.weight", "norm.weight"):
        check.shape(tensors, norm, size)
    if "projection.weight" in tensors:                       # what specviz's own have before the target's LM head
        check.shape(tensors, "projection.weight", size, size)
        known.add("projection.weight")
    known |= _attention_shapes(tensors, size, size, num_query, num_kv, facts["head_dim"], check)
    if any(key.startswith((LAYER + "mlp.", LAYER + "post_attention_layernorm.")) for key in tensors):
        known |= _mlp_shapes(tensors, size, check)
    known |= _vocabulary(tensors, config, size, check)
    check.nothing_left(tensors, known, "an exit adapter")
    used = {key: tensor for key, tensor in tensors.items() if key in known and key != "t2d"}
    return Heads("exit_adapter", check.name, used, {**facts, "exit_layer": exit_layer, **_own_facts(config)})


def _vocabulary(tensors: Mapping[str, Tensor], config: Mapping[str, Any], size: int, check: _Check) -> set[str]:
    """Check LM head, vocabulary map and embeddings; returns the names used."""
    num_rows, num_tokens = check.target.embeddings.num_embeddings, check.target.num_tokens
    embeddings = tensors.get("embed_tokens.weight")
    if embeddings is None and size != check.hidden_size:
        raise check.refuse(f"the tensor embed_tokens.weight is missing, expected [{num_rows}, {size}], since the target's embeddings have "
                           f"size {check.hidden_size}")
    if embeddings is not None:
        check.shape(tensors, "embed_tokens.weight", max(num_tokens, len(embeddings)), size)
    if "lm_head.weight" not in tensors:
        if size != check.hidden_size:
            rows = len(tensors["d2t"]) if "d2t" in tensors else num_rows
            raise check.refuse(f"the tensor lm_head.weight is missing, expected [{rows}, {size}]")
        if "d2t" not in tensors:
            return set()
        _token_map(torch.arange(len(tensors["d2t"])) + tensors["d2t"].long(), check)       # rows of the target's own LM head
        return {"d2t"}
    rows = len(tensors["lm_head.weight"])
    if "d2t" not in tensors:
        check.shape(tensors, "lm_head.weight", max(num_tokens, rows), size)
        return {"lm_head.weight"}
    rows = check.number(config, "draft_vocab_size", rows)
    check.shape(tensors, "lm_head.weight", rows, size)
    check.shape(tensors, "d2t", rows)
    _token_map(torch.arange(rows) + tensors["d2t"].long(), check)
    return {"lm_head.weight", "d2t"}


def _rope(layer: Mapping[str, Any], check: _Check) -> dict[str, Any]:
    """The rotary settings under transformers 5's names, from either generation of configurations."""
    given = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    rope = dict(given) if isinstance(given, dict) else {}
    kind = rope["rope_type"] = str(rope.get("rope_type") or rope.pop("type", None) or "default")
    rope["rope_theta"] = check.number({**layer, **rope}, "rope_theta", 10000.0, float)
    if kind not in _ROPE_NEEDS:
        raise LoadError(f"The config.json of {check.name} asks for rotary positions of type {kind!r}; expected {', '.join(_ROPE_NEEDS)}.")
    trained = "original_max_position_embeddings"
    rope[trained] = rope.get(trained) or layer.get(trained) or layer.get("max_position_embeddings")
    optional = [key for key in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim") if rope.get(key) is not None]
    return rope | {key: check.number(rope, key, kind=float) for key in (*_ROPE_NEEDS[kind], *optional)}
