"""The KV cache: staged trees, keeping a path, forking and freeing, without any model."""
from __future__ import annotations

import pytest
import torch

from specviz.engine.cache import VIEW, KVCache
from specviz.errors import NotEnoughMemory, PromptTooLong


@torch.inference_mode()
def write(cache: KVCache, row: int, values: list[int], parents=None):
    """Feed one forward of a one-layer, one-head, width-one model whose keys are `values` and whose values are their negatives."""
    feed = cache.stage(row, len(values), parents)
    keys = torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)
    return feed, *feed.write(0, keys, -keys)


def committed(cache: KVCache, row: int) -> list[int]:
    state = cache._rows[row]
    assert torch.equal(state.values[0], -state.keys[0])
    return state.keys[0][0, :state.length, 0].long().tolist()


def seen(feed, keys: torch.Tensor, window: int | None = None) -> list[list[int]]:
    """For each fed token the keys that it may look at."""
    mask = feed.mask(window, torch.float64)
    return [keys[0, row == 0, 0].long().tolist() for row in mask]


def test_a_chain_sees_everything_before_it():
    """Committed entries, then its own ancestors; positions count up; the view is a multiple of VIEW."""
    cache = KVCache(1000)
    row = cache.allocate()
    write(cache, row, [1, 2, 3])
    cache.keep(row, range(3))
    feed, keys, _ = write(cache, row, [4, 5])
    assert feed.positions == [3, 4]
    assert keys.shape[1] == VIEW
    assert seen(feed, keys) == [[1, 2, 3, 4], [1, 2, 3, 4, 5]]


def test_a_tree_grown_over_two_forwards_sees_ancestors_only():
    """Parents may be entries of an earlier forward; positions are length plus depth, not index."""
    cache = KVCache(1000)
    row = cache.allocate()
    write(cache, row, [1, 2])
    cache.keep(row, range(2))
    write(cache, row, [10, 11, 12], [-1, -1, 0])
    feed, keys, _ = write(cache, row, [20, 21, 22], [1, 2, 4])
    assert feed.positions == [3, 4, 5]
    assert seen(feed, keys) == [[1, 2, 11, 20], [1, 2, 10, 12, 21], [1, 2, 10, 12, 21, 22]]


def test_keep_gathers_a_path_and_forgets_the_rest():
    """What is kept comes out in path order; the next tokens follow it."""
    cache = KVCache(1000)
    row = cache.allocate()
    write(cache, row, [1, 2])
    cache.keep(row, range(2))
    write(cache, row, [10, 11, 12], [-1, -1, 0])
    write(cache, row, [20, 21, 22], [1, 2, 4])
    trace = cache.keep(row, (0, 2, 4))
    assert (trace.before, trace.fed, trace.after) == (2, 6, 5)
    assert committed(cache, row) == [1, 2, 10, 12, 21]
    feed, keys, _ = write(cache, row, [30])
    assert seen(feed, keys) == [[1, 2, 10, 12, 21, 30]]
    assert cache.keep(row, ()).after == 5
    assert committed(cache, row) == [1, 2, 10, 12, 21]


def test_windows_count_positions_not_slots():
    """A tree node's distance to a key is measured in text positions, so siblings share a window."""
    cache = KVCache(1000)
    row = cache.allocate()
    write(cache, row, [1, 2, 3, 4])
    cache.keep(row, range(4))
    feed, keys, _ = write(cache, row, [10, 11, 12, 13], [-1, -1, -1, 2])
    assert seen(feed, keys, window=3) == [[3, 4, 10], [3, 4, 11], [3, 4, 12], [4, 12, 13]]


def test_rows_grow_and_keep_their_content():
    """Growing past the first allocation, to the capacity, loses nothing."""
    cache = KVCache(700)
    row = cache.allocate()
    for start in range(0, 700, 70):
        write(cache, row, list(range(start, start + 70)))
        cache.keep(row, range(70))
    assert committed(cache, row) == list(range(700))


def test_more_than_the_capacity_is_refused_with_numbers():
    """The sentence names what was needed and what there is."""
    cache = KVCache(10)
    row = cache.allocate()
    write(cache, row, list(range(8)))
    with pytest.raises(PromptTooLong, match="11 tokens.*10"):
        cache.stage(row, 3)


def test_a_fork_is_independent():
    """Writing to a fork leaves the source as it was, and the other way round; freeing returns the memory."""
    cache = KVCache(1000)
    row = cache.allocate()
    write(cache, row, [1, 2, 3])
    cache.keep(row, range(3))
    bytes_of_one = cache.num_bytes
    fork = cache.fork(row, 2)
    write(cache, fork, [9])
    cache.keep(fork, range(1))
    write(cache, row, [4])
    cache.keep(row, range(1))
    assert committed(cache, row) == [1, 2, 3, 4]
    assert committed(cache, fork) == [1, 2, 9]
    cache.truncate(fork, 1)
    assert committed(cache, fork) == [1]
    cache.free(fork)
    assert cache.num_bytes == bytes_of_one and list(cache) == [row]


def test_no_memory_is_a_sentence(monkeypatch):
    """The allocator's error becomes one that says what to do, and the row can still be used."""
    cache = KVCache(1000)
    row = cache.allocate()
    write(cache, row, [1])
    cache.keep(row, range(1))

    def fail(*_args, **_kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", fail)
        with pytest.raises(NotEnoughMemory, match="Shorten the chat"):
            write(cache, row, list(range(400)))
    cache.keep(row, ())
    write(cache, row, [2])
    cache.keep(row, range(1))
    assert committed(cache, row) == [1, 2]
