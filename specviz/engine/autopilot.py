"""Chooses how much to draft, step by step, so that a run is as fast as it can be and never much slower than plain decoding.

It knows nothing of models or tokens: it is told what steps cost on this machine (`CostTable.v`) and what was accepted. It reads judged
outcomes only, since a decision that looked at an unjudged draw would change the text's distribution; times enter as shares of a step.

Everything is counted in plain steps, T(1). A draft that may have n nodes brings 1 + sum of o_i r_i tokens on average and costs
1 + sum of o_i (v(1 + i) - v(i)) + d(n): o_i is how often a draft asked for has an i-th node, r_i how often that is accepted, d what
drafting costs. This is the design's S = E / (K c + v(K+1)) for drafts that may end early, and for trees as well as chains.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..trace import ChoiceTrace
from .draft import Draft
from .verify import Verdict

__all__ = ["Autopilot", "Costs", "Evidence"]

MOST = 32                        # nodes at most
_FIRST, _NEXT = 0.5, 0.7         # supposed at the start: chance of the first node, and of each further one once the one before was accepted
_WEIGHT = 1.5                    # what these suppositions count for, in observations
_MEMORY, _IDLE_MEMORY = 0.9, 0.985      # what a new draft leaves of the evidence before it, and for each step without one in between
_MARGIN = 0.02                   # a gain smaller than this is none
_PROBE, _PROBE_NODES, _LONGEST_WAIT = 4, 2, 64       # steps before the first look whether drafting pays again, doubling up to the longest
# Of a drafter that limits itself: drafts supposed at the start, tokens accepted of each, its nodes and what drafting it cost; and what a new
# draft leaves of the evidence before it.
_ASKS, _WON, _NODES, _DRAFTING = 8.0, 0.5, 2.0, 0.15
_LONG_MEMORY = 0.96


class Costs(Protocol):
    """What `cost.CostTable` offers."""

    def v(self, num_tokens: int, context_length: int, num_rows: int = 1) -> float: ...


class Evidence:
    """What drafts of one method came to lately. Positions count from 0; a position is a node's rank among the judged ones.

    asked, offered, hits: drafts that might have had a node there, those that had one, and those whose node was accepted. chances: of the
    offered ones, those in which the node before was accepted. All fade when something new comes, see `_MEMORY`. idle: steps since the last
    draft; wait: how many of them to let pass before the next look whether it pays again.

    limit: nodes that a draft may have at most, of a drafter that proposes only what is worth judging (`worth.py`); 0 for others, whose length
    is chosen here. Of such a one only the whole counts: over `asks` drafts, the empty ones included, tokens accepted (won), nodes, and plain
    steps that drafting took.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.asks, self.won, self.nodes, self.drafting = _ASKS, _ASKS * _WON, _ASKS * _NODES, _ASKS * _DRAFTING
        self.asked, self.offered, self.hits, self.chances = ([0.0] * MOST for _ in range(4))
        self.tried = self.found = 0.0                  # drafts asked for, and those that were not empty
        self.window = 0.0                              # nodes that are fed besides and never judged
        self.longest = 2                               # of what was offered lately; twice as much may be asked for
        self.idle, self.wait = 0, _PROBE
        self._moments = [0.0] * 5                      # of (nodes, cost of drafting): weight, n, d, n n, n d

    def add_whole(self, num_accepted: int, num_nodes: int, draft_cost: float, is_probe: bool) -> None:
        """One draft of a drafter that limits itself, with nodes or without. draft_cost: in plain steps."""
        self.asks, self.won, self.nodes, self.drafting = (_LONG_MEMORY * before + new for before, new in (
            (self.asks, 1.0), (self.won, num_accepted), (self.nodes, num_nodes), (self.drafting, draft_cost)))
        self._remember_cost(num_nodes, draft_cost)
        self.offered[0] += 1
        self.idle, self.wait = 0, _PROBE if num_accepted else min(2 * self.wait, _LONGEST_WAIT) if is_probe else self.wait

    def _remember_cost(self, num: int, draft_cost: float) -> None:
        self._moments = [0.9 * moment + new for moment, new in zip(self._moments, (1, num, draft_cost, num * num, num * draft_cost))]

    def add(self, num_asked: int, accepted: Sequence[bool], num_window: int, draft_cost: float) -> None:
        """One step. accepted: for each judged node, in order. draft_cost: in plain steps."""
        num = len(accepted)
        self.tried, self.found = _MEMORY * self.tried + 1, _MEMORY * self.found + (num > 0)
        self._remember_cost(num, draft_cost)
        if not num:
            self.idle += 1
            return
        factor = _MEMORY * _IDLE_MEMORY ** self.idle
        for series in (self.asked, self.offered, self.hits, self.chances):
            series[:] = [value * factor for value in series]
        self.idle, self.wait = 0, _PROBE if any(accepted) else min(2 * self.wait, _LONGEST_WAIT)
        self.window = 0.7 * self.window + 0.3 * num_window if self.window else float(num_window)
        self.longest = max(num, self.longest - 1, 2)
        for i in range(min(num_asked, MOST)):
            self.asked[i] += 1
        before = True
        for i, hit in enumerate(accepted[:MOST]):
            self.offered[i] += 1
            self.chances[i] += before
            self.hits[i] += hit
            before = hit

    def acceptance(self) -> list[float]:
        """r_i: the chance that an offered node is accepted. Where little was seen, the node before and the common trend count."""
        trend = (sum(self.hits[1:]) + _WEIGHT * _NEXT) / (sum(self.chances[1:]) + _WEIGHT)
        rates, expected = [], _FIRST
        for hits, offered in zip(self.hits, self.offered):
            rates.append((hits + _WEIGHT * expected) / (offered + _WEIGHT))
            expected = rates[-1] * min(1.0, trend)
        return rates

    def presence(self) -> list[float]:
        """o_i: the chance that a draft which is not empty has a node there, if it may."""
        return [(offered + _WEIGHT) / (asked + _WEIGHT) for offered, asked in zip(self.offered, self.asked)]

    def draft_cost(self, num_nodes: int) -> float:
        """d: what drafting so many nodes costs, a line through what was seen lately."""
        weight, n, d, nn, nd = self._moments
        if not n:
            return 0.0
        spread = nn - n * n / weight
        slope = (nd - n * d / weight) / spread if spread > 0.5 else d / n
        slope = min(max(slope, 0.0), d / n)
        return max(0.0, (d - slope * n) / weight) + slope * num_nodes


