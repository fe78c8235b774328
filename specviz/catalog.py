"""The models this program knows by name, from models/*.toml, and opening targets and draft models. It knows nothing of engines.

A card describes one target; anything else that `loading` understands (folder, GGUF file, hub id) can be opened without one.
"""
from __future__ import annotations

import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .default_model import Progress, is_prepared
from .errors import LoadError, VocabularyMismatch
from .loading import Loaded, load_target
from .machine import available
from .memory import MAX_CONTEXT, Estimate, Shape, Sizes, estimate, shortage, sizes_of
from .placement import QUANTIZATIONS
from .sources import describe

__all__ = ["Catalog", "ChatCard", "HeadsCard", "PackedCard", "TargetCard", "check_vocabulary", "first_difference"]

MODELS_DIR = Path(__file__).resolve().parent.parent / "models"
TYPES = {"str": str, "int": int, "bool": bool}


@dataclass(frozen=True, slots=True)
class ChatCard:
    """What is worth knowing of a target's chat template."""
    template: str
    default_system: str = ""
    end_of_turn: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class PackedCard:
    """A checkpoint of the target whose weights bitsandbytes has packed already: a smaller download, for CUDA only."""
    source: str
    quantization: str


@dataclass(frozen=True, slots=True)
class HeadsCard:
    """Drafting heads that somebody has published for the target. kind: "medusa", "eagle" or "eagle3"."""
    source: str
    kind: str


@dataclass(frozen=True, slots=True)
class TargetCard:
    """One file models/*.toml, table [target].

    Sizes in bytes. vram_gb: the smallest common graphics card that holds it in some quantization, 0 for a model meant for the CPU.
    draft_sources: draft models that share the vocabulary, best first. gated: its owner asks for an account and accepted terms.
    download_bytes, disk_bytes: 0 where nobody looked; see `fetch_bytes`.
    """
    id: str
    name: str
    source: str
    licence: str
    origin: str
    model_type: str
    num_parameters: int
    context_length: int
    shape: Shape
    chat: ChatCard
    summary: str = ""
    gated: bool = False
    vram_gb: int = 0
    download_bytes: int = 0
    disk_bytes: int = 0
    weights_sha256: str = ""
    draft_sources: tuple[str, ...] = ()
    packed: tuple[PackedCard, ...] = ()
    heads: tuple[HeadsCard, ...] = ()
    default_method: str = "prompt_lookup"

    @property
    def fetch_bytes(self) -> int:
        """The download: as measured, or two bytes for each weight, as checkpoints of chat models have."""
        return self.download_bytes or 2 * self.num_parameters

    def estimate(self, quantization: str = "none", *, device: str = "cpu", context: int = MAX_CONTEXT, drafter: TargetCard | None = None
                 ) -> Estimate:
        """Memory on a device of this kind, see `memory.estimate`."""
        return estimate(self.shape, quantization, min(context, self.context_length), device=device,
                        drafter=drafter.shape if drafter is not None else None)


class Catalog:
    """The cards of a folder, and where fetched models go. Raises LoadError for a card that cannot be read."""

    def __init__(self, models_dir: Path | None = None, *, cache_dir: Path | None = None, offline: bool = False) -> None:
        self.cache_dir, self.offline = cache_dir, offline
        self.targets = tuple(read_card(path) for path in sorted((models_dir or MODELS_DIR).glob("*.toml")))

    def card(self, name: str) -> TargetCard | None:
        """The card with this id, name or source."""
        return next((card for card in self.targets if name in (card.id, card.name, card.source)), None)

    def reason(self, card: TargetCard, *, device: str = "cpu", quantization: str | None = None, drafter: TargetCard | None = None) -> str:
        """Why a target cannot run on this machine now, "" if it can. quantization: None tries all that the device has."""
        if card.source == "default" and self.offline and not is_prepared(self.cache_dir):
            return f"{card.name} has not been fetched yet, and --offline forbids it."
        free_bytes, kind = available(device), device.partition(":")[0]
        sentences = [shortage(card.name, card.estimate(each, device=kind, drafter=drafter), free_bytes, f"{device}, {each}")
                     for each in ([quantization] if quantization is not None else QUANTIZATIONS[kind])]
        return "" if "" in sentences else sentences[-1]

    def sizes(self, name: str, *, progress: Progress | None = None) -> Sizes:
        """What a model holds, from its card or from its small files, which may be fetched. Raises what `describe` raises."""
        if (card := self.card(name)) is not None:
            return sizes_of(card.shape)
        described = describe(name, cache_dir=self.cache_dir, offline=self.offline, progress=progress)
        return sizes_of(described.config())

    def open_target(self, name: str = "default", *, device: str = "auto", dtype: str = "auto", quantization: str = "none",
                    draft: str | None = None, progress: Progress | None = None) -> Loaded:
        """Load a target by card or by anything `load_target` takes. draft: what will be opened next and must fit beside it. Raises what
        `load_target` raises."""
        card = self.card(name)
        drafter = self.sizes(draft, progress=progress) if draft is not None else None
        return load_target(card.source if card is not None else name, device=device, dtype=dtype, quantization=quantization,
                           drafter=drafter, cache_dir=self.cache_dir, offline=self.offline, progress=progress)

    def open_draft(self, name: str, target: Loaded, *, quantization: str = "none", progress: Progress | None = None) -> Loaded:
        """Load a draft model onto the target's device and check that it speaks the target's tokens. Raises VocabularyMismatch too."""
        placement = target.placement
        dtype = next(text for text in ("float32", "bfloat16", "float16") if str(placement.dtype) == f"torch.{text}")
        draft = self.open_target(name, device=str(placement.device), dtype=dtype, quantization=quantization, progress=progress)
        check_vocabulary(target.tokenizer, draft.tokenizer)
        return draft


