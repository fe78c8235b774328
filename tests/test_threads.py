"""The choice of threads is made from measurements, in the calling thread."""
import torch

from specviz.engine.threads import choose_threads


class Machine:
    """A clock that a trial moves by a table of costs, so that no test waits for real time."""

    def __init__(self, costs):
        self.costs, self.now, self.calls = costs, 0.0, []

    def trial(self, num_tokens):
        count = torch.get_num_threads()
        self.calls.append((count, num_tokens))
        self.now += self.costs[count][num_tokens] / 1e3

    def clock(self):
        return self.now


def chosen(costs, candidates=None):
    before, machine = torch.get_num_threads(), Machine(costs)
    try:
        choice = choose_threads(machine.trial, candidates or list(costs), clock=machine.clock)
        assert torch.get_num_threads() == choice.count
        return choice, machine
    finally:
        torch.set_num_threads(before)


def test_the_fastest_count_wins_over_both_lengths():
    """Two threads that are good at one token and stall at six are not taken; timings are milliseconds."""
    choice, machine = chosen({1: {1: 40, 6: 60}, 2: {1: 30, 6: 600}})
    assert choice.count == 1
    assert abs(choice.timings[2][1] - 600) < 1e-6 and abs(choice.timings[1][0] - 40) < 1e-6
    assert {(1, 1), (1, 6), (2, 1), (2, 6)} <= set(machine.calls)
    assert chosen({1: {1: 40, 6: 60}, 2: {1: 30, 6: 40}})[0].count == 2


def test_more_threads_must_pay():
    """A gain within the noise keeps the smaller count: fewer threads leave the machine to others."""
    assert chosen({1: {1: 40, 6: 60}, 2: {1: 39, 6: 59}})[0].count == 1


def test_one_candidate_needs_no_trial():
    """With one count nothing is run."""
    choice, machine = chosen({1: {1: 1, 6: 1}}, [1])
    assert choice.count == 1 and machine.calls == []
