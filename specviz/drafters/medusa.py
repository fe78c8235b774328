"""Medusa: extra heads on the target's last state guess several tokens ahead at once (Cai et al. 2024, arXiv 2401.10774).

There is no second model and no cache: one state in, a static tree of guesses out. The heads do not know each other's guesses, so deep
paths fit together badly.
"""
from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine.draft import Draft
from ..engine.drafting import Budget, DraftSettings, Outcome
from ..engine.model import FINAL, LanguageModel
from ..engine.option import Option
from ..engine.sequence import Sequence
from .parts import Heads, Parts
from .products import product, products
from .static_tree import Path, best_tree, prefix, tree_option, written_tree
from .worth import floor_option, most_worth

__all__ = ["Medusa", "MedusaHeads", "RANK_CHANCES", "missing", "options"]

# How often the first and one of the first five guesses of each head are right: measured by the authors for Vicuna-7B after one epoch
# (`medusa_acc.csv` of github.com/FasterDecoding/Medusa). Only the order in which a tree grows follows from it.
_TOP_ONE, _TOP_FIVE = (0.56, 0.32, 0.20, 0.15, 0.12), (0.78, 0.56, 0.42, 0.34, 0.30)
_SHARES = (0.45, 0.25, 0.17, 0.13, 0.08, 0.06, 0.05, 0.04, 0.03)        # a judgement: how ranks 2 to 10 share the rest
RANK_CHANCES = tuple((one, *(share * (five - one) for share in _SHARES)) for one, five in zip(_TOP_ONE, _TOP_FIVE))


def missing(parts: Parts) -> str:
    """Why this method cannot run."""
    sentence = "no Medusa heads are loaded; choose heads trained for this target as drafter under Models, or start with --draft"
    return "" if "medusa" in parts.heads else sentence


def options(parts: Parts) -> tuple[Option, ...]:
    """What can be set; K is the number of nodes."""
    num_heads = parts.heads["medusa"].facts["num_heads"] if "medusa" in parts.heads else 1
    return (tree_option(), Option("depth", "Heads used", "whole", num_heads, "Each head guesses one place further ahead.", 1, num_heads),
            floor_option(parts))


class MedusaHeads:
    """All heads on the target's device and in its dtype.

    Head k: h + SiLU(W h + b), as often as it has layers, then an LM head: its own, one that all share, or the target's, with a square matrix
    in front where there is one.
    """

    def __init__(self, heads: Heads, target: LanguageModel) -> None:
        self._target = target
        self._weights = {name: tensor.to(target.device, target.dtype) for name, tensor in heads.tensors.items()
                         if tensor.is_floating_point()}
        self.num_heads: int = heads.facts["num_heads"]
        self._num_layers: int = heads.facts["num_layers"]
        token_map = heads.tensors.get("token_map")
        self.token_ids: Tensor | None = None if token_map is None else token_map.to(target.device)
        self._has_own_heads = "heads.0.lm_head.weight" in self._weights
        rows = None if token_map is None or self._has_own_heads else target.head_rows(self.token_ids)
        self._rows = None if rows is None else product(rows, None, target)
        self._products = products(self._weights, target)

    def log_probs(self, hidden: Tensor, depth: int) -> Tensor:
        """What the first `depth` heads guess behind the target's last states, [n, H] -> [n, depth, D]; D counts `token_ids`, or is the
        target's V."""
        rows = []
        for k in range(depth):
            state = hidden
            for j in range(self._num_layers):
                name = f"heads.{k}.layers.{j}"
                state = state + F.silu(self._products[name](state))
            projection = self._products.get(f"heads.{k}.projection")
            rows.append(state if projection is None else projection(state))
        states = torch.stack(rows, 1)
        if self._has_own_heads:
            logits = torch.stack([self._products[f"heads.{k}.lm_head"](states[:, k]) for k in range(depth)], 1)
        elif self._rows is not None:
            logits = self._rows(states)
        else:
            logits = self._target.head(states.flatten(0, 1)).unflatten(0, (len(hidden), depth))
            logits = logits if self.token_ids is None else logits[..., self.token_ids.clamp(max=self._target.num_tokens - 1)]
        if self.token_ids is None:
            logits = logits[..., :self._target.num_tokens]
        elif (unknown := self.token_ids >= self._target.num_tokens).any():
            logits = logits.masked_fill(unknown, float("-inf"))
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


