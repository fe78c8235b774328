"""Freed memory goes back to the system when much was freed and nothing is to be done, and never while an answer is written."""
from __future__ import annotations

import ctypes
import sys
import threading

import pytest
import torch
from test_service import ask, ready
from tiny import slow_steps

from specviz import freed_memory
from specviz.engine.cache import KVCache
from specviz.freed_memory import LEAST_BYTES, REST_S, Freed, give_back


def test_a_little_is_kept_and_much_goes_back_once():
    """Bytes add up until they are worth it; then it is due once nobody was answered for a while; after giving back the count begins anew."""
    calls, now = [], [0.0]
    freed = Freed(lambda: calls.append(True), lambda: now[0])
    assert freed.rest_s(0) is None and freed.rest_s(LEAST_BYTES - 1) is None
    assert freed.rest_s(LEAST_BYTES) == REST_S
    now[0] = 1.5
    freed.work()
    now[0] = 2.5
    assert freed.rest_s(2 * LEAST_BYTES) == REST_S - 1 and not calls
    now[0] = 1.5 + REST_S
    assert freed.rest_s(2 * LEAST_BYTES) == 0
    freed.give_back()
    assert calls == [True] and freed.rest_s(3 * LEAST_BYTES - 1) is None and freed.rest_s(3 * LEAST_BYTES) == 0


def test_a_cache_counts_what_its_rows_held():
    """A freed row adds the bytes of its keys and values, an empty one nothing."""
    cache = KVCache(300)
    rows = [cache.allocate(), cache.allocate()]
    cache.stage(rows[0], 3).write(0, torch.ones(3, 2, 4), torch.ones(3, 2, 4))
    cache.keep(rows[0], range(3))
    held = cache.num_bytes
    cache.free(rows[1])
    assert cache.num_freed_bytes == 0 < held
    cache.free(rows[0])
    assert cache.num_freed_bytes == held and cache.num_bytes == 0


def test_systems_without_a_way_are_left_alone(monkeypatch):
    """Another system, or a C library that has no such function, is no error."""
    class Bare:
        def __init__(self, name):
            pass
    monkeypatch.setattr(ctypes, "CDLL", Bare)
    assert give_back() is False
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "CDLL", None)
    assert give_back() is False


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_glibc_gives_pages_back():
    """Small blocks freed between blocks in use leave the process at once when asked for: the function really is the one meant."""
    import psutil
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    blocks = [libc.malloc(60_000) for _ in range(1000)]
    for block in blocks:
        ctypes.memset(block, 1, 60_000)
    for block in blocks[:-1]:
        libc.free(block)
    pin = blocks[-1]
    before = psutil.Process().memory_info().rss
    assert give_back() and before - psutil.Process().memory_info().rss > 30e6
    libc.free(pin)


def test_the_engine_gives_back_when_it_rests_and_when_it_ends(monkeypatch):
    """Nothing while answers are written, however much is freed meanwhile; then once, when nobody has come for a while; and once more when
    the model is let go."""
    monkeypatch.setattr(freed_memory, "LEAST_BYTES", 1)
    monkeypatch.setattr(freed_memory, "REST_S", 0.05)
    service, busy, rested = ready(), [], threading.Event()
    driver, engine = service._driver, service._opened.engine

    def given():
        busy.append(not engine.idle)
        rested.set()
        return True
    monkeypatch.setattr(driver._freed, "_give_back", given)
    with slow_steps(engine):
        beside = service.submit(ask(conversation="beside", max_new_tokens=200))
        steps = iter(beside)
        next(steps)
        for number in range(3):
            list(service.submit(ask(f"{number} {number}", conversation=str(number), max_new_tokens=3)))
            service.forget(str(number))
        assert not busy
        beside.cancel()
        list(steps)
    assert rested.wait(20) and busy == [False]
    list(service.submit(ask(conversation="beside", max_new_tokens=3)))
    assert driver._freed.rest_s(engine.cache.num_freed_bytes) is None, "what stays parked was not freed"
    service.close()
    assert len(busy) == 2
