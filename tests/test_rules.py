"""The rules beside rejection: what they promise holds on real forwards of tiny models, for every way of drafting."""
from __future__ import annotations

import math
from fractions import Fraction as F

import pytest
import torch
from engine_helpers import Lab, repeating_prompt
from fakes import vector

from specviz.drafters import DRAFTERS
from specviz.drafters.plain import Stateless
from specviz.engine.draft import EMPTY, ROOT, Draft
from specviz.engine.rules import RULES, block, shared, typical
from specviz.engine.sampling import KeyedNoise, SharedNoise

METHODS = list(DRAFTERS)
LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]


class Guesses(Stateless):
    """A test drafter without a model of its own: a tree of tokens near to what the target would say, drawn or chosen.

    It draws siblings without replacement with the request's own noise, from a flat distribution of its own.
    """
    name, needs = "guesses", ()

    def __init__(self, widths, drawn, size=384):
        self._widths, self._drawn, self._size = widths, drawn, size

    def propose(self, sequences, budgets):
        return [self._propose(*each).truncate(budget.nodes) for each, budget in zip(zip(sequences, budgets), budgets)]

    def _propose(self, sequence, budget):
        nodes, parents, rows = [], [], []
        level = [ROOT]
        for depth, width in enumerate(self._widths[:budget.depth]):
            position, following = len(sequence.tokens) + depth, []
            for parent in level:
                left = torch.full((self._size,), 1 / self._size, dtype=torch.float64)
                for sibling in range(width):
                    token = sequence.noise.draw_draft(left, position, sequence.num_steps, sibling) if self._drawn else (7 * position + sibling) % 384
                    following.append(len(nodes))
                    nodes.append(token)
                    parents.append(parent)
                    rows.append(left)
                    left = left.clone()
                    left[token] = 0
                    left /= left.sum()
            level = following
        return Draft(tuple(nodes), tuple(parents), torch.stack(rows) if self._drawn and rows else None)


def accepted(results) -> int:
    return sum(node.state == "accepted" for result in results for step in result.steps for node in step.nodes)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_shared_noise_gives_plain_samplings_own_tokens(temperature):
    """Token for token, in batches: every registered method, and trees and chains of drawn and of chosen guesses."""
    lab = Lab(likeness=0.97)
    drafters = [*METHODS, Guesses((1, 1, 1), True), Guesses((3, 2), True), Guesses((3, 2), False), Guesses((1, 1), False)]
    prompts = [repeating_prompt(9 + 2 * i, period=4 + i % 5, seed=i) for i in range(len(drafters))]
    options = dict(temperature=temperature, max_new_tokens=20)
    expected = [lab.add(prompt, seed=seed, scope=f"plain {seed}", **options) for seed, prompt in enumerate(prompts)]
    results = [lab.add(prompt, drafter, k=6, seed=seed, rule="shared-noise", scope=f"ours {seed}", **options)
               for seed, (drafter, prompt) in enumerate(zip(drafters, prompts))]
    lab.finish()
    assert [result.tokens for result in results] == [result.tokens for result in expected]
    assert accepted(results) > 20 and any(step.num_rows > 1 for result in results for step in result.steps)


@pytest.mark.parametrize("options", [dict(top_k=20), dict(top_p=0.8, repetition_penalty=1.3), dict(min_p=0.05)], ids=str)
def test_shared_noise_with_every_option(options):
    """Filters and penalties are part of both distributions; the text stays that of plain sampling, the warm second turn included."""
    lab = Lab(likeness=0.99)
    prompt = repeating_prompt(15)
    for seed in range(3):
        case = dict(temperature=0.9, seed=seed, max_new_tokens=16, **options)
        expected = lab.run(prompt, scope=f"plain {seed}", **case)
        result = lab.run(prompt, "draft_model", rule="shared-noise", scope=f"ours {seed}", **case)
        assert result.tokens == expected.tokens
        again = lab.run(prompt + result.tokens + [9, 8, 7], "draft_model", rule="shared-noise", scope=f"ours {seed}", **case)
        assert again.sequence.num_reused and again.tokens == Lab().run(prompt + result.tokens + [9, 8, 7], **case).tokens