class Medusa:
    """Proposes the tree's paths, each token the heads' guess of that rank. Guesses are chosen, never drawn.

    tree: paths of ranks, parents first, most trusted first; a budget of n nodes takes the first n. By default the n paths
    most likely right.
    """
    name = "medusa"
    needs: tuple[int, ...] = (FINAL,)

    def __init__(self, parts: Parts, *, tree: Seq[Path] | None = None) -> None:
        self._heads = MedusaHeads(parts.heads["medusa"], parts.target)
        self._num_tokens = parts.target.num_tokens
        self._tree = tree

    def tree(self, num_nodes: int, depth: int, paths: Seq[Path] | None = None) -> list[Path]:
        """The paths that a budget pays for. paths: a tree in place of the drafter's own."""
        depth, paths = min(self._heads.num_heads, depth), paths or self._tree
        if paths is None:
            chances = tuple(RANK_CHANCES[min(k, len(RANK_CHANCES) - 1)] for k in range(depth))
            return list(best_tree(chances, num_nodes))
        return prefix(paths, num_nodes, depth)

    def _wanted(self, sequence: Sequence, budget: Budget) -> list[Path]:
        if min(budget.nodes, budget.depth) <= 0:
            return []
        option = sequence.settings.option
        return self.tree(budget.nodes, min(budget.depth, option("depth", budget.depth)), written_tree(option("tree", "best")))

    def limits(self, settings: DraftSettings) -> dict[str, int]:
        """See `drafting.limits_of`."""
        return most_worth(settings)

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        trees = [self._wanted(*each) for each in zip(sequences, budgets)]
        going = [i for i, tree in enumerate(trees) if tree]
        drafts = [Draft(stop="budget") for _ in sequences]
        if going:
            hidden = torch.stack([sequences[i].drafting for i in going])
            guesses = self._heads.log_probs(hidden, max(len(path) for i in going for path in trees[i]))
            for i, rows in zip(going, guesses):
                drafts[i] = self._draft(sequences[i], trees[i], rows)
        return drafts

    def _draft(self, sequence: Sequence, tree: list[Path], rows: Tensor) -> Draft:
        """rows: [depth, D] log-probabilities."""
        width = min(1 + max(path[-1] for path in tree), rows.shape[-1])
        top = rows.topk(width, -1)
        ids = (top.indices if self._heads.token_ids is None else self._heads.token_ids[top.indices]).tolist()
        values = top.values.tolist()
        nodes: dict[Path, int] = {}
        tokens, parents, scores = [], [], []
        floor, stop = sequence.settings.option("floor", 0.0), "length"
        for path in tree:
            depth, rank = len(path) - 1, path[-1]
            parent = nodes.get(path[:-1], -1)
            if rank >= width or values[depth][rank] == float("-inf") or (depth and parent < 0):
                continue                                     # fewer known tokens than the tree has ranks, or its parent was dropped
            score = values[depth][rank] + (scores[parent] if depth else 0.0)
            if math.exp(score) < floor:
                stop = "confidence"
                continue
            nodes[path] = len(tokens)
            tokens.append(ids[depth][rank])
            parents.append(parent)
            scores.append(score)
        shown = None
        if sequence.keep_probs and tokens:
            probs = rows.exp()
            if self._heads.token_ids is not None:
                probs = probs.new_zeros(len(rows), self._num_tokens).index_add_(
                    -1, self._heads.token_ids.clamp(max=self._num_tokens - 1), probs)
            shown = probs[[len(path) - 1 for path in nodes]]
        products = torch.tensor(scores, dtype=torch.float64).exp().tolist()
        return Draft(tuple(tokens), tuple(parents), scores=tuple(products), shown_probs=shown, stop=stop)

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """Keep the state of the last token that was committed. A block that is cut before it is the sequence's last."""
        for outcome in outcomes:
            pending = len(outcome.hidden) - len(outcome.draft)
            path = outcome.verdict.path if outcome.verdict else ()
            outcome.sequence.drafting = outcome.hidden[pending + path[-1] if path else pending - 1].clone()

    def fork(self, source: Sequence, target: Sequence, length: int) -> int:
        """Everything: the state that the first draft needs is that of the prompt's last token, which is always read anew."""
        return length

    def release(self, sequence: Sequence) -> None:
        sequence.drafting = None
