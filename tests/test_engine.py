"""The decoding loop on tiny random models: the text is the target's, whoever drafts; rows and caches end clean."""
from __future__ import annotations

import pytest
import torch
from engine_helpers import Lab, Result, repeating_prompt
from tiny import FAMILIES

from specviz.drafters import DRAFTERS
from specviz.drafters.plain import Stateless
from specviz.engine.draft import Draft
from specviz.engine.model import FINAL, Output, Row
from specviz.engine.sequence import Status
from specviz.errors import InputError, PromptTooLong, UnsupportedModel

METHODS = list(DRAFTERS)


class Oracle(Stateless):
    """Proposes the true continuation with some mistakes, as a chain or as a tree: every verdict occurs in one run."""
    name, needs = "oracle", ()

    def __init__(self, truth: dict[int, list[int]], tree: bool, wrong_every: int = 5) -> None:
        self._truth, self._tree, self._wrong_every = truth, tree, wrong_every

    def propose(self, sequences, budgets):
        return [self._propose(*each) for each in zip(sequences, budgets)]

    def _propose(self, sequence, budget):
        start = len(sequence.tokens)
        ahead = [t if (start + i) % self._wrong_every else (t + 1) % 384 for i, t in enumerate(self._truth[sequence.id][start:start + budget.depth])]
        if not self._tree:
            return Draft.chain(ahead[:budget.nodes])
        junk = [(t + 5) % 384 for t in ahead]
        paths = [junk[:2], ahead, ahead[:1] + junk[1:2]]
        return Draft.from_paths(paths).truncate(budget.nodes)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_method_gives_the_plain_tokens_in_one_batch(family):
    """Greedy, float64: rows of different length with different drafters in one batch emit what plain decoding emits, alone and in a batch."""
    lab = Lab(family, max_rows=len(METHODS))
    prompts = [repeating_prompt(9 + 5 * i, period=4 + i, seed=i) for i in range(len(METHODS))]
    plain = [lab.add(prompt, max_new_tokens=20, scope=f"plain {i}") for i, prompt in enumerate(prompts)]
    lab.finish()
    expected = [result.tokens for result in plain]
    assert [lab.run(prompt, max_new_tokens=20, scope="alone").tokens for prompt in prompts[::4]] == expected[::4]
    results = [lab.add(prompt, method, k=3 + i, max_new_tokens=20, scope=method) for i, (prompt, method) in enumerate(zip(prompts, METHODS))]
    lab.finish()
    assert [result.tokens for result in results] == expected
    assert any(step.num_rows == len(METHODS) for result in results for step in result.steps)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "phi"])
