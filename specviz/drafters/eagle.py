"""EAGLE, EAGLE-2 and EAGLE-3: a one-layer head guesses the target's next states and, from them, a tree of tokens.

EAGLE (arXiv 2401.15077) grows a tree of fixed shape, EAGLE-2 (arXiv 2406.16858) one that follows the head's confidence, with the same
weights; EAGLE-3 (arXiv 2503.01840) grows EAGLE-2's tree with another head. None knows what is inside the head (`eagle_head.py`).

The head reads pairs: entry i of its cache is token i + 1 with the target's state at i. Where the target has read n tokens and one more is
known, pairs 0 to n - 1 are complete. States that the head guessed live for one proposal only: its entries are dropped at the end, and
whatever the target commits is read again with the target's own states.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..engine.cache import KVCache
from ..engine.draft import ROOT, Draft
from ..engine.drafting import Budget, DraftSettings, Outcome
from ..engine.option import Option
from ..engine.sequence import Sequence, Status
from .eagle_head import EagleHead, Guess
from .parts import Parts
from .static_tree import MAX_RANK, Path, best_tree, prefix, tree_option, written_tree
from .target_states import HeardStates, hear
from .worth import confidence_option, floor_option, most_worth

__all__ = ["Eagle", "Eagle2", "Eagle3", "fixed_options", "grown_options", "missing"]

_CHUNK = 256                   # pairs of a long prompt read at a time
_TRIAL = 64                    # pairs before a measured pass
_SPARE = 1024                  # entries that a tree may need beyond the context, inner nodes only
_DEPTH, _WIDTH = 6, MAX_RANK + 1         # as deep and wide as the reference grows its trees; the paper tries 5 to 7
# A judgement: the head's first guess is right three times out of four, ranks 2 to 10 share the rest. It only orders the fixed tree.
_CHANCES = (0.75, 0.09, 0.04, 0.025, 0.018, 0.014, 0.011, 0.009, 0.007, 0.006)


def missing(kind: str) -> Callable[[Parts], str]:
    """Why a method with heads of this kind cannot run."""
    name = "EAGLE-3" if kind == "eagle3" else "EAGLE"
    sentence = f"no {name} head is loaded; choose a head trained for this target as drafter under Models, or start with --draft"
    return lambda parts: "" if kind in parts.heads else sentence


def _depth_option() -> Option:
    return Option("depth", "Depth", "whole", _DEPTH, "Tokens on the longest path at most; each level is one more pass of the head.", 1, 12)


def fixed_options(parts: Parts) -> tuple[Option, ...]:
    """What can be set of EAGLE's tree; K is the number of nodes."""
    return (tree_option(), _depth_option())


def grown_options(parts: Parts) -> tuple[Option, ...]:
    """What can be set of EAGLE-2's and EAGLE-3's; K is the number of nodes."""
    return (_depth_option(), Option("width", "Width", "whole", _WIDTH, "At each depth so many of the best nodes get so many children; of "
                                    "all these the best K are proposed.", 1, _WIDTH), confidence_option(parts), floor_option(parts))


