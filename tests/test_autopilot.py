"""The autopilot on simulated text and costs, on the real engine, and, outcome by outcome, that it changes no distribution."""
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine_helpers import Lab, repeating_prompt
from fakes import EnumeratingNoise, Table, target_law, whole_law
from test_service import ask, ready

from specviz import metrics
from specviz.cost import CostTable
from specviz.engine.autopilot import Autopilot
from specviz.engine.draft import Draft
from specviz.engine.drafting import DraftSettings, limits_of, parts_of
from specviz.engine.sampling import SamplingParams
from specviz.engine.verify import Verdict, verify
from specviz.trace import CacheTrace, ChoiceTrace, EmittedToken, NodeTrace, StepTrace, Trace, dumps, loads

SIZES = (1, 2, 4, 8, 16, 32, 64)


def costs(slope: float) -> CostTable:
    """A step of M tokens takes 1 + 0.08 + slope (M - 1) plain steps."""
    return CostTable(SIZES, (256,), (tuple(40 * (1 + (size > 1) * 0.08 + slope * (size - 1)) for size in SIZES),))


class Text:
    """Text in which a drafted token is right with a chance that depends on the place, and, for lookups, a draft is found with another.

    drafting: what a drafted token costs, in plain steps.
    """

    def __init__(self, right: Callable[[int], float], found: float = 1.0, drafting: float = 0.01, slope: float = 0.05, seed: int = 0) -> None:
        self.right, self.found, self.drafting, self.costs, self.random = right, found, drafting, costs(slope), random.Random(seed)
        self.num_tokens, self.spent = 0, 0.0
        self.asked: list[int] = []

    def step(self, k: int) -> tuple[Draft, Verdict, float]:
        num = k if self.random.random() < self.found else 0
        accepted = 0
        while accepted < num and self.random.random() < self.right(self.num_tokens):
            accepted += 1
        share = self.drafting * num / self.costs.v(1 + num, 256)
        self.asked.append(k)
        self.num_tokens += accepted + 1
        self.spent += self.costs.v(1 + num, 256) + self.drafting * num
        return Draft.chain([0] * num), Verdict(tuple(range(accepted)), 0, "bonus" if accepted == num else "correction"), share

    def fly(self, num_tokens: int, pilot: Autopilot | None = None) -> Autopilot:
        pilot = pilot or Autopilot(self.costs)
        while self.num_tokens < num_tokens:
            pilot.observe(*self.step(*pilot.choose(256, 32)))
        return pilot

    def fixed(self, num_tokens: int, k: int) -> float:
        """Speed with a fixed length, in tokens per plain step's time."""
        while self.num_tokens < num_tokens:
            self.step(k)
        return self.speed

    @property
    def speed(self) -> float:
        return self.num_tokens / self.spent


@pytest.mark.parametrize("chance, slope, drafting", [(0.5, 0.03, 0.01), (0.8, 0.03, 0.01), (0.8, 0.12, 0.15), (0.6, 0.05, 0.1), (0.95, 0.4, 0.0)])
def test_it_comes_near_the_best_fixed_length(chance, slope, drafting):
    """On steady text the mean of ten runs reaches at least nine tenths of what the best fixed length reaches on the same text."""
    def speeds(run: Callable[[Text], float]) -> float:
        return sum(run(Text(lambda at: chance, 1.0, drafting, slope, seed)) for seed in range(10)) / 10

    def auto(text: Text) -> float:
        text.fly(500)
        return text.speed
    best = max(speeds(lambda text, k=k: text.fixed(500, k)) for k in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24))
    assert speeds(auto) >= 0.9 * best


@pytest.mark.parametrize("drafting, slope", [(0.0, 0.03), (0.15, 0.12), (0.3, 0.6)])
def test_it_switches_off_where_nothing_is_right(drafting, slope):
    """On hopeless text it drafts nothing from the twentieth step on, but for a look now and then."""
    text = Text(lambda at: 0.0, 1.0, drafting, slope)
    text.fly(300)
    assert any(text.asked[:10]) and sum(k > 0 for k in text.asked[20:]) <= 280 / 10
    assert all(k <= 2 for k in text.asked[20:])


