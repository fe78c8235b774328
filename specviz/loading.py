"""Gets a model and its tokenizer from the default download, a folder, a GGUF file or the hub. It knows nothing of engines or drafters.

No code from a model repository is ever run and no pickled weights are read. Only this file asks the network for models; the default
model's own download is in default_model.py.
"""
from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel,
                          PreTrainedTokenizerBase)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .default_model import DEFAULT, Progress, default_cache_dir, file_sha256, prepare_default, silent
from .errors import InputError, LoadError, NotEnoughMemory
from .gguf_file import brief, read_gguf
from .text import end_of_turn_id

__all__ = ["Loaded", "Placement", "QUANTIZATIONS", "choose_placement", "default_cache_dir", "load_target", "prepare_default"]

QUANTIZATIONS = {"cpu": ("none", "int8"), "cuda": ("none", "int8", "nf4", "fp4"), "mps": ("none",)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*(/[\w-][\w.-]*)?)(@(?P<revision>[\w./-]+))?")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
INSIDE_THE_MODEL = re.compile(r"(model\.|transformer\.)?(layers|h|embed_tokens|norm|lm_head)\.")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and in which numbers a model runs. quantization on a CPU is applied by the engine, on CUDA while loading."""
    device: torch.device
    dtype: torch.dtype
    quantization: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready for the engine: eval mode, no gradients, on its device.

    eos_ids: every id that ends an answer, sorted. facts: what identifies the weights: "revision" (hub commit), "weights_sha256" (the GGUF),
    "chat_template_sha256"; only those that are known. notes: sentences the user should see.
    """
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    source: str
    placement: Placement
    eos_ids: tuple[int, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def load_target(source: str = "default", *, device: str = "auto", dtype: str = "auto", quantization: str = "none",
                cache_dir: Path | None = None, offline: bool = False, progress: Progress | None = None) -> Loaded:
    """Load a causal language model.

    source: "default", a local folder, a local .gguf file, or a hub id such as "owner/name" or "owner/name@revision". cache_dir holds the
    default model only; hub models lie in the hub's own cache, shared with other programs. Raises InputError for a setting, LoadError or
    NotEnoughMemory for the rest.
    """
    placement, progress = choose_placement(device, dtype, quantization), progress or silent
    path = Path(source).expanduser()
    facts: dict[str, str] = {}
    try:
        if source == "default":
            folder = prepare_default(cache_dir, progress, offline=offline)
            name, facts["weights_sha256"] = DEFAULT.name, DEFAULT.gguf_sha256
        elif path.is_file():
            return load_gguf(path, source, placement, progress)
        elif path.is_dir():
            folder, name = path, path.resolve().name
        else:
            folder, name = fetch_from_hub(source, offline, progress), source.partition("@")[0]
            facts["revision"] = folder.name
        progress(f"Loading {name}", None)
        model, tokenizer, notes = load_folder(folder, name, placement)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise NotEnoughMemory(f"{source} does not fit into the memory of {placement.device} as {placement.dtype} with quantization "
                              f"{placement.quantization}; choose a smaller model or a stronger quantization.") from error
    return finished(model, tokenizer, name, source, placement, facts, notes)


def choose_placement(device: str = "auto", dtype: str = "auto", quantization: str = "none") -> Placement:
    """Check the three settings against each other and this machine. Raises InputError with what is possible."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if kind not in QUANTIZATIONS or not re.fullmatch(r"(cpu|mps|cuda(:\d+)?)", device):
        raise InputError(f"The device {device!r} is not known; use auto, cpu, cuda, cuda:1 or mps.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("The device cuda was asked for, but this PyTorch sees no CUDA device; use --device cpu or a PyTorch with CUDA.")
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise InputError(f"The device {device} was asked for, but there are only {torch.cuda.device_count()} CUDA devices, counted from 0.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise InputError("The device mps was asked for, but this machine has none; use --device cpu.")
    if quantization not in QUANTIZATIONS[kind]:
        known = any(quantization in names for names in QUANTIZATIONS.values())
        reason = f"needs a CUDA device, and this is {kind}" if known else "is not known"
        raise InputError(f"The quantization {quantization!r} {reason}; on {kind} there is {', '.join(QUANTIZATIONS[kind])}.")
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"The dtype {dtype!r} is not known; use auto, {', '.join(DTYPES)}.")
    notes = ("The device mps is untested.",) if kind == "mps" else ()
    return Placement(torch.device(device), DTYPES.get(dtype) or automatic_dtype(torch.device(device)), quantization, notes)


def automatic_dtype(device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16   # older cards only emulate bfloat16


def load_gguf(path: Path, source: str, placement: Placement, progress: Progress) -> Loaded:
    if path.suffix.lower() != ".gguf":
        raise LoadError(f"{path.name} is a file; expected a .gguf file or the folder of a model.")
    if placement.quantization != "none" and placement.device.type == "cuda":
        raise InputError(f"A GGUF file is unpacked while loading and cannot be quantized to {placement.quantization} on the way; use "
                         "quantization none, or a folder with safetensors weights.")
    progress(f"Unpacking {path.name}", None)
    model, tokenizer = read_gguf(path, placement.dtype)
    check_vocabulary_size(model, tokenizer, path.stem)
    facts = {"weights_sha256": file_sha256(path)}
    return finished(model.to(placement.device), tokenizer, path.stem, source, placement, facts, ())


def load_folder(folder: Path, name: str, placement: Placement) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, tuple[str, ...]]:
    """Model and tokenizer of a local folder, checked against each other."""
    config = read_config(folder, name)
    check_weight_files(folder, name)
    tokenizer = read_tokenizer(folder, name)
    options: dict[str, Any] = {"device_map": {"": placement.device}} if placement.device.type == "cuda" else {}
    if placement.device.type == "cuda" and placement.quantization != "none":
        options["quantization_config"] = bitsandbytes_config(placement)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=placement.dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True, **options)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, KeyError, OSError, RuntimeError, ImportError, TypeError, AttributeError) as error:
        raise LoadError(f"The weights of {name} do not fit its config.json, or cannot be read ({brief(error)}).") from error
    wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if wrong:
        raise LoadError(f"The weights of {name} contradict its config.json: {len(wrong)} tensors are missing or have another shape, first "
                        f"{wrong[0]}.")
    unread = sorted(map(str, report["unexpected_keys"]))
    unread_layers = [key for key in unread if INSIDE_THE_MODEL.match(key)]
    if unread_layers:
        raise LoadError(f"The weights of {name} contradict its config.json: {len(unread_layers)} tensors have no place in the model, first "
                        f"{unread_layers[0]}.")
    check_vocabulary_size(model, tokenizer, name)
    notes = (f"{len(unread)} tensors of {name} are not part of the language model and were left out, first {unread[0]}.",) if unread else ()
    return model.to(placement.device) if placement.device.type == "mps" else model, tokenizer, notes


def read_config(folder: Path, name: str) -> PretrainedConfig:
    """The folder's config if it describes a causal language model."""
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError(f"{name} has no config.json, so it is not the folder of a transformers model; name the folder that holds it "
                        "and the *.safetensors files.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        model_type = content["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"The config.json of {name} cannot be read or names no model_type ({brief(error)}).") from error
    parts = [part for part in ("vision", "audio") if f"{part}_config" in content]
    if parts:
        raise LoadError(f"{name} ({model_type}) reads {parts[0]} input; choose the text-only model of its family.")
    architectures = [str(architecture) for architecture in content.get("architectures") or ()]
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    is_known = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if content.get("is_encoder_decoder") or not is_known or (architectures and not causal & set(architectures)):
        kind = architectures[0] if architectures else model_type
        has_code = "auto_map" in content and not is_known
        reason = "brings its own code, which specviz never runs" if has_code else "is not a model that writes text token by token"
        raise LoadError(f"{name} ({kind}) {reason}; choose a causal language model that transformers knows.")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:   # config classes validate in their own ways, with exceptions of many kinds
        raise LoadError(f"The config.json of {name} is not valid for a {model_type} model ({brief(error)}).") from error


def check_weight_files(folder: Path, name: str) -> None:
    """Open every weight file: a file cut short, a missing part or a pointer instead of a file is found before memory is spent."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not single.is_file() and not index.is_file():
        other = next((path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))), None)
        found = f"only {other}, a format that can run code when read" if other else "no weights"
        raise LoadError(f"{name} has {found}; expected model.safetensors.")
    try:
        parts = [single.name] if single.is_file() else json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [folder / part for part in sorted(set(parts))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise LoadError(f"{index.name} of {name} cannot be read ({brief(error)}); download it again.") from error
    for path in files:
        if not path.is_file() or path.parent != folder:
            raise LoadError(f"The weight file {path.name} of {name} is missing; download it again.")
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise LoadError(f"The weight file {path.name} of {name} is damaged or cut short ({brief(error)}); fetch it again.") from error


def read_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase:
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise LoadError(f"{name} has no tokenizer; copy tokenizer.json and tokenizer_config.json of the model into its folder.")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:   # the Rust library raises bare Exception
        raise LoadError(f"The tokenizer of {name} cannot be read ({brief(error)}); copy tokenizer.json and tokenizer_config.json "
                        "again.") from error


def check_vocabulary_size(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    num_rows = model.get_input_embeddings().num_embeddings
    if tokenizer.vocab_size > num_rows:
        raise LoadError(f"The tokenizer of {name} has {tokenizer.vocab_size:,} tokens, but the model knows only {num_rows:,}: they do not "
                        "belong together; copy the model's own tokenizer.json.")


def bitsandbytes_config(placement: Placement) -> BitsAndBytesConfig:
    """Threshold 0.0: no host synchronisation, and no row depends on the others. 16-bit compute: float32 leaves the tensor cores idle."""
    if placement.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    compute_dtype = automatic_dtype(placement.device) if placement.dtype == torch.float32 else placement.dtype
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=placement.quantization, bnb_4bit_compute_dtype=compute_dtype)


def fetch_from_hub(source: str, offline: bool, progress: Progress) -> Path:
    """The folder of a hub snapshot; its name is the commit. Only configuration, tokenizer and safetensors files at the top level."""
    match = HUB_ID.fullmatch(source)
    if match is None or source.startswith((".", "~")) or "\\" in source:
        raise LoadError(f"There is no file or folder {source}; give a folder with config.json, a .gguf file, or a hub id (owner/name).")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    repo, revision = match["repo"], match["revision"]
    progress(f"Looking for {repo} in the hub's cache" if offline else f"Fetching {repo} from the hub", None)
    try:
        return Path(snapshot_download(repo, revision=revision, local_files_only=offline,
                                      allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
                                      ignore_patterns=["*/*", "consolidated*", "*.fp16.*"]))
    except GatedRepoError as error:
        raise LoadError(f"{repo} is gated; accept its terms on its hub page and log in with `hf auth login`, then start again.") from error
    except RepositoryNotFoundError as error:
        raise LoadError(f"There is no file, folder or hub model {source}, or it is private; check the spelling.") from error
    except LocalEntryNotFoundError as error:
        reason = "--offline forbids fetching it" if offline else "the hub cannot be reached"
        raise LoadError(f"{repo} is not on this machine and {reason}; connect once, or give a local folder.") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise LoadError(f"{repo} could not be fetched from the hub ({brief(error)}).") from error


def finished(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, source: str, placement: Placement,
             facts: dict[str, str], notes: tuple[str, ...]) -> Loaded:
    if isinstance(tokenizer.chat_template, str):
        facts["chat_template_sha256"] = sha256(tokenizer.chat_template.encode()).hexdigest()
    model.eval().requires_grad_(False)
    return Loaded(model, tokenizer, name, source, placement, eos_ids(model, tokenizer), facts, placement.notes + notes)


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end an answer, from all places where models keep them: generation config, config, tokenizer, chat template."""
    found: set[int] = set()
    for value in (getattr(model.generation_config, "eos_token_id", None), getattr(model.config, "eos_token_id", None),
                  tokenizer.eos_token_id, end_of_turn_id(tokenizer)):
        found.update(value if isinstance(value, (list, tuple)) else () if value is None else (value,))
    return tuple(sorted(found))
