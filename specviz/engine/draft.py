"""A draft: the tree of guessed tokens that one verification checks. It knows nothing of who guessed them."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Draft", "EMPTY", "ROOT"]

ROOT = -1


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed continuations of the last committed token, as a tree. A chain is a tree with one branch, nothing is plain decoding.

    tokens: n token ids, parents before children, siblings in the order in which they are tried.
    parents: n indices into `tokens`, `ROOT` for children of the last committed token; parents[i] < i.
    probs: [n, V], row i the distribution node i was really drawn from, given its parent and its earlier siblings. None means that every
        node was chosen (by rank, or looked up), not drawn; a chosen node inside a drawn draft has a one-hot row. Getting this wrong
        makes verification lossy (design of the tree rule: SpecInfer, arXiv 2305.09781; Leviathan et al., arXiv 2211.17192).
    judged: False for nodes that are fed but never judged; None means all are judged. Must not depend on drawn tokens.
    scores: for the eye only; verification never reads them.
    shown_probs: [n, V], the drafter's own probabilities at temperature 1 where nodes were chosen from them; for the eye only as well.
    stop: why drafting ended ("length", "confidence", "no match", "eos", "budget", ...).
    by: which part made it, where a drafter has several. num_pooled: n-grams in the drafter's pool, if it has one.
    """
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: Any = None
    judged: tuple[bool, ...] | None = None
    scores: tuple[float, ...] | None = None
    shown_probs: Any = None
    stop: str = ""
    by: str = ""
    num_pooled: int | None = None

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents), "one parent per token"
        assert all(ROOT <= parent < i for i, parent in enumerate(self.parents)), "parents come before their children"
        assert self.probs is None or len(self.probs) == len(self.tokens), "one row of probabilities per token"
        assert self.judged is None or len(self.judged) == len(self.tokens), "one flag per token"

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int], probs: Any = None, stop: str = "") -> Draft:
        """One guess after the other."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), probs, stop=stop)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], stop: str = "") -> Draft:
        """A tree of chosen tokens from root-to-leaf paths, most trusted first; common prefixes are merged.

        >>> Draft.from_paths([[5, 6], [5, 7], [8]]).parents
        (-1, 0, 0, -1)
        """
        tokens: list[int] = []
        parents: list[int] = []
        seen: dict[tuple[int, int], int] = {}
        for path in paths:
            parent = ROOT
            for token in path:
                key = (parent, token)
                if key not in seen:
                    seen[key] = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
                parent = seen[key]
        return cls(tuple(tokens), tuple(parents), stop=stop)

    @property
    def is_chain(self) -> bool:
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    @property
    def num_judged(self) -> int:
        """Nodes that verification may judge (all but the window)."""
        return len(self.tokens) if self.judged is None else sum(self.judged)

    def children(self, parent: int) -> list[int]:
        """Judged children of a node (or `ROOT`), in the order in which they are tried."""
        return [i for i, p in enumerate(self.parents) if p == parent and (self.judged is None or self.judged[i])]

    def path(self, node: int) -> list[int]:
        """Node indices from the root's child down to `node`; empty for `ROOT`."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    @property
    def depths(self) -> tuple[int, ...]:
        """1 for the root's children, their children 2, and so on."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def truncate(self, num_nodes: int, stop: str = "budget") -> Draft:
        """The first `num_nodes` nodes: still a tree, since parents come first. Lossless: the cut looks at no drawn token."""
        if len(self) <= num_nodes:
            return self
        n = max(0, num_nodes)

        def head(rows: Any) -> Any:
            return None if rows is None else rows[:n]
        return replace(self, tokens=self.tokens[:n], parents=self.parents[:n], probs=head(self.probs), judged=head(self.judged),
                       scores=head(self.scores), shown_probs=head(self.shown_probs), stop=stop)


EMPTY = Draft()
