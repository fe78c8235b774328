"""Keys and values of every token a model has read, one row per sequence. It knows nothing of tokens, drafts or models.

A row has a committed prefix and, behind it, staged entries: whatever forwards have written since the last `keep`. Staged entries form a
tree; an entry's parent may come from an earlier forward of the same step, so a drafter can grow a tree level by level. `keep` commits
the entries of one path and forgets the rest. Rows are stored apart and at full length, also for sliding-window layers, because an
entry that a window has dropped cannot be brought back after a rejection.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import NotEnoughMemory, PromptTooLong
from ..trace import CacheTrace
from .attention import VIEW_MULTIPLE, view_length
from .draft import ROOT

__all__ = ["Branch", "Feed", "KVCache", "Storage", "VIEW"]

VIEW = VIEW_MULTIPLE
_GROWTH = 256      # rows grow by doubling, from this many slots


@dataclass(slots=True, weakref_slot=True, eq=False)
class Storage:
    """One row's entries: how many are committed, the staged tree, and one tensor per layer. Others move it, none but the cache fills it."""
    length: int = 0
    parents: list[int] = field(default_factory=list)        # of the staged entries
    depths: list[int] = field(default_factory=list)         # root's children have depth 0
    keys: list[Tensor | None] = field(default_factory=list)  # per layer [heads, capacity, D]
    values: list[Tensor | None] = field(default_factory=list)

    @property
    def fed(self) -> int:
        return len(self.parents)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values) if tensor is not None)

    @property
    def is_chain(self) -> bool:
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    def move(self, keys: Sequence[Tensor], values: Sequence[Tensor], num_entries: int) -> None:
        """Copy the first entries into other tensors of the same heads, layer by layer, and live there from now on."""
        for stored, others in ((self.keys, keys), (self.values, values)):
            for layer, other in enumerate(others):
                if (tensor := stored[layer]) is not other:
                    count = min(num_entries, tensor.shape[1])
                    other[:, :count] = tensor[:, :count]
                    stored[layer] = other


@dataclass(frozen=True, slots=True)
class Branch:
    """A piece of a root-to-leaf path of a fed tree: its last tokens, which no earlier branch has.

    tokens: [n] indices among the fed ones. start, end: the slots that they would have in a text without the other branches. mask: [n, L],
    what they may see there, L the end rounded up to `VIEW`.
    """
    tokens: Tensor
    start: int
    end: int
    mask: Tensor


