"""Steps at fixed addresses, captured and replayed, with a tape of operators in place of CUDA's graphs."""
from __future__ import annotations

import gc
import inspect
import random

import pytest
import torch
from engine_helpers import Lab, repeating_prompt
from tiny import tiny_model

from specviz.engine import graphs, places
from specviz.engine.graph_backends import CudaBackend, TapeBackend
from specviz.engine.graphs import StaticSteps, rounded_tokens, rounded_view
from specviz.engine.model import FINAL, LanguageModel, Row


class Broken(TapeBackend):
    """A backend whose device cannot capture."""

    def capture(self, function):
        raise RuntimeError("operation not permitted when stream is capturing")


def models(family: str, **static: object) -> tuple[LanguageModel, LanguageModel]:
    """The same weights with steps at fixed addresses and without, in float64."""
    ours = LanguageModel(tiny_model(family, dtype=torch.float64), exact=False, static=StaticSteps(TapeBackend(), **static))
    return ours, LanguageModel(tiny_model(family, dtype=torch.float64), exact=False)


def story(model: LanguageModel, seed: int = 0, num_steps: int = 60) -> list[torch.Tensor]:
    """Two rows through chains, trees, taps, early exits, rejections, forks and frees: every number that came out."""
    choose, out = random.Random(seed), []
    cache = model.new_cache(400)
    rows = [cache.allocate(), cache.allocate()]
    for row, length in zip(rows, (20, 33)):
        output, = model.forward([Row(row, [choose.randrange(384) for _ in range(length)], num_logits=1)], cache)
        cache.keep(row, range(length))
        out.append(output.logits)
    for step in range(num_steps):
        who = rows[:choose.choice((1, 1, 2))] if choose.random() < 0.7 else rows[1:]
        size = choose.choice((1, 1, 5, 9))
        parents = None if choose.random() < 0.6 else [choose.randrange(-1, i) if i else -1 for i in range(size)]
        taps = choose.choice(((), (), (1, FINAL)))
        layers = choose.choice((None, None, 2)) if not taps else None
        fed = [Row(row, [choose.randrange(384) for _ in range(size)], parents, choose.choice((None, 1))) for row in who]
        for output in model.forward(fed, cache, hidden=taps, num_layers=layers):
            out += [output.logits, *([output.hidden] if taps else [])]
        for each in fed:
            path = list(range(choose.randrange(size + 1))) if parents is None else [0] if choose.random() < 0.7 else []
            cache.keep(each.row, path if layers is None else ())
        if step % 13 == 12:
            new = cache.fork(rows[0], cache.length(rows[0]) - 1)
            cache.free(rows[0])
            rows[0] = new
    return out


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_replayed_steps_are_the_steps(family, monkeypatch):
    """Whatever is fed, in any order of shapes and rows, a replayed graph gives the bits of the same function run from Python, and an
    ordinary forward's numbers up to rounding: nothing that was padded or left behind by another shape leaks in."""
    ours, plain = models(family)
    got, expected = story(ours), story(plain)
    assert ours.graphs.num_replayed > 10 and not ours.graphs.failure
    assert len(got) == len(expected) and all(torch.allclose(a, b, atol=1e-10, rtol=0) for a, b in zip(got, expected))
    monkeypatch.setattr(graphs, "WARM_UPS", 10 ** 9)
    other, _ = models(family)
    assert all(map(torch.equal, got, story(other))) and other.graphs.num_replayed == 0