def check_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raise VocabularyMismatch, naming the first differing token, unless both mean the same text by every id.

    Contents count, not sizes: added tokens behind the end of the shorter vocabulary and padding are no difference. (The drafter must still
    not be fed an id beyond its own embedding table.)
    """
    if difference := first_difference(target, draft):
        raise VocabularyMismatch(f"The draft model has another vocabulary: {difference}; choose a draft model of the target's family.")


def first_difference(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str:
    """The first token by which two vocabularies differ, in words; "" for vocabularies that agree as `check_vocabulary` means it."""
    target_tokens, draft_tokens = tokens_by_id(target), tokens_by_id(draft)
    shorter = min(max(target_tokens, default=-1), max(draft_tokens, default=-1))
    for token_id in sorted(target_tokens.keys() | draft_tokens.keys()):
        ours, theirs = target_tokens.get(token_id), draft_tokens.get(token_id)
        is_tail = token_id > shorter and (token_id in target.added_tokens_decoder or token_id in draft.added_tokens_decoder)
        if ours != theirs and not is_tail:
            return f"token {token_id} is {shown(ours)} for the target and {shown(theirs)} for the draft model"
    return ""


def tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def shown(token: str | None) -> str:
    return "nothing" if token is None else repr(token[:60])


def read_card(path: Path) -> TargetCard:
    """One card. Raises LoadError naming the file and the entry that is wrong."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))["target"]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError) as error:
        raise LoadError(f"The model card {path.name} cannot be read or has no [target] table ({error}).") from error
    where = f"{path.name}, [target"
    tables = dict(table)
    parts = {"chat": build(ChatCard, tables.pop("chat", None), f"{where}.chat]"),
             "shape": build(Shape, tables.pop("shape", None), f"{where}.shape]")}
    for name, kind in (("packed", PackedCard), ("heads", HeadsCard)):
        rows = tables.pop(name, [])
        if not isinstance(rows, list):
            raise LoadError(f"The model card {where}.{name}] is one table; write [[target.{name}]].")
        parts[name] = [build(kind, row, f"{where}.{name}]") for row in rows]
    return build(TargetCard, {**tables, **parts}, f"{where}]")


def build(card_type: type, table: Any, where: str) -> Any:
    """An instance from a table that has exactly the known entries, with the right types."""
    if not isinstance(table, dict):
        raise LoadError(f"The model card {where} is missing; add the table.")
    known = {entry.name: entry for entry in fields(card_type)}
    wrong = sorted(table.keys() - known.keys())
    missing = sorted(name for name, entry in known.items() if entry.default is MISSING and name not in table)
    if wrong or missing:
        problem = f"does not know the entry {wrong[0]!r}" if wrong else f"lacks the entry {missing[0]!r}"
        raise LoadError(f"The model card {where} {problem}; expected {', '.join(known)}.")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    for name, value in values.items():
        declared = str(known[name].type)
        if type(value) is not (tuple if declared.startswith("tuple") else TYPES.get(declared, type(value))):
            raise LoadError(f"The model card {where}: {name} is {value!r}, expected {known[name].type}.")
    return card_type(**values)
