"""Judging on the device and asking it once: the same verdicts and records as judging on the host, with one transfer a step."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_helpers import Lab, repeating_prompt
from torch.overrides import TorchFunctionMode

from specviz.engine import sampling
from specviz.engine.draft import Draft
from specviz.engine.graph_backends import TapeBackend
from specviz.engine.graphs import StaticSteps
from specviz.engine.reading import fetch, look
from specviz.engine.sampling import KeyedNoise, SamplingParams, shaped
from specviz.engine.verify import verify
from specviz.trace import step_from, to_dict


def drafts(seed: int, vocabulary: int, likely: torch.Tensor) -> Draft:
    """Chains and trees of any shape: chosen or drawn, with siblings, with nodes that are never judged."""
    generator = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))
    size = number(7)
    parents = tuple(i - 1 if seed % 3 == 0 else number(i + 1) - 1 for i in range(size))
    tokens, taken = [], set()
    for parent in parents:                                   # siblings differ, and are often what the target likes
        order = [*likely[1 + parent].topk(3).indices.tolist(), *torch.randperm(vocabulary, generator=generator).tolist()]
        tokens.append(next(token for token in order[number(3):] if (parent, token) not in taken))
        taken.add((parent, tokens[-1]))
    probs = torch.rand(size, vocabulary, generator=generator, dtype=torch.float64).softmax(-1) if seed % 2 and size else None
    judged = tuple(number(4) > 0 for _ in range(size)) if seed % 5 == 0 and size else None
    if judged is not None:                                   # what continues an unjudged node is not judged either
        flags: list[bool] = []
        for i, flag in enumerate(judged):
            flags.append(flag and (parents[i] < 0 or flags[parents[i]]))
        judged = tuple(flags)
    return Draft(tuple(tokens), parents, probs, judged)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_device_judges_as_the_host_does(temperature):
    """Over random drafts: path, token, origin, every judgement and every residual's most probable tokens are those of `verify`."""
    vocabulary, params = 20, SamplingParams(temperature=temperature, top_k=12)
    num_rejected = num_bonus = 0
    for seed in range(150):
        generator = torch.Generator().manual_seed(1000 + seed)
        logits = torch.randn(8, vocabulary, generator=generator, dtype=torch.float64) * 3
        draft = drafts(seed, vocabulary, logits)
        logits = logits[:1 + len(draft)]
        probs, noise = shaped(logits, params), KeyedNoise(seed)
        expected = verify(draft, probs, noise, 11)
        reading = look(draft, logits, probs, params, noise, 11, 4)
        fetch([reading])
        got = reading.verdict(draft, noise, 11)
        assert replace(expected, judgements=(), residuals=()) == replace(got, judgements=())
        for ours, theirs in zip(got.judgements, expected.judgements, strict=True):
            assert (ours.node, ours.accepted, ours.u) == (theirs.node, theirs.accepted, theirs.u)
            assert (ours.target_prob, ours.draft_prob) == (pytest.approx(theirs.target_prob), pytest.approx(theirs.draft_prob))
        assert [parent for parent, _ in reading.residual] == [parent for parent, _ in expected.residuals]
        for (_, top), (_, left) in zip(reading.residual, expected.residuals):
            assert top.probs == pytest.approx(left.topk(4).values.tolist())
        num_rejected += bool(expected.residuals)
        num_bonus += got.origin == "bonus"
    assert num_rejected > 30 and num_bonus > 20


CASES = [("plain", {}), ("draft_model", {}), ("draft_tree", {"temperature": 0.9, "seed": 5}), ("prompt_lookup", {"temperature": 0.7, "top_p": 0.9}),
         ("draft_model", {"repetition_penalty": 1.3, "temperature": 0.6}), ("lookahead", {}), ("draft_model", {"temperature": 0.8, "rule": "shared-noise"})]