class Feed:
    """Where one forward's T tokens of one row go: slots, positions, and who sees whom.

    positions: T absolute positions (committed length + depth). Layers call `write` and read the view that it returns.
    """

    def __init__(self, row: Storage, first: int, num_tokens: int, capacity_of: KVCache) -> None:
        self._row, self._cache = row, capacity_of
        self._first = first                                  # index of the first token among the staged entries
        self.num_tokens = num_tokens
        self.start = row.length + first                      # slot of the first token
        self.end = self.start + num_tokens
        self.view = view_length(self.end)
        self.positions = [row.length + depth for depth in row.depths[first:]]
        self._masks: dict[int | None, Tensor] = {}
        self._branches: dict[int | None, list[Branch]] = {}

    @property
    def storage(self) -> Storage:
        """The row's entries, for those who keep them where they need them."""
        return self._row

    @property
    def capacity(self) -> int:
        """Most entries the row may hold."""
        return self._cache.capacity

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [T, heads, D] keys and values in this layer; returns the view [heads, L, D] of both, L a multiple of `VIEW`."""
        row = self._row
        while len(row.keys) <= layer:
            row.keys.append(None)
            row.values.append(None)
        row.keys[layer] = stored = self._cache._fit(row.keys[layer], keys, self)
        stored[:, self.start:self.end] = keys.transpose(0, 1)
        row.values[layer] = stored_values = self._cache._fit(row.values[layer], values, self)
        stored_values[:, self.start:self.end] = values.transpose(0, 1)
        return stored[:, :self.view], stored_values[:, :self.view]

    def reserve(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """This layer's storage of keys and values, [heads, slots, D], with room for the fed tokens, which the caller writes.

        like: [1, heads, D]."""
        keys, values = self._row.keys, self._row.values
        while len(keys) <= layer:
            keys.append(None)
            values.append(None)
        keys[layer] = self._cache._fit(keys[layer], like, self)
        values[layer] = self._cache._fit(values[layer], like, self)
        return keys[layer], values[layer]

    def lineages(self) -> list[tuple[int, list[int]]]:
        """Where each fed token's visible keys lie, in the order of their positions: slots 0 to before the first number, then those listed.

        The token itself is the last. Windows are left to the caller: key i of a token has position i.
        """
        row = self._row
        if row.is_chain:
            return [(slot + 1, []) for slot in range(self.start, self.end)]
        lineages: list[tuple[int, list[int]]] = []
        for node, (parent, depth) in enumerate(zip(row.parents, row.depths)):
            straight, others = lineages[parent] if parent != ROOT else (row.length, [])
            lineages.append((straight + 1, []) if node == depth else (straight, [*others, row.length + node]))
        return lineages[self._first:]

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What each token may see, [T, L], to be added to the scores: 0 or -inf. `window`: keys at this distance or more are hidden."""
        if window not in self._masks:
            visible = self.visible(window)
            self._masks[window] = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf")).to(self._cache.device)
        return self._masks[window]

    def branches(self, window: int | None, dtype: torch.dtype) -> list[Branch]:
        """The fed tree, depth first: written into their slots one after the other, each branch finds its ancestors in the slots before it.

        Empty for a chain, and for tokens that continue staged entries of an earlier forward. Arguments as of `mask`.
        """
        if window not in self._branches:
            self._branches[window] = [self._branch(path, shared, window, dtype) for path, shared in self._paths()]
        return self._branches[window]

    def _paths(self) -> list[tuple[list[int], int]]:
        """Root-to-leaf paths, depth first, and how many tokens each shares with the one before."""
        parents = self._row.parents
        if self._first or self._row.is_chain:
            return []
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        paths, path, shared = [], [], 0
        open_nodes = children[ROOT][::-1]
        while open_nodes:
            node = open_nodes.pop()
            del path[self._row.depths[node]:]
            shared = min(shared, len(path))
            path.append(node)
            if node in children:
                open_nodes.extend(children[node][::-1])
            else:
                paths.append((list(path), shared))
                shared = len(path)
        return paths

    def _branch(self, path: list[int], shared: int, window: int | None, dtype: torch.dtype) -> Branch:
        start, end = self.start + shared, self.start + len(path)
        positions, slots = torch.arange(start, end)[:, None], torch.arange(view_length(end))
        visible = slots <= positions
        if window is not None:
            visible &= positions - slots < window
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return Branch(torch.tensor(path[shared:]).to(self._cache.device), start, end, mask.to(self._cache.device))

    def visible(self, window: int | None) -> Tensor:
        """What each token may see, bool [T, L] on the CPU; `window` as of `mask`."""
        visible = self._visible()
        if window is not None:
            row = self._row
            key_positions = torch.arange(self.view)
            key_positions[row.length:row.length + row.fed] = row.length + torch.tensor(row.depths, dtype=torch.long)
            visible &= torch.tensor(self.positions)[:, None] - key_positions[None, :] < window
        return visible

    def _visible(self) -> Tensor:
        row = self._row
        visible = torch.zeros(self.num_tokens, self.view, dtype=torch.bool)
        visible[:, :row.length] = True
        staged = visible[:, row.length:row.length + row.fed]
        if row.is_chain:
            staged.copy_(torch.ones(self.num_tokens, row.fed, dtype=torch.bool).tril_(self._first))
            return visible
        for i in range(self.num_tokens):
            node = self._first + i
            while node != ROOT:
                staged[i, node] = True
                node = row.parents[node]
        return visible


