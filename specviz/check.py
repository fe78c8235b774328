"""`python -m specviz.check TARGET [DRAFTER]`: can these two work together here, and with which methods. It loads no weights of models.

It knows nothing of screens; a page shows the same `Report`. Everything is read from configurations and tokenizers. The engine's own
refusals are asked of a model without storage, so the two cannot disagree.
"""
from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .catalog import Catalog, first_difference
from .checkpoint import check_weight_files, eos_ids, packed_as, read_config
from .drafters import DRAFTERS, Heads, Parts
from .drafters.checkpoints import load_heads
from .engine.model import LanguageModel
from .errors import LoadError, SpecvizError
from .gguf_file import brief
from .head_source import FoundHeads, find_heads
from .loading import MISFITS, checked_packing
from .machine import available, missing_cuda_note
from .memory import MAX_CONTEXT, Sizes, estimate, gigabytes, shortage, sizes_of, skeleton
from .placement import Placement, choose_placement, precision_name
from .shipped import Shipped, find_shipped
from .sources import Described, describe

__all__ = ["Report", "Row", "check_pair", "main"]

_MARKS = {"ok": "+", "warn": "!", "no": "x"}
_KINDS = {"medusa": "Medusa heads", "eagle": "An EAGLE head", "eagle3": "An EAGLE-3 head", "exit_adapter": "An exit adapter"}