@pytest.mark.parametrize("found", [1.0, 0.5])
def test_it_comes_back_where_text_is_copied(found):
    """After 200 hopeless tokens a copied passage is met with long drafts, and the run is faster than every fixed length."""
    def right(at: int) -> float:
        return 0.97 if 200 <= at < 400 else 0.0
    text = Text(right, found)
    pilot = text.fly(275)
    assert sum(k >= 4 for k in text.asked[-8:]) >= 4 and pilot.choice.why == "pays"
    text.fly(600, pilot)
    assert text.speed > max(Text(right, found).fixed(600, k) for k in (0, 1, 2, 4, 8, 16))


@pytest.mark.parametrize("seed", range(6))
def test_it_is_never_much_slower_than_plain(seed):
    """At every moment of text made to mislead it, the time spent is at most 1.02 of plain decoding's plus four steps (plus the first
    draft, whose cost nobody knew)."""
    source = random.Random(seed)
    chances = [source.choice([0.0, 0.0, 0.3, 1.0]) for _ in range(200)]
    text = Text(lambda at: chances[at // 7 % 200], source.choice([1.0, 0.4]), source.choice([0.0, 0.2]), source.choice([0.05, 0.5]), seed)
    pilot = Autopilot(text.costs)
    while text.num_tokens < 500:
        pilot.observe(*text.step(*pilot.choose(256, 32)))
        assert text.spent <= 1.02 * text.num_tokens + 4 + 4 * text.drafting
    assert pilot.spent == pytest.approx(text.spent)


@pytest.mark.parametrize("good", [0, 1])
def test_parts_have_lengths_of_their_own(good):
    """Of two drafters that are asked in turn, the first finding something in half of the steps, the good one drafts and the hopeless one
    does not, whichever comes first; when their fortunes change, so do their lengths."""
    text, names = Text(lambda at: 0.0), ("first", "second")
    texts = [Text(lambda at, part=part: 0.9 if (part == good) == (text.num_tokens < 400) else 0.0, found=(0.5, 1.0)[part], seed=part) for part in range(2)]
    pilot, used = Autopilot(costs(0.05), names), []
    while text.num_tokens < 1200:
        ks = pilot.choose(256, 32)
        for part, k in enumerate(ks):
            draft, verdict, share = texts[part].step(k) if k else (Draft(), Verdict((), 0, "correction"), 0.0)
            if len(draft):
                break
        text.num_tokens += len(verdict.path) + 1
        for one in texts:
            one.num_tokens = text.num_tokens
        pilot.observe(replace(draft, by=names[part]) if len(draft) else draft, verdict, share)
        used.append((text.num_tokens, ks, pilot.choice.method if len(draft) else ""))
    for best, among in ((good, [one for one in used if 150 < one[0] < 400]), (1 - good, [one for one in used if one[0] > 900])):
        assert sum(ks[best] >= 3 for _, ks, _ in among) > 0.9 * len(among) > 9
        assert sum(ks[1 - best] > 0 for _, ks, _ in among) < 0.3 * len(among)
        assert {method for *_, method in among} >= {names[best]}


def test_a_first_part_that_pays_less_than_the_second_is_not_asked():
    """A lookup whose finds are seldom right stays silent before a drafter that is nearly always right, though alone it would pay."""
    names, shares = ("lookup", "head"), []
    for parts in (names, names[:1]):
        texts, pilot, asked = [Text(lambda at: 0.45), Text(lambda at: 0.95, seed=1)], Autopilot(costs(0.02), parts), []
        for _ in range(150):
            ks = pilot.choose(256, 32)
            part = next((part for part, k in enumerate(ks) if k), 0)
            draft, verdict, share = texts[part].step(ks[part])
            pilot.observe(replace(draft, by=names[part]) if len(draft) else draft, verdict, share)
            asked.append(ks[0] > 0)
        shares.append(sum(asked[50:]) / 100)
    assert shares[0] < 0.3 and shares[1] > 0.6


def test_a_hybrid_obeys_it_part_by_part():
    """On the real engine a part whose length is 0 is not asked, and no part drafts more than its own length."""
    class Fixed(Autopilot):
        def choose(self, context_length, most, num_rows=1):
            super().choose(context_length, most, num_rows)
            ks = tuple(min(k, most) for k in wanted)
            self._chosen = [replace(choice, k=k) for choice, k in zip(self._chosen, ks)]
            return ks
    lab, prompt = Lab(), repeating_prompt(40)
    plain = lab.run(prompt).tokens
    for wanted in ((3, 0, 2), (0, 0, 2), (4, 0, 0)):
        drafter = lab.drafters["hybrid"]
        result = lab.add(prompt, "hybrid", 1, max_new_tokens=24)
        result.sequence.pilot = Fixed(costs(0.02), parts_of(drafter))
        lab.finish()
        assert result.tokens == plain
        lengths = {name: k for name, k in zip(parts_of(drafter), wanted)}
        drafted = [step for step in result.steps if step.nodes]
        assert drafted and all(len(step.nodes) <= lengths[step.draft_by] for step in drafted)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("slope", [0.05, 0.9])
def test_the_law_of_the_text_is_the_target_s(slope, greedy):
    """With drafts drawn as long as the autopilot says, through all steps of a run, every text has exactly the target's probability."""
    target, drafting = Table("target", 2, greedy), Table("draft", 2)
    table, asked = costs(slope), set()

    class Flight:
        """Drafter, verifier and autopilot of one run."""

        def __init__(self) -> None:
            self.pilot = Autopilot(table, reserve=3)
            flights.append(self)

        def __call__(self, tokens, step, noise) -> Draft:
            [k] = self.pilot.choose(len(tokens), 2)
            asked.add(k)
            drawn: list[int] = []
            probs = []
            for _ in range(k):
                probs.append(drafting([*tokens, *drawn]))
                drawn.append(noise.draw_draft(probs[-1], len(tokens) + len(drawn), step))
            return Draft.chain(drawn, probs if drawn else None)
    flights: list[Flight] = []

    def judged(draft, rows, noise, position):
        verdict = verify(draft, rows, noise, position)
        flights[-1].pilot.observe(draft, verdict, 0.1)
        return [draft.tokens[node] for node in verdict.path] + [verdict.token]
    length = 5
    assert whole_law(target, Flight, length, judged, EnumeratingNoise) == target_law(target, length)
    assert len(asked) > 1


class Heads(Text):
    """Heads that propose one to three nodes, as they are sure, whatever they may: a pass costs 0.12."""

    def step(self, k: int) -> tuple[Draft, Verdict, float]:
        return super().step(min(k, self.random.randint(1, 3)))

    def chances(self, length: int, pilot: Autopilot) -> list[bool]:
        """Flies so many steps; returns for each whether heads were asked."""
        asked = []
        for _ in range(length):
            [k] = pilot.choose(256, 32)
            asked.append(k > 0)
            pilot.observe(*self.step(k))
        return asked


def test_heads_that_limit_themselves_are_let_be_while_they_pay():
    """Right half of the time they are asked at nearly every step, and as much as they may; on hopeless text hardly ever from the twentieth step
    on; on text that is worth as much as it costs they are not switched off by a few misses; and they come back where they are right again."""
    good, bad = Heads(lambda at: 0.5, drafting=0.06), Heads(lambda at: 0.0, drafting=0.06)
    pilot = Autopilot(good.costs, limits={"": 6})
    assert sum(good.chances(100, pilot)) > 95 and pilot.choose(256, 32) == (6,) and pilot.choice.why == "pays"
    pilot = Autopilot(bad.costs, limits={"": 6})
    assert sum(bad.chances(150, pilot)[20:]) < 15 and bad.spent <= 1.02 * bad.num_tokens + 4
    turning = Heads(lambda at: 0.8 if at > 200 else 0.0, drafting=0.06)
    pilot = Autopilot(turning.costs, limits={"": 6})
    assert sum(turning.chances(200, pilot)) < 30 and sum(turning.chances(150, pilot)[80:]) > 40


def test_heads_are_switched_off_in_a_full_batch_at_once():
    """What drafts bring is remembered, what judging them costs is looked up anew when others join."""
    table = CostTable(SIZES, (256,), (tuple(10.0 + 0.2 * size + 0.4 * max(0, size - 8) for size in SIZES),), num_rows=(1, 8), batch_sizes=(1, 8),
                      batch_factors=((1.0, 1.0),))
    heads, pilot = Heads(lambda at: 0.5, drafting=0.06), Autopilot(table, limits={"": 6})
    heads.chances(60, pilot)
    assert pilot.choose(256, 32, 1)[0] and not pilot.choose(256, 32, 8)[0]


def test_a_part_that_a_request_leaves_out_is_never_named():
    """Its length is nought, and the trace's choice is that of a part which is there."""
    pilot = Autopilot(costs(0.05), ("first", "second"), {"second": 0})
    for _ in range(40):
        ks = pilot.choose(256, 32)
        assert ks[1] == 0 and pilot.choice.method == "first"
        pilot.observe(Draft(), Verdict((), 0, "plain"), 0.01)
        assert pilot.choice.method == "first"


def test_methods_tell_their_limits():
    """Heads with a least probability limit themselves, the more the dearer a node is; hybrid tells its parts' and what a request leaves out."""
    lab = Lab()
    settings = DraftSettings(5, (("floor", 0.1), ("first", "suffix")))
    assert limits_of(lab.drafters["eagle2"], settings) == limits_of(lab.drafters["medusa"], settings) == {"": 5}
    assert limits_of(lab.drafters["eagle2"], DraftSettings(5, (("floor", 0.01),))) == {"": 32}
    assert limits_of(lab.drafters["eagle2"], DraftSettings(5)) == limits_of(lab.drafters["suffix"], settings) == {}
    assert limits_of(lab.drafters["hybrid"], settings)["prompt_lookup"] == 0


@pytest.mark.parametrize("method", ["prompt_lookup", "suffix", "draft_model", "draft_tree", "eagle2", "medusa", "lookahead", "early_exit"])
def test_the_engine_obeys_it_and_writes_it_down(method):
    """On the real engine every method gives plain decoding's tokens, drafts no more than was chosen, and the choice survives the trace file."""
    lab = Lab()
    prompt = repeating_prompt(40)
    plain = lab.run(prompt).tokens
    result = lab.add(prompt, method, 1, max_new_tokens=24)
    result.sequence.pilot = Autopilot(costs(0.02))
    lab.finish()
    assert result.tokens == plain
    decode = [step for step in result.steps if step.kind != "prefill"]
    assert all(step.choice is not None and sum(node.state != "window" for node in step.nodes) <= step.choice.k for step in decode)
    assert max(step.choice.k for step in decode) > 1, "the request's own k does not limit it"
    read = loads(dumps(Trace({}, tuple(result.steps))))
    assert [step.choice.why for step in read.steps if step.choice] == [step.choice.why for step in decode]


def test_a_request_without_it_is_as_before():
    """No autopilot, no choice in the trace, and the request's own k."""
    result = Lab().run(repeating_prompt(40), "prompt_lookup", 3)
    assert all(step.choice is None and len(step.nodes) <= 3 for step in result.steps)


def test_the_service_flies_only_with_a_table():
    """A request for it is served either way; with measured costs each step says what was chosen, without them the given k is used."""
    service = ready()
    try:
        request = replace(ask(), auto_k=True)
        run = service.submit(request)
        assert all(step.choice is None for step in run) and run.meta["config"]["auto_k"] is False
        service._driver.opened.costs = costs(0.05)
        run = service.submit(request)
        steps = [step for step in run if step.kind != "prefill"]
        assert all(step.choice for step in steps) and run.meta["config"]["auto_k"] is True
        assert all(token.margin is not None for token in run.measure_plain(100)) and run.trace().compare["identical"]
        assert run.trace().stats["regret"] < 1 and run.trace().stats["best_fixed_k"] >= 0
    finally:
        service.close()


def test_drafts_get_shorter_as_the_batch_fills():
    """On the same text, with prices that rise with all tokens of a step, drafts are the shorter the more sequences share it, hardly any where
    a full batch leaves no room, long again when the others have gone; and by its own account no run is slower than its plain steps allow."""
    table = CostTable(SIZES, (256,), (tuple(10.0 + 0.2 * size + 0.06 * max(0, size - 8) ** 1.5 for size in SIZES),), num_rows=(1, 2, 4),
                      batch_sizes=(1, 8), batch_factors=((1.1, 1.0), (1.2, 1.0)))

    def asked(num_tokens: int, num_rows_at: Callable[[int], int]) -> list[tuple[int, int]]:
        text, pilot, choices = Text(lambda at: 0.8), Autopilot(table), []
        while text.num_tokens < num_tokens:
            num_rows = num_rows_at(text.num_tokens)
            choices.append((num_rows, *pilot.choose(256, 32, num_rows)))
            draft, verdict, _ = text.step(choices[-1][1])
            pilot.observe(draft, verdict, 0.0)
            assert pilot.spent <= 1.02 * pilot.num_tokens + 4
        return choices

    def mean(values: list[int]) -> float:
        return sum(values) / len(values)
    means = [mean([k for _, k in asked(400, lambda at, rows=rows: rows)[20:]]) for rows in (1, 2, 4, 8, 16)]
    assert all(b < a for a, b in zip(means, means[1:])) and means[0] > 4 and means[-1] < 1, means
    choices = asked(900, lambda at: 8 if 300 < at < 600 else 1)
    assert mean([k for rows, k in choices if rows == 8]) < 0.6 * mean([k for rows, k in choices if rows == 1]) and choices[-1][1] > 3


def test_the_engine_tells_how_full_its_batch_is():
    """Each step's choice is made for the sequences that decode in it."""
    told = []

    class Heard(Autopilot):
        def choose(self, context_length, most, num_rows=1):
            told.append(num_rows)
            return super().choose(context_length, most, num_rows)
    lab = Lab()
    results = [lab.add(repeating_prompt(20, seed=i), "prompt_lookup", max_new_tokens=length) for i, length in enumerate((6, 14, 40))]
    for result in results:
        result.sequence.pilot = Heard(costs(0.05))
    lab.finish()
    assert told[:3] == [3, 3, 3] and told[-1] == 1 and set(told) == {1, 2, 3}


def test_choosing_costs_next_to_nothing():
    """It asks for the table's prices once per stretch of text, not once per step: 400 steps at one context ask 33 times at most."""
    calls = []
    table = SimpleNamespace(v=lambda num_tokens, context, num_rows=1: calls.append(1) or 1 + 0.05 * num_tokens)
    pilot = Autopilot(table)
    for _ in range(400):
        [k] = pilot.choose(500, 32)
        pilot.observe(Draft.chain([0] * k), Verdict(tuple(range(k)), 0, "bonus"), 0.01)
    assert len(calls) <= 65


def test_sampling_settings_do_not_matter_to_it():
    """A sampled request with the same seed runs to its end under it."""
    lab = Lab()
    result = lab.add(repeating_prompt(40), "draft_model", temperature=1.0, seed=3, max_new_tokens=20)
    result.sequence.pilot = Autopilot(costs(0.05))
    lab.finish()
    assert len(result.tokens) == 20 and result.sequence.params == SamplingParams(temperature=1.0, seed=3, max_new_tokens=20)


def flown(pilot_ks: list[int], chance: float, seed: int = 0) -> Trace:
    """A run with these draft lengths over text in which each guess is right with the same chance, as the engine would record it."""
    source, table, steps, context = random.Random(seed), costs(0.05), [], 256
    for k in pilot_ks:
        accepted = 0
        while accepted < k and source.random() < chance:
            accepted += 1
        states = ["accepted"] * accepted + ["rejected"] * (accepted < k) + ["unjudged"] * (k - accepted - 1)
        nodes = tuple(NodeTrace(1, "x", i - 1, state) for i, state in enumerate(states))
        emitted = tuple(EmittedToken(1, "x", "draft") for _ in range(accepted)) + (EmittedToken(1, "x", "bonus"),)
        steps.append(StepTrace("spec" if k else "plain", 0.0, 0.0, table.verify_ms(1 + k, 256), 0.0, nodes, emitted,
                               kv={"target": CacheTrace(context, 1 + k, context + 1 + accepted)}, choice=ChoiceTrace(k, "pays")))
    return Trace({"cost": table.to_json()}, tuple(steps))


def test_regret_against_the_best_fixed_length():
    """It is nought for the best length itself, what the formulas say for a worse one, and told only where lengths were chosen and costs known."""
    speed = {k: sum(0.8 ** i for i in range(k + 1)) / costs(0.05).v(1 + k, 256) for k in range(17)}
    best = max(speed, key=lambda k: speed[k])
    assert abs(metrics.autopilot(flown([best] * 3000, 0.8))["regret"]) < 0.05
    mixed = metrics.autopilot(flown([16, 1, 1, 1] * 1000, 0.8))
    tokens, cost = (sum(n * one(k) for n, k in ((1, 16), (3, 1))) for one in (lambda k: speed[k] * costs(0.05).v(1 + k, 256), lambda k: costs(0.05).v(1 + k, 256)))
    assert mixed["regret"] == pytest.approx(1 - tokens / cost / speed[best], abs=0.05) and abs(mixed["best_fixed_k"] - best) <= 3
    assert metrics.autopilot(flown([2] * 50, 0.0)) == {"regret": pytest.approx(1 - 1 / costs(0.05).v(3, 256), abs=1e-3), "best_fixed_k": 0}
    assert metrics.autopilot(replace(flown([2] * 5, 0.5), meta={})) == {} and metrics.autopilot(Trace({"cost": costs(0.05).to_json()})) == {}