class KVCache:
    """Rows of keys and values for one model.

    capacity: most entries a row may hold, staged ones included. device: where the entries live.
    """

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.device = torch.device(device)
        self._rows: dict[int, Storage] = {}
        self._next = 0
        self.num_freed_bytes = 0             # of all rows that were ever freed

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def allocate(self) -> int:
        """A new, empty row."""
        row, self._next = self._next, self._next + 1
        self._rows[row] = Storage()
        return row

    def length(self, row: int) -> int:
        """Committed entries."""
        return self._rows[row].length

    def fed(self, row: int) -> int:
        """Staged entries: written since the last `keep`."""
        return self._rows[row].fed

    def stage(self, row: int, num_tokens: int, parents: Sequence[int] | None = None) -> Feed:
        """Make room for T more tokens behind what is staged already.

        parents: for each token the staged entry it continues (an index counted since the last `keep`, this call's tokens included) or
        `ROOT` for the committed text; None means a chain that continues the last staged entry. Raises PromptTooLong.
        """
        state = self._rows[row]
        first = state.fed
        if parents is None:
            parents = range(first - 1, first + num_tokens - 1)
        if state.length + first + num_tokens > self.capacity:
            raise PromptTooLong(f"The text needs {state.length + first + num_tokens} tokens of context; this model has room for "
                                f"{self.capacity}. Shorten the prompt or start a new chat.")
        for i, parent in enumerate(parents):
            assert ROOT <= parent < first + i, "parents come before their children"
            state.parents.append(parent)
            state.depths.append(0 if parent == ROOT else state.depths[parent] + 1)
        return Feed(state, first, num_tokens, self)

    @torch.inference_mode()
    def keep(self, row: int, fed: Sequence[int]) -> CacheTrace:
        """Commit these staged entries, in this order, and drop the rest. `keep(row, ())` drops all.

        fed: indices counted since the last `keep`; a path, each the child of the one before.
        """
        state = self._rows[row]
        before, num_fed = state.length, state.fed
        if any(index != i for i, index in enumerate(fed)):
            source = torch.tensor(fed, device=self.device) + before
            for stored in (state.keys, state.values):
                for tensor in stored:
                    if tensor is not None:
                        tensor[:, before:before + len(fed)] = tensor[:, source.to(tensor.device)]      # layers may lie on several cards
        state.length += len(fed)
        state.parents.clear()
        state.depths.clear()
        return CacheTrace(before, num_fed, state.length)

    def truncate(self, row: int, length: int) -> None:
        """Forget committed entries from `length` on, and all staged ones."""
        state = self._rows[row]
        assert length <= state.length
        state.length = length
        state.parents.clear()
        state.depths.clear()

    @torch.inference_mode()
    def fork(self, row: int, length: int) -> int:
        """A new row with a copy of the first `length` committed entries of `row`."""
        source = self._rows[row]
        assert length <= source.length
        new = self.allocate()
        if length:
            target = self._rows[new]
            slots = -(-length // _GROWTH) * _GROWTH
            for stored, copies in ((source.keys, target.keys), (source.values, target.values)):
                for tensor in stored:
                    if tensor is None:
                        copies.append(None)
                        continue
                    copy = self._empty(tensor, slots)
                    copy[:, :length] = tensor[:, :length]
                    copies.append(copy)
            target.length = length
        return new

    @torch.inference_mode()
    def repeat(self, row: int, length: int) -> None:
        """Fill a row up to `length` committed entries with copies of those it has: a text of any length to time forwards behind."""
        state = self._rows[row]
        while state.length < length:
            count = min(state.length, length - state.length)
            feed = self.stage(row, count)
            for layer, (keys, values) in enumerate(zip(state.keys, state.values)):
                if keys is not None:
                    feed.write(layer, keys[:, :count].transpose(0, 1), values[:, :count].transpose(0, 1))
            self.keep(row, range(count))

    def free(self, row: int) -> None:
        """Forget a row."""
        self.num_freed_bytes += self._rows.pop(row).num_bytes

    @property
    def num_bytes(self) -> int:
        """Memory held by all rows."""
        return sum(row.num_bytes for row in self._rows.values())

    def _fit(self, stored: Tensor | None, new: Tensor, feed: Feed) -> Tensor:
        """The layer's storage with room for `feed`: as it is, or a larger copy."""
        if stored is not None and stored.shape[1] >= feed.view:
            return stored
        slots = max(_GROWTH, -(-feed.view // _GROWTH) * _GROWTH)
        if stored is not None:
            slots = max(slots, min(2 * stored.shape[1], view_length(self.capacity)))
        grown = self._empty(new.transpose(0, 1), slots)
        if stored is not None:
            grown[:, :stored.shape[1]] = stored
        return grown

    def _empty(self, like: Tensor, slots: int) -> Tensor:
        """Zeros, so that a masked tail never holds a NaN."""
        try:
            return like.new_zeros(like.shape[0], slots, like.shape[2])
        except RuntimeError as error:              # torch.OutOfMemoryError is one, the CPU allocator raises it bare
            raise NotEnoughMemory(f"No memory for {slots} cached tokens of one layer ({like.shape[0] * slots * like.shape[2] * like.element_size()} "
                                  f"bytes). Shorten the chat, close other programs, or choose a smaller model.") from error
