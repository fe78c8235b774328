"""Reads published drafting heads from a folder: Medusa, EAGLE, EAGLE-3, in the spellings that are in use. It runs nothing.

It knows nothing of the hub and of drafting. What a checkpoint is, is read from its config.json and its tensors' names and shapes, never
from file or folder names; what does not fit the target is refused with tensor, found and expected shape. Pickled files are read as tensors
only (`weights_only`), so no code in them runs.
"""
from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..engine.model import LanguageModel
from ..errors import LoadError
from .parts import Heads

__all__ = ["PICKLED", "checked_heads", "head_kind", "load_heads"]

PICKLED = ("*.bin", "*.pt")
_ROPE_TYPES = ("default", "linear", "llama3")
_LAYER = "layers.0."
_MEDUSA = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
_MEDUSA_BLOCKS = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_PART_OF_MEDUSA = re.compile(r"(medusa_head\.)?\d+\.\d+\..*|blocks\..*|lm_heads\..*|lm_head\.weight|token_map")
_OTHERS = {"DFlash or DSpark": r"hidden_norm\.weight|markov_w1.*", "P-EAGLE": r"mask_hidden",
           "Hydra": r"hydra_mlp\..*|prefix_embeding_layer\..*", "ReDrafter": r"rnn_[uw].*", "MLP speculator": r"speculator\.(emb|proj|head|ln)\..*"}


def head_kind(folder: Path, name: str) -> str | None:
    """What heads a folder holds: "medusa", "eagle", "eagle3", or None for anything else, such as an ordinary model.

    Raises LoadError for heads of a method that specviz does not have, and for files that cannot be read.
    """
    return _kind(set(_Files(folder, name)), name)


def load_heads(folder: Path, name: str, target: LanguageModel, target_name: str) -> Heads:
    """Read a folder's heads and check them against the target. name, target_name: for the eye. Raises LoadError."""
    return checked_heads(_Files(folder, name), _read_config(folder, name), name, target, target_name)


def checked_heads(tensors: Mapping[str, Tensor], config: Mapping[str, Any], name: str, target: LanguageModel, target_name: str) -> Heads:
    """Heads from tensors under their published names and a config.json's content. Raises LoadError where they do not fit the target."""
    tensors = tensors if isinstance(tensors, _Files) else {_clean(key): tensor for key, tensor in tensors.items()}
    kind = _kind(set(tensors), name)
    if kind is None:
        raise LoadError(f"{name} holds no drafting heads that specviz knows: expected tensors of Medusa, EAGLE or EAGLE-3, found "
                        f"{', '.join(sorted(tensors)[:3]) or 'none'}.")
    check = _Check(name, target, target_name)
    if kind == "medusa":                                     # of a whole model with heads, the heads alone are read
        return _medusa({key: tensors[key] for key in tensors if _PART_OF_MEDUSA.fullmatch(key)}, config, check)
    return _eagle(kind, {key: tensors[key] for key in tensors if not key.endswith("rotary_emb.inv_freq")}, config, check)


# ---- files ------------------------------------------------------------------------------------------------------------
class _Files(Mapping[str, Tensor]):
    """The tensors of a folder's weight files, safetensors before pickled ones, under one spelling; read when asked for."""

    def __init__(self, folder: Path, name: str) -> None:
        self._places: dict[str, tuple[Path, str]] = {}
        self._pickled: dict[str, Tensor] = {}
        try:
            for path in (safe := sorted(folder.glob("*.safetensors"))):
                with safe_open(path, "pt") as file:
                    self._places.update((_clean(key), (path, key)) for key in file.keys())
        except (SafetensorError, OSError) as error:
            raise LoadError(f"The weights of {name} cannot be read ({str(error)[:120]}); fetch them again.") from error
        if not safe:
            self._pickled = _read_pickled([path for pattern in PICKLED for path in sorted(folder.glob(pattern))], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places or self._pickled)

    def __len__(self) -> int:
        return len(self._places or self._pickled)

    def __getitem__(self, key: str) -> Tensor:
        if key in self._pickled:
            return self._pickled[key]
        path, name = self._places[key]
        with safe_open(path, "pt") as file:
            return file.get_tensor(name)


