"""A small model with the same tokenizer guesses a tree: the most probable continuations when greedy, drawn siblings when sampling.

It knows nothing of how the tree is judged. The draft model reads a tree level by level, one forward per level for all sequences; its
entries stay staged until the target has chosen a path.
"""
from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..engine.draft import ROOT, Draft
from ..engine.drafting import Budget
from ..engine.model import Row
from ..engine.option import Option
from ..engine.sampling import distribution, penalized
from ..engine.sequence import Sequence
from ..engine.verify import without
from .chain import Chain, fitted
from .draft_model import DraftModel
from .parts import Parts

__all__ = ["ChosenTree", "DraftTree", "DrawnTree", "options", "shape"]

# Supposed chances that the first, second, ... sibling is the one; they only shape the tree.
_ACCEPTED = (0.7, 0.2, 0.07, 0.03, 0.015, 0.008, 0.005, 0.003)


def options(parts: Parts) -> tuple[Option, ...]:
    """What can be set; K is the number of nodes."""
    return (Option("width", "Children per node", "whole", 3, "How many continuations of one token are tried at most; 1 is a chain.", 1,
                   len(_ACCEPTED)),
            Option("depth", "Depth", "whole", 8, "Tokens on the longest path at most; each level is one more pass of the "
                   "draft model.", 1, 16),
            Option("siblings", "Siblings when sampling", "choice", "drawn", "Greedy answers always take the most probable continuations.",
                   choices=(("drawn", "drawn, without replacement"), ("top", "the most probable"))))


@lru_cache(maxsize=256)
def shape(num_nodes: int, depth: int, width: int) -> tuple[int, ...]:
    """The parents of the drawn tree's nodes, level by level, siblings in the order they are tried.

    The best tree of this size if the s-th sibling were accepted with a fixed chance wherever it stands (Chen et al. 2024, arXiv
    2402.12374): a function of the arguments alone, since a shape that looked at drawn tokens would change the text's law.

    >>> shape(5, 5, 2)
    (-1, -1, 0, 2, 3)
    """
    heap = [(-chance, (sibling,)) for sibling, chance in enumerate(_ACCEPTED[:width])] if depth else []
    heapq.heapify(heap)
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) < num_nodes:
        negative, path = heapq.heappop(heap)
        paths.append(path)
        if len(path) < depth:
            for sibling, chance in enumerate(_ACCEPTED[:width]):
                heapq.heappush(heap, (negative * chance, (*path, sibling)))
    paths.sort(key=lambda path: (len(path), path))
    index = {path: i for i, path in enumerate(paths)}
    return tuple(index[path[:-1]] if len(path) > 1 else ROOT for path in paths)


class DrawnTree:
    """A tree of a fixed shape whose siblings are drawn without replacement, each from its conditional distribution.

    frontier: nodes (or `ROOT`) whose children are drawn next. draw: (probs [V], depth of the token from 0, number of the token at that
    depth) -> token. A node has fewer children than its shape says only where fewer tokens are possible, which no draw can change.
    """

    def __init__(self, parents: Seq[int], draw: Callable[[Any, int, int], int]) -> None:
        self._draw = draw
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            self._children.setdefault(parent, []).append(node)
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probs: list[Any] = []
        self._depth = 0
        self._shapes = {ROOT: ROOT}                    # which node of the shape a node is
        self.frontier = [ROOT] if parents else []

    def add(self, rows: Seq[Any]) -> None:
        """Draw the children of the frontier's nodes from their distributions, [V] each; the frontier moves one level on."""
        level: list[int] = []
        for node, left in zip(self.frontier, rows, strict=True):
            wanted = self._children[self._shapes[node]][:int(left.count_nonzero())]
            for i, child in enumerate(wanted):
                token = self._draw(left, self._depth, len(level))
                self._shapes[len(self.tokens)] = child
                level.append(len(self.tokens))
                self.tokens.append(token)
                self.parents.append(node)
                self.probs.append(left)
                if i + 1 < len(wanted):
                    left = without(left, token)
        self._depth += 1
        self.frontier = [node for node in level if self._shapes[node] in self._children]

    def finished(self) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
        """Tokens, parents, and for each node of the draft its number here."""
        return tuple(self.tokens), tuple(self.parents), list(range(len(self.tokens)))