def test_other_seeds_and_other_noise_give_other_text():
    """The equality above is no accident: another seed, or the rejection rule with the same seed, writes something else."""
    lab = Lab(likeness=0.97)
    def tokens(method, rule, seed):
        return lab.run(repeating_prompt(12), method, rule=rule, seed=seed, temperature=1.0, scope=f"{method} {rule} {seed}").tokens
    plain = tokens("plain", "rejection", 3)
    assert tokens("draft_model", "shared-noise", 3) == plain != tokens("draft_model", "shared-noise", 4)
    assert tokens("draft_model", "rejection", 3) != plain


def test_shared_noise_is_what_makes_drawn_drafts_right():
    """A drafter equal to the target has every token accepted with the shared noise, and few of this vocabulary with noise of its own."""
    p = torch.full((3, 384), 1 / 384)
    def num_accepted(noise):
        draft = Draft.chain([noise.draw_draft(p[0], 5 + i, 0) for i in range(2)], p[:2])
        return len(shared(draft, p, noise, 5).path)
    assert all(num_accepted(SharedNoise(seed)) == 2 for seed in range(50))
    assert sum(num_accepted(KeyedNoise(seed)) for seed in range(50)) <= 3


@pytest.mark.parametrize("rule", LOSSLESS[1:])
def test_greedy_runs_are_the_same_under_every_lossless_rule(rule):
    """At temperature 0 every rule accepts the argmax and nothing else: same tokens, same verdicts as rejection, in a mixed batch."""
    lab = Lab(likeness=0.97)
    prompts = [repeating_prompt(10 + 3 * i, period=4 + i % 5, seed=i) for i in range(len(METHODS))]
    plain = [lab.add(prompt, scope=f"plain {i}", max_new_tokens=14) for i, prompt in enumerate(prompts)]
    ours, theirs = ([lab.add(prompt, method, rule=name, scope=f"{name} {i}", max_new_tokens=14)
                     for i, (prompt, method) in enumerate(zip(prompts, METHODS))] for name in (rule, "rejection"))
    lab.finish()
    assert [result.tokens for result in ours] == [result.tokens for result in theirs] == [result.tokens for result in plain]
    for one, other in zip(ours, theirs):
        assert [[node.state for node in step.nodes] for step in one.steps] == [[node.state for node in step.nodes] for step in other.steps]
        assert all(node.u is None for step in one.steps for node in step.nodes)
    assert accepted(ours) > 0


def test_rules_mix_in_a_batch():
    """The rule is the request's own: in one batch each request gives what it gives alone."""
    prompt, case = repeating_prompt(12), dict(temperature=1.0, seed=5, max_new_tokens=12)
    alone = [Lab(likeness=0.97).run(prompt, "draft_model", rule=rule, **case).tokens for rule in RULES]
    lab = Lab(likeness=0.97)
    together = [lab.add(prompt, "draft_model", rule=rule, scope=rule, **case) for rule in RULES]
    lab.finish()
    assert [result.tokens for result in together] == alone and [result.sequence.rule.name for result in together] == list(RULES)


def test_block_leaves_trees_to_rejection_and_says_so():
    """A step whose draft branches is judged token by token and names that rule in the trace; chain steps name none."""
    lab = Lab(likeness=0.97)
    case = dict(temperature=1.0, seed=1, rule="block")
    tree = lab.run(repeating_prompt(12), Guesses((2, 1), True), scope="tree", **case)
    chain = lab.run(repeating_prompt(12), "draft_model", scope="chain", **case)
    assert {step.rule for step in tree.steps if len(step.nodes) > 1} == {"rejection"}
    assert {step.rule for step in chain.steps} == {""}
    assert tree.tokens == lab.run(repeating_prompt(12), Guesses((2, 1), True), scope="same", temperature=1.0, seed=1).tokens


