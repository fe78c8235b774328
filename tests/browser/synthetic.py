"""Seeded runs for tests of the screen: records that satisfy the invariants of real ones. It knows no model; every number is invented.

The answer follows a fixed text; drafts guess it right or wrong. Verdicts, u, p, q, residual, caches and times agree with each other, and
`stats` and `compare` come from `metrics`, as in a real run.
"""
from __future__ import annotations

import random
import re
from dataclasses import replace

from specviz import metrics
from specviz.trace import CacheTrace, EmittedToken, NodeTrace, PlainToken, ResidualTrace, StepTrace, TopTrace, Trace

TEXT = """A small model guesses a few words ahead, and the large model reads them all in one pass. Where the guess is what the large \
model would have written, several words are gained for the price of one; where it is not, the large model's own word takes its place \
and the rest of the guess is thrown away.

Nothing is lost: the text is exactly what the large model writes alone, only sooner. How much sooner depends on how often the guesses \
are right, on what a guess costs, and on how cheaply many words can be read at once.

1. Draft a few tokens.
2. Verify them together.
3. Keep the longest correct prefix, then go on.
"""
OTHERS = " the| a| quickly| word| often| and| then| tokens| not| little| time| model| to| of| gained| cheap| one".split("|")
PIECES = re.findall(r"\n| ?[A-Za-z]{1,7}| ?[^A-Za-z\n]", TEXT)


def token_id(text: str) -> int:
    return sum(ord(char) * 31 ** i for i, char in enumerate(text[:6])) % 32000


def _answer(num_tokens: int, rng: random.Random) -> list[str]:
    """The text's pieces; past its end its sentences come again in another order, so that nothing repeats eight tokens three times."""
    pieces = list(PIECES)
    while len(pieces) < num_tokens + 16:
        pieces += rng.choices(PIECES, k=12)
    return pieces[:num_tokens + 16]


def _position(rng: random.Random, right: str, guess: str) -> tuple[dict[str, float], dict[str, float]]:
    """p and q over a few tokens: p prefers `right`, q drew `guess`."""
    p, q = {}, {}
    if right == guess:
        q[right], p[right] = rng.uniform(.35, .93), rng.uniform(.3, .97)
    else:
        q[guess] = rng.uniform(.35, .7)
        p[guess] = q[guess] * rng.uniform(.02, .5)
        p[right] = (1 - p[guess]) * rng.uniform(.6, .9)
        q[right] = min(p[right], 1 - q[guess]) * rng.uniform(.1, .6)
    rest = [text for text in rng.sample(OTHERS, 8) if text not in p][:5]
    for dist in (p, q):
        weights = [rng.random() + .05 for _ in rest]
        left = (1 - sum(dist.values())) * .95
        dist |= {text: left * weight / sum(weights) for text, weight in zip(rest, weights)}
    return p, q


def _top(p: dict[str, float], q: dict[str, float], at: int, one: bool) -> TopTrace:
    rows = sorted(((token_id(text), text, p[text], q[text]) for text in p), key=lambda row: -row[2])
    return TopTrace(at, tuple(rows), one)


def _chain(rng: random.Random, pieces: list[str], k: int, hit: float, greedy: bool) -> tuple[list, list, list, list]:
    """Nodes, emitted, tops, residuals of one step that continues with `pieces`."""
    nodes, emitted, tops, residuals, alive = [], [], [], [], True
    for depth in range(k):
        right = pieces[depth]
        guess = right if rng.random() < hit else next(word for word in rng.sample(OTHERS, len(OTHERS)) if word != right)
        p, q = _position(rng, right, guess)
        if not alive:
            raw = {"p_t1": p[guess], "q_t1": q[guess]}
            raw |= {} if greedy else {"q": q[guess], "p": p[guess]}
            nodes.append(NodeTrace(token_id(guess), guess, depth - 1, "unjudged", **raw))
            continue
        tops.append(_top(p, q, depth - 1, greedy))
        if greedy:
            good = guess == right
            verdict = {"p": float(good), "accept_prob": float(good), "p_t1": p[guess], "q_t1": q[guess]}
        else:
            accept = min(1.0, p[guess] / q[guess])
            good = guess == right
            u = rng.uniform(0, accept * .99) if good else rng.uniform(accept, 1)
            verdict = {"q": q[guess], "p": p[guess], "accept_prob": accept, "u": u, "p_t1": p[guess], "q_t1": q[guess]}
        nodes.append(NodeTrace(token_id(guess), guess, depth - 1, "accepted" if good else "rejected", **verdict))
        if good:
            emitted.append(EmittedToken(token_id(right), right, "draft"))
        else:
            alive = False
            emitted.append(EmittedToken(token_id(right), right, "correction"))
            if not greedy:
                left = {text: max(p[text] - q[text], 0) for text in p}
                rows = [(token_id(text), text, mass / sum(left.values())) for text, mass in left.items() if mass]
                residuals.append(ResidualTrace(depth - 1, tuple(sorted(rows, key=lambda row: -row[2]))))
    if alive:
        p, q = _position(rng, pieces[k], pieces[k])
        tops.append(_top(p, q, k - 1, greedy))
        emitted.append(EmittedToken(token_id(pieces[k]), pieces[k], "bonus" if k else "plain"))
    return nodes, emitted, tops, residuals


