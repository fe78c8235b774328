"""`python -m specviz.train generate | fit | evaluate | export`: makes drafters for a target, from nothing but the target and some prompts.

It knows nothing of what the steps do inside. Every step can be interrupted and goes on when it is called again.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..catalog import Catalog
from ..drafters import DRAFTERS, Parts
from ..engine.model import FINAL
from ..errors import InputError, SpecvizError
from ..loading import Loaded, load_target
from ..opening import language_model
from ..shipped import find_shipped
from ..text import TextCodec, special_ids
from .cost import measure_costs
from .evaluate import LOOKUPS, TREES, chains, lookup_ranks, measure, net_ranks, summarise, table
from .export import export, read_exported
from .fit import Batches, draft_vocabulary, fit, read_recipe
from .generate import Writer, fill, restore
from .heads import NETS, Given, Net
from .prompts import PARTS, Prompts, read_prompts
from .store import Store
from .walk import chain, hybrid, tree, walk

__all__ = ["main"]


def _generate(args: argparse.Namespace) -> None:
    loaded = _target(args)
    target, codec = language_model(loaded), TextCodec(loaded.tokenizer)
    taps = (FINAL, *args.taps)
    facts = {"vocab_size": target.config.vocab_size, "taps": list(taps), "seed": args.seed, "batch": args.batch, "weights": dict(loaded.facts),
             "linears": target.linears.get("precision")}
    store, prompts = Store(args.out, facts), Prompts([row for path in args.prompts for row in read_prompts(path)], args.part, args.seed)
    amx = "AMX" in str(target.linears.get("isa", ""))
    writer = Writer(target, codec, frozenset(loaded.eos_ids), taps=taps, limit=args.limit, dtype=torch.bfloat16 if amx else None)
    bar = _Bar("answer tokens")
    if args.tokens_from:
        restore(Store(args.tokens_from), store, writer, lambda done, total: _Bar("shards").show(done, total))
        return
    if args.part == "train":
        fill(store, writer, prompts, seed=args.seed, size=args.batch, num_tokens=args.tokens, worker=args.worker[0], num_workers=args.worker[1],
             report=lambda number, total: bar.show(total, args.tokens))
        return
    jobs = prompts.measured(args.per_category, 0.0) + (prompts.measured(args.per_category // 2, 1.0) if args.part == "test" else [])
    for number, start in enumerate(range(0, len(jobs), args.batch)):
        if not store.has(number):
            store.write(number, writer.conversations(jobs[start:start + args.batch], args.seed * 100_003 + start, args.part))
        bar.show(min(len(jobs), start + args.batch), len(jobs))


def _fit(args: argparse.Namespace) -> None:
    recipe = read_recipe(args.drafter, dict(args.set))
    stores, texts = [Store(folder) for folder in args.data], []
    for store in stores:
        numbers = store.numbers()
        texts += store.texts(numbers[:max(1, round(args.fraction * len(numbers)))])
    store = stores[0]
    earlier = _earlier(args.begin_with)
    ids = earlier.draft_ids if earlier is not None else None
    given = _given(args, draft_vocabulary(texts, recipe["vocabulary"], store.facts["vocab_size"]) if ids is None else ids)
    answers = sum(text.num_answer_tokens for text in texts)
    print(f"{len(texts)} texts with {answers:,} answer tokens", flush=True)
    bar, seen = _Bar("steps"), []

    def report(step: int, loss: float, agreement: tuple[float, ...]) -> None:
        seen.append((loss, agreement))
        recent = seen[-20:]
        bar.show(step + 1, recipe["steps"], f"loss {sum(loss for loss, _ in recent) / len(recent):.3f}  agreement "
                 + " ".join(f"{sum(a[d] for _, a in recent if len(a) > d) / len(recent):.2f}" for d in range(len(agreement))))
    net = fit(recipe, given, texts, args.out, report=report, stop_at=args.stop_at, begin_with=earlier and earlier.tensors,
              is_published=earlier is not None and earlier.is_published)
    torch.save({"net": net.state_dict(), "draft_ids": given.draft_ids, "recipe": recipe, "answer_tokens": answers, "num_texts": len(texts),
                "data": store.facts}, args.out / "trained.pt")


@dataclass(frozen=True, slots=True)
class _Earlier:
    """Weights to go on from. draft_ids: the tokens that they guess among, None where the folder does not say."""
    tensors: dict[str, torch.Tensor]
    draft_ids: torch.Tensor | None
    is_published: bool


def _earlier(folder: Path | None) -> _Earlier | None:
    """What `fit` or `export` wrote into a folder. Raises InputError where there is neither."""
    if folder is None:
        return None
    if (path := folder / "trained.pt").is_file():
        saved = torch.load(path, map_location="cpu", weights_only=True)
        return _Earlier(saved["net"], saved["draft_ids"], False)
    if not (folder / "model.safetensors").is_file():
        raise InputError(f"There is neither trained.pt nor model.safetensors in {folder}; --begin-with takes a folder that fit wrote to its end, or "
                         "one that export wrote.")
    return _Earlier(*read_exported(folder), True)


def _evaluate(args: argparse.Namespace) -> None:
    if args.cost:
        return _costs(args)
    store = Store(args.data)
    texts = [text for text in store.texts() if text.states is not None and len(text.answers) == 1 and text.num_answer_tokens > 4]
    if args.per_category:
        counts: dict[tuple[str, bool], int] = {}
        kept = []
        for text in texts:
            key = (text.category, text.temperature > 0)
            counts[key] = counts.get(key, 0) + 1
            if counts[key] <= args.per_category:
                kept.append(text)
        texts = kept
    nets = {run.name: _trained(args, run) for run in args.runs}
    rows: list[dict[str, Any]] = []
    for sampled in (False, True):
        chosen = [text for text in texts if (text.temperature > 0) == sampled]
        if not chosen:
            continue
        categories = [text.category for text in chosen]
        found = {name: lookup_ranks(make(), chosen) for name, make in LOOKUPS.items()}
        measured = [row for name, ranked in found.items() for row in measure(name, ranked, chains(False, False), categories)]
        matches = lookup_ranks(LOOKUPS["suffix"](min_match=3), chosen)        # type: ignore[call-arg]
        for name, net in nets.items():
            batches = Batches(chosen, 4096, 0, net.given.config.hidden_size, torch.device(args.device), max_length=1024)
            ranked = net_ranks(net, chosen, batches, args.depth, mixed=True)
            settings = chains(sampled, net.is_drawn, ranked[0].ranks.shape[1])
            if not net.is_drawn:
                settings |= {label: tree(paths) for label, paths in TREES.items()}
            measured += measure(name, ranked, settings, categories)
            for length in range(1, ranked[0].ranks.shape[1] + 1):
                tallies_of = [hybrid(match, chain(6), settings[f"K={length}"]) for match in matches]
                tallies = [walk(each, accept) for each, accept in zip(ranked, tallies_of)]
                measured += summarise(f"suffix + {name}", f"K={length}", tallies, categories)
        print(f"\nT = {1 if sampled else 0}, {len(chosen)} answers, tokens per step (95 % interval over answers)")
        for setting in ("K=1", "K=2", "K=3", "K=4", "K=6", *TREES):
            print(f"\n{setting}\n{table(measured, setting)}")
        rows += [{"sampled": sampled, **{field: getattr(row, field) for field in row.__slots__}} for row in measured]
    if args.json:
        args.json.write_text(json.dumps(rows), encoding="utf-8")


def _costs(args: argparse.Namespace) -> None:
    """The drafters that come with specviz, in the engine."""
    loaded = _target(args)
    card = Catalog(offline=args.offline).card(loaded.source)
    shipped = find_shipped(card.id, loaded.facts) if card is not None else None
    if shipped is None:
        raise InputError(f"No drafters come with specviz for {loaded.name}.")
    target, codec, ends = language_model(loaded), TextCodec(loaded.tokenizer), frozenset(loaded.eos_ids)
    narrow = replace(loaded.placement, quantization="none")
    draft = shipped.draft_model(target, lambda model: language_model(replace(loaded, model=model, placement=narrow)))
    parts = Parts(target, target.new_cache(1024), draft, ends | special_ids(loaded.tokenizer), heads=shipped.heads(target, loaded.name),
                  preferred=shipped.preferred)
    texts = [text for text in Store(args.data).texts() if text.temperature == 0]
    prompts = [text.tokens[:text.answers[0][0]].tolist() for text in texts[::max(1, len(texts) // args.cost)]][:args.cost]
    found = measure_costs(parts, prompts, [name for name, method in DRAFTERS.items() if name != "plain" and not method.missing(parts)
                                          and (args.methods is None or name in args.methods)], args.k, eos_ids=ends)
    print("| method | K | draft | verify | step | tokens per step | speed-up |\n|---|---|---|---|---|---|---|")
    rows = []
    for row in found:
        rows.append(row)
        print(f"| {row.method} | {row.k} | {row.draft:.2f} | {row.verify:.2f} | {row.step:.2f} | {row.tokens_per_step:.2f} | {row.speed_up:.2f} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps([{field: getattr(row, field) for field in row.__slots__} for row in rows]), encoding="utf-8")


def _export(args: argparse.Namespace) -> None:
    net = _trained(args, args.run)
    saved = torch.load(args.run / "trained.pt", weights_only=True)
    facts = {**saved["data"]["weights"], "answer_tokens": saved["answer_tokens"], **dict(args.fact)}
    export(net, args.out, facts, in_full=args.full, int8=args.int8)
    if args.full and net.kind == "draft_model":                # a model of its own is loaded with its tokenizer
        load_target(args.target, offline=args.offline).tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {sum(path.stat().st_size for path in args.out.iterdir()) / 1e6:.1f} MB")


# ---- shared -----------------------------------------------------------------------------------------------------------
def _target(args: argparse.Namespace) -> Loaded:
    torch.set_num_threads(args.threads)
    on_cpu = args.device == "cpu"
    return load_target(args.target, device=args.device, quantization=args.quantization if args.quantization != "auto" else "int8" if on_cpu else "none",
                       offline=args.offline)


def _given(args: argparse.Namespace, draft_ids: Any) -> Given:
    """The target's tables, in float32."""
    torch.set_num_threads(args.threads)
    model = load_target(args.target, device=args.device, offline=args.offline).model
    embeddings = model.get_input_embeddings().weight.detach().float().clone()
    head = model.get_output_embeddings().weight.detach()
    head = embeddings if head.data_ptr() == model.get_input_embeddings().weight.data_ptr() else head.float().clone()
    return Given(embeddings, head, torch.as_tensor(draft_ids, device=embeddings.device), model.config.get_text_config())


