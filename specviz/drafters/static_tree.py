"""Trees whose shape is fixed before a token is known: lists of paths, a path being the rank of the guess taken at each depth.

They know nothing of models and tokens. (0, 0) is the best guess at depth 2 behind the best guess at depth 1.
"""
from __future__ import annotations

import heapq
import re
from collections.abc import Sequence as Seq
from functools import lru_cache

from ..engine.option import Option

__all__ = ["MAX_DEPTH", "MAX_RANK", "Path", "best_tree", "chain_tree", "prefix", "tree_option", "written_tree"]

MAX_DEPTH, MAX_RANK, _MAX_PATHS = 16, 9, 256

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


@lru_cache(maxsize=64)
def written_tree(text: str) -> tuple[Path, ...] | None:
    """The tree that a text describes: "best" (None: whatever is best for the budget), "chain", or paths of ranks, parents first.

    >>> written_tree("0 0.0 1 0.1")
    ((0,), (0, 0), (1,), (0, 1))

    Raises ValueError with what was expected.
    """
    words = text.replace(",", " ").split()
    if words in ([], ["best"]):
        return None
    if words == ["chain"]:
        return chain_tree(MAX_DEPTH)
    expected = '"best", "chain", or paths of ranks such as 0 0.0 1 0.1, each behind its parent'
    paths: list[Path] = []
    for word in words:
        if not re.fullmatch(r"\d+(\.\d+)*", word):
            raise ValueError(f"{expected}; {word!r} is no path")
        path = tuple(map(int, word.split(".")))
        if max(path) > MAX_RANK or len(path) > MAX_DEPTH or len(paths) == _MAX_PATHS:
            raise ValueError(f"ranks up to {MAX_RANK}, at most {MAX_DEPTH} deep and {_MAX_PATHS} paths; {word} is beyond that")
        if len(path) > 1 and path[:-1] not in paths:
            raise ValueError(f"{expected}; {word} comes before {'.'.join(map(str, path[:-1]))}")
        if path not in paths:
            paths.append(path)
    return tuple(paths)


def tree_option() -> Option:
    """The setting of methods with a tree of fixed shape."""
    return Option("tree", "Tree", "text", "best", "best: the K paths most likely right; chain: the first guess only; or paths of ranks, "
                  "parents first, such as 0 0.0 1 0.1.", check=written_tree)
