"""Forwards of a few shapes with everything at fixed addresses, so that a shape seen before is replayed instead of launched from Python.

It knows nothing of models beyond one function that runs the layers, and nothing of drafts. What captures and replays is a backend:
CUDA's graphs (`graph_backends.CudaBackend`), or a tape of operators with which all of this is tested on a CPU.

A shape is (rows, tokens per row, length of the view, tapped layers, number of layers); tokens and view are rounded up to a few values. What
is padded writes behind the row's end, where the next forward writes first, and is never looked at. The first forwards of a shape run from
Python, then it is captured. Whatever fails is run from Python ever after, and a note says so.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .attention import capped_attention, packed_attention, view_length
from .cache import Feed
from .places import Place, Places

__all__ = ["Backend", "Buffer", "Graphs", "Key", "StaticSteps", "WARM_UPS", "rounded_tokens", "rounded_view"]

MOST_ROWS, MOST_GRAPHS = 4, 48
_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
WARM_UPS = 2                    # forwards of a shape before it is captured: libraries choose kernels and take workspace in the first ones
_SHORTEST_VIEW = 256

Outputs = tuple[Tensor, "Tensor | None"]
Run = Callable[[Tensor, Tensor, Any, tuple[int, ...], int], Outputs]


class Buffer(Protocol):
    """Numbers on their way to the device: `host` is filled after `wait`, and `send` copies it to `device` without waiting."""
    host: Tensor
    device: Tensor

    def wait(self) -> None: ...
    def send(self) -> None: ...


class Backend(Protocol):
    """Makes buffers, and captures what a function computes. Its graphs share one pool of memory, whichever model they are of."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Buffer: ...

    def warm(self, function: Callable[[], Outputs]) -> Outputs:
        """Run the function as it will be captured. Its result is good until the next call."""

    def capture(self, function: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """What replays the function's operators on the same tensors; its result is good until the next replay of any graph."""


@dataclass(frozen=True, slots=True)
class StaticSteps:
    """How a model may run its steps. capture: replay them. least_tokens: rows with fewer tokens are padded to so many, so that plain
    decoding and short drafts run the very kernels that longer drafts do."""
    backend: Backend
    capture: bool = True
    least_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Key:
    """The shape of a forward. num_tokens: per row."""
    num_rows: int
    num_tokens: int
    view: int
    taps: tuple[int, ...]
    num_layers: int


def rounded_tokens(num_tokens: int, least: int = 1) -> int | None:
    """The number of tokens that a row is padded to; None if it has too many for a graph."""
    return next((size for size in _TOKENS if size >= max(num_tokens, least)), None)


def rounded_view(num_keys: int) -> int:
    """The length of the view: a power of two, or one and a half times one, so that few shapes serve every length of text."""
    size = _SHORTEST_VIEW
    while size < num_keys:
        if size * 3 // 2 >= num_keys:
            return size * 3 // 2
        size *= 2
    return size


class _Inputs:
    """The buffers of one shape: token ids, positions and slots, [3, rows, tokens], and a mask [rows, tokens, view] for each window."""

    def __init__(self, key: Key, backend: Backend) -> None:
        self.key, self._backend = key, backend
        self.numbers = backend.buffer((3, key.num_rows, key.num_tokens), torch.long)
        self._masks: dict[int | None, Buffer] = {}
        self._feeds: list[Feed] = []

    def fill(self, tokens: Sequence[Sequence[int] | Tensor], feeds: Sequence[Feed]) -> None:
        """Send what these rows feed, in the order of their places. Tokens that are on the device already never leave it."""
        self._feeds = list(feeds)
        self.numbers.wait()
        for numbers, given, feed in zip(self.numbers.host.unbind(1), tokens, feeds, strict=True):
            spare = self.key.num_tokens - len(given)
            ids = [0] * len(given) if isinstance(given, Tensor) else given
            numbers.copy_(torch.tensor([[*ids, *ids[-1:] * spare], [*feed.positions, *feed.positions[-1:] * spare],
                                        range(feed.start, feed.start + self.key.num_tokens)]))
        self.numbers.send()
        for numbers, given in zip(self.numbers.device[0], tokens):
            if isinstance(given, Tensor):
                numbers[:len(given)] = given
        for window in self._masks:
            self._fill_mask(window)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[rows, tokens, view] on the device, 0 or -inf."""
        if window not in self._masks:
            self._masks[window] = self._backend.buffer((self.key.num_rows, self.key.num_tokens, self.key.view), dtype)
            self._fill_mask(window)
        return self._masks[window].device

    def _fill_mask(self, window: int | None) -> None:
        buffer = self._masks[window]
        buffer.wait()
        for mask, feed in zip(buffer.host.fill_(float("-inf")), self._feeds, strict=True):
            mask[:feed.num_tokens, :feed.view].masked_fill_(feed.visible(window), 0)
            mask[feed.num_tokens:, 0] = 0                    # what is padded sees something, or its keys would be no numbers
        buffer.send()


class _Step:
    """What the layers call during one forward, at fixed addresses only."""

    def __init__(self, inputs: _Inputs, places: Sequence[Place]) -> None:
        self._inputs, self._places = inputs, places
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None = None,
               softcap: float | None = None) -> Tensor:
        """query [S, Hq, D], key and value [S, Hkv, D], S the padded tokens of all rows in order; returns [S, Hq * D]."""
        shape, slots = self._inputs.key, self._inputs.numbers.device[2]
        group = 1 if softcap is not None else query.shape[1] // key.shape[1]
        masks, parts = self._mask(window, group, query.dtype), []
        for row, place in enumerate(self._places):
            mine = slice(row * shape.num_tokens, (row + 1) * shape.num_tokens)
            keys, values = place.keys[layer], place.values[layer]
            keys.index_copy_(1, slots[row], key[mine].transpose(0, 1))
            values.index_copy_(1, slots[row], value[mine].transpose(0, 1))
            view = query[mine], keys[:, :shape.view], values[:, :shape.view], masks[row], scaling
            parts.append(packed_attention(*view) if softcap is None else capped_attention(*view, softcap))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """[rows, tokens * group, view]: once for all layers, not once for each."""
        if (window, group) not in self._masks:
            mask = self._inputs.mask(window, dtype)
            self._masks[window, group] = mask if group == 1 else mask[:, :, None].expand(-1, -1, group, -1).flatten(1, 2)
        return self._masks[window, group]


@dataclass(slots=True)
class _Shape:
    """A shape in use. generations: of the places when it was captured."""
    inputs: _Inputs
    num_seen: int = 0
    generations: tuple[int, ...] = ()
    replay: Callable[[], Outputs] | None = field(default=None, repr=False)


class Graphs:
    """The forwards of one model that run at fixed addresses.

    run(ids [S], positions [S], step, taps, num_layers) -> (logits [S, V], states [S, H'] or None): the layers. num_layers: the model's.
    notes: sentences for people. num_replayed, num_captured: for reports. failure: why nothing is captured any more, "" if all is well.
    """

    def __init__(self, run: Run, static: StaticSteps, num_layers: int, most_graphs: int = MOST_GRAPHS) -> None:
        self._run, self._static, self._num_layers, self._most_graphs = run, static, num_layers, most_graphs
        self._shapes: OrderedDict[Key, _Shape] = OrderedDict()
        self.places = Places(MOST_ROWS)
        self.notes: list[str] = []
        self.failure = "" if static.capture else "not asked for"
        self.num_replayed = self.num_captured = 0

    @property
    def keys(self) -> list[Key]:
        """The shapes in use, least recently used first."""
        return list(self._shapes)

    def forward(self, tokens: Sequence[Sequence[int] | Tensor], feeds: Sequence[Feed], taps: tuple[int, ...], num_layers: int
                ) -> list[Outputs] | None:
        """Each row's logits [T, V] and states; None where this forward has none of a few known shapes: the caller runs it its own way."""
        key = self._key(feeds, taps, num_layers)
        if key is None or (self.failure and self._static.least_tokens == 1):
            return None
        try:
            order = self.places.settle(feeds, max(key.view, max(feed.start for feed in feeds) + key.num_tokens))
            shape = self._shape(key)
            shape.inputs.fill([tokens[i] for i in order], [feeds[i] for i in order])
        except torch.OutOfMemoryError as error:
            self.places = Places(MOST_ROWS)                  # rows that live there keep what they need
            self._give_up(error)
            return None
        outputs = self._compute(shape)
        if outputs is None:
            return None
        found: list[Outputs | None] = [None] * len(feeds)
        for at, index in enumerate(order):
            mine = slice(at * key.num_tokens, at * key.num_tokens + feeds[index].num_tokens)
            found[index] = tuple(None if part is None else part[mine].clone() for part in outputs)      # the next replay writes there again
        return found

    def _key(self, feeds: Sequence[Feed], taps: tuple[int, ...], num_layers: int) -> Key | None:
        num_tokens = rounded_tokens(max(feed.num_tokens for feed in feeds), self._static.least_tokens)
        if len(feeds) > MOST_ROWS or num_tokens is None or not all(self._is_filled(feed) for feed in feeds):
            return None
        longest = view_length(max(feed.capacity for feed in feeds) + _TOKENS[-1])        # no row is ever read beyond
        view = min(longest, rounded_view(max(feed.start for feed in feeds) + num_tokens))
        return Key(len(feeds), num_tokens, view, taps, num_layers)

    def _is_filled(self, feed: Feed) -> bool:
        """Whether every layer has read something of the row: then the shapes of its entries are known."""
        keys = feed.storage.keys
        return len(keys) == self._num_layers and all(tensor is not None for tensor in keys)

    def _shape(self, key: Key) -> _Shape:
        if key not in self._shapes:
            if len(self._shapes) >= self._most_graphs:
                self._shapes.popitem(last=False)
            self._shapes[key] = _Shape(_Inputs(key, self._static.backend))
        self._shapes.move_to_end(key)
        return self._shapes[key]

    def _compute(self, shape: _Shape) -> Outputs | None:
        """Replay, or capture first, or run from Python; None after a failure."""
        key = shape.inputs.key
        places = self.places.all[:key.num_rows]

        def function() -> Outputs:
            ids, positions, _ = shape.inputs.numbers.device.flatten(1)
            return self._run(ids, positions, _Step(shape.inputs, places), key.taps, key.num_layers)
        generations = tuple(place.generation for place in places)
        if shape.generations != generations:
            shape.replay, shape.generations = None, generations
        shape.num_seen += 1
        if self.failure or shape.num_seen <= WARM_UPS:
            return self._static.backend.warm(function)
        if shape.replay is None:
            try:
                shape.replay = self._static.backend.capture(function)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                self._give_up(error)
                return None if self._static.least_tokens == 1 else self._static.backend.warm(function)
            self.num_captured += 1
        self.num_replayed += 1
        return shape.replay()

    def _give_up(self, error: Exception) -> None:
        self._shapes.clear()
        reason = " ".join(str(error).split())[:200]
        self.failure = f"{type(error).__name__}: {reason}"
        self.notes.append(f"A step could not be captured as a CUDA graph ({self.failure}), so every step is launched from Python, "
                          "which is slower.")