def test_good_drafts_are_accepted_and_change_nothing(family, tree):
    """A drafter that mostly knows the answer saves steps; text and cache are those of plain decoding, past sliding windows too."""
    lab = Lab(family)
    prompt = repeating_prompt(30)
    plain = lab.run(prompt, max_new_tokens=40)
    oracle = Oracle({1: prompt + plain.tokens}, tree)
    result = lab.run(prompt, oracle, k=9, max_new_tokens=40, scope="other")
    assert result.tokens == plain.tokens
    assert len(result.steps) < len(plain.steps) / 2
    states = {node.state for step in result.steps for node in step.nodes}
    assert {"accepted", "rejected"} <= states
    length = len(prompt) + len(plain.tokens) - 1
    assert lab.cache.length(result.sequence.row) == length
    ours, theirs = lab.cache._rows[result.sequence.row], lab.cache._rows[plain.sequence.row]
    for a, b in zip(ours.keys + ours.values, theirs.keys + theirs.values):
        torch.testing.assert_close(a[:, :length], b[:, :length], rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_eos_and_limits_at_every_offset_of_a_block(method):
    """Wherever EOS, a stop string or the length limit falls in a block, the answer ends exactly there, and the cache with it. All cases
    share one batch."""
    lab = Lab(likeness=0.99, max_rows=36, max_parked=40, token_budget=2048)
    prompt = repeating_prompt(20)
    free = lab.run(prompt, max_new_tokens=16)

    def add(**params) -> Result:
        return lab.add(prompt, method, k=6, **{"max_new_tokens": 16, **params})

    text = " ".join(map(str, free.tokens)) + " "
    cases = []
    for cut in range(1, 13):
        token = free.tokens[cut - 1]
        stop = " ".join(map(str, free.tokens[max(0, cut - 2):cut])) + " "
        cases += [(add(eos=[token]), "eos", free.tokens[:free.tokens.index(token) + 1], None),
                  (add(stop=(stop,)), "stop", None, text[:text.find(stop)]),
                  (add(max_new_tokens=cut), "length", free.tokens[:cut], None)]
    lab.finish()
    for result, reason, tokens, shown in cases:
        assert result.sequence.reason == reason
        assert tokens is None or result.tokens == tokens
        assert shown is None or result.sequence.sink.text == shown
        assert lab.cache.length(result.sequence.row) <= len(result.sequence.tokens)


def test_blocks_are_cut_inside_accepted_drafts():
    """With a drafter that is always right, EOS at every offset still ends the text there; accepted tokens beyond it are counted, not emitted."""
    lab = Lab()
    prompt = repeating_prompt(20)
    free = lab.run(prompt, max_new_tokens=14)
    wasted = 0
    for cut in range(2, 14):
        token = free.tokens[cut]
        first = free.tokens.index(token) + 1
        oracle = Oracle({request: prompt + free.tokens for request in range(99)}, tree=False, wrong_every=1000)
        result = lab.run(prompt, oracle, k=5, max_new_tokens=14, eos=[token])
        assert result.tokens == free.tokens[:first]
        accepted = sum(node.state == "accepted" for step in result.steps for node in step.nodes)
        wasted += accepted - sum(token.origin == "draft" for step in result.steps for token in step.emitted)
        assert lab.cache.length(result.sequence.row) <= len(result.sequence.tokens)
    assert wasted > 0


@pytest.mark.parametrize("method", METHODS)
def test_second_turn_warm_equals_cold(method):
    """A follow-up that reuses the cached prefix gives the tokens that a fresh engine gives, and reads only what is new."""
    warm, cold = Lab(), Lab()
    first = repeating_prompt(18)
    answer = warm.run(first, method, max_new_tokens=12)
    second = first + answer.tokens + [5, 6, 7, 8] + first[:6]
    again = warm.run(second, method, max_new_tokens=12)
    assert again.sequence.num_reused == len(first) + len(answer.tokens) - 1
    assert again.tokens == cold.run(second, method, max_new_tokens=12).tokens
    other = warm.run(second, method, max_new_tokens=12, scope="somebody else")
    assert other.sequence.num_reused == 0


def test_chunked_prefill_changes_nothing():
    """A prompt read in chunks of 5, while another row decodes, gives the same tokens and one prefill record."""
    whole, chunked = Lab(), Lab(token_budget=5)
    long, short = repeating_prompt(43, seed=3), repeating_prompt(6, seed=4)
    expected = whole.run(long, "draft_model").tokens
    runner = chunked.add(short, "prompt_lookup", max_new_tokens=30)
    for _ in range(6):
        chunked.step()
    result = chunked.add(long, "draft_model")
    chunked.finish()
    assert result.tokens == expected
    assert [step.kind for step in result.steps[:2]] == ["prefill", "spec"]
    assert result.steps[0].num_prompt_tokens == 43 and result.steps[0].t0_ms < 0
    assert runner.tokens == whole.run(short, max_new_tokens=30).tokens


class Listener(Oracle):
    """An oracle that also wants hidden states, and keeps those of every token that was committed."""
    name = "listener"

    def __init__(self, truth, needs) -> None:
        super().__init__(truth, tree=True)
        self.needs, self.states, self.chunks = needs, [], []

    def observe(self, outcomes):
        for outcome in outcomes:
            pending = len(outcome.hidden) - len(outcome.draft)
            path = outcome.verdict.path if outcome.verdict else ()
            self.chunks.append((pending, outcome.verdict is None, outcome.logits is None))
            self.states.append(outcome.hidden[[*range(pending), *(pending + node for node in path)]])


def test_drafters_hear_the_hidden_states_of_every_committed_token():
    """Chunk by chunk of the prompt and step by step, in the drafter's own order of layers, beside a drafter that wants other layers."""
    lab = Lab(token_budget=7)
    prompt = repeating_prompt(25)
    plain = lab.run(prompt, max_new_tokens=20, scope="plain")
    truth = {request: prompt + plain.tokens for request in range(9)}
    first, second = Listener(truth, (2, FINAL)), Listener(truth, (0, 2))
    results = [lab.add(prompt, drafter, k=6, max_new_tokens=20, scope=str(drafter.needs)) for drafter in (first, second)]
    lab.finish()
    row = lab.cache.allocate()
    tokens = prompt + plain.tokens
    for drafter, result in zip((first, second), results):
        assert result.tokens == plain.tokens
        whole = lab.target.forward([Row(row, tokens)], lab.cache, hidden=drafter.needs)[0].hidden
        lab.cache.keep(row, ())
        heard = torch.cat(drafter.states)
        torch.testing.assert_close(heard[:len(tokens) - 1], whole[:len(tokens) - 1], rtol=0, atol=1e-9)
        assert [chunk for chunk in drafter.chunks if chunk[1]] and all(chunk[1] == chunk[2] for chunk in drafter.chunks)


def test_cancel_keeps_the_text_and_frees_the_row():
    """Cancelling while waiting, while reading the prompt or while decoding ends the request at once; the others go on unchanged."""
    lab = Lab(max_rows=2, token_budget=8, max_parked=0)
    prompts = [repeating_prompt(20, seed=i) for i in range(4)]
    expected = Lab().run(prompts[0], "draft_model").tokens
    survivor, decoding, waiting = (lab.add(prompt, "draft_model") for prompt in prompts[:3])
    while not decoding.tokens:
        lab.step()
    partial = list(decoding.tokens)
    for result in (waiting, decoding):
        lab.engine.cancel(result.sequence.id)
    assert (decoding.tokens, decoding.sequence.reason, waiting.sequence.status) == (partial, "cancelled", Status.FINISHED)
    reading = lab.add(prompts[3], "draft_model")
    lab.step()
    lab.engine.cancel(reading.sequence.id)
    lab.finish()
    assert survivor.tokens == expected
    assert len(lab.cache) == 0 and len(lab.drafters["draft_model"]._cache) == 0
    lab.engine.cancel(12345)


def test_a_long_run_with_everything_leaks_no_row():
    """After many requests with reuse, only the parked rows hold cache."""
    lab = Lab(max_rows=3, max_parked=2)
    for i in range(2 * len(METHODS)):
        lab.add(repeating_prompt(8 + i, seed=i % 3), METHODS[i % len(METHODS)], max_new_tokens=6)
    lab.finish()
    assert len(lab.cache) == len(lab.engine.scheduler.parked) == 2
    lab.engine.forget()
    assert len(lab.cache) == 0
    assert all(len(drafter._cache) == 0 for drafter in lab.drafters.values() if hasattr(drafter, "_cache"))


@pytest.mark.parametrize("method", METHODS)
def test_the_context_ends_the_answer_not_the_program(method):
    """Every slot of the context is used, then the answer ends with the reason "context"."""
    lab = Lab(capacity=40)
    result = lab.run(repeating_prompt(30), method, k=6, max_new_tokens=100)
    assert (len(result.tokens), result.sequence.reason) == (11, "context")
    assert result.tokens == Lab().run(repeating_prompt(30), max_new_tokens=11).tokens


def test_a_prompt_that_does_not_fit_is_refused_with_numbers():
    """The sentence says how long the prompt is and how much fits; an empty prompt is refused too."""
    lab = Lab(capacity=40)
    with pytest.raises(PromptTooLong, match="41 tokens.*39"):
        lab.add(repeating_prompt(41))
    with pytest.raises(InputError, match="empty"):
        lab.add([])


def test_values_that_are_not_numbers_are_refused(monkeypatch):
    """NaN logits end the step with a sentence: nothing is ever accepted or drawn from them."""
    lab = Lab()
    forward = lab.target.forward

    def broken(*args, **kwargs):
        return [Output(output.logits * float("nan"), output.hidden) for output in forward(*args, **kwargs)]
    monkeypatch.setattr(lab.target, "forward", broken)
    result = lab.add(repeating_prompt(9), "prompt_lookup")
    with pytest.raises(UnsupportedModel, match="not numbers"):
        lab.step()
    assert lab.engine.abort() == [result.sequence] and not result.tokens
    monkeypatch.undo()
    assert len(lab.run(repeating_prompt(9), "prompt_lookup").tokens) == 24


@pytest.mark.parametrize("method", METHODS)
def test_sampling_can_be_repeated(method):
    """The same seed gives the same text, another seed another one."""
    lab = Lab()
    prompt = repeating_prompt(20)
    texts = [lab.run(prompt, method, temperature=1.5, seed=seed, scope=str(i)).tokens for i, seed in enumerate((1, 1, 2))]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [dict(temperature=1.0), dict(temperature=0.7, top_k=3, repetition_penalty=1.3)], ids=["plain", "all options"])