@pytest.mark.parametrize("method, how", CASES)
def test_records_are_the_same(method, how):
    """Whole answers, step by step: the trace that is made from one transfer has what the trace made of the tensors has."""
    steps = []
    for one_transfer in (False, True):
        lab = Lab()
        lab.engine.one_transfer = one_transfer
        result = lab.run(repeating_prompt(20), method, max_new_tokens=16, **how)
        steps.append([replace(step, t0_ms=0, draft_ms=0, verify_ms=0, other_ms=0, record_ms=0) for step in result.steps])
    for host, device in zip(*steps, strict=True):
        assert [vars_of(node) for node in host.nodes] == [vars_of(node) for node in device.nodes]
        assert [(top.at, [entry[0] for entry in top.rows]) for top in host.top] == [(top.at, [entry[0] for entry in top.rows]) for top in device.top]
        for ours, theirs in zip(host.top + host.residual, device.top + device.residual, strict=True):
            assert all(a[2:] == pytest.approx(b[2:]) for a, b in zip(ours.rows, theirs.rows, strict=True))
        assert replace(host, nodes=(), top=(), residual=()) == replace(device, nodes=(), top=(), residual=())


def vars_of(node):
    """A node's fields with its numbers rounded, since sums of rows side by side round otherwise."""
    return tuple(round(value, 9) if isinstance(value, float) else value for value in (getattr(node, name) for name in node.__slots__))


class Questions(TorchFunctionMode):
    """Counts what would make the host wait for a device: every number that is read from a tensor."""
    WAITING = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__bool__, torch.Tensor.__int__,
               torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.nonzero, torch.nonzero}

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.WAITING:
            self.asked.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method, how", [("prompt_lookup", {}), ("suffix", {"temperature": 0.8}), ("draft_tree", {"temperature": 0.8})])
def test_one_question_a_step(method, how, monkeypatch):
    """From the target's logits to the finished record the device is asked once, whatever was drafted and shown; without that, often."""
    monkeypatch.setattr(sampling, "argmax", lambda x: x.argmax(-1))          # as it is on a device
    asked = {}
    for one_transfer in (False, True):
        lab = Lab()
        engine = lab.engine
        engine.one_transfer, most = one_transfer, []
        lab.add(repeating_prompt(20), method, max_new_tokens=16, **how)
        forward = engine._forward

        def counted(batch, forward=forward, most=most):
            forward(batch)
            most.append(Questions())
            most[-1].__enter__()
        engine._forward = counted
        while lab.step():
            most[-1].__exit__(None, None, None)
        asked[one_transfer] = [len(questions.asked) for questions in most]
    assert set(asked[True]) == {1} and max(asked[False]) > 1


class CountedClock:
    """A device that reaches every point 2 ms after the one before; it may be read only after the host has waited."""

    def __init__(self):
        self.points, self.now = {}, 0

    def mark(self, name):
        self.now += 2
        self.points[name] = self.now

    def between_ms(self, first, second):
        return float(self.points[second] - self.points[first])


def test_a_device_has_its_own_times():
    """Where the device works behind the host, each step says what it took by its own clock beside what the host saw; elsewhere nothing."""
    lab = Lab()
    lab.engine.one_transfer, lab.engine._device_clock = True, CountedClock()
    steps = [step for step in lab.run(repeating_prompt(20), "prompt_lookup", max_new_tokens=6).steps if step.kind != "prefill"]
    assert steps and all((step.draft_device_ms, step.verify_device_ms) == (2.0, 2.0) for step in steps)
    assert step_from(to_dict(steps[0])).verify_device_ms == 2.0
    assert all("device" not in name for name in to_dict(Lab().run(repeating_prompt(20), "plain", max_new_tokens=2).steps[-1]))


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8}, {"temperature": 0.8, "rule": "shared-noise"}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("method", ["draft_model", "early_exit"])
def test_a_draft_is_read_once(method, how):
    """Where the device works behind the host a chain's forwards are queued without reading the tokens between, from Python and replayed; the
    drafts and the text stay what they are. Where the next token hangs on more than the last one, it is read as before."""
    runs, asked = [], []
    for ahead, static in ((False, None), (True, None), (True, StaticSteps(TapeBackend()))):
        lab = Lab(exact=False, static=static)
        lab.target.runs_ahead = lab.draft.runs_ahead = ahead
        propose, most = lab.engine._propose, []

        def counted(batch, propose=propose, most=most):
            with Questions() as questions:
                propose(batch)
            most.append(len(questions.asked))
        lab.engine._propose = counted
        result = lab.run(repeating_prompt(20), method, k=5, max_new_tokens=14, **how)
        runs.append((result.tokens, [[node.id for node in step.nodes] for step in result.steps]))
        asked.append(max(most))
    assert runs[0] == runs[1] == runs[2]
    if "rule" not in how and "repetition_penalty" not in how:
        assert asked[0] >= 5 and asked[1:] == [1, 1]
