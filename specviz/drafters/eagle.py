"""EAGLE, EAGLE-2 and EAGLE-3: a one-layer head guesses the target's next states and, from them, a tree of tokens.

EAGLE (arXiv 2401.15077) grows a tree of fixed shape, EAGLE-2 (arXiv 2406.16858) one that follows the head's confidence, with the same
weights; EAGLE-3 (arXiv 2503.01840) grows EAGLE-2's tree with another head. None knows what is inside the head (`eagle_head.py`).

The head reads pairs: entry i of its cache is token i + 1 with the target's state at i. Where the target has read n tokens and one more is
known, pairs 0 to n - 1 are complete. States that the head guessed live for one proposal only: its entries are dropped at the end, and
whatever the target commits is read again with the target's own states.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..engine.cache import KVCache
from ..engine.draft import ROOT, Draft
from ..engine.drafting import Budget, Outcome
from ..engine.sequence import Sequence
from .eagle_head import EagleHead
from .parts import Parts
from .static_tree import Path, best_tree, prefix

__all__ = ["Eagle", "Eagle2", "Eagle3", "missing"]

_CHUNK = 256                   # pairs of a long prompt read at a time
_SPARE = 1024                  # entries that a tree may need beyond the context, inner nodes only
_DEPTH, _WIDTH = 6, 10         # as deep and wide as the reference grows its trees; the paper tries 5 to 7
# A judgement: the head's first guess is right three times out of four, ranks 2 to 10 share the rest. It only orders the fixed tree.
_CHANCES = ((0.75, 0.09, 0.04, 0.025, 0.018, 0.014, 0.011, 0.009, 0.007, 0.006),) * _DEPTH


def missing(kind: str) -> Callable[[Parts], str]:
    """Why a method with heads of this kind cannot run."""
    sentence = f"no {'EAGLE-3' if kind == 'eagle3' else 'EAGLE'} head is loaded; start with --draft and a head that was trained for this target"
    return lambda parts: "" if kind in parts.heads else sentence


@dataclass(slots=True)
class _State:
    """Per request: its row in the head's cache, and the target's states from that row's length on, `known` of all tokens counted."""
    row: int
    known: int = 0
    states: list[Tensor] = field(default_factory=list)       # [m, H'] each


@dataclass(slots=True)
class _Tree:
    """A tree in the making. Lists run over its nodes, dictionaries over those that were read, `ROOT` standing for the committed text."""
    sequence: Sequence
    budget: Budget
    state: _State
    shape: frozenset[Path] = frozenset()                     # of a fixed tree
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)          # by rank
    scores: list[float] = field(default_factory=list)        # log of the product of the head's probabilities
    entries: dict[int, int] = field(default_factory=dict)    # where it lies among the staged entries
    carried: dict[int, Tensor] = field(default_factory=dict)
    log_probs: dict[int, Tensor] = field(default_factory=dict)

    def add(self, parent: int, tokens: Seq[int], log_probs: Seq[float], ranks: Seq[int]) -> None:
        base, path = (0.0, ()) if parent == ROOT else (self.scores[parent], self.paths[parent])
        for rank in ranks:
            if log_probs[rank] > float("-inf"):
                self.tokens.append(tokens[rank])
                self.parents.append(parent)
                self.paths.append((*path, rank))
                self.scores.append(base + log_probs[rank])


