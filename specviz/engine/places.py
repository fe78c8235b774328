"""A few places at fixed addresses for the keys and values of rows: a captured graph reads and writes the same memory every time.

They know nothing of graphs, models or caches: a row of any cache moves in when it is computed with, and another row that lives there moves
out into memory of its own. While a row lives in a place its cache works on it as on any other.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from .attention import view_length
from .cache import Feed, Storage

__all__ = ["Place", "Places"]

_SMALLEST = 1024                 # slots; a place grows by doubling


class Place:
    """Storage for one row: per layer [heads, slots, D]. generation: how often the tensors were replaced; a graph made before is void."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.generation = 0
        self._tenant: weakref.ref[Storage] | None = None

    @property
    def slots(self) -> int:
        return self.keys[0].shape[1] if self.keys else 0

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def holds(self, row: Storage) -> bool:
        """Whether this row was the last to move in; it may have grown out of some layers since."""
        return self._tenant is not None and self._tenant() is row

    @property
    def tenant(self) -> Storage | None:
        """The row that lives here, in some layers at least; None if it was freed or has left."""
        row = None if self._tenant is None else self._tenant()
        return row if row is not None and any(mine is theirs for mine, theirs in zip(self.keys, row.keys)) else None

    def fits(self, row: Storage) -> bool:
        """Whether the tensors have the row's shapes, all but the length."""
        def shapes(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
            return [(t.shape[0], t.shape[2], t.dtype, t.device) for t in tensors]
        return shapes(self.keys) == shapes(row.keys) and shapes(self.values) == shapes(row.values)

    def clear(self) -> None:
        """Let the row that lives here take its entries along into memory of its own."""
        if row := self.tenant:
            slots = view_length(max(1, row.length + row.fed))
            row.move([_copy(tensor, slots) for tensor in row.keys], [_copy(tensor, slots) for tensor in row.values], 0)
        self._tenant = None

    def take(self, row: Storage, num_entries: int, slots: int, most: int) -> None:
        """Let a row move in with its first entries, into at least so many slots, at most `most`; does little if it lives here already."""
        if self.slots < slots or not self.fits(row):
            room = max(slots, min(most, max(_SMALLEST, 2 * self.slots)))
            if not self.holds(row):
                self.clear()
            self.keys, self.values = ([tensor.new_zeros(tensor.shape[0], room, tensor.shape[2]) for tensor in tensors]
                                      for tensors in (row.keys, row.values))      # zeros: a masked tail must hold no NaN
            self.generation += 1
        row.move(self.keys, self.values, num_entries)
        self._tenant = weakref.ref(row)


class Places:
    """The first so many places are enough for a forward of so many rows, whichever they are."""

    def __init__(self, num: int) -> None:
        self.all = [Place() for _ in range(num)]

    @property
    def num_bytes(self) -> int:
        return sum(place.num_bytes for place in self.all)

    @torch.inference_mode()
    def settle(self, feeds: Sequence[Feed], slots: int) -> list[int]:
        """Make the rows live in the first places, one each, with at least so many slots. Returns for each place which feed lives there."""
        rows = [feed.storage for feed in feeds]
        used = self.all[:len(rows)]
        order: list[int | None] = [next((i for i, row in enumerate(rows) if place.holds(row)), None) for place in used]
        missing = [i for i in range(len(rows)) if i not in order]
        for at, place in enumerate(used):
            if order[at] is None:
                place.clear()
                order[at] = missing.pop(0)
        for at, place in zip(order, used):
            for other in self.all[len(rows):]:
                if other.holds(rows[at]):
                    other.clear()
            place.take(rows[at], feeds[at].start, slots, view_length(feeds[at].capacity) + _SMALLEST)
        return order


def _copy(tensor: Tensor, slots: int) -> Tensor:
    copy = tensor.new_zeros(tensor.shape[0], slots, tensor.shape[2])
    count = min(slots, tensor.shape[1])
    copy[:, :count] = tensor[:, :count]
    return copy
