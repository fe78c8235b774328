"""The table of what a step costs: interpolation, keeping it on disk, and measuring it piece by piece, also beside answers."""
from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch
from test_service import ask, open_tiny, ready

from specviz.cost import CostStore, CostTable, monotone
from specviz.cost_trial import CONTEXTS, SIZES, measure
from specviz.engine.cache import KVCache
from specviz.engine.model import Output
from specviz.errors import InputError

BATCHED = CostTable((1, 8), (100,), ((10.0, 24.0),), None, "2026-11-29T12:00:00+00:00", 0.0, (1, 2, 4), (1, 5), ((1.2, 1.0), (2.0, 1.4)))
TABLE = CostTable((1, 2, 8), (100, 300), ((10.0, 12.0, 24.0), (14.0, 20.0, 56.0)), 2.5, "2026-11-29T12:00:00+00:00")


def test_times_between_and_beyond_what_was_measured():
    """Linear between sizes and between contexts, the last slope beyond them, the shortest context below it; v is relative to one token."""
    assert TABLE.verify_ms(2, 100) == 12 and TABLE.verify_ms(5, 100) == 18 and TABLE.verify_ms(10, 100) == 28
    assert TABLE.verify_ms(2, 200) == 16 and TABLE.verify_ms(2, 500) == 28 and TABLE.verify_ms(2, 5) == 12
    assert TABLE.v(1, 250) == 1 and TABLE.v(8, 100) == 2.4 and TABLE.v(8, 300) == 4
    assert TABLE.verify_ms(2, 100, num_rows=4) == TABLE.verify_ms(8, 100) and TABLE.v(2, 100, 4) == 24 / 16


def test_several_sequences_cost_more_than_one_long_one():
    """The factor is linear between what was measured, constant beyond, and 1 for a single sequence or where nothing was measured."""
    assert [BATCHED.batch_factor(1, rows) for rows in (1, 2, 3, 4, 9)] == [1.0, 1.2, 1.6, 2.0, 2.0]
    assert [BATCHED.batch_factor(size, 4) for size in (1, 3, 5, 40)] == pytest.approx([2.0, 1.7, 1.4, 1.4])
    assert BATCHED.verify_ms(2, 100, 4) == pytest.approx(24 * BATCHED.batch_factor(2, 4)) and TABLE.batch_factor(3, 4) == 1
    assert CostTable.from_json(json.loads(json.dumps(BATCHED.to_json()))) == BATCHED and "num_rows" not in TABLE.to_json()
    for change in ({"num_rows": [1, 4]}, {"num_rows": [2, 3, 4]}, {"batch_sizes": [5, 1]}, {"batch_factors": [[1, 0], [1, 1]]}, {"batch_factors": []}):
        with pytest.raises(InputError, match="verification costs"):
            CostTable.from_json(BATCHED.to_json() | change)


def test_monotone_is_the_nearest_rising_series():
    """Rising, with the sum of the values unchanged, and no nearer series among many random rising ones."""
    values = [1.0, 3.0, 2.0, 2.0, 5.0, 4.0, 6.0]
    nearest = monotone(values)
    assert nearest == sorted(nearest) and sum(nearest) == pytest.approx(sum(values))
    generator = torch.Generator().manual_seed(0)
    others = (torch.tensor(nearest) + 0.3 * torch.randn(2000, 7, generator=generator)).sort(-1).values
    distance = ((others - torch.tensor(values)) ** 2).sum(-1)
    assert sum((a - b) ** 2 for a, b in zip(nearest, values)) <= float(distance.min())


def test_the_table_survives_json_and_nothing_else_does():
    """What is written is what is read; a changed or cut file is refused with a sentence."""
    data = json.loads(json.dumps(TABLE.to_json()))
    assert CostTable.from_json(data) == TABLE
    for change in ({"num_tokens": [2, 3, 8]}, {"num_tokens": [1, 8, 2]}, {"verify_ms": [[1, 2, 3]]}, {"verify_ms": [[1, 2, -3], [1, 2, 3]]},
                   {"context_lengths": ["a", "b"]}, {"draft_ms": float("nan")}, {"verify_ms": None}):
        with pytest.raises(InputError, match="verification costs"):
            CostTable.from_json(data | change)


def test_a_table_belongs_to_one_configuration(tmp_path):
    """Another configuration finds nothing, the same one finds the table, and a broken file counts as none."""
    store, configuration = CostStore(tmp_path / "costs"), {"target": "a", "threads": 1, "exits": (1, 2)}
    assert store.read(configuration) is None
    store.write(configuration, TABLE)
    assert store.read(configuration) == TABLE and store.read(configuration | {"threads": 2}) is None
    [file] = (tmp_path / "costs").iterdir()
    file.write_text(file.read_text()[:50])
    assert store.read(configuration) is None