class Scripted:
    """Accepts by a list of u, tried in the order asked; keeps what it was asked."""

    def __init__(self, numbers, token=0):
        self._numbers, self._token, self.asked = list(numbers), token, []

    def accepts(self, prob, position, sibling):
        u = self._numbers.pop(0)
        self.asked.append((prob, position, sibling))
        return u < prob, u

    def draw(self, probs, position):
        self.drawn = probs, position
        return self._token


@pytest.mark.parametrize("numbers, path, origin, drawn", [
    ([0.1], (0, 1), "bonus", (vector(1, 1), 6)),
    ([0.2, 0.1], (0,), "correction", (vector(0, 1), 5)),
    ([0.2, 0.3], (), "correction", (vector(0, 1), 4))], ids=["both", "one", "none"])
def test_block_by_hand(numbers, path, origin, drawn):
    """Two drawn tokens, worked out with pencil: r = (1, 1/2, 1/6), s = 1/8 behind the first, so h = 1/5; the longest block is tried first."""
    draft = Draft.chain([0, 0], [vector(1, 1), vector(3, 1)])
    noise = Scripted(numbers)
    verdict = block(draft, [vector(1, 3), vector(1, 3), vector(1, 1)], noise, 4)
    assert noise.asked == [(F(1, 6), 5, -2), (F(1, 5), 4, -1)][:len(numbers)]
    assert (verdict.path, verdict.origin, noise.drawn) == (path, origin, drawn)
    judged = [(j.node, j.accept_prob, j.u, j.accepted) for j in verdict.judgements]
    assert judged == {2: [(0, None, None, True), (1, F(1, 6), 0.1, True)], 1: [(0, F(1, 5), 0.1, True), (1, F(1, 6), 0.2, False)],
                      0: [(0, F(1, 5), 0.3, False)]}[len(path)]


def test_typical_changes_the_distribution():
    """LOSSY, as its label says: a likely token that was chosen is kept always, and q shows through where tokens are drawn."""
    p, q = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64), torch.tensor([0.1, 0.8, 0.1], dtype=torch.float64)
    rows = torch.stack([p, p])
    law = torch.zeros(3, dtype=torch.float64)
    for token, weight in enumerate(q.tolist()):              # every draft, with its probability; typical acceptance draws nothing itself
        verdict = typical(Draft.chain([token], q[None]), rows, KeyedNoise(0), 0)
        law += weight * (torch.eye(3, dtype=torch.float64)[token] if verdict.path else p)
    assert not torch.allclose(law, p, atol=0.1)
    chosen = typical(Draft.chain([1]), rows, KeyedNoise(0), 0)
    assert chosen.path == (0,) and RULES["typical"].promise == "nothing" and not RULES["typical"].lossless
    assert p[1] > min(0.09, 0.3 * math.exp(-torch.special.entr(p).sum()))


def test_typical_changes_the_text_of_a_real_run():
    """LOSSY on a real model: where the second most probable token is guessed, it is written far more often than under rejection."""
    lab = Lab(likeness=0.97)
    prompt = repeating_prompt(12)
    class Same(Guesses):
        def _propose(self, sequence, budget):
            return Draft.chain([favourite][:budget.depth])
    from specviz.engine.model import Row
    row = lab.cache.allocate()
    first = lab.run(prompt, temperature=0.3, max_new_tokens=1).tokens
    probs = (lab.target.forward([Row(row, [*prompt, *first], num_logits=1)], lab.cache)[0].logits[0] / 0.3).softmax(-1)
    favourite = int(probs.argsort(descending=True)[1])
    lab.cache.free(row)
    def share(rule):
        results = [lab.add(prompt, Same((1,), False), rule=rule, seed=seed, temperature=0.3, max_new_tokens=3, scope=f"{rule} {seed}")
                   for seed in range(100)]
        lab.finish()
        seconds = [result.tokens[1] == favourite for result in results if result.tokens[:1] == first]
        return sum(seconds), len(seconds)
    (hits, num), (lossless_hits, lossless_num) = share("typical"), share("rejection")
    assert num == lossless_num > 20 and hits / num - lossless_hits / lossless_num > 0.3


