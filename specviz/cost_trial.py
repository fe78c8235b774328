"""Measures what a step costs, in small pieces that fit between other work. It knows nothing of who asks or of where the table goes.

A piece is a forward of one token and one of M tokens right after it: their ratio does not suffer when the machine is slower for a while.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from datetime import datetime, timezone
from functools import partial
from statistics import median, quantiles
from time import perf_counter

from .cost import CostTable, monotone
from .engine.cache import KVCache
from .engine.graphs import WARM_UPS
from .engine.model import LanguageModel, Row

__all__ = ["BATCH_SIZES", "CONTEXTS", "ROWS", "SIZES", "behind", "measure"]

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (256, 1280)
ROWS, BATCH_SIZES = (2, 4), (1, 4, 12)      # more than one sequence in a forward, with so many tokens each
_FEW = (1, 4, 16, 64)               # sizes measured behind the longer text; the others follow the shorter one's curve
_READ = 64                          # tokens that are really read; the rest of the text is copies of their entries
_ROUNDS, _BATCH_ROUNDS, _NUM_DRAFT = 3, 5, 4      # odd numbers: a median leaves out first calls and one change of the machine's speed

Measuring = Generator[float, None, CostTable]


def measure(target: LanguageModel, draft: LanguageModel | None = None, head: Callable[[], None] | None = None, *, contexts: Sequence[int] = CONTEXTS, sizes: Sequence[int] = SIZES,
            clock: Callable[[], float] = perf_counter) -> Measuring:
    """A generator that does one piece at a time, yields the share that is done, and returns the table.

    head: does one pass of an EAGLE head and waits for the result.

    Run it in the thread that decodes, since the number of threads belongs to that. Contexts that do not fit the model are shortened.
    """
    most = target.context - max(sizes)
    sizes = [size for size in sizes if size < target.context]
    contexts = sorted({min(context, max(1, most)) for context in contexts})
    plans = [[size for size in sizes if size > 1 and (number == 0 or size in _FEW)] for number in range(len(contexts))]
    batch_sizes = tuple(size for size in BATCH_SIZES if ROWS[-1] * size <= sizes[-1])
    num_pieces = _ROUNDS * sum(map(len, plans)) + _BATCH_ROUNDS * len(ROWS) * len(batch_sizes) + (_NUM_DRAFT + 1) * ((draft is not None) + (head is not None))
    done = 0
    cache = target.new_cache()
    ratios: list[dict[int, float]] = []
    single_ms: list[float] = []
    unrest = 0.0
    for context, plan in zip(contexts, plans):
        run = behind(target, cache, context)

        def timed(size: int) -> float:
            start = clock()
            run(size)
            return 1e3 * (clock() - start)
        timed(1)
        for size in (1, *plan):
            _settle(target, run, size)
        singles: list[float] = []
        seen: dict[int, list[float]] = {size: [] for size in plan}
        for _ in range(_ROUNDS):
            for size in plan:
                singles.append(timed(1))
                seen[size].append(timed(size) / singles[-1])
                done += 1
                yield done / num_pieces
        single_ms.append(median(singles) if singles else timed(1))
        if len(singles) > 3:
            unrest = max(unrest, _spread(singles))
        ratios.append({1: 1.0} | {size: median(values) for size, values in seen.items()})
    runs = {rows: behind(target, cache, contexts[0], rows) for rows in (1, *(ROWS if batch_sizes else ()))}
    _settle(target, runs[1], 1)
    small: dict[str, Callable[[], None]] = {} if head is None else {"head": head}
    if draft is not None:
        run_draft = behind(draft, draft.new_cache(), min(contexts[0], draft.context - 1))
        _settle(draft, run_draft, 1)
        small["draft"] = partial(run_draft, 1)
    small_ms: dict[str, float] = {}
    for name, run_small in small.items():        # each after a forward of the target, which leaves nothing of it in the processor's caches
        shares = []
        for _ in range(_NUM_DRAFT + 1):
            start = clock()
            runs[1](1)
            middle = clock()
            run_small()
            shares.append((clock() - middle) / (middle - start))
            done += 1
            yield done / num_pieces
        small_ms[name] = round(single_ms[0] * median(shares), 4)
    factors: dict[tuple[int, int], list[float]] = {(rows, size): [] for rows in ROWS for size in batch_sizes}
    for rows, size in factors:
        _settle(target, runs[1], rows * size)
        _settle(target, runs[rows], size)
    for _ in range(_BATCH_ROUNDS):
        for (rows, size), seen_factors in factors.items():
            start = clock()
            runs[1](rows * size)
            middle = clock()
            runs[rows](size)
            seen_factors.append((clock() - middle) / (middle - start))
            done += 1
            yield done / num_pieces
    if batch_sizes:
        unrest = max(unrest, median(_spread(each) for each in factors.values()))
    return CostTable(tuple(sizes), tuple(contexts), _rows(sizes, single_ms, ratios), small_ms.get("draft"),
                     datetime.now(timezone.utc).isoformat(timespec="seconds"), unrest, (1, *ROWS) if batch_sizes else (1,), batch_sizes,
                     tuple(tuple(median(factors[rows, size]) for size in batch_sizes) for rows in ROWS) if batch_sizes else (),
                     small_ms.get("head"))


def _spread(values: Sequence[float]) -> float:
    """How far apart the middle half of them lies, relative to their median."""
    low, middle, high = quantiles(values, n=4)
    return (high - low) / middle


def _settle(model: LanguageModel, run: Callable[[int], None], size: int) -> None:
    """Run a size until its time is the one to come: where steps are captured, the first ones are launched from Python."""
    if model.graphs is not None:
        for _ in range(WARM_UPS + 1):
            run(size)


def behind(model: LanguageModel, cache: KVCache, context: int, num_rows: int = 1) -> Callable[[int], None]:
    """A function that feeds a chain of so many tokens behind a text of `context` tokens, waits for the result, and takes it back.

    num_rows: such texts, each with a chain of its own, in one forward.
    """
    generator = random.Random(0)
    rows = [cache.allocate() for _ in range(num_rows)]
    read = [generator.randrange(model.num_tokens) for _ in range(min(_READ, context))]
    for row in rows:
        model.forward([Row(row, read, num_logits=0)], cache)
        cache.keep(row, range(len(read)))
        cache.repeat(row, context)

    def run(num_tokens: int) -> None:
        for output in model.forward([Row(row, [1] * num_tokens) for row in rows], cache):
            output.logits.argmax(-1).tolist()   # the device has finished when the answer is here
        for row in rows:
            cache.keep(row, ())
    return run


def _rows(sizes: Sequence[int], single_ms: Sequence[float], ratios: Sequence[dict[int, float]]) -> tuple[tuple[float, ...], ...]:
    """Times from ratios, in order; sizes that a longer context lacks are filled in along the first context's curve."""
    rows: list[list[float]] = []
    for single, seen in zip(single_ms, ratios):
        known = sorted(seen)
        values = []
        for size in sizes:
            if size not in seen:
                low, high = max(n for n in known if n < size), min((n for n in known if n > size), default=known[-1])
                first = ratios[0]
                share = (size - low) / (high - low) if high > low else 0.0
                factor = seen[low] / first[low] + share * (seen[high] / first[high] - seen[low] / first[low])
                values.append(first[size] * factor)
            else:
                values.append(seen[size])
        row = [single * value for value in monotone(values)]
        rows.append(row if not rows else [max(a, b) for a, b in zip(row, rows[-1])])        # a longer text never costs less
    return tuple(map(tuple, rows))