class Eagle:
    """The fixed tree. Guesses are chosen by rank, never drawn.

    tree: paths of ranks, parents first, most trusted first; a budget of n nodes takes the first n (`static_tree.chain_tree` gives a chain).
    By default the n paths most likely right.
    """
    name, kind = "eagle", "eagle"

    def __init__(self, parts: Parts, *, tree: Seq[Path] | None = None) -> None:
        self._head = EagleHead(parts.heads[self.kind], parts.target)
        self._target, self._target_cache = parts.target, parts.cache
        self._cache = KVCache(parts.cache.capacity + _SPARE, parts.target.device)
        self._fixed = tree
        self.needs = self._head.needs

    # ---- what differs between the methods -------------------------------------------------------------------------------
    def _shape(self, budget: Budget) -> frozenset[Path]:
        """All paths of the tree, where they are known beforehand."""
        if self._fixed is None:
            return frozenset(best_tree(_CHANCES[:budget.depth], budget.nodes))
        return frozenset(prefix(self._fixed, budget.nodes, budget.depth))

    def _children(self, tree: _Tree, node: int, width: int) -> list[int]:
        """Which of the `width` best guesses behind a node become nodes."""
        path = () if node == ROOT else tree.paths[node]
        return [rank for rank in range(width) if (*path, rank) in tree.shape]

    def _frontier(self, tree: _Tree, level: Seq[int]) -> list[int]:
        """Which of the newest nodes are read, to get children."""
        return [node for node in level if self._children(tree, node, _WIDTH)]

    def _chosen(self, tree: _Tree) -> list[int]:
        """Which nodes are proposed."""
        return list(range(len(tree.tokens)))

    # ---- drafting -------------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        trees = []
        for sequence, budget in zip(sequences, budgets):
            sequence.draft_kv = None
            if min(budget.nodes, budget.depth) > 0:
                trees.append(_Tree(sequence, budget, sequence.drafting, self._shape(budget)))
        self._root(trees)
        going = [(tree, list(range(len(tree.tokens)))) for tree in trees]
        while going := [(tree, frontier) for tree, level in going if (frontier := self._frontier(tree, level))]:
            going = self._deepen(going)
        drafts = {}
        for tree in trees:
            num_pairs = tree.entries[ROOT] + 1
            tree.sequence.draft_kv = self._cache.keep(tree.state.row, range(num_pairs))
            tree.state.states.clear()
            drafts[tree.sequence.id] = self._draft(tree)
        return [drafts.get(sequence.id) or Draft(stop="budget") for sequence in sequences]

    def _root(self, trees: list[_Tree]) -> None:
        """Read the pairs that became complete, and guess what follows the text."""
        feeds, tokens, states = [], [], []
        for tree in trees:
            state, sequence = tree.state, tree.sequence
            fused = self._head.fuse(torch.cat(state.states))
            while len(fused) > _CHUNK:
                start = self._cache.length(state.row) + 1
                self._head.forward([self._cache.stage(state.row, _CHUNK)], self._ids(sequence.tokens[start:start + _CHUNK]), fused[:_CHUNK])
                self._cache.keep(state.row, range(_CHUNK))
                fused = fused[_CHUNK:]
            pairs = sequence.tokens[self._cache.length(state.row) + 1:]
            assert len(pairs) == len(fused), "one state of the target for each pair"
            feeds.append(self._cache.stage(state.row, len(pairs)))
            tokens.extend(pairs)
            states.append(fused)
            tree.entries[ROOT] = len(pairs) - 1
        if trees:
            ends = torch.tensor([len(part) for part in states]).cumsum(0) - 1
            guess = self._head.forward(feeds, self._ids(tokens), torch.cat(states))
            self._grow([(tree, ROOT) for tree in trees], guess.carried[ends], guess.read[ends])

    def _deepen(self, going: list[tuple[_Tree, list[int]]]) -> list[tuple[_Tree, list[int]]]:
        """Read these nodes of all trees at once; returns each tree with its new nodes."""
        feeds, read = [], []
        for tree, frontier in going:
            first = self._cache.fed(tree.state.row)
            feeds.append(self._cache.stage(tree.state.row, len(frontier), [tree.entries[tree.parents[node]] for node in frontier]))
            tree.entries.update((node, first + i) for i, node in enumerate(frontier))
            read.extend((tree, node) for node in frontier)
        before = [len(tree.tokens) for tree, _ in going]
        guess = self._head.forward(feeds, self._ids([tree.tokens[node] for tree, node in read]),
                                   torch.stack([tree.carried[tree.parents[node]] for tree, node in read]))
        self._grow(read, guess.carried, guess.read)
        return [(tree, list(range(start, len(tree.tokens)))) for (tree, _), start in zip(going, before)]

    def _grow(self, read: list[tuple[_Tree, int]], carried: Tensor, states: Tensor) -> None:
        """Give the nodes that were just read their children."""
        log_probs = self._head.log_probs(states)
        top = log_probs.topk(min(_WIDTH, log_probs.shape[-1]), -1)
        tokens = (top.indices if self._head.token_ids is None else self._head.token_ids[top.indices]).tolist()
        for i, ((tree, node), ids, values) in enumerate(zip(read, tokens, top.values.tolist())):
            tree.carried[node], tree.log_probs[node] = carried[i], log_probs[i]
            tree.add(node, ids, values, self._children(tree, node, len(ids)))

    def _draft(self, tree: _Tree) -> Draft:
        chosen = self._chosen(tree)
        index = {node: i for i, node in enumerate(chosen)}
        parents = [tree.parents[node] for node in chosen]
        shown = None
        if tree.sequence.keep_probs and chosen:
            rows = sorted(set(parents))
            probs = torch.stack([tree.log_probs[node] for node in rows]).exp()
            if self._head.token_ids is not None:
                probs = probs.new_zeros(len(rows), self._target.num_tokens).index_add_(-1, self._head.token_ids, probs)
            shown = probs[[rows.index(parent) for parent in parents]]
        scores = torch.tensor([tree.scores[node] for node in chosen], dtype=torch.float64).exp().tolist()
        tokens, parents = [tree.tokens[node] for node in chosen], [index.get(parent, ROOT) for parent in parents]
        return Draft(tuple(tokens), tuple(parents), scores=tuple(scores), shown_probs=shown, stop="length")

    def _ids(self, tokens: Seq[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.long, device=self._target.device)

    # ---- the rest of the protocol ---------------------------------------------------------------------------------------
    def observe(self, outcomes: Seq[Outcome]) -> None:
        """Store the target's states of all tokens that it committed."""
        for outcome in outcomes:
            sequence = outcome.sequence
            if sequence.drafting is None:
                sequence.drafting = _State(self._cache.allocate())
            state: _State = sequence.drafting
            pending = len(outcome.hidden) - len(outcome.draft)
            path = outcome.verdict.path if outcome.verdict else ()
            kept = self._target_cache.length(sequence.row) - state.known         # a block cut by EOS or a stop is shorter than its path
            state.states.append(outcome.hidden[[*range(pending), *(pending + node for node in path)][:kept]])
            state.known += kept

    def fork(self, source: Sequence, target: Sequence, length: int) -> int:
        """Copy the row. Its next pair needs the target's state at the fork's last token; where that was used up, the token is read anew."""
        if source.drafter is not self or source.drafting is None:
            return 0
        state: _State = source.drafting
        first = self._cache.length(state.row)                # token of the first state that is still there
        if length > first:
            states = [torch.cat(state.states)[:length - first].clone()]
            target.drafting = _State(self._cache.fork(state.row, first), length, states)
            return length
        if length > 1:
            target.drafting = _State(self._cache.fork(state.row, length - 1), length - 1)
        return length - 1

    def release(self, sequence: Sequence) -> None:
        if sequence.drafting is not None:
            self._cache.free(sequence.drafting.row)
            sequence.drafting = None


class Eagle2(Eagle):
    """The tree that follows the head's confidence: expand, then rerank (arXiv 2406.16858, section 4).

    Expand: at each depth the `width` best nodes by the product of probabilities along their path get their `width` best children.
    Rerank: of all nodes the best of the budget are proposed. They hang together, since a child is never worth more than its parent.
    """
    name = "eagle2"

    def __init__(self, parts: Parts, *, depth: int = _DEPTH, width: int = _WIDTH) -> None:
        super().__init__(parts)
        self._depth, self._width = depth, width

    def _shape(self, budget: Budget) -> frozenset[Path]:
        return frozenset()

    def _children(self, tree: _Tree, node: int, width: int) -> list[int]:
        return list(range(min(width, self._width, tree.budget.nodes)))

    def _frontier(self, tree: _Tree, level: Seq[int]) -> list[int]:
        if not level or len(tree.paths[level[0]]) >= min(self._depth, tree.budget.depth):
            return []
        return sorted(sorted(level, key=lambda node: -tree.scores[node])[:min(self._width, tree.budget.nodes)])

    def _chosen(self, tree: _Tree) -> list[int]:
        order = sorted(range(len(tree.tokens)), key=lambda node: -tree.scores[node])         # stable: of equals the shallower comes first
        return order[:tree.budget.nodes]


class Eagle3(Eagle2):
    """EAGLE-2's tree from a head that reads three of the target's layers and was trained on its own guesses."""
    name, kind = "eagle3", "eagle3"
