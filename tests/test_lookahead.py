"""Lookahead: the comb that is fed, what its predictions become, the pool, and what the draft length means."""
from __future__ import annotations

import pytest
from engine_helpers import Lab, repeating_prompt

from specviz.drafters.lookahead import Lookahead, Pool, Size, Window, best_size
from specviz.engine.draft import ROOT
from specviz.engine.drafting import Budget
from specviz.engine.model import Row
from specviz.metrics import summarize
from specviz.trace import Trace, dumps, loads

TEXT = list(range(20, 60))


def filled(width=3, size=4, guesses=2) -> tuple[Window, Pool]:
    """A window with all its rows after steps of one token; row r holds 1000 r + 100 + column."""
    pool = Pool(guesses)
    window = Window(width, size, pool)
    for step in range(size - 1):
        assert len(window.draft(TEXT, Budget(0, 4, 99))) == width * (step + 1)
        window.learn([1000 * step + 100 + c for c in range(width)], TEXT, 1)
    return window, pool


def test_the_window_is_a_comb():
    """Row 0 is a chain from the root, column c hangs off its token c: the depth of every entry is row + column + 1; none is judged."""
    window, _ = filled()
    draft = window.draft(TEXT, Budget(4, 4, 99))
    assert (len(draft), draft.num_judged, draft.stop) == (9, 0, "no guess")
    assert draft.depths == (1, 2, 3, 2, 3, 4, 3, 4, 5)
    assert draft.parents == (ROOT, 0, 1, 0, 1, 2, 3, 4, 5)
    assert window.fed == [6, 7, 8]


def test_full_columns_become_ngrams_and_rows_move_up():
    """Behind the last row comes the next iterate: each column with it is one n-gram; the oldest row goes, the others keep their places."""
    window, pool = filled()
    draft = window.draft(TEXT, Budget(0, 4, 99))
    rows = [draft.tokens[start:start + 3] for start in (0, 3, 6)]
    pool_before = len(pool)
    window.learn([7, 8, 9], TEXT, 1)
    assert len(pool) >= pool_before + 1
    for column in range(3):
        assert (rows[1][column], rows[2][column], 7 + column) in pool.after(rows[0][column])
    after = window.draft(TEXT, Budget(0, 4, 99)).tokens
    assert (after[:3], after[3:6], after[6:9]) == (rows[1], rows[2], (7, 8, 9))


def test_accepted_tokens_move_the_window_to_the_left():
    """A step that emits three tokens moves every entry three places on: one by the row that goes, two by columns."""
    window, _ = filled()
    rows = [window.draft(TEXT, Budget(0, 4, 99)).tokens[start:start + 3] for start in (0, 3, 6)]
    window.learn([7, 8, 9], TEXT, 3)
    after = window.draft(TEXT, Budget(0, 4, 99)).tokens
    assert (after[0], after[3], after[6]) == (rows[1][2], rows[2][2], 9)
    assert set(after) <= {*TEXT, rows[1][2], rows[2][2], 9}
    window.learn([1, 2, 3], TEXT, 9)                     # further than the window is wide: all columns start anew from the text
    assert set(window.draft(TEXT, Budget(0, 4, 99)).tokens) <= set(TEXT)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_warm_up_fills_the_window_row_by_row(size):
    """N - 1 steps after the start there are N - 1 rows, at N = 2 at once, and the first n-grams come with the step after."""
    pool = Pool(9)
    window = Window(2, size, pool)
    counts = []
    for step in range(size + 1):
        counts.append((len(window.draft(TEXT, Budget(0, 4, 99))), len(pool)))
        window.learn([500 + 2 * step, 501 + 2 * step], TEXT, 1)
    assert [nodes for nodes, _ in counts] == [2 * min(step + 1, size - 1) for step in range(size + 1)]
    assert [pooled > 0 for _, pooled in counts] == [step >= size - 1 for step in range(size + 1)]
    assert all(len(rest) == size - 1 for key in [*TEXT, *range(500, 520)] for rest in pool.after(key))


def test_guesses_come_first_and_keep_to_the_draft_length():
    """K limits the guessed nodes, whole n-grams only; the window comes on top, and is left out where the cache has no place for it."""
    pool = Pool(3)
    window = Window(2, 3, pool)
    for ngram in ([59, 1, 2], [59, 1, 3], [59, 4, 5]):
        pool.add(ngram)
    draft = window.draft(TEXT, Budget(6, 6, 2))
    assert (draft.tokens[:5], draft.parents[:5]) == ((4, 5, 1, 3, 2), (ROOT, 0, ROOT, 2, 2))
    assert draft.judged == (True,) * 5 + (False,) * 2 and draft.num_pooled == 3
    assert [window.draft(TEXT, Budget(k, k, 99)).num_judged for k in (5, 4, 2, 1)] == [4, 4, 2, 1]
    small = window.draft(TEXT, Budget(6, 6, 1))
    assert len(small) == small.num_judged == 5 and not window.fed


def test_the_pool_forgets_the_least_recent():
    """Per first token the latest G stay, one that comes again counts as new; of many first tokens the least recently used go."""
    pool = Pool(2, max_keys=2)
    for rest in ([1, 1], [2, 2], [1, 1], [3, 3]):
        pool.add([9, *rest])
    assert pool.after(9) == [(3, 3), (1, 1)]
    pool.add([8, 0, 0])
    pool.after(9)
    pool.add([7, 0, 0])
    assert (pool.after(8), len(pool.after(9)), len(pool)) == ([], 2, 3)
    copy = pool.copy()
    copy.add([7, 5, 5])
    assert (len(pool), len(copy)) == (3, 4)