def test_shapes_are_told_apart_and_bounded():
    """Tokens, view, rows, taps and layers each make another graph; it is captured at its third use, and the least used one goes."""
    model, _ = models("llama")
    model.graphs._most_graphs = 4
    cache = model.new_cache(500)
    one, two = cache.allocate(), cache.allocate()
    for row in (one, two):
        model.forward([Row(row, [5] * 20)], cache)
        cache.keep(row, range(20))
    assert not model.graphs.keys                             # a row that no layer has read yet is none for a graph

    def feed(*rows: Row, **how: object) -> None:
        model.forward(rows, cache, **how)
        for row in rows:
            cache.keep(row.row, ())
    feed(Row(one, [1] * 65))
    assert not model.graphs.keys                             # nor is a chunk of a prompt
    for number in range(4):
        feed(Row(one, [1, 2]))
        assert (model.graphs.num_captured, model.graphs.num_replayed) == ((0, 0), (0, 0), (1, 1), (1, 2))[number]
    feed(Row(one, [1] * 9))
    feed(Row(one, [1] * 12))
    feed(Row(one, [1, 2]), Row(two, [1]))
    feed(Row(one, [1, 2]), hidden=(1,))
    assert len(model.graphs.keys) == 4 and {(key.num_rows, key.num_tokens, key.taps) for key in model.graphs.keys} == {
        (1, 2, ()), (1, 12, ()), (2, 2, ()), (1, 2, (1,))}
    feed(Row(one, [1, 2]), num_layers=2)
    assert len(model.graphs.keys) == 4 and (1, 2, 3) not in {(key.num_rows, key.num_tokens, key.num_layers) for key in model.graphs.keys if not key.taps}


def test_a_place_that_grows_voids_its_graphs(monkeypatch):
    """When a row's memory moves, graphs that would write to the old place are captured anew, and the text goes on as if nothing were."""
    monkeypatch.setattr(places, "_SMALLEST", 64)
    monkeypatch.setattr(graphs, "_SHORTEST_VIEW", 128)
    ours, plain = models("llama")
    caches = [ours.new_cache(400), plain.new_cache(400)]
    seen, generations = [], set()
    rows = [cache.allocate() for cache in caches]
    for model, cache, row in zip((ours, plain), caches, rows):
        model.forward([Row(row, list(range(3, 40)))], cache)
        cache.keep(row, range(37))
    for position in range(120):
        pair = [model.forward([Row(row, [position % 300 + 5])], cache)[0].logits for model, cache, row in zip((ours, plain), caches, rows)]
        for cache, row in zip(caches, rows):
            cache.keep(row, [0])
        seen.append(torch.allclose(*pair, atol=1e-10, rtol=0))
        generations.add(ours.graphs.places.all[0].generation)
    assert all(seen) and len(generations) >= 2 and ours.graphs.num_captured >= len(generations) and ours.graphs.num_replayed > 90


def test_what_cannot_be_captured_runs_from_python_for_good():
    """One failed capture is told in a sentence, nothing is tried again, and the numbers stay right. The tape refuses what a GPU would."""
    model = LanguageModel(tiny_model("llama", dtype=torch.float64), exact=False, static=StaticSteps(Broken()))
    plain = LanguageModel(tiny_model("llama", dtype=torch.float64), exact=False)
    assert all(torch.allclose(a, b, atol=1e-10, rtol=0) for a, b in zip(story(model), story(plain)))
    assert "not permitted" in model.graphs.failure and len(model.graphs.notes) == 1 and model.graphs.num_replayed == 0
    tape, number = TapeBackend(), torch.ones(1)
    for reads in (lambda: (number * number.item(), None), lambda: (number + torch.tensor([1.0]), None)):
        with pytest.raises(RuntimeError, match="not permitted"):
            tape.capture(reads)


def test_without_memory_for_places_steps_go_on(monkeypatch):
    """If a place cannot be made or grow, rows stay where they are, steps are launched as ever, and a note says so."""
    ours, plain = models("llama")
    settle, calls = places.Places.settle, []

    def failing(self, feeds, slots):
        calls.append(slots)
        if len(calls) == 9:
            raise torch.OutOfMemoryError("no memory left")
        return settle(self, feeds, slots)
    monkeypatch.setattr(places.Places, "settle", failing)
    assert all(torch.allclose(a, b, atol=1e-10, rtol=0) for a, b in zip(story(ours, num_steps=20), story(plain, num_steps=20)))
    assert len(calls) == 9 and "no memory left" in ours.graphs.failure and len(ours.graphs.notes) == 1 and not ours.graphs.keys