class ChosenTree:
    """The `num_nodes` continuations with the largest path probability, as EAGLE-2 expands and reranks (Li et al. 2024, arXiv 2406.16858).

    Nothing is drawn, so the shape may follow the probabilities. frontier: nodes (or `ROOT`) to expand next: those of the last level that
    are among the best so far. most_fed: nodes that may be expanded in all.
    """

    def __init__(self, num_nodes: int, depth: int, width: int, most_fed: int) -> None:
        self._num_nodes, self._max_depth, self._width, self._most_fed = num_nodes, depth, width, most_fed
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.probs: list[Tensor] = []
        self._depth = 0
        self.frontier = [ROOT] if num_nodes > 0 and depth > 0 else []

    def add(self, rows: Seq[Tensor]) -> None:
        """Expand the frontier's nodes by their distributions, [V] each."""
        level: list[int] = []
        for node, row in zip(self.frontier, rows, strict=True):
            top = row.topk(min(self._width, len(row)))
            for prob, token in zip(top.values.tolist(), top.indices.tolist()):
                if prob <= 0:
                    break
                level.append(len(self.tokens))
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(prob * (self.scores[node] if node != ROOT else 1.0))
                self.probs.append(row)
        self._depth += 1
        best = self._best()
        going = [node for node in best if node in set(level)][:self._most_fed] if self._depth < self._max_depth else []
        self._most_fed -= len(going)
        self.frontier = going

    def finished(self) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
        """Tokens, parents, and for each node of the draft its number here."""
        best = self._best()
        place = {ROOT: ROOT} | {node: i for i, node in enumerate(best)}
        return tuple(self.tokens[node] for node in best), tuple(place[self.parents[node]] for node in best), best

    def _best(self) -> list[int]:
        """The best nodes so far, best first. A child is never worth more than its parent and comes after it: always a tree."""
        return sorted(range(len(self.tokens)), key=lambda node: -self.scores[node])[:self._num_nodes]


@dataclass(slots=True)
class _Growth:
    """One sequence's tree in the making. staged: where each fed node lies among the cache's staged entries."""
    sequence: Sequence
    row: int
    pending: list[int]
    tree: DrawnTree | ChosenTree
    num_tokens: int
    staged: dict[int, int] = field(default_factory=dict)

    def next_row(self) -> Row:
        """What the draft model reads next: the pending tokens, then the frontier."""
        tree = self.tree
        if tree.frontier == [ROOT]:
            return Row(self.row, self.pending, num_logits=1)
        last = len(self.pending) - 1
        parents = [last if tree.parents[node] == ROOT else self.staged[tree.parents[node]] for node in tree.frontier]
        for node in tree.frontier:
            self.staged[node] = len(self.pending) + len(self.staged)
        return Row(self.row, [tree.tokens[node] for node in tree.frontier], parents)

    def add(self, logits: Tensor) -> None:
        """Grow by one level from [frontier, V'] logits."""
        params, logits = self.sequence.params, fitted(logits, self.num_tokens)
        histories = [self.sequence.tokens + self._path(node) for node in self.tree.frontier] if params.repetition_penalty != 1 else None
        probs = penalized(logits, params, histories).softmax(-1) if params.greedy else distribution(logits, params, histories)
        self.tree.add(list(probs))

    def draft(self) -> Draft:
        """The finished draft: drawn with its distributions, or chosen with scores."""
        tokens, parents, order = self.tree.finished()
        if isinstance(self.tree, DrawnTree):
            return Draft(tokens, parents, torch.stack(self.tree.probs), stop="length")
        shown = torch.stack([self.tree.probs[node] for node in order]) if self.sequence.keep_probs and order else None
        return Draft(tokens, parents, scores=tuple(self.tree.scores[node] for node in order), shown_probs=shown, stop="length")

    def kept(self) -> dict[int, int]:
        """The draft's nodes that were fed, and where they lie."""
        return {i: self.staged[node] for i, node in enumerate(self.tree.finished()[2]) if node in self.staged}

    def _path(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.append(self.tree.tokens[node])
            node = self.tree.parents[node]
        return path[::-1]


class DraftTree(DraftModel):
    """Drafts trees with `parts.draft`. The user's K is the number of nodes.

    width: children per node at most. A greedy request gets the K most probable paths, and a sampled one that asks for "top" siblings:
    those are chosen, point masses to the verifier. Otherwise K nodes in the fixed shape of `shape` are drawn.
    """
    name = "draft_tree"

    def __init__(self, parts: Parts, *, width: int = 3) -> None:
        super().__init__(parts)
        self._width = width

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        begun = [self._begin(*each) for each in zip(sequences, budgets)]
        going = growths = [growth for growth in begun if isinstance(growth, _Growth)]
        while going:
            for growth, output in zip(going, self._model.forward([growth.next_row() for growth in going], self._cache), strict=True):
                growth.add(output.logits)
            going = [growth for growth in going if growth.tree.frontier]
        for growth in growths:
            growth.sequence.drafting.staged = growth.kept()
        return [growth.draft() if isinstance(growth, _Growth) else Draft(stop=growth) for growth in begun]

    def _begin(self, sequence: Sequence, budget: Budget) -> _Growth | str:
        """A tree to grow, with everything but its last pending tokens read; or why nothing can be drafted."""
        chain = self._chain(sequence, budget)
        if not isinstance(chain, Chain):
            return chain
        settings, room = sequence.settings, self._cache.capacity - len(sequence.tokens)
        width, depth = settings.option("width", self._width), min(chain.length, settings.option("depth", chain.length))
        if sequence.params.greedy or settings.option("siblings", "drawn") == "top":
            tree: DrawnTree | ChosenTree = ChosenTree(budget.nodes, depth, width, room)
        else:
            def draw(probs: Tensor, depth: int, number: int) -> int:
                return sequence.noise.draw_draft(probs, len(sequence.tokens) + depth, sequence.num_steps, number)
            tree = DrawnTree(shape(min(budget.nodes, room + 1), depth, width), draw)
        return _Growth(sequence, chain.row, chain.pending, tree, self._num_tokens)
