"""What could be loaded on this machine: the known targets with their fit, and the report on one choice before it is loaded.

It knows nothing of engines and requests, loads no weights, and asks the hub for nothing but small files.
"""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from .catalog import Catalog, TargetCard
from .check import Report, Row, check_pair
from .checkpoint import check_weight_files, packed_as
from .default_model import is_prepared
from .errors import LoadError, SpecvizError
from .head_source import find_heads, may_hold_heads
from .hub import fetch_files, fetch_small_files, is_hub_id, page_url
from .machine import available, missing_cuda_note
from .memory import MAX_CONTEXT, Estimate, estimate, gigabytes, shortage, sizes_of
from .options import Options
from .placement import QUANTIZATIONS, Placement, choose_placement
from .service import Choice, Inspection, Line, Offer
from .sources import Described, describe

__all__ = ["Shelf"]

_METHOD = "method: "


class Shelf:
    """The cards, seen from this machine with these options."""

    def __init__(self, options: Options, catalog: Catalog | None = None) -> None:
        self._options = options
        self._catalog = catalog or Catalog(cache_dir=options.cache_dir, offline=options.offline)

    # ---- the list -----------------------------------------------------------------------------------------------------
    def offers(self, held_bytes: int = 0) -> list[Offer]:
        """All cards, those that fit first, small ones first. held_bytes: what unloading the pair in use would give back."""
        device = self._device()
        free_bytes = available(device) + held_bytes
        offers = [offer for card in self._catalog.targets for offer in self._offers(card, device.type, free_bytes)]
        return sorted(offers, key=lambda offer: (bool(offer.fit), offer.source != "default", offer.num_parameters))

    def advice(self) -> list[Line]:
        note = missing_cuda_note()
        return [Line("note", note)] if note else []

    def suggestion(self, held_bytes: int = 0) -> Offer | None:
        """The largest target without a gate that fits the CUDA device, packed where somebody has packed it; None without CUDA."""
        device = self._device()
        if device.type != "cuda" or self._options.offline:
            return None
        fitting = [offer for offer in self.offers(held_bytes) if not offer.fit and not offer.gated and offer.source != "default"]
        if not fitting:
            return None
        return max(fitting, key=lambda offer: (offer.num_parameters, -offer.download_bytes))

    def _offers(self, card: TargetCard, kind: str, free_bytes: int) -> list[Offer]:
        """The card, and the checkpoints that hold its weights packed already, where they would be packed on loading anyhow."""
        offer = self._offer(card, kind, free_bytes)
        packed = [each for each in card.packed if kind == "cuda" and not offer.fit and each.quantization == offer.quantizations[0]]
        return [offer, *(replace(
            offer, source=each.source, name=f"{card.name}, packed as {each.quantization}", quantizations=("none",),
            summary=f"The same model in a smaller download, packed by others: {each.source}.",
            download_bytes=0 if self._is_here(each.source) else card.estimate(each.quantization, device=kind).weights_bytes)
            for each in packed)]

    def _offer(self, card: TargetCard, kind: str, free_bytes: int) -> Offer:
        needs = {name: card.estimate(name, device=kind) for name in QUANTIZATIONS[kind]}
        # on a CPU int8 is quicker and bit-exact; on CUDA weights as they are, if there is room, and 4 bits if not
        wishes = ("int8", "none") if kind == "cpu" else ("none", "nf4", "nf4-double", "int8", "fp4", "fp4-double")
        names = [name for name in wishes if name in needs]
        advised = next((name for name in names if needs[name].peak_bytes <= free_bytes), None)
        least = min(needs.values(), key=lambda need: need.peak_bytes)
        fit = "" if advised else f"does not fit: needs {gigabytes(least.peak_bytes)}, {gigabytes(free_bytes)} free"
        if fit and kind != "cuda" and card.vram_gb:
            fit = f"needs CUDA with {card.vram_gb} GB, or {gigabytes(least.peak_bytes)} of memory ({gigabytes(free_bytes)} free)"
        names.sort(key=lambda name: name != advised)
        memory_bytes = (needs[advised] if advised else least).total_bytes
        return Offer(card.source, card.name, card.summary, card.licence, card.context_length, card.num_parameters,
                     0 if self._is_here(card.source) else card.fetch_bytes, memory_bytes, fit,
                     (*card.draft_sources, *(heads.source for heads in card.heads)), tuple(names), card.gated)

    # ---- one choice ---------------------------------------------------------------------------------------------------
    def inspect(self, choice: Choice, held_bytes: int = 0) -> Inspection:
        """The report of `check`, memory beside or instead of the pair in use, and the download. Small files may be fetched.

        held_bytes: what unloading the pair in use would give back. Not while a model is being loaded: both change transformers' defaults.
        """
        lines: list[Line] = []
        try:
            return self._inspect(choice, held_bytes, lines)
        except SpecvizError as error:
            return Inspection((*lines, Line("bad", str(error))))

    def held_bytes(self, choice: Choice) -> int:
        """What a loaded pair holds, by the formula that judges the next one; 0 where that cannot be told. As `inspect`."""
        try:
            needed = self._estimate(choice, self._described(choice.target), choice.draft, MAX_CONTEXT)
            return needed.weights_bytes + needed.drafter_bytes
        except SpecvizError:
            return 0

    def check_here(self, choice: Choice) -> None:
        """Raise LoadError if something of a choice would have to be fetched first."""
        for source in filter(None, (choice.target, choice.draft)):
            if source != "default" and not self._is_here(source):
                raise LoadError(f"{source}, which was chosen last time, is not on this machine any more. Choose it again to fetch it.")

    def _inspect(self, choice: Choice, held_bytes: int, lines: list[Line]) -> Inspection:
        placement, card = self._placement(choice), self._catalog.card(choice.target)
        download_bytes: int | None = 0
        if card is not None and card.gated and not self._is_here(card.source):
            lines.append(Line("note", f"{card.name} is gated: accept its terms at {page_url(card.source)} and log in on this machine with "
                                      "`hf auth login`."))
        if choice.target == "default" and not is_prepared(self._options.cache_dir):
            if self._options.offline:
                raise LoadError(f"{card.name} has not been fetched yet, and --offline forbids it.")
            needed = card.estimate(self._quantization(placement), device=placement.device.type)
            return self._judged(card.name, needed, placement, held_bytes, lines, card.fetch_bytes)
        target, draft = self._described(choice.target), choice.draft
        if draft and (later := self._unfetched_heads(draft)) != 0:
            lines.append(Line("note", f"{draft} holds drafting heads, which are fetched and tried while loading."))
            draft, download_bytes = None, later
        report = check_pair(choice.target, draft, device=choice.device, quantization=self._quantization(placement), dtype=choice.dtype,
                            catalog=self._catalog)
        lines += _lines(report)
        if not report.is_possible and not all(row.what == "memory" for row in report.rows if row.verdict == "no" and not _is_method(row)):
            return Inspection(tuple(lines), report.download_bytes)
        context = min(MAX_CONTEXT, int(getattr(target.config().get_text_config(), "max_position_embeddings", None) or MAX_CONTEXT))
        needed = self._estimate(choice, target, draft, context)
        placement = replace(placement, quantization=packed_as(target.config()) or placement.quantization)
        download_bytes = None if download_bytes is None else download_bytes + report.download_bytes
        lines += self._packed(card, placement, report.download_bytes)
        return self._judged(target.name, needed, placement, held_bytes, lines, download_bytes)

    def _estimate(self, choice: Choice, target: Described, draft: str | None, context: int) -> Estimate:
        """Files that are packed already keep their quantization, whatever was chosen."""
        placement, config = self._placement(choice), target.config()
        chosen = self._quantization(placement)
        other = self._described(draft).config() if draft and not self._is_heads(draft) else None
        return estimate(sizes_of(config), packed_as(config) or chosen, context, device=placement.device.type, dtype=placement.dtype,
                        drafter=sizes_of(other) if other is not None else None,
                        drafter_quantization=packed_as(other) or chosen if other is not None else None)

    def _judged(self, name: str, needed: Estimate, placement: Placement, held_bytes: int, lines: list[Line], download_bytes: int | None
                ) -> Inspection:
        """The last lines: memory and download."""
        where, free_bytes = f"{placement.device}, {self._quantization(placement)}", available(placement.device)
        beside = needed.peak_bytes <= free_bytes
        if beside or needed.peak_bytes <= free_bytes + held_bytes:
            words = "free" if beside else f"free, and about {gigabytes(held_bytes)} more once the model in use is unloaded"
            lines.append(Line("good" if beside else "note", f"memory: {gigabytes(needed.total_bytes)} on {where} ({needed.parts()}); "
                                                            f"{gigabytes(free_bytes)} {words}."))
        else:
            lines.append(Line("bad", shortage(name, needed, free_bytes + held_bytes, where)))
        if download_bytes != 0:
            lines.append(Line("note", f"download: {'of unknown size' if download_bytes is None else gigabytes(download_bytes)}."))
        return Inspection(tuple(lines), download_bytes, beside)

    def _packed(self, card: TargetCard | None, placement: Placement, download_bytes: int) -> list[Line]:
        """A smaller download of the same weights."""
        if card is None or not download_bytes or placement.device.type != "cuda":
            return []
        return [Line("note", f"{each.source} holds these weights packed as {each.quantization}, a download of about "
                             f"{gigabytes(card.estimate(each.quantization, device='cuda').weights_bytes)}, with quantization none.")
                for each in card.packed if each.quantization == placement.quantization]

    def _unfetched_heads(self, source: str) -> int | None:
        """Bytes of drafting heads on the hub that are not here yet, None if nobody says how many; 0 for all else. Fetches their config."""
        if self._catalog.card(source) or Path(source).expanduser().exists() or not is_hub_id(source) or self._options.offline:
            return 0
        if not may_hold_heads(fetch_files(source, False, ["config.json"])) or self._is_heads(source):
            return 0
        try:
            return fetch_small_files(source, False).weights_bytes
        except LoadError:                         # pickled ones only
            return None

    # ---- helpers ------------------------------------------------------------------------------------------------------
    def _device(self) -> torch.device:
        try:
            return choose_placement(self._options.device).device
        except SpecvizError:                      # an impossible --device is told by the engine that was to be loaded with it
            return choose_placement().device

    def _placement(self, choice: Choice) -> Placement:
        """As `opening` resolves "auto": int8 in float32 on a CPU, elsewhere the weights as they are."""
        placement = choose_placement(choice.device, choice.dtype, "none" if choice.quantization == "auto" else choice.quantization)
        is_float_cpu = placement.device.type == "cpu" and placement.dtype == torch.float32
        return replace(placement, quantization="int8") if choice.quantization == "auto" and is_float_cpu else placement

    def _quantization(self, placement: Placement) -> str:
        """What the engine will make of it: on a CPU int8 is for float32 only."""
        return "none" if placement.device.type == "cpu" and placement.dtype != torch.float32 else placement.quantization

    def _described(self, source: str) -> Described:
        card = self._catalog.card(source)
        return describe(card.source if card else source, cache_dir=self._options.cache_dir, offline=self._options.offline, prepare=False)

    def _is_here(self, source: str) -> bool:
        """Whether every file of a model is on this machine, found out without a network."""
        try:
            if source == "default":
                return is_prepared(self._options.cache_dir)
            described = describe(source, cache_dir=self._options.cache_dir, offline=True, prepare=False)
            if described.kind != "gguf":
                check_weight_files(described.path, described.name)
            return True
        except SpecvizError:
            return False

    def _is_heads(self, source: str) -> bool:
        """Whether this names drafting heads that are here."""
        if self._catalog.card(source):
            return False
        try:
            return find_heads(source, offline=True, progress=lambda message, fraction: None) is not None
        except SpecvizError:
            return False


def _is_method(row: Row) -> bool:
    return row.what.startswith(_METHOD)


def _lines(report: Report) -> list[Line]:
    """The report without memory, which is judged here; methods in two lines, because that one cannot run is no fault."""
    lines = [Line({"ok": "good", "warn": "note", "no": "bad"}[row.verdict], f"{row.what}: {row.sentence}")
             for row in report.rows if not _is_method(row) and row.what != "memory"]
    methods = [(row.what.removeprefix(_METHOD), row) for row in report.rows if _is_method(row)]
    if able := [f"{name} ({row.sentence.removeprefix('Possible, but ').rstrip('.')})" if row.verdict == "warn" else name
                for name, row in methods if row.verdict != "no"]:
        lines.append(Line("good", f"methods that can run: {', '.join(able)}."))
    unable: dict[str, list[str]] = {}
    for name, row in methods:
        if row.verdict == "no":
            unable.setdefault(row.sentence.removeprefix("Not possible: ").partition(";")[0].rstrip("."), []).append(name)
    if unable:
        words = [", ".join(names) + f" ({reason})" for reason, names in unable.items()]
        lines.append(Line("note", f"not with this pair: {'; '.join(words)}."))
    return lines