@dataclass(slots=True)
class _Tree:
    """A tree in the making. Lists run over its nodes, dictionaries over those that were read, `ROOT` standing for the committed text."""
    sequence: Sequence
    budget: Budget
    state: HeardStates
    shape: frozenset[Path] = frozenset()                     # of a fixed tree
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)          # by rank
    scores: list[float] = field(default_factory=list)        # log of the product of the head's probabilities
    entries: dict[int, int] = field(default_factory=dict)    # where it lies among the staged entries
    carried: dict[int, Tensor] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    stop: str = "length"                                     # why it is no larger

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
    def _shape(self, sequence: Sequence, budget: Budget) -> frozenset[Path]:
        """All paths of the tree, where they are known beforehand."""
        paths = written_tree(sequence.settings.option("tree", "best")) or self._fixed
        depth = min(budget.depth, sequence.settings.option("depth", budget.depth if paths else _DEPTH))
        return frozenset(prefix(paths, budget.nodes, depth) if paths else best_tree((_CHANCES,) * depth, budget.nodes))

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
                trees.append(_Tree(sequence, budget, sequence.drafting, self._shape(sequence, budget)))
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
        feeds, tokens, states, ends = [], [], [], []
        for tree in trees:
            state, sequence = tree.state, tree.sequence
            fused = self._read(sequence, state, self._head.fuse(torch.cat(state.states)), _CHUNK)
            pairs = sequence.tokens[self._cache.length(state.row) + 1:]
            assert len(pairs) == len(fused), "one state of the target for each pair"
            feeds.append(self._cache.stage(state.row, len(pairs)))
            tokens.extend(pairs)
            states.append(fused)
            tree.entries[ROOT] = len(pairs) - 1
            ends.append(len(tokens) - 1)
        if trees:
            guess = self._head.guess(feeds, tokens, torch.cat(states), ends, _WIDTH)
            self._grow([(tree, ROOT) for tree in trees], guess.carried[ends], guess)

    def _read(self, sequence: Sequence, state: HeardStates, fused: Tensor, most_left: int) -> Tensor:
        """Read pairs until at most `most_left` are left; returns what is left of their states."""
        while (count := min(_CHUNK, len(fused) - most_left)) > 0:
            start = self._cache.length(state.row) + 1
            self._head.guess([self._cache.stage(state.row, count)], sequence.tokens[start:start + count], fused[:count], ())
            self._cache.keep(state.row, range(count))
            fused = fused[count:]
        return fused

    def _deepen(self, going: list[tuple[_Tree, list[int]]]) -> list[tuple[_Tree, list[int]]]:
        """Read these nodes of all trees at once; returns each tree with its new nodes."""
        feeds, read = [], []
        for tree, frontier in going:
            first = self._cache.fed(tree.state.row)
            feeds.append(self._cache.stage(tree.state.row, len(frontier), [tree.entries[tree.parents[node]] for node in frontier]))
            tree.entries.update((node, first + i) for i, node in enumerate(frontier))
            read.extend((tree, node) for node in frontier)
        before = [len(tree.tokens) for tree, _ in going]
        guess = self._head.guess(feeds, [tree.tokens[node] for tree, node in read],
                                 torch.stack([tree.carried[tree.parents[node]] for tree, node in read]), range(len(read)), _WIDTH)
        self._grow(read, guess.carried, guess)
        return [(tree, list(range(start, len(tree.tokens)))) for (tree, _), start in zip(going, before)]

    def _grow(self, read: list[tuple[_Tree, int]], carried: Tensor, guess: Guess) -> None:
        """Give the nodes that were just read their children."""
        for i, ((tree, node), tokens, log_probs) in enumerate(zip(read, guess.tokens, guess.log_probs)):
            tree.carried[node], tree.logits[node] = carried[i], guess.logits[i]
            tree.add(node, tokens, log_probs, self._children(tree, node, len(tokens)))

    def _draft(self, tree: _Tree) -> Draft:
        chosen = self._chosen(tree)
        index = {node: i for i, node in enumerate(chosen)}
        parents = [tree.parents[node] for node in chosen]
        shown = None
        if tree.sequence.keep_probs and chosen:
            rows = sorted(set(parents))
            probs = torch.stack([tree.logits[node] for node in rows])
            probs = probs.to(torch.promote_types(probs.dtype, torch.float32)).softmax(-1)
            if self._head.token_ids is not None:
                probs = probs.new_zeros(len(rows), self._target.num_tokens).index_add_(-1, self._head.token_ids, probs)
            shown = probs[[rows.index(parent) for parent in parents]]
        scores = torch.tensor([tree.scores[node] for node in chosen], dtype=torch.float64).exp().tolist()
        tokens, parents = [tree.tokens[node] for node in chosen], [index.get(parent, ROOT) for parent in parents]
        return Draft(tuple(tokens), tuple(parents), scores=tuple(scores), shown_probs=shown, stop=tree.stop)

    @contextmanager
    def single_pass(self) -> Iterator[Callable[[], None]]:
        """While it is open, a function that reads one token behind a short text, for whoever measures what a pass takes."""
        row = self._cache.allocate()
        states = torch.zeros(_TRIAL, self._target.config.hidden_size, dtype=self._target.dtype, device=self._target.device)
        with torch.inference_mode():
            self._head.guess([self._cache.stage(row, _TRIAL)], [1] * _TRIAL, states, ())
        self._cache.keep(row, range(_TRIAL))

        @torch.inference_mode()
        def run() -> None:
            self._head.guess([self._cache.stage(row, 1)], [1], states[:1], [0], _WIDTH)
            self._cache.keep(row, ())
        try:
            yield run
        finally:
            self._cache.free(row)

    # ---- the rest of the protocol ---------------------------------------------------------------------------------------
    @torch.inference_mode()
    def observe(self, outcomes: Seq[Outcome]) -> None:
        """Store the target's states of all tokens that it committed. A prompt that was read to its end is read here too, all but the pair that the
        first guess needs: it belongs to reading the prompt, not to the first draft."""
        hear(outcomes, self._cache, self._target_cache)
        for outcome in outcomes:
            sequence = outcome.sequence
            if outcome.verdict is not None and sequence.num_steps == 1 and sequence.status is Status.RUNNING:
                state: HeardStates = sequence.drafting
                states = torch.cat(state.states)
                self._read(sequence, state, self._head.fuse(states), 1)
                state.states = [states[-1:].clone()]

    def fork(self, source: Sequence, target: Sequence, length: int) -> int:
        """Copy the row. Its next pair needs the target's state at the fork's last token; where that was used up, the token is read anew."""
        if source.drafter is not self or source.drafting is None:
            return 0
        state: HeardStates = source.drafting
        first = self._cache.length(state.row)                # token of the first state that is still there
        if length > first:
            states = [torch.cat(state.states)[:length - first].clone()]
            target.drafting = HeardStates(self._cache.fork(state.row, first), length, states)
            return length
        if length > 1:
            target.drafting = HeardStates(self._cache.fork(state.row, length - 1), length - 1)
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

    def limits(self, settings: DraftSettings) -> dict[str, int]:
        """See `drafting.limits_of`."""
        return most_worth(settings)

    def _shape(self, sequence: Sequence, budget: Budget) -> frozenset[Path]:
        return frozenset()

    def _most(self, tree: _Tree) -> int:
        return min(tree.sequence.settings.option("width", self._width), tree.budget.nodes)

    def _children(self, tree: _Tree, node: int, width: int) -> list[int]:
        return list(range(min(width, self._most(tree))))

    def _frontier(self, tree: _Tree, level: Seq[int]) -> list[int]:
        settings = tree.sequence.settings
        if not level or len(tree.paths[level[0]]) >= min(settings.option("depth", self._depth), tree.budget.depth):
            return []
        if math.exp(max(tree.scores[node] for node in level)) < settings.option("confidence", 0.0):
            tree.stop = "confidence"
            return []
        return sorted(sorted(level, key=lambda node: -tree.scores[node])[:self._most(tree)])

    def _chosen(self, tree: _Tree) -> list[int]:
        order = sorted(range(len(tree.tokens)), key=lambda node: -tree.scores[node])         # stable: of equals the shallower comes first
        floor = tree.sequence.settings.option("floor", 0.0)
        chosen = [node for node in order[:tree.budget.nodes] if math.exp(tree.scores[node]) >= floor]
        if len(chosen) < min(len(order), tree.budget.nodes):
            tree.stop = "confidence"
        return chosen


class Eagle3(Eagle2):
    """EAGLE-2's tree from a head that reads three of the target's layers and was trained on its own guesses."""
    name, kind = "eagle3", "eagle3"