def _read_pickled(paths: list[Path], name: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    failure: Exception | None = None
    for path in paths:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
            failure = error
            continue
        if isinstance(content, Mapping):
            tensors.update((_clean(key), value) for key, value in content.items() if isinstance(value, Tensor))
    if failure is not None and not tensors:
        raise LoadError(f"{paths[0].name} of {name} is damaged, or holds more than tensors, which specviz never reads; look for "
                        "a safetensors file of these heads.") from failure
    return tensors


def _clean(name: str) -> str:
    """One spelling for tensors that projects name differently."""
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.", _LAYER, name)
    name = re.sub(r"^transformer\.(?=self_attn\.|mlp\.|input_layernorm\.|post_attention_layernorm\.)", _LAYER, name)
    return re.sub(r"^fusion_fc\.", "fc.", name)


def _read_config(folder: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"The config.json of {name} is missing or cannot be read ({str(error)[:120]}); copy it beside the "
                        "weights.") from error
    if not isinstance(config, dict):
        raise LoadError(f"The config.json of {name} holds no table of settings; fetch it again.")
    return config


def _kind(names: set[str], name: str) -> str | None:
    if any(_MEDUSA_BLOCKS.fullmatch(key) or ((found := _MEDUSA.fullmatch(key)) and found[3]) for key in names):
        return "medusa"
    telling = "|".join(_OTHERS[other] for other in ("Hydra", "ReDrafter", "MLP speculator"))
    if "fc.weight" not in names and not any(re.fullmatch(telling, key) for key in names):
        return None
    for other, pattern in _OTHERS.items():
        if any(re.fullmatch(pattern, key) for key in names):
            raise LoadError(f"{name} holds {other} heads, a method that specviz does not have; it reads Medusa, EAGLE and EAGLE-3.")
    if _LAYER + "hidden_norm.weight" in names:
        return "eagle3"
    return "eagle" if _LAYER + "self_attn.q_proj.weight" in names else None


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
    if lm_heads and "token_map" in tensors:
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
    num_heads = check.number(layer, "num_attention_heads")
    num_kv_heads = check.number(layer, "num_key_value_heads", num_heads)
    head_dim = check.number(layer, "head_dim", max(1, size // num_heads))
    if (act := layer.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise LoadError(f"The config.json of {check.name} names the activation {act!r}; expected silu.")
    facts: dict[str, Any] = {"head_dim": head_dim, "epsilon": check.number(layer, "rms_norm_eps", 1e-6, float), "rope": _rope(layer, check),
                             **_own_facts(config)}
    known: set[str] = {"t2d", "embed_tokens.weight"}
    if fused:
        facts |= _fused_facts(tensors, config, layer, check)
        width, num_in = 2 * size, len(facts["taps"]) * check.hidden_size
        for norm in (_LAYER + "input_layernorm", _LAYER + "hidden_norm", "norm"):
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
        for norm in (_LAYER + "input_layernorm", "embedding_layernorm", "hidden_states_layernorm", "pre_lm_head_layernorm"):
            if norm + ".weight" in tensors:
                check.shape(tensors, norm + ".weight", size)
                known.add(norm + ".weight")
        if ("embedding_layernorm.weight" in tensors) != ("hidden_states_layernorm.weight" in tensors):
            raise check.refuse("of the norms embedding_layernorm and hidden_states_layernorm only one is there; expected both or none")
    known |= check.linear(tensors, "fc", size, num_in)
    if config.get("bias") is True and "fc.bias" not in tensors and not fused:
        raise check.refuse(f"config.json says that fc has a bias, but the tensor fc.bias is missing, expected [{size}]")
    known |= _layer_shapes(tensors, size, width, num_heads * head_dim, num_kv_heads * head_dim, check)
    for norm in (_LAYER + "self_attn.q_norm.weight", _LAYER + "self_attn.k_norm.weight"):
        if norm in tensors:
            check.shape(tensors, norm, head_dim)
            known.add(norm)
    known |= _vocabulary(tensors, config, size, check)
    if unread := sorted(set(tensors) - known):
        raise LoadError(f"{check.name} has {len(unread)} tensors that have no place in a one-layer {'EAGLE-3' if fused else 'EAGLE'} head, "
                        f"first {unread[0]} {list(tensors[unread[0]].shape)}; specviz reads heads of one layer.")
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
        taps = tuple(int(i) + (int(ids[0]) == 1) for i in ids)       # ids that begin with 1 count outputs of layers, others inputs
    if not taps or not all(0 <= tap <= num_layers for tap in taps):
        raise check.refuse(f"it reads the target's layers {', '.join(map(str, taps))}, and the target has {num_layers}")
    return {"taps": taps, "norm_before_residual": flag("norm_before_residual"), "norm_output": flag("norm_output"),
            "norm_before_fc": flag("norm_before_fc", "input_norm.weight" in tensors),
            "fc_norm": flag("fc_norm", "fc_norm.0.weight" in tensors)}


def _layer_shapes(tensors: Mapping[str, Tensor], size: int, width: int, num_query: int, num_kv: int, check: _Check) -> set[str]:
    """Check the decoder layer; returns the names of its tensors."""
    gate = tensors.get(_LAYER + "mlp.gate_proj.weight")
    inner = len(gate) if gate is not None else 0
    names = {_LAYER + "post_attention_layernorm.weight"}
    check.shape(tensors, _LAYER + "post_attention_layernorm.weight", size)
    shapes = {"self_attn.q_proj": (num_query, width), "self_attn.k_proj": (num_kv, width), "self_attn.v_proj": (num_kv, width),
              "self_attn.o_proj": (size, num_query), "mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size),
              "mlp.down_proj": (size, inner)}
    for name, (num_out, num_in) in shapes.items():
        names |= check.linear(tensors, _LAYER + name, num_out, num_in)
    return names


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
        if "d2t" in tensors or size != check.hidden_size:
            rows = len(tensors["d2t"]) if "d2t" in tensors else num_rows
            raise check.refuse(f"the tensor lm_head.weight is missing, expected [{rows}, {size}]")
        return set()
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
    kind = rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope["rope_theta"] = check.number({**layer, **rope}, "rope_theta", 10000.0, float)
    if kind not in _ROPE_TYPES:
        raise LoadError(f"The config.json of {check.name} asks for rotary positions of type {kind!r}; expected {', '.join(_ROPE_TYPES)}.")
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
    return rope | {key: check.number(rope, key, kind=float) for key in needed.get(kind, ())}