def _tree(rng: random.Random, pieces: list[str], depth: int, width: int, hit: float) -> tuple[list, list, list, list]:
    """A greedy tree: `width` siblings per level under the best node of the level before, judged in order."""
    nodes, emitted, tops, spine, alive = [], [], [], -1, True
    for level in range(depth):
        right = pieces[level]
        place = rng.choice([0, 0, 1, 2]) % width if rng.random() < hit else -1
        others = [word for word in rng.sample(OTHERS, len(OTHERS)) if word != right]
        texts = [right if i == place else others[i] for i in range(width)]
        p, q = _position(rng, right, texts[0])
        if alive:
            tops.append(_top(p, q, spine, True))
        judging, parent = alive, spine
        for i, text in enumerate(texts):
            good = judging and text == right
            state = "accepted" if good else "rejected" if judging else "unjudged"
            probs = {"p_t1": p.get(text, .01), "q_t1": q.get(text, .05), "score": round(.9 ** (level + i), 4)}
            judged = {"p": float(good), "accept_prob": float(good)} if judging else {}
            nodes.append(NodeTrace(token_id(text), text, parent, state, **judged, **probs))
            if good or i == 0 and place < 0:
                spine = len(nodes) - 1
            judging = judging and not good
        if alive and place >= 0:
            emitted.append(EmittedToken(token_id(right), right, "draft"))
        elif alive:
            emitted.append(EmittedToken(token_id(right), right, "correction"))
            alive = False
    if alive:
        p, q = _position(rng, pieces[depth], pieces[depth])
        tops.append(_top(p, q, spine, True))
        emitted.append(EmittedToken(token_id(pieces[depth]), pieces[depth], "bonus"))
    return nodes, emitted, tops, []


def make_trace(num_steps: int = 40, *, seed: int = 0, k: int = 5, hit: float = .78, greedy: bool = False, tree: bool = False,
               plain: bool = True, num_rows: int = 1, plain_ms: float = 16.0) -> Trace:
    """A whole run: a prefill step, `num_steps` steps, the plain run, `stats` and `compare`."""
    rng = random.Random(seed)
    pieces = _answer(num_steps * (k + 1) + 1, rng)
    first, at, length, clock = pieces[0], 1, 40, 0.0
    steps = [StepTrace("prefill", -182.5, 0.0, 180.0, 2.5, emitted=(EmittedToken(token_id(first), first, "plain"),),
                       kv={"target": CacheTrace(0, length, length)}, num_prompt_tokens=length)]
    for _ in range(num_steps):
        make = (lambda: _tree(rng, pieces[at:], 4, 3, hit)) if tree else (lambda: _chain(rng, pieces[at:], k, hit, greedy))
        nodes, emitted, tops, residuals = make()
        num_accepted = sum(node.state == "accepted" for node in nodes)
        draft_ms, verify_ms, other_ms = (round(x, 3) for x in (len(nodes) * rng.uniform(1, 1.4), rng.uniform(17, 21), rng.uniform(.3, .9)))
        steps.append(StepTrace("spec" if nodes else "plain", round(clock, 3), draft_ms, verify_ms, other_ms, tuple(nodes), tuple(emitted),
                               "length" if nodes else "no match",
                               {"target": CacheTrace(length, 1 + len(nodes), length + 1 + num_accepted),
                                "drafter": CacheTrace(length, len(nodes), length + min(num_accepted + 1, len(nodes)))},
                               num_rows, .4, tuple(tops), tuple(residuals)))
        clock += draft_ms + verify_ms + other_ms
        length += 1 + num_accepted
        at += len(emitted)
    tokens = [token for step in steps for token in step.emitted]
    plain_tokens, now = [], 0.0
    for i, token in enumerate(tokens if plain else []):
        took = 180.0 if i == 0 else round(rng.uniform(.94, 1.06) * plain_ms, 3)
        now += took if i else 0.0
        plain_tokens.append(PlainToken(token.id, token.text, round(now, 3), took, round(rng.uniform(.05, 4), 4)))
    meta = {"target": "Big-7B", "drafter": "Small-0.5B", "method": "draft model",
            "config": {"k": k, "dtype": "bfloat16", "quantization": "int8", "device": "cpu", "threads": 4},
            "sampling": {"temperature": 0 if greedy or tree else .8, "top_p": .95, "seed": seed}, "prompt_tokens": 40}
    trace = Trace(meta, tuple(steps), tuple(plain_tokens))
    return replace(trace, stats=metrics.summarize(trace).to_dict(), compare=metrics.compare(trace))