@torch.inference_mode()
def test_repeating_fills_a_row_with_copies():
    """Entries behind the read ones are copies, through growth of the storage; the row goes on like any other."""
    cache = KVCache(1000)
    row = cache.allocate()
    keys = torch.arange(12.0).view(3, 2, 2)
    cache.stage(row, 3).write(0, keys, -keys)
    cache.keep(row, range(3))
    cache.repeat(row, 700)
    seen, values = cache.stage(row, 1).write(0, torch.zeros(1, 2, 2), torch.zeros(1, 2, 2))
    assert cache.length(row) == 700
    assert torch.equal(seen[:, :700], keys.transpose(0, 1).repeat(1, 234, 1)[:, :700]) and torch.equal(values[:, :700], -seen[:, :700])


class Machine:
    """A model on a machine with an exact price: 5 ms, 2 per token, 0.01 per token and token before it, and 3 for each
    further row; twice that while it is busy."""
    graphs = None
    num_tokens = 50

    def __init__(self, context: int = 4096, price: float = 1.0, busy: int = 2) -> None:
        self.context, self._price, self._busy = context, price, busy
        self.now_s, self.calls = 0.0, 0

    def new_cache(self) -> KVCache:
        return KVCache(self.context)

    @torch.inference_mode()
    def forward(self, rows, cache):
        price, outputs = 5.0 + 3 * (len(rows) - 1), []
        for row in rows:
            num_tokens, before = len(row.tokens), cache.length(row.row)
            cache.stage(row.row, num_tokens).write(0, torch.zeros(num_tokens, 1, 1), torch.zeros(num_tokens, 1, 1))
            price += num_tokens * (2 + 0.01 * before)
            outputs.append(Output(torch.zeros(num_tokens if row.num_logits is None else row.num_logits, 3), None))
        self.calls += 1
        self.now_s += 1e-3 * self._price * (self._busy if self.calls // 45 % 2 else 1) * price
        return outputs


def finished(trial) -> CostTable:
    shares = []
    while True:
        try:
            shares.append(next(trial))
        except StopIteration as end:
            assert shares == sorted(shares) and shares[-1] == 1
            return end.value


def test_measuring_finds_the_price_of_a_machine_that_is_busy_now_and_then():
    """v comes out as the machine's price has it, at both contexts, though every second 45 calls take twice as long; so do the draft's
    cost and that of a head's pass."""
    machine, small, heads = Machine(), Machine(price=0.1), [0.0]

    def single_pass() -> None:
        heads[0] += 0.002
    table = finished(measure(machine, small, single_pass, clock=lambda: machine.now_s + small.now_s + heads[0]))
    assert table.num_tokens == SIZES and table.context_lengths == CONTEXTS
    for context in CONTEXTS:
        for size in SIZES:
            price = (5 + size * (2 + 0.01 * context)) / (5 + 2 + 0.01 * context)
            assert table.v(size, context) == pytest.approx(price, rel=0.2 if size in (2, 3) else 0.12)
    assert table.unrest > 0.3, "such a table is not kept"
    assert finished(measure(quiet := Machine(busy=1), clock=lambda: quiet.now_s)).unrest < 0.1
    for rows in (2, 4):
        for size in (1, 4, 12):
            price = (5 + 3 * (rows - 1) + rows * size * (2 + 2.56)) / (5 + rows * size * (2 + 2.56))
            assert table.batch_factor(size, rows) == pytest.approx(price, rel=0.05)
    assert table.draft_ms == pytest.approx(0.1 * table.verify_ms(1, CONTEXTS[0]), rel=0.01)
    assert table.pass_cost(CONTEXTS[0]) == pytest.approx(2 / (5 + 2 + 0.01 * CONTEXTS[0]), rel=0.01)
    assert CostTable.from_json(table.to_json()).head_ms == table.head_ms and CostTable.from_json({**table.to_json(), "head_ms": None}).pass_cost(9) is None


@pytest.mark.parametrize("context", [40, 100, 500])
def test_short_contexts_are_measured_as_far_as_they_go(context):
    """A model with little context gives a table all the same, and nothing is fed beyond its end."""
    table = finished(measure(machine := Machine(context), clock=lambda: machine.now_s))
    assert CostTable.from_json(table.to_json()).num_tokens[-1] < context and max(table.context_lengths) <= max(1, context - 64)


def test_the_service_measures_between_answers_and_writes_the_table_into_traces():
    """While an answer runs no piece is measured; afterwards the table is finished and stands in the next trace's meta as plain JSON."""
    pieces = threading.Semaphore(0)
    holder = []

    def opener(options, progress):
        opened = open_tiny(options, progress)

        def trial():
            for number in range(4):
                pieces.acquire()
                assert opened.engine.idle, "measured in the middle of an answer"
                yield number / 4
            return TABLE
        opened.trial = trial()
        holder.append(opened)
        return opened
    service = ready(opener)
    try:
        run = service.submit(ask(max_new_tokens=30))
        pieces.release()
        assert len(list(run)) and "cost" not in run.trace().meta
        pieces.release(3)
        while holder[0].costs is None:
            threading.Event().wait(0.01)
        trace = service.submit(ask(max_new_tokens=3)).trace()
        assert CostTable.from_json(json.loads(json.dumps(trace.meta["cost"]))) == replace(TABLE)
        assert service.status().message == "Ready."
    finally:
        pieces.release(9)
        service.close()
        holder.clear()