def _trained(args: argparse.Namespace, run: Path) -> Net:
    saved = torch.load(run / "trained.pt", map_location=args.device, weights_only=True)
    net = NETS[saved["recipe"]["kind"]](_given(args, saved["draft_ids"]), saved["recipe"])
    net.load_state_dict(saved["net"])
    return net.to(args.device).eval()


class _Bar:
    """One line that says how far it is; where nobody watches, a line now and then."""

    def __init__(self, what: str) -> None:
        self._what, self._begun, self._shown = what, time.monotonic(), 0.0

    def show(self, done: int, total: int, more: str = "") -> None:
        now, watched = time.monotonic(), sys.stderr.isatty()
        if done < total and now - self._shown < (0.2 if watched else 20):
            return
        self._shown = now
        filled = round(30 * min(1.0, done / max(1, total)))
        line = f"{'#' * filled}{'.' * (30 - filled)} {done:,} of {total:,} {self._what}, {now - self._begun:.0f} s  {more}"
        print(("\r\x1b[K" if watched else "") + line, end="" if watched and done < total else "\n", file=sys.stderr, flush=True)


def _worker(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise argparse.ArgumentTypeError("expected I/N with I from 0 to N - 1, such as 0/2")
    return int(number), int(count)


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError("expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m specviz.train", description="Makes drafters for a target.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        each = commands.add_parser(name, help=text, description=text)
        each.set_defaults(run_command=run)
        each.add_argument("--target", default="default", metavar="MODEL", help="as for app.py (default: the default model)")
        each.add_argument("--device", default="cpu", metavar="NAME", help='"cpu" or "cuda" (default: cpu)')
        each.add_argument("--threads", type=int, default=max(1, torch.get_num_threads()), metavar="N")
        each.add_argument("--offline", action="store_true", help="download nothing")
        return each
    one = command("generate", _generate, "Let the target write texts; keeps token ids and states.")
    one.add_argument("--prompts", type=Path, nargs="*", default=[], metavar="FILE", help="JSON lines with category, prompt, source")
    one.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    one.add_argument("--part", choices=PARTS, default="train", help="train, or the prompts that are kept apart for measuring")
    one.add_argument("--tokens-from", type=Path, metavar="FOLDER", help="write nothing new: read the texts of this folder, which has token ids only")
    one.add_argument("--tokens", type=int, default=1_500_000, metavar="N", help="answer tokens to write for training")
    one.add_argument("--per-category", type=int, default=34, metavar="N", help="answers per category for measuring")
    one.add_argument("--quantization", default="auto", metavar="NAME", help="of the target while it writes (default: as the app runs it)")
    one.add_argument("--taps", type=int, nargs="*", default=[3], metavar="LAYER", help="layers whose input is kept beside the final state")
    one.add_argument("--limit", type=int, default=256, metavar="N", help="tokens of an answer at most")
    one.add_argument("--batch", type=int, default=160, metavar="N", help="conversations written at a time")
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--worker", type=_worker, default=(0, 1), metavar="I/N", help="of N processes that write into one folder, this is number I")
    two = command("fit", _fit, "Train one drafter on those texts.")
    two.add_argument("drafter", metavar="DRAFTER", help=f"{', '.join(NETS)}, or a recipe's .toml file")
    two.add_argument("--data", type=Path, nargs="+", required=True, metavar="FOLDER")
    two.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    two.add_argument("--set", type=_setting, action="append", default=[], metavar="KEY=VALUE", help="change an entry of the recipe")
    two.add_argument("--fraction", type=float, default=1.0, metavar="X", help="of the shards, the first ones")
    two.add_argument("--begin-with", type=Path, metavar="FOLDER", help="go on from an earlier run's weights, or exported ones, with a schedule of its own")
    two.add_argument("--stop-at", type=int, metavar="N", help="end after this step, to go on later")
    three = command("evaluate", _evaluate, "Measure trained drafters and lookups on held-out texts.")
    three.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="folders that fit wrote")
    three.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="texts of --part test")
    three.add_argument("--per-category", type=int, default=0, metavar="N", help="use so many answers only (default: all)")
    three.add_argument("--quantization", default="auto", metavar="NAME", help="of --cost: the target's (default: as the app runs it)")
    three.add_argument("--cost", type=int, default=0, metavar="N", help="instead: run the drafters that come with specviz on N of the prompts")
    three.add_argument("--methods", nargs="*", metavar="NAME", help="of --cost: only these")
    three.add_argument("--k", type=int, nargs="*", default=[2, 4], metavar="K", help="of --cost: draft lengths")
    three.add_argument("--depth", type=int, default=6, metavar="N", help="longest chain")
    three.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    four = command("export", _export, "Write a trained drafter as a folder with config.json and model.safetensors.")
    four.add_argument("run", type=Path, metavar="RUN")
    four.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    four.add_argument("--full", action="store_true", help="for other tools: with LM head, embeddings and vocabulary maps")
    four.add_argument("--int8", action="store_true", help="half as large, for specviz alone; not for the draft model")
    four.add_argument("--fact", type=_setting, action="append", default=[], metavar="KEY=VALUE", help="put into the configuration's specviz block")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 1 with one sentence on stderr if something that the user gave does not work."""
    args = _parser().parse_args(argv)
    try:
        args.run_command(args)
    except SpecvizError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
