"""Measures drafters on texts that the target wrote to prompts nobody trained on. It knows nothing of training.

The target does not run again: what it chose stands in the texts, its states beside them (`walk.py` says why that is enough).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ..drafters.prompt_lookup import PromptLookup
from ..drafters.suffix import Suffix
from ..engine.drafting import Budget, Drafter, DraftSettings
from .fit import Batches
from .heads import Net
from .store import Text
from .walk import MISS, Accept, Ranked, Tally, chain, drawn, interval, rates, walk

__all__ = ["LOOKUPS", "Row", "TREES", "chains", "lookup_ranks", "measure", "net_ranks", "summarise", "table"]

_DEPTH = 6
Drafts = Sequence[Ranked]


@torch.inference_mode()
def net_ranks(net: Net, texts: Sequence[Text], batches: Batches, depth: int = _DEPTH, mixed: bool = False) -> list[Ranked]:
    """How a trained drafter ranks what the target wrote in each text's last answer, at every place and depth.

    A head that guesses several depths at once, or one after another from its own states, sees the text as it would while drafting: what
    it is fed after the first guess is right wherever that guess was, and nothing behind a wrong guess counts. mixed: in bfloat16, where
    that is faster.
    """
    before, net.depth = net.depth, depth if net.kind == "eagle" else net.depth
    device = net.given.head.device.type
    mixed = mixed and (device != "cpu" or torch.cpu._is_avx512_bf16_supported())
    with torch.autocast(device, torch.bfloat16, enabled=mixed):
        found = _ranks(net, texts, batches, depth)
    net.depth = before
    return found


def _ranks(net: Net, texts: Sequence[Text], batches: Batches, depth: int) -> list[Ranked]:
    place_of = torch.full((len(net.given.head),), -1, dtype=torch.long)
    found = []
    for text in texts:
        start, end = text.answers[-1]
        batch = batches.make([text])
        length = batch.tokens.shape[1]
        end = min(end, length)
        guesses = net.guesses(batch)
        place_of.fill_(-1)
        place_of[net.ids] = torch.arange(len(net.ids))
        shift_of_first = guesses[0][0]
        columns = []
        for shift, read in guesses:
            # the guess about token `start + i + d` was made at place `start + i + d - shift`
            depth_here = shift - shift_of_first
            targets = torch.arange(start + depth_here, end)
            ranks = np.full(end - start, MISS, np.uint8)
            if len(targets):
                logits = net.logits(read[0, targets - shift]).float()
                place = place_of[batch.tokens[0, targets]]
                own = logits.gather(1, place.clamp(min=0)[:, None])
                rank = (logits > own).sum(-1).clamp(max=MISS - 1)
                ranks[:len(targets)] = torch.where(place < 0, MISS, rank).numpy().astype(np.uint8)
            columns.append(ranks)
        if len(columns) == 1 and net.kind in ("exit_adapter", "draft_model"):         # each guess is made from the text before it alone
            columns = [np.concatenate([columns[0][d:], np.full(d, MISS, np.uint8)])[:end - start] for d in range(depth)]
        overlaps = None
        if net.is_drawn and text.temperature > 0:
            shift, read = guesses[0]
            targets = torch.arange(start, end)
            mine = net.logits(read[0, targets - shift]).float().softmax(-1)
            theirs = F.linear(batch.states[0, targets - 1], net.given.head).softmax(-1)[:, net.ids]
            overlaps = torch.minimum(mine, theirs).sum(-1).numpy()
        found.append(Ranked(start, np.stack(columns, 1), overlaps=overlaps))
    return found


@dataclass(slots=True)
class _Asked:
    """What the lookup drafters read of a request."""
    tokens: list[int]
    settings: DraftSettings
    drafting: Any = None


def lookup_ranks(drafter: Drafter, texts: Sequence[Text], depth: int = _DEPTH) -> list[Ranked]:
    """The same for a drafter that only reads the text. A tree counts with its first branch's depth: rank 0 where any branch goes on right."""
    found = []
    for text in texts:
        start, end = text.answers[-1]
        tokens = text.tokens.tolist()
        asked = _Asked(tokens[:start], DraftSettings(depth))
        ranks, number = np.full((end - start, depth), MISS, np.uint8), np.zeros(end - start, np.uint8)
        for place in range(start, end):
            if place > start:
                asked.tokens.append(tokens[place - 1])
            draft = drafter.propose([asked], [Budget(depth, depth)])[0]       # type: ignore[list-item]
            number[place - start] = max((draft.depths[node] for node in range(len(draft))), default=0) if len(draft) else 0
            going = -1
            for d in range(min(depth, end - place)):
                child = next((node for node in range(len(draft)) if draft.parents[node] == going and draft.tokens[node] == tokens[place + d]), None)
                if child is None:
                    break
                ranks[place - start, d] = 0
                going = child
        found.append(Ranked(start, ranks, number))
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """One drafter in one setting on one category. rates: acceptance by depth."""
    drafter: str
    setting: str
    category: str
    num_answers: int
    tokens_per_step: float
    low: float
    high: float
    rates: tuple[float, ...]


def measure(name: str, drafts: Drafts, settings: Mapping[str, Accept | Callable[[int], Accept]], categories: Sequence[str],
            depth: int = _DEPTH) -> list[Row]:
    """A row for every setting and category, and for all together. A setting that depends on the answer is a function of its number."""
    rows = []
    for setting, accept in settings.items():
        tallies = [walk(ranked, accept) for ranked in drafts]
        rows += summarise(name, setting, tallies, categories, depth)
    return rows


def summarise(name: str, setting: str, tallies: Sequence[Tally], categories: Sequence[str], depth: int = _DEPTH) -> list[Row]:
    rows = []
    for category in ["all", *sorted(set(categories))]:
        chosen = [tally for tally, each in zip(tallies, categories, strict=True) if category in ("all", each)]
        rows.append(Row(name, setting, category, len(chosen), *interval(chosen), tuple(rates(chosen, depth))))
    return rows


def chains(sampled: bool, is_drawn: bool, longest: int = _DEPTH) -> dict[str, Accept]:
    """Chains of 1 to `longest`; drawn where the drafter draws and the text was sampled."""
    return {f"K={length}": drawn(length) if sampled and is_drawn else chain(length) for length in range(1, longest + 1)}


def table(rows: Sequence[Row], setting: str) -> str:
    """A Markdown table of one setting: drafters down, categories across."""
    categories = list(dict.fromkeys(row.category for row in rows))
    lines = [f"| drafter | {' | '.join(categories)} |", "|---" * (len(categories) + 1) + "|"]
    for name in dict.fromkeys(row.drafter for row in rows):
        cells = {row.category: row for row in rows if row.drafter == name and row.setting == setting}
        if cells:
            lines.append(f"| {name} | " + " | ".join(
                f"{cells[c].tokens_per_step:.2f} ({cells[c].low:.2f}–{cells[c].high:.2f})" if c in cells else "" for c in categories) + " |")
    return "\n".join(lines)


LOOKUPS: dict[str, Callable[[], Drafter]] = {"prompt lookup": PromptLookup, "suffix": Suffix}
TREES: dict[str, tuple[tuple[int, ...], ...]] = {
    "tree of 5": ((0,), (0, 0), (1,), (0, 0, 0), (0, 1)), "tree of 8": ((0,), (0, 0), (1,), (0, 0, 0), (0, 1), (2,), (0, 0, 0, 0), (1, 0))}