@pytest.mark.parametrize("method", ["plain", "draft_tree", "early_exit", "eagle"])
def test_whole_answers_are_the_same(method):
    """The engine with graphs for target and draft model, one backend for both, writes the text that it writes without: greedy and drawn."""
    backend = TapeBackend()
    labs = [Lab(exact=False, static=StaticSteps(backend)), Lab(exact=False)]
    for params in ({}, {"temperature": 0.8, "seed": 3}):
        ours, plain = (lab.run(repeating_prompt(24), method, max_new_tokens=16, **params) for lab in labs)
        assert ours.tokens == plain.tokens
    assert labs[0].target.graphs.num_replayed > 5
    if method == "draft_tree":
        assert labs[0].draft.graphs.num_replayed > 5


def test_rows_come_and_go():
    """Several requests at a time share few places; each answer is what it is alone."""
    lab, alone = Lab(exact=False, static=StaticSteps(TapeBackend()), max_rows=5), Lab(exact=False)
    prompts = [repeating_prompt(10 + 3 * i, seed=i) for i in range(5)]
    results = [lab.add(prompt, "draft_model", k=2 + i % 3, max_new_tokens=8 + 3 * i) for i, prompt in enumerate(prompts)]
    lab.finish()
    assert [result.tokens for result in results] == [alone.run(prompt, "plain", max_new_tokens=8 + 3 * i).tokens for i, prompt in enumerate(prompts)]
    assert {key.num_rows for key in lab.target.graphs.keys} >= {1, 2, 3} and max(key.num_rows for key in lab.target.graphs.keys) <= 4


@pytest.mark.parametrize("method, k", [("prompt_lookup", 6), ("draft_model", 4)])
def test_padded_to_one_shape(method, k):
    """With a least number of tokens, plain decoding and chains of drafts run in one shape, captured or not, and the texts agree."""
    for capture in (False, True):
        lab = Lab(exact=False, dtype=torch.float32, static=StaticSteps(TapeBackend(), capture, least_tokens=8))
        plain, drafted = (lab.run(repeating_prompt(24), name, k=k, max_new_tokens=20) for name in ("plain", method))
        assert plain.tokens == drafted.tokens
        assert {key.num_tokens for key in lab.target.graphs.keys} == {8} and bool(lab.target.graphs.num_replayed) is capture


def test_rounding():
    """Sizes are rounded up, and what is too long is none for a graph."""
    assert [rounded_tokens(n) for n in (1, 8, 9, 33, 64, 65)] == [1, 8, 12, 48, 64, None] and rounded_tokens(1, 8) == 8
    views = [rounded_view(n) for n in (1, 256, 257, 385, 1000, 8193)]
    assert views == [256, 256, 384, 512, 1024, 12288] and all(view % 64 == 0 for view in views)


def test_captures_for_cuda_are_framed(monkeypatch):
    """On CUDA a step is captured into the common pool, on the stream it was warmed on, with no garbage collected meanwhile, also if it fails."""
    seen = []

    class Frame:
        def __init__(self, graph, pool, stream, capture_error_mode):
            seen.append((pool, stream, capture_error_mode))

        def __enter__(self):
            seen.append(gc.isenabled())

        def __exit__(self, *error):
            pass

    class Graph:
        def replay(self):
            seen.append("replayed")
    for name, value in {"graph": Frame, "CUDAGraph": Graph, "graph_pool_handle": lambda: (7, 7), "Stream": lambda device: "side"}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    backend = CudaBackend("cuda")
    replay = backend.capture(lambda: (5, None))
    assert replay() == (5, None) and seen == [((7, 7), "side", "thread_local"), False, "replayed"] and gc.isenabled()
    with pytest.raises(RuntimeError, match="no capture"):
        backend.capture(lambda: (_ for _ in ()).throw(RuntimeError("no capture")).send(None))
    assert gc.isenabled()


def test_cuda_has_what_the_backend_asks_of_it():
    """The calls that cannot run here fit the installed PyTorch's own signatures."""
    inspect.signature(torch.cuda.graph).bind(object(), pool=(0, 0), stream=None, capture_error_mode="thread_local")
    inspect.signature(torch.cuda.Event.__new__).bind(torch.cuda.Event, enable_timing=True)
    assert all(callable(getattr(torch.cuda, name)) for name in ("CUDAGraph", "Stream", "graph_pool_handle", "current_stream", "set_sync_debug_mode"))
    assert all(callable(getattr(torch.cuda.Event, name)) for name in ("record", "query", "synchronize", "elapsed_time"))