@dataclass(slots=True)
class _Plan:
    """A way to go on: how many nodes, what that brings and costs, in tokens and plain steps; and at worst."""
    k: int
    tokens: float = 1.0
    cost: float = 1.0
    worst: float = 0.0                                 # cost beyond a plain step if nothing is accepted
    found_rate: float = 1.0                            # `rate` of those steps in which a draft is found

    @property
    def rate(self) -> float:
        return self.tokens / self.cost


class Autopilot:
    """One request's chooser.

    parts: names of the drafters that are asked in turn until one has something (`drafting.parts_of`): each has its own length, 0 where it
    does not pay or where those behind it pay more. limits: of parts that propose only what is worth judging, the most nodes they may have, see
    `Evidence`; 0 for a part that this request leaves out. share, reserve: the run costs at most (1 + share) times plain decoding plus `reserve`
    plain steps, by the table and as far as drafting costs what it did before: no draft is asked for that could break this if all of it
    were rejected.
    """

    def __init__(self, costs: Costs, parts: Sequence[str] = ("",), limits: Mapping[str, int] | None = None, share: float = 0.02,
                 reserve: float = 4.0) -> None:
        self._costs, self._parts, self._share, self._reserve = costs, tuple(parts), share, reserve
        self._left_out = {part for part, limit in (limits or {}).items() if not limit}
        self.evidence = [Evidence((limits or {}).get(part, 0)) for part in parts]
        self.num_tokens, self.spent = 0, 0.0           # emitted so far, and what that cost in plain steps
        self.choice = ChoiceTrace(0, "off")            # of the part that drafted in the last step
        self._chosen = [ChoiceTrace(0, "off", method=name) for name in self._parts]
        self._context, self._num_rows, self._prices = -1, 1, [0.0]

    @property
    def balance(self) -> float:
        """Plain steps that may still be lost. Sequences that share a step lose together what one of them loses, so they share the reserve."""
        return self.num_tokens - self.spent + self._reserve / self._num_rows + self._share * self.num_tokens

    def choose(self, context_length: int, most: int, num_rows: int = 1) -> tuple[int, ...]:
        """How many nodes each part may draft next, at most `most`.

        num_rows: sequences that share the step. Prices are those of a step in which all of them draft alike, over a plain step of them all:
        the fuller the batch, the less room a forward has for guesses, and the shorter the drafts.
        """
        if num_rows != self._num_rows:
            self._context, self._num_rows = -1, num_rows
        rate = 1.0                                     # of what comes if this part has nothing
        for part in reversed(range(len(self._parts))):
            if self._parts[part] in self._left_out:
                self._chosen[part] = ChoiceTrace(0, "off", method=self._parts[part])
                continue
            plan, why = self._decide(part, context_length, most, rate)
            self._chosen[part] = ChoiceTrace(plan.k, why, plan.tokens, plan.cost, self._parts[part])
            if plan.k and why != "probe":
                rate = max(rate, plan.rate)
        self.choice = next(choice for choice in reversed(self._chosen) if choice.method not in self._left_out)
        return tuple(choice.k for choice in self._chosen)

    def _decide(self, part: int, context_length: int, most: int, rate: float) -> tuple[_Plan, str]:
        """One part's length, and why. rate: of what comes if it has nothing."""
        evidence, plans = self.evidence[part], self._plans(part, context_length, most)
        margin = -_MARGIN if evidence.limit and self._num_rows == 1 else _MARGIN     # alone, heads are let be while they cost nothing to speak of
        good = [plan for plan in plans if plan.rate > 1 + margin and (plan.found_rate > rate or evidence.limit)]
        best = max(good, key=lambda plan: plan.rate, default=_Plan(0))
        why = ("start" if evidence.offered[0] < 2 else "pays") if good else "off"
        look = evidence.limit or _PROBE_NODES
        if not good and (due := [plan for plan in plans if plan.k == min(look, most) and self._due(evidence, plan)]):
            good, best, why = plans, due[0], "probe"
        if best.k and best.worst > self.balance:
            cheaper = [plan for plan in good if plan.worst <= self.balance]
            best, why = max(cheaper, key=lambda plan: plan.rate, default=_Plan(0)), why if cheaper else "bound"
        return best, why

    def observe(self, draft: Draft, verdict: Verdict, draft_share: float) -> None:
        """What became of the step that was chosen last. draft_share: time of drafting over time of verifying."""
        judged = [i for i in range(len(draft)) if draft.judged is None or draft.judged[i]]
        verify_cost = self._price(len(draft))
        draft_cost = draft_share * verify_cost
        self.num_tokens += len(verdict.path) + 1
        self.spent += verify_cost + draft_cost
        path = set(verdict.path)
        asked = [part for part, choice in enumerate(self._chosen) if choice.k]
        drafted = self._parts.index(draft.by) if draft.by in self._parts else asked[-1] if asked else len(self._parts) - 1
        self.choice = self._chosen[drafted]
        for part, evidence in enumerate(self.evidence):
            if part == drafted and self.choice.k:
                if evidence.limit:
                    evidence.add_whole(len(path), len(draft), draft_cost, self.choice.why == "probe")
                else:
                    evidence.add(self.choice.k, [i in path for i in judged], len(draft) - len(judged), draft_cost)
            elif part in asked and part < drafted:
                evidence.add(self._chosen[part].k, (), 0, 0.0)         # it was asked first and had nothing
            else:
                evidence.idle += 1

    def _due(self, evidence: Evidence, plan: _Plan) -> bool:
        """Whether it is time to look if a method pays again; sooner where a look costs little, so that looks take half of what may be lost."""
        return evidence.idle >= min(evidence.wait, max(2 * _PROBE, 2 * plan.worst / self._share))

    def _plans(self, part: int, context_length: int, most: int) -> list[_Plan]:
        """Every number of nodes that may be asked for, with what it is expected to bring."""
        if abs(context_length - self._context) >= 32 or self._context < 0:
            self._context, self._prices = context_length, []
        evidence = self.evidence[part]
        if evidence.limit:
            return self._limited(evidence, min(most, evidence.limit))
        window = round(evidence.window)
        found = (evidence.found + _WEIGHT) / (evidence.tried + _WEIGHT)
        base = self._price(window) - 1
        tokens, cost, plans = 0.0, base, []
        rates, presence = evidence.acceptance(), evidence.presence()
        for i in range(min(most, MOST, 2 * evidence.longest)):
            tokens += presence[i] * rates[i]
            cost += presence[i] * (self._price(window + i + 1) - self._price(window + i))
            drafting = evidence.draft_cost(i + 1)
            plans.append(_Plan(i + 1, 1 + found * tokens, 1 + found * cost + drafting, self._price(window + i + 1) + drafting - 1,
                               (1 + tokens) / (1 + cost + drafting)))
        return plans

    def _limited(self, evidence: Evidence, most: int) -> list[_Plan]:
        """As much as may be, less only where the run may not lose so much. What is expected is the average of late, at the present prices."""
        tokens, nodes = 1 + evidence.won / evidence.asks, evidence.nodes / evidence.asks
        whole, part = int(nodes), nodes % 1
        cost = (1 - part) * self._price(whole) + part * self._price(whole + 1) + evidence.drafting / evidence.asks
        return [_Plan(k, tokens, cost, self._price(k) - 1 + evidence.draft_cost(k), tokens / cost) for k in range(most, 0, -1)]

    def _price(self, num_nodes: int) -> float:
        """v(1 + n) at the present context."""
        while len(self._prices) <= num_nodes:
            self._prices.append(self._costs.v(1 + len(self._prices), max(self._context, 0), self._num_rows))
        return self._prices[num_nodes]
