"""Trees whose shape is fixed before a token is known: lists of paths, a path being the rank of the guess taken at each depth.

They know nothing of models and tokens. (0, 0) is the best guess at depth 2 behind the best guess at depth 1.
"""
from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from functools import lru_cache

__all__ = ["Path", "best_tree", "chain_tree", "prefix"]

Path = tuple[int, ...]


def chain_tree(depth: int) -> tuple[Path, ...]:
    """The best guess at every depth and nothing else.

    >>> chain_tree(3)
    ((0,), (0, 0), (0, 0, 0))
    """
    return tuple((0,) * length for length in range(1, depth + 1))


@lru_cache(maxsize=64)
def best_tree(chances: tuple[tuple[float, ...], ...], num_nodes: int) -> tuple[Path, ...]:
    """The `num_nodes` paths that are most likely right, most likely first, parents before children; a shorter budget takes a prefix.

    chances: for each depth, how likely the guess of each rank is right, falling. A path's chance is their product, as in the tree search
    of Medusa (Cai et al. 2024, arXiv 2401.10774, section 2.3.3).

    >>> best_tree(((0.6, 0.2), (0.5, 0.1)), 4)
    ((0,), (0, 0), (1,), (1, 0))
    """
    heap = [(-chance, 1, (rank,)) for rank, chance in enumerate(chances[0])]
    heapq.heapify(heap)
    paths: list[Path] = []
    while heap and len(paths) < num_nodes:
        negative, depth, path = heapq.heappop(heap)
        paths.append(path)
        if depth < len(chances):
            for rank, chance in enumerate(chances[depth]):
                heapq.heappush(heap, (negative * chance, depth + 1, (*path, rank)))
    return tuple(paths)


def prefix(paths: Seq[Path], num_nodes: int, depth: int) -> list[Path]:
    """The first `num_nodes` paths that are at most `depth` long: still a tree, since parents come first."""
    return [path for path in paths if len(path) <= depth][:num_nodes]