def test_sampled_tokens_follow_the_target(method, options):
    """Chi-square of the first three emitted tokens against the target's own law, by decode position; false alarm below 1e-6.

    The law of a position given its prefix is computed from the model; draws are pooled over prefixes by their probability rank. Fifty
    requests with their own seeds share each batch, which is only quicker.
    """
    from specviz.engine.sampling import SamplingParams, distribution
    lab = Lab(likeness=0.97, dtype=torch.float64, max_rows=50, token_budget=4096)
    prompt = repeating_prompt(12)
    params = SamplingParams(**options)
    runs, depth = 250, 3
    observed = torch.zeros(depth, 4)
    expected = torch.zeros(depth, 4, dtype=torch.float64)
    laws: dict[tuple[int, ...], torch.Tensor] = {}
    answers = []
    for first in range(0, runs, lab.engine.scheduler.max_rows):
        seeds = range(first, min(runs, first + lab.engine.scheduler.max_rows))
        results = [lab.add(prompt, method, k=3, max_new_tokens=depth + 1, seed=seed, **options) for seed in seeds]
        lab.finish()
        answers += [result.tokens for result in results]
        unknown = {(*prompt, *tokens[:i]) for tokens in answers[first:] for i in range(1, depth + 1)} - laws.keys()
        rows = [Row(lab.cache.allocate(), prefix, num_logits=1) for prefix in sorted(unknown)]
        for row, output in zip(rows, lab.target.forward(rows, lab.cache) if rows else ()):
            lab.cache.free(row.row)
            laws[row.tokens] = distribution(output.logits, params, [row.tokens])[0]
    for tokens in answers:
        for i in range(1, depth + 1):                       # token 0 comes from the prefill and was never drafted
            law = laws[(*prompt, *tokens[:i])]
            cuts = law.sort(descending=True)
            ranks = torch.empty_like(cuts.indices)
            ranks[cuts.indices] = torch.arange(len(law))
            cell = torch.tensor([0] * 1 + [1] * 2 + [2] * 5 + [3] * (len(law) - 8))
            observed[i - 1, cell[ranks[tokens[i]]]] += 1
            expected[i - 1].index_add_(0, cell, cuts.values)
    for row, law in zip(observed, expected):
        used = law > 0
        assert row[~used].sum() == 0
        statistic = ((row - law)[used] ** 2 / law[used]).sum().item()
        assert statistic < 33, (method, statistic)           # chi-square, 3 degrees of freedom: P(> 33) = 3e-7