@dataclass(frozen=True, slots=True)
class Row:
    """One finding. what: the thing looked at. verdict: "ok", "warn" or "no". sentence: for people; may quote a model's files, so it is
    text, never markup."""
    what: str
    verdict: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Report:
    """target, drafter: their names. download_bytes: what is still to be fetched for both."""
    target: str
    drafter: str | None
    rows: tuple[Row, ...]
    download_bytes: int = 0

    @property
    def is_possible(self) -> bool:
        """Whether the pair can be loaded and used; single methods may be impossible nevertheless."""
        return not any(row.verdict == "no" for row in self.rows if not row.what.startswith("method: "))

    def text(self) -> str:
        """For a terminal."""
        pair = self.target + (f" with {self.drafter}" if self.drafter else "")
        width = max(len(row.what) for row in self.rows)
        lines = [f"{_MARKS[row.verdict]} {row.what:<{width}}  {row.sentence}" for row in self.rows]
        return "\n".join([pair, *lines, "This pair can be used." if self.is_possible else "This pair cannot be used."])


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two models, as far as its small files tell."""
    described: Described
    config: Any
    tokenizer: PreTrainedTokenizerBase
    model: LanguageModel
    sizes: Sizes
    placement: Placement             # as it will be: files that are packed already decide their quantization

    @property
    def num_rows(self) -> int:
        return self.model.embeddings.num_embeddings


def check_pair(target: str, drafter: str | None = None, *, device: str = "auto", quantization: str = "auto", dtype: str = "auto",
               context: int = MAX_CONTEXT, catalog: Catalog | None = None) -> Report:
    """Look at a target and a draft model or drafting heads. Configurations and tokenizers (and heads, which are small) may be fetched.

    What is wrong with either becomes a row; raises InputError only, for a setting that does not exist.
    """
    catalog = catalog or Catalog()
    placement = choose_placement(device, dtype)
    if quantization == "auto":
        quantization = "int8" if placement.device.type == "cpu" and placement.dtype == torch.float32 else "none"
    placement = choose_placement(device, dtype, quantization)
    rows = [Row("machine", "warn", note)] if (note := missing_cuda_note()) else []
    try:
        one = _side(catalog, target, placement)
    except SpecvizError as error:
        return Report(target, drafter, (*rows, Row("target", "no", str(error)), *_card_rows(catalog, target, drafter, placement, context)))
    rows += [_what_it_is("target", one), *_weights("target", one), _layers("target", one, placement), _own_tokenizer("target", one),
             _template(one)]
    two, heads, problem = None, None, ""
    if drafter is not None:
        try:
            heads = _heads(catalog, drafter)
            two = _side(catalog, drafter, placement) if heads is None else None
        except SpecvizError as error:
            problem = str(error)
            rows.append(Row("drafter", "no", problem))
    if two is not None:
        rows += [_what_it_is("drafter", two), *_weights("drafter", two), _layers("drafter", two, placement), _common_tokenizer(one, two),
                 _ends(one, two), _lengths(one, two)]
    card = catalog.card(target)
    shipped = find_shipped(card.id, {}) if card is not None and drafter is None else None
    parts, head_rows = _shipped_parts(one, shipped) if shipped is not None else _parts(one, two, heads)
    rows += head_rows
    rows.append(_memory(one, two, placement, context))
    rows += _methods(parts, is_foreign=any(row.what == "vocabulary" and row.verdict == "no" for row in rows))
    download = sum(side.described.download_bytes for side in (one, two) if side is not None)
    return Report(one.described.name, (two.described.name if two else heads.name if heads else drafter), tuple(rows), download)


def _side(catalog: Catalog, name: str, placement: Placement) -> _Side:
    card = catalog.card(name)
    described = describe(card.source if card is not None else name, cache_dir=catalog.cache_dir, offline=catalog.offline, prepare=False)
    config = described.config()
    placement = checked_packing(described, config, placement)
    tokenizer = described.tokenizer()
    try:
        bare = skeleton(config)
        model = LanguageModel(bare, num_tokens=len(tokenizer))
        return _Side(described, config.get_text_config(), tokenizer, model, sizes_of(config), placement)
    except SpecvizError:
        raise
    except MISFITS as error:
        raise LoadError(f"The config.json of {described.name} describes no model that can be built ({brief(error)}).") from error


def _heads(catalog: Catalog, name: str) -> FoundHeads | None:
    return None if catalog.card(name) else find_heads(name, offline=catalog.offline, progress=lambda message, fraction: None)


def _what_it_is(what: str, side: _Side) -> Row:
    later = f"; {gigabytes(side.described.download_bytes)} to fetch" if side.described.download_bytes else ""
    packing = packed_as(side.described.config())
    packed = f", packed as {packing}" if packing else ""
    return Row(what, "ok", f"{side.config.model_type}, {side.sizes.num_parameters:,} parameters, {side.model.num_layers} "
                         f"layer{'s' * (side.model.num_layers != 1)}{packed}{later}.")


def _weights(what: str, side: _Side) -> list[Row]:
    """Weight files that are here must be whole; those still to be fetched are no fault."""
    described = side.described
    if described.kind == "gguf" or described.download_bytes or not any(described.path.glob("*.safetensors")):
        return []
    try:
        check_weight_files(described.path, described.name)
    except LoadError as error:
        return [Row(f"{what}'s weights", "no", str(error))]
    return []


def _layers(what: str, side: _Side, placement: Placement) -> Row:
    """Layer types and what the cache makes of them. Types that cannot be rolled back never get here: the engine refuses the model."""
    types = Counter(getattr(side.config, "layer_types", None) or ["full_attention"] * side.model.num_layers)
    window = getattr(side.config, "sliding_window", None)
    sliding = types.get("sliding_attention", 0)
    dtype = str(placement.dtype).removeprefix("torch.")
    num_bytes = 1000 * side.sizes.cache_per_token * placement.dtype.itemsize
    kept = f"all keys and values are kept, so rejected drafts can be rolled back ({gigabytes(num_bytes)} for 1,000 tokens in {dtype})."
    if sliding and window:
        return Row(f"{what}'s cache", "ok", f"{sliding} of {side.model.num_layers} layers look back {window:,} tokens, the others to the "
                                            f"beginning; {kept}")
    return Row(f"{what}'s cache", "ok", f"Every layer looks back to the beginning; {kept}")


def _own_tokenizer(what: str, side: _Side) -> Row:
    num_tokens = len(side.tokenizer)
    if side.tokenizer.vocab_size > side.num_rows:
        return Row(f"{what}'s tokenizer", "no", f"It has {side.tokenizer.vocab_size:,} tokens, but the model knows only {side.num_rows:,}: "
                                                "they do not belong together.")
    spare = side.num_rows - num_tokens
    padding = f" The model's table has {spare:,} rows more, which stand for nothing and are never drawn." if spare > 0 else ""
    return Row(f"{what}'s tokenizer", "ok", f"{num_tokens:,} tokens.{padding}")


def _template(side: _Side) -> Row:
    if not side.tokenizer.chat_template:
        return Row("chat template", "warn", "The target has none; conversations are written as plain paragraphs, which suits base models "
                                            "passably.")
    return Row("chat template", "ok", "The target brings its own.")


def _common_tokenizer(one: _Side, two: _Side) -> Row:
    """Compared by content: sizes and padding do not matter."""
    if difference := first_difference(one.tokenizer, two.tokenizer):
        return Row("vocabulary", "no", f"The two differ: {difference}. Choose a draft model of the target's family.")
    differ = one.num_rows != two.num_rows
    padded = f" Their tables are padded to {one.num_rows:,} and {two.num_rows:,} rows, which is fine." if differ else ""
    return Row("vocabulary", "ok", f"Both mean the same text by every token.{padded}")


def _ends(one: _Side, two: _Side) -> Row:
    ours, theirs = (set(eos_ids(side.config, _generation_config(side.described), side.tokenizer)) for side in (one, two))
    names = ", ".join(repr(one.tokenizer.convert_ids_to_tokens(token)) for token in sorted(ours))
    if ours == theirs:
        return Row("end of answer", "ok", f"Both end with {names or 'no token at all'}.")
    other = ", ".join(repr(one.tokenizer.convert_ids_to_tokens(token)) for token in sorted(ours ^ theirs))
    return Row("end of answer", "warn", f"The target ends with {names or 'no token at all'}, which is what counts; the drafter's list "
                                        f"differs by {other}, so drafts at the end may be rejected.")


def _generation_config(described: Described) -> Any:
    from transformers import GenerationConfig
    if described.kind == "gguf" or not (described.path / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(described.path, local_files_only=True)
    except MISFITS:
        return None


def _lengths(one: _Side, two: _Side) -> Row:
    if two.model.context < one.model.context:
        return Row("context", "warn", f"The drafter reads {two.model.context:,} tokens, the target {one.model.context:,}: beyond the "
                                      "shorter, nothing is drafted.")
    return Row("context", "ok", f"{one.model.context:,} tokens; the drafter reads as far.")


def _card_rows(catalog: Catalog, target: str, drafter: str | None, placement: Placement, context: int) -> list[Row]:
    """What the card alone tells of a target whose files cannot be had now."""
    if (card := catalog.card(target)) is None:
        return []
    drafter_card = catalog.card(drafter) if drafter else None
    needed = card.estimate(placement.quantization, device=placement.device.type, context=context, drafter=drafter_card)
    where = f"{placement.device}, {precision_name(placement)}"
    return [Row("memory by its card", "ok", f"About {gigabytes(needed.peak_bytes)} ({where}: {needed.parts()}).")]


def _memory(one: _Side, two: _Side | None, placement: Placement, context: int) -> Row:
    context = min(context, one.model.context)
    needed = estimate(one.sizes, one.placement.quantization, context, device=placement.device.type, dtype=placement.dtype,
                      drafter=two.sizes if two is not None else None,
                      drafter_quantization=two.placement.quantization if two is not None else None)
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if placement.spread else [placement.device]
    free_bytes, where = sum(map(available, devices)), f"{placement.device}, {precision_name(one.placement)}"
    if sentence := shortage(one.described.name, needed, free_bytes, where):
        return Row("memory", "no", sentence)
    return Row("memory", "ok", f"About {gigabytes(needed.peak_bytes)} ({where}, {context:,} tokens: {needed.parts()}); "
                               f"{gigabytes(free_bytes)} are free.")


def _parts(one: _Side, two: _Side | None, found: FoundHeads | None) -> tuple[Parts, list[Row]]:
    """What a drafter would be built from, with models that have no storage."""
    heads, rows = {}, []
    if found is not None:
        try:
            loaded = load_heads(found.folder, found.name, one.model, one.described.name)
            heads[loaded.kind] = loaded
            rows.append(Row("drafter", "ok", f"{_what_heads(loaded, one.model)} How well they guess shows once both are loaded."))
        except SpecvizError as error:
            rows.append(Row("drafter", "no", str(error)))
    draft = two.model if two is not None else None
    return Parts(one.model, one.model.new_cache(), draft, heads=heads), rows


def _shipped_parts(one: _Side, shipped: Shipped) -> tuple[Parts, list[Row]]:
    """The same with the drafters that open beside this target by themselves."""
    try:
        heads = replace(shipped, difference="").heads(one.model, one.described.name)
        folder = shipped.folders.get("draft_model")
        draft = None
        if folder is not None:
            draft = LanguageModel(skeleton(read_config(folder, shipped.name)), num_tokens=one.model.num_tokens)
    except SpecvizError as error:
        parts, _ = _parts(one, None, None)
        return parts, [Row("drafters", "warn", str(error))]
    names = [_KINDS[kind] for kind in heads] + (["a draft model"] if draft is not None else [])
    sentence = f"Trained for this target, they open with it: {', '.join(name.replace('An ', 'an ') for name in names)}."
    return Parts(one.model, one.model.new_cache(), draft, heads=heads, preferred=shipped.preferred), [Row("drafters", "ok", sentence)]


def _what_heads(heads: Heads, target: LanguageModel) -> str:
    """Kind, what they read of the target, and among which tokens they guess."""
    facts, words = heads.facts, []
    if "num_heads" in facts:
        words.append(f"{facts['num_heads']} of them, on the last state")
    elif "taps" in facts:
        words.append(f"reads the states entering layers {', '.join(map(str, facts['taps']))} of {target.num_layers}")
    elif "exit_layer" in facts:
        words.append(f"behind the first {facts['exit_layer']} of {target.num_layers} layers")
    else:
        words.append("reads the state after the last norm")
    own = next((heads.tensors[name] for name in ("d2t", "token_map") if name in heads.tensors), None)
    words.append(f"guesses among {len(own):,} of {target.num_tokens:,} tokens" if own is not None else "guesses among all tokens")
    return f"{_KINDS[heads.kind]} whose tensors fit the target: {', '.join(words)}."


def _methods(parts: Parts, is_foreign: bool = False) -> list[Row]:
    """is_foreign: the draft model's tokens mean something else, so nothing that rests on it can run."""
    rows = []
    for method in DRAFTERS.values():
        reason, note = method.missing(parts), method.note(parts)
        if not reason and is_foreign and method.missing(replace(parts, draft=None)):
            reason = "the draft model has another vocabulary"
        sentence = f"Not possible: {reason}." if reason else f"Possible, but {note}." if note else "Possible."
        rows.append(Row(f"method: {method.label}", "no" if reason else "warn" if note else "ok", sentence))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 0: can be used, 1: cannot, 2: a setting that does not exist."""
    parser = argparse.ArgumentParser(prog="python -m specviz.check",
                                     description="Can this target and this drafter work together on this machine?")
    parser.add_argument("target", metavar="TARGET", help="a name from models/, a hub repository, a folder or a GGUF file")
    parser.add_argument("drafter", metavar="DRAFTER", nargs="?", help="likewise; or a folder or repository with drafting heads")
    parser.add_argument("--device", default="auto", metavar="NAME")
    parser.add_argument("--dtype", default="auto", metavar="NAME")
    parser.add_argument("--quantization", default="auto", metavar="NAME")
    parser.add_argument("--context", type=int, default=MAX_CONTEXT, metavar="TOKENS", help="tokens of one conversation")
    parser.add_argument("--cache-dir", type=Path, metavar="FOLDER")
    parser.add_argument("--offline", action="store_true", help="use only what is on this machine")
    given = parser.parse_args(argv)
    try:
        report = check_pair(given.target, given.drafter, device=given.device, dtype=given.dtype, quantization=given.quantization,
                            context=given.context, catalog=Catalog(cache_dir=given.cache_dir, offline=given.offline))
    except SpecvizError as error:
        print(f"specviz: {error}", file=sys.stderr)
        return 2
    print(report.text())
    return 0 if report.is_possible else 1


if __name__ == "__main__":
    sys.exit(main())