def test_guesses_end_with_the_turn():
    """Nothing is guessed beyond a token that ends the turn."""
    window = Window(4, 3, Pool(4), frozenset([5]))
    window.pool.add([59, 5, 6])
    assert window.draft(TEXT, Budget(4, 4, 0)).tokens == (5,)


@pytest.mark.parametrize("ngram", [2, 3, 4])
def test_the_text_is_plain_whatever_the_window(ngram):
    """Greedy text is that of plain decoding; once warm, every step but the last has the whole window and nothing hangs off its nodes."""
    lab = Lab()
    prompt = repeating_prompt(15)
    plain = lab.run(prompt, max_new_tokens=30, scope="plain").tokens
    result = lab.run(prompt, Lookahead(lab.parts, window=3, ngram=ngram, guesses=3), k=6, max_new_tokens=30)
    assert result.tokens == plain
    states = [[node.state for node in step.nodes] for step in result.steps[ngram:-1]]
    assert states and all(found.count("window") == 3 * (ngram - 1) for found in states)
    assert all(step.num_pooled is not None for step in result.steps[1:-1])
    for step in result.steps[1:]:
        assert not any(node.parent >= 0 and "window" in (node.state, step.nodes[node.parent].state) and
                       node.state != step.nodes[node.parent].state for node in step.nodes)


def test_feedback_is_the_argmax_at_the_last_row(monkeypatch):
    """What the window learns is what the target would choose behind each column, computed here one path at a time."""
    lab = Lab()
    result = lab.add(repeating_prompt(15), "lookahead", k=4, max_new_tokens=30)
    for _ in range(5):
        lab.step()
    tokens, drafts, learnt = list(result.sequence.tokens), [], []
    draft, learn = Window.draft, Window.learn
    monkeypatch.setattr(Window, "draft", lambda self, *args: drafts.append(draft(self, *args)) or drafts[-1])
    monkeypatch.setattr(Window, "learn", lambda self, feedback, *args: learnt.append(feedback) or learn(self, feedback, *args))
    lab.step()
    row = lab.cache.allocate()
    expected = []
    for node in range(len(drafts[0]) - len(learnt[0]), len(drafts[0])):
        path = [drafts[0].tokens[i] for i in drafts[0].path(node)]
        expected.append(int(lab.target.forward([Row(row, tokens + path, num_logits=1)], lab.cache)[0].logits.argmax()))
        lab.cache.keep(row, ())
    assert learnt == [expected] and len(expected) == 4


def test_window_nodes_count_in_no_figure():
    """Drafted and accepted tokens are those that were judged; windows and pool sizes are in the trace file, windows in no metric."""
    lab = Lab()
    result = lab.run(repeating_prompt(12), "lookahead", k=4, max_new_tokens=40)
    judged = [node for step in result.steps for node in step.nodes if node.state != "window"]
    windows = [node for step in result.steps for node in step.nodes if node.state == "window"]
    trace = loads(dumps(Trace({"method": "lookahead"}, tuple(result.steps))))
    summary = summarize(trace)
    assert [step.num_pooled for step in trace.steps] == [step.num_pooled for step in result.steps]
    assert windows and summary.num_draft_tokens == len(judged)
    assert summary.num_accepted_draft_tokens == sum(node.state == "accepted" for node in judged)


def test_the_pool_goes_on_to_the_next_turn_of_its_conversation():
    """A second turn of the same scope starts with the pool of the first, another scope with an empty one; the first pool stays as it was."""
    lab = Lab()
    prompt = repeating_prompt(12)
    first = lab.run(prompt, "lookahead", max_new_tokens=20, scope="mine")
    size = first.steps[-2].num_pooled
    mine = lab.run(prompt + first.tokens + [5, 6], "lookahead", max_new_tokens=6, scope="mine")
    other = lab.run(prompt + first.tokens + [5, 6], "lookahead", max_new_tokens=6, scope="yours")
    assert mine.steps[1].num_pooled >= size > other.steps[1].num_pooled == 0


def test_a_size_that_suits_the_machine():
    """Dear tokens give the smallest window, free ones the largest, and no other size has more expected tokens for its time."""
    assert best_size(None) == Size(4, 3, 4)
    assert best_size(lambda num_tokens: float(num_tokens)) == Size(2, 2, 2)
    assert best_size(lambda num_tokens: 1.0).num_fed == max(Size(w, n, w).num_fed for w in (20,) for n in (7,))
    for slope in (0.002, 0.01, 0.05):
        def cost(num_tokens: int) -> float:
            return 1 + slope * (num_tokens - 1)
        chosen = best_size(cost)
        for size in (Size(w, n, w) for w in range(2, 21) for n in range(2, 8)):
            assert chosen.tokens_per_step / cost(chosen.num_fed) >= size.tokens_per_step / cost(size.num_fed) - 1e-12
    sizes = [best_size(lambda num_tokens: 1 + slope * (num_tokens - 1)).num_fed for slope in (0.0, 0.002, 0.01, 0.05, 1.0)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 3


def test_expected_tokens_are_those_of_a_simulation():
    """The formula is the mean of what so many independent guesses, each right with the supposed chance per token, would give."""
    import random
    from specviz.drafters.lookahead import _ALPHA, _EVERY
    size, source, runs = Size(3, 4, 3), random.Random(1), 40_000

    def accepted() -> int:
        return max(next((i for i in range(size.ngram - 1) if source.random() >= _ALPHA), size.ngram - 1) for _ in range(size.guesses))
    mean = sum(1 + accepted() for _ in range(runs)) / runs
    assert size.tokens_per_step == pytest.approx((_EVERY - 1 + mean) / _EVERY, abs=0.01)       # 6 standard errors: below 1e-8