def test_typical_takes_the_longest_path():
    """Among all paths whose tokens pass, the deepest; what passed beside it is not judged, what failed is rejected."""
    p = torch.tensor([0.4, 0.4, 0.15, 0.05])
    low = torch.tensor([0.0, 0.0, 0.05, 0.95])
    draft = Draft((3, 0, 1, 2, 3), (ROOT, ROOT, ROOT, 1, 2))
    verdict = typical(draft, torch.stack([p, p, low, low, p, p]), KeyedNoise(1), 0)
    assert verdict.path == (2, 4) and verdict.origin == "bonus"
    assert [(j.node, j.accepted) for j in verdict.judgements] == [(0, False), (2, True), (4, True)]
    assert typical(draft, torch.stack([low] * 6), KeyedNoise(1), 0).path == (0,)
    assert typical(Draft.chain([0]), torch.stack([low] * 2), KeyedNoise(1), 0).origin == "correction"


@pytest.mark.parametrize("name", list(RULES))
def test_no_draft_is_plain_decoding_under_every_rule(name):
    """The empty draft and a draft of window nodes draw one token from p, with the noise of plain sampling."""
    p = torch.tensor([0.2, 0.5, 0.3])
    for seed in range(20):
        rule = RULES[name]
        for draft in (EMPTY, Draft((1,), (ROOT,), judged=(False,))):
            verdict = rule.judge(draft, torch.stack([p, p]), rule.noise(seed), 9)
            assert (verdict.path, verdict.token, verdict.origin) == ((), KeyedNoise(seed).draw(p, 9), "plain")


@pytest.mark.parametrize("method", ["draft_model", "prompt_lookup"])
@pytest.mark.parametrize("rule", list(RULES))
def test_records_of_every_rule_are_readable(rule, method):
    """What a step writes down under any rule is a valid trace: accepted nodes form one path, numbers are numbers."""
    from specviz.trace import Trace, dumps, loads
    result = Lab(likeness=0.97).run(repeating_prompt(12), method, rule=rule, temperature=0.7, seed=2, max_new_tokens=30)
    assert len(loads(dumps(Trace({"verification": rule}, tuple(result.steps)))).steps) == len(result.steps)


def test_the_menu_names_every_rule_and_calls_the_lossy_one_lossy():
    """The page's words and the formulas know exactly the engine's rules; where the promise is nothing, menu, note and formula say LOSSY."""
    from specviz.metrics import FORMULAS
    from specviz.ui.strings import VERIFICATIONS, verification_note, verification_word
    assert list(VERIFICATIONS) == list(RULES) and set(RULES) <= set(FORMULAS)
    for name, rule in RULES.items():
        label, note = VERIFICATIONS[name]
        assert ("lossy" in label) == ("LOSSY" in note) == ("LOSSY" in FORMULAS[name].note) == (not rule.lossless)
        assert verification_note(name) == note and rule.source.rpartition("arXiv ")[2] in FORMULAS[name].source
        assert verification_word({"verification": name}) == ("" if name == "rejection" else label.partition(":")[0])
    assert verification_word({}) == "" and verification_word({"verification": "<b>"}) == "<b>"


def test_a_lossy_run_says_so_in_every_figure():
    """The charts' titles of a run whose rule promises nothing, and of no other."""
    from specviz.ui.viewer import start_body
    def titles(meta):
        return [figure["layout"]["title"]["text"] for theme in start_body(meta, "active")["figures"].values() for figure in theme.values()]
    assert all("lossy" in title for title in titles({"promise": "nothing"}))
    assert not any("lossy" in title for meta in ({}, {"promise": "text"}) for title in titles(meta))
