"""What a trace amounts to: every number that is shown, defined once, with its formula and its source.

It knows nothing of engines or screens; it reads `trace` records only, so a recorded or remote run is measured like a live one.
Names follow vLLM's per-request speculation metrics.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from .cost import CostTable
from .errors import InputError
from .trace import StepTrace, Trace

__all__ = ["FORMULAS", "Formula", "Summary", "TIE_MARGIN", "autopilot", "compare", "draft_counts", "expected_tokens", "predicted_speed_up", "summarize", "tie_margin"]

TIE_MARGIN = 1e-4      # log-probability gap below which differently shaped passes may round to different tokens
# On a GPU logits come in 16 bits: the step between neighbouring numbers from 16 to 32, where the largest logits usually lie
_TIE_MARGINS_16 = {"bfloat16": 2.0 ** -3, "float16": 2.0 ** -6}


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run; None where there is nothing to measure. `FORMULAS` says what each means.

    Decode steps are all but prefill steps. `acceptance_histogram[i]` counts the steps with i accepted tokens. The `per_step` series and
    the histogram hold only steps that had a draft. `num_compared_tokens` is the number of tokens that `speed_up` is measured over;
    `shared` is True where decode steps shared their forward with other sequences, at most `most_at_once` with this one, and then there is
    no speed-up; nor where `disturbed`
    says what else the machine was busy with during either run.
    """
    num_tokens: int
    num_steps: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float | None
    acceptance_rate_alpha: float | None
    acceptance_rate_alpha_by_depth: tuple[float, ...]
    mean_acceptance_length: float | None
    tokens_per_step: float | None
    acceptance_histogram: tuple[int, ...]
    per_step_accepted: tuple[int, ...]
    per_step_drafted: tuple[int, ...]
    ttft_s: float | None
    tpot_s: float | None
    itl_s: float | None
    tokens_per_s: float | None
    plain_tokens_per_s: float | None
    speed_up: float | None
    num_compared_tokens: int
    shared: bool
    repeating: bool
    disturbed: str = ""
    most_at_once: int = 1

    def to_dict(self) -> dict[str, Any]:
        """For `Trace.stats`: all fields, tuples as lists."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def summarize(trace: Trace) -> Summary:
    """All figures of a run, live or read from a file.

    Steps without nodes (remote engines) count by their `num_drafted` and `num_accepted`; where either is unknown they count as decode
    steps but in no draft metric. A record with source "aggregate" stands for many steps: it counts in the totals and makes every figure
    per step None. Where the server told (drafted, accepted) of every step that had a draft, `meta["remote"]["counted"]`, draft metrics are
    made of these, since it may not be known which of the steps they belong to.
    """
    decode = [step for step in trace.steps if step.kind != "prefill"]
    aggregate = any(step.source == "aggregate" for step in decode)
    counts = [draft_counts(step) for step in decode]
    told = _told_by_server(trace)
    spec = told or [count for count in counts if count[0]]
    drafted, accepted = tuple(d for d, _ in spec), tuple(a for _, a in spec)
    is_blind = aggregate and not told
    judged = _judged_by_depth(decode)
    num_parents, num_hits = sum(n for n, _ in judged), sum(hits for _, hits in judged)
    num_decoded = sum(map(_num_tokens, decode))
    histogram = Counter(accepted)
    times = _emission_times(trace.steps)
    shared = any(step.num_rows > 1 for step in decode)
    disturbed = next((record.disturbed for record in (*decode, *trace.plain[1:]) if record.disturbed), "")
    speed_up, num_compared = (None, 0) if shared or disturbed else _speed_up(trace, decode)
    return Summary(
        num_tokens=sum(map(_num_tokens, trace.steps)),
        num_steps=len(decode),
        num_spec_steps=len(spec),
        num_draft_tokens=sum(drafted),
        num_accepted_draft_tokens=sum(accepted),
        draft_acceptance_rate=_ratio(sum(accepted), sum(drafted)),
        acceptance_rate_alpha=_ratio(num_hits, num_parents),
        acceptance_rate_alpha_by_depth=tuple(hits / n for n, hits in judged),
        mean_acceptance_length=1 + sum(accepted) / len(spec) if spec and not is_blind else None,
        tokens_per_step=None if aggregate else _ratio(num_decoded, len(decode)),
        acceptance_histogram=tuple(histogram[i] for i in range(max(histogram) + 1)) if histogram and not is_blind else (),
        per_step_accepted=() if is_blind else accepted,
        per_step_drafted=() if is_blind else drafted,
        ttft_s=(times[0][0] - trace.steps[0].t0_ms) / 1000 if times else None,
        tpot_s=_tpot_s(times),
        itl_s=median(b - a for (a, _), (b, _) in zip(times, times[1:])) / 1000 if len(times) > 1 else None,
        tokens_per_s=_rate(num_decoded, sum(map(_took_ms, decode))),
        plain_tokens_per_s=_rate(len(trace.plain) - 1, sum(token.ms for token in trace.plain[1:])),
        speed_up=speed_up,
        num_compared_tokens=num_compared,
        shared=shared,
        disturbed=disturbed,
        most_at_once=max((step.num_rows for step in decode), default=1),
        repeating=_repeating([token.text if token.id is None else token.id for step in trace.steps for token in step.emitted]))


def compare(trace: Trace) -> dict[str, Any]:
    """Whether the speculative answer is the plain one, token by token; for `Trace.compare`.

    Greedy: {"mode": "greedy", "identical", "tokens", "of", "partial"}: the first `tokens` of the `of` tokens that both runs have are
    equal; `partial` is True where one run is longer ("identical so far"). After a divergence also {"index", "speculative": {"id",
    "text"}, "plain": {"id", "text"}, "margin", "tie"}: `margin` is the target's top-2 gap there, `tie` whether it is small enough to be
    rounding. `identical` is None where nothing was compared: no plain run, or unknown token ids. Sampling under a rule that promises the
    very text of plain sampling with the same seed is compared in the same way, as mode "shared-noise"; `margin` is then the gap between
    the two best draws. Other sampling: {"mode": "sampling"}, since texts may differ while the distribution is the same. A rule that
    promises nothing: {"mode": "lossy"}, whatever the texts are.
    """
    sampling = trace.meta.get("sampling")
    temperature = (sampling if isinstance(sampling, dict) else trace.meta).get("temperature")
    promise = trace.meta.get("promise", "distribution")
    if promise == "nothing":
        return {"mode": "lossy"}
    if temperature is None or temperature != 0 and promise != "text":
        return {"mode": "sampling" if temperature is not None else "unknown"}
    mode = "greedy" if temperature == 0 else "shared-noise"
    answer = [token for step in trace.steps for token in step.emitted]
    both = list(zip(answer, trace.plain))
    if not both or any(ours.id is None or plain.id is None for ours, plain in both):
        return {"mode": mode, "identical": None, "tokens": 0, "of": 0, "partial": True}
    index = next((i for i, (ours, plain) in enumerate(both) if ours.id != plain.id), None)
    result = {"mode": mode, "identical": index is None, "tokens": len(both) if index is None else index, "of": len(both),
              "partial": len(answer) != len(trace.plain)}
    if index is not None:
        ours, plain = both[index]
        result |= {"index": index, "speculative": {"id": ours.id, "text": ours.text}, "plain": {"id": plain.id, "text": plain.text},
                   "margin": plain.margin, "tie": plain.margin is not None and plain.margin < tie_margin(trace)}
    return result


def tie_margin(trace: Trace) -> float:
    """Below this gap of log-probabilities another token is a rounding tie: `TIE_MARGIN`, on a GPU one step of its 16-bit logits."""
    config = trace.meta.get("config")
    if not isinstance(config, dict) or not str(config.get("device", "")).startswith("cuda"):
        return TIE_MARGIN
    return _TIE_MARGINS_16.get(str(config.get("dtype")), TIE_MARGIN)


def autopilot(trace: Trace) -> dict[str, Any]:
    """{"regret", "best_fixed_k"} of a run whose draft lengths were chosen step by step; nothing for others, and without measured costs.

    For every fixed K up to the most that was asked for, tokens and cost of a step are put together from this run's positions: how often a
    draft had an i-th node where it might (o), how often that was accepted (r), and how often there was a draft at all (f). Costs come from
    the table in `meta`, drafting from the steps' own times, both in plain steps. An estimate, since other lengths were not run.
    """
    steps = [step for step in trace.steps if step.choice is not None]
    try:
        table = CostTable.from_json(trace.meta.get("cost"))
    except InputError:
        return {}
    known = [step.kv["target"] for step in steps if "target" in step.kv]
    if not steps or len(known) != len(steps):
        return {}
    context = sum(kept.before for kept in known) // len(known)

    def v(num_tokens: int) -> float:
        return table.v(num_tokens, context)
    drafts = [[node.state == "accepted" for node in step.nodes if node.state != "window"] for step in steps]
    drafting = [step.draft_ms / step.verify_ms * v(kept.fed) if step.verify_ms else 0.0 for step, kept in zip(steps, known)]
    asked = [(step.choice.k, draft) for step, draft in zip(steps, drafts) if step.choice.k]
    drafted = [(k, draft) for k, draft in asked if draft]
    own = sum(map(_num_tokens, steps)) / sum(v(kept.fed) + cost for kept, cost in zip(known, drafting))
    best, best_k = 1.0, 0
    if drafted:
        found, each = len(drafted) / len(asked), sum(drafting) / sum(map(len, drafts))
        tokens = cost = 0.0
        for i in range(max(k for k, _ in drafted)):
            allowed = [draft for k, draft in drafted if k > i]
            hits = [draft[i] for draft in allowed if len(draft) > i]
            if not hits:
                break
            tokens += sum(hits) / len(allowed)
            cost += len(hits) / len(allowed) * (v(i + 2) - v(i + 1) + each)
            rate = (1 + found * tokens) / (1 + found * cost)
            best, best_k = max((best, best_k), (rate, i + 1), key=lambda pair: pair[0])
    return {"regret": round(1 - own / best, 4), "best_fixed_k": best_k}


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens that a step with a chain of k drafted tokens emits on average, if each is accepted with chance `alpha`: 1 to k + 1.

    (1 - alpha^(k+1)) / (1 - alpha): Leviathan et al. 2023, arXiv 2211.17192, equation 1.
    """
    assert 0 <= alpha <= 1 and k >= 0, "alpha is a probability, k a count"
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def predicted_speed_up(tokens_per_step: float, k: int, draft_cost: float, verify_cost: float, overhead: float = 0.0) -> float:
    """Speed-up to expect from measured costs, all in units of one plain step T(1). Always labelled predicted.

    tokens_per_step: E, from `expected_tokens` or measured. draft_cost: one drafted token, c. verify_cost: v(K+1) = T(K+1) / T(1).
    overhead: what a step costs besides. Leviathan's formula supposes v = 1 and o = 0; quantized linears and CPUs do not.
    """
    return tokens_per_step / (k * draft_cost + verify_cost + overhead)


def _num_tokens(step: StepTrace) -> int:
    return sum(token.num_tokens for token in step.emitted)


def _took_ms(step: StepTrace) -> float:
    return step.draft_ms + step.verify_ms + step.other_ms


def draft_counts(step: StepTrace) -> tuple[int, int]:
    """Drafted and accepted tokens; (0, 0) where nothing was drafted or it is not known. Window nodes are no guesses."""
    nodes = [node for node in step.nodes if node.state != "window"]
    drafted = len(nodes) if step.num_drafted is None else step.num_drafted
    accepted = step.num_accepted
    if accepted is None:
        if drafted and not nodes:
            return 0, 0
        accepted = sum(node.state == "accepted" for node in nodes)
    return drafted, accepted


def _told_by_server(trace: Trace) -> list[tuple[int, int]]:
    """(drafted, accepted) of each step with a draft by the other server's own count; empty where it told none or the file holds nonsense."""
    remote = trace.meta.get("remote")
    pairs = remote.get("counted") if isinstance(remote, dict) else None
    good = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) for n in pair)
                                           and 0 <= pair[1] <= pair[0] and pair[0] for pair in pairs)
    return [(drafted, accepted) for drafted, accepted in pairs] if good else []


def _judged_by_depth(steps: Sequence[StepTrace]) -> list[tuple[int, int]]:
    """For each depth (first the text so far): parents with a judged child, and those of them with an accepted one."""
    levels: list[list[int]] = []
    for step in steps:
        depths: list[int] = []
        parents: dict[int, bool] = {}
        for node in step.nodes:
            depths.append(0 if node.parent < 0 else depths[node.parent] + 1)
            if node.state in ("accepted", "rejected"):
                parents[node.parent] = parents.get(node.parent, False) or node.state == "accepted"
        for parent, hit in parents.items():
            depth = 0 if parent < 0 else depths[parent] + 1
            levels.extend([0, 0] for _ in range(depth + 1 - len(levels)))
            levels[depth][0] += 1
            levels[depth][1] += hit
    return [(n, hits) for n, hits in levels]


def _emission_times(steps: Sequence[StepTrace]) -> list[tuple[float, int]]:
    """End in ms and number of tokens of every step that emitted any."""
    return [(step.t0_ms + _took_ms(step), n) for step in steps if (n := _num_tokens(step))]


def _tpot_s(times: Sequence[tuple[float, int]]) -> float | None:
    num_later = sum(n for _, n in times) - 1
    return (times[-1][0] - times[0][0]) / 1000 / num_later if len(times) > 1 else None


def _speed_up(trace: Trace, decode: Sequence[StepTrace]) -> tuple[float | None, int]:
    """Plain time over speculative time for the same number of decoded tokens, and that number.

    The first plain token came with the prefill and is left out, like the speculative run's. The last speculative step that counts is the
    last one that the plain run has reached.
    """
    num_plain = len(trace.plain) - 1
    num_tokens, took_ms = 0, 0.0
    for step in decode:
        if num_tokens + _num_tokens(step) > num_plain:
            break
        num_tokens += _num_tokens(step)
        took_ms += _took_ms(step)
    if not num_tokens or took_ms <= 0:
        return None, 0
    return sum(token.ms for token in trace.plain[1:num_tokens + 1]) / took_ms, num_tokens


def _repeating(tokens: Sequence[Any], size: int = 8, times: int = 3) -> bool:
    """Whether some run of `size` tokens occurs `times` times without overlap: a loop, which inflates acceptance."""
    seen: Counter[tuple[Any, ...]] = Counter()
    free_from: dict[tuple[Any, ...], int] = {}
    for i in range(len(tokens) - size + 1):
        gram = tuple(tokens[i:i + size])
        if i >= free_from.get(gram, 0):
            free_from[gram] = i + size
            seen[gram] += 1
            if seen[gram] == times:
                return True
    return False


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _rate(num_tokens: int, took_ms: float) -> float | None:
    return 1000 * num_tokens / took_ms if num_tokens > 0 and took_ms > 0 else None


@dataclass(frozen=True, slots=True)
class Formula:
    """How a number is made: `label` for people, `formula` in plain text, `source` of the definition, `note` what to beware of."""
    label: str
    formula: str
    source: str
    note: str = ""


_LEVIATHAN = "Leviathan et al. 2023, arXiv 2211.17192"
_VLLM = "vLLM, per-request speculation metrics"
_SERVING = "the usual serving metrics (vLLM, NVIDIA AIPerf)"
_OURS = "specviz"

FORMULAS: dict[str, Formula] = {
    "num_tokens": Formula("tokens", "tokens that entered the answer", _OURS, "After a cut by end of text, stop string or length."),
    "num_steps": Formula("decode steps", "steps of the target after the prompt was read", _OURS, "With and without a draft."),
    "num_spec_steps": Formula("steps with a draft", "decode steps in which at least one token was drafted", _VLLM),
    "num_draft_tokens": Formula("draft tokens", "tokens drafted in all steps", _VLLM,
                                "Nodes that are never meant to be judged do not count."),
    "num_accepted_draft_tokens": Formula("accepted draft tokens", "draft tokens that the target accepted", _VLLM,
                                         "Counted before a cut by end of text, stop string or length."),
    "draft_acceptance_rate": Formula("drafts accepted", "accepted / drafted", _VLLM,
                                     "Small for trees by construction: at most one branch can be accepted."),
    "acceptance_rate_alpha": Formula("acceptance rate alpha", "judged parents with an accepted child / judged parents",
                                     f"{_LEVIATHAN}, section 3.1, measured",
                                     "For a chain: how often the next guess is accepted once the ones before it were."),
    "acceptance_rate_alpha_by_depth": Formula("alpha by depth", "alpha over the parents at each depth of the draft",
                                              "EAGLE, arXiv 2401.15077, section 4", "Few parents are judged at great depth."),
    "mean_acceptance_length": Formula("mean acceptance length", "1 + accepted / steps with a draft", _VLLM,
                                      "Steps without a draft do not count."),
    "tokens_per_step": Formula("tokens per step", "tokens emitted by decode steps / decode steps", f"{_LEVIATHAN}, section 3; tau in EAGLE",
                               "Steps without a draft count: this is what multiplies into the speed-up."),
    "acceptance_histogram": Formula("acceptance histogram", "steps with a draft by number of accepted tokens", _VLLM),
    "per_step_accepted": Formula("accepted per step", "accepted draft tokens of each step with a draft", _VLLM),
    "per_step_drafted": Formula("drafted per step", "draft tokens of each step with a draft", _VLLM),
    "ttft_s": Formula("time to first token", "end of the step that emitted the first token - start of the first step", _SERVING,
                      "Reading the prompt is here and in no other figure. Waiting in the queue is not included."),
    "tpot_s": Formula("time per output token", "(time of last token - time of first token) / (tokens - 1)", _SERVING),
    "itl_s": Formula("inter-token latency", "median gap between emissions", _SERVING, "A step emits its tokens at once: one gap per step."),
    "tokens_per_s": Formula("tokens/s", "tokens emitted by decode steps / time inside decode steps", _OURS,
                            "Decode only. Time spent on writing the record is not included."),
    "plain_tokens_per_s": Formula("plain tokens/s", "tokens of the plain run / time inside its steps, without the first token", _OURS,
                                  "Same engine, same prompt, without a drafter; measured after the answer."),
    "speed_up": Formula("speed-up", "time of the plain run / time of the speculative run, for the same number of tokens", _OURS,
                        "Measured, decode only. Not given where steps were shared with other sequences or the machine was busy with more."),
    "num_compared_tokens": Formula("tokens compared", "decoded tokens that both runs have, up to a whole step", _OURS),
    "shared": Formula("shared steps", "any decode step whose forward served other sequences too", _OURS),
    "most_at_once": Formula("answers at once", "most sequences that one decode step served, this one included", _OURS),
    "disturbed": Formula("disturbed times", "what else the machine was busy with during a step of either run", _OURS),
    "repeating": Formula("repeating text", "a run of 8 tokens occurs 3 times", _OURS,
                         "A loop is easy to guess: the figures are not representative."),
    "margin": Formula("margin", "log p(first) - log p(second) of the target; with shared noise log p/e of both", _OURS,
                      f"Below {TIE_MARGIN:g} a different token is a rounding tie between differently shaped passes; on a GPU below one step "
                      f"of its 16-bit logits, {_TIE_MARGINS_16['bfloat16']:g} (bfloat16) or {_TIE_MARGINS_16['float16']:g} (float16)."),
    "accept_prob": Formula("acceptance probability", "min(1, p(x) / q(x)); p(x) for a chosen token", f"{_LEVIATHAN}, Algorithm 1",
                           "After a rejected sibling, p is what is left of the target's distribution."),
    "residual": Formula("residual distribution", "max(p - q, 0), divided by its sum", f"{_LEVIATHAN}, Algorithm 1",
                        "The correction is drawn from it; this is what makes the output follow the target exactly."),
    "rejection": Formula("rejection", "accept x with chance min(1, p(x) / q(x)), else draw from max(p - q, 0), divided by its sum",
                         f"{_LEVIATHAN}, Algorithm 1; Chen et al. 2023, arXiv 2302.01318",
                         "The text follows the target's distribution exactly."),
    "shared-noise": Formula("shared noise", "accept x if x = argmax p / e, with the noise e of this seed and position; draft: argmax q / e",
                            "Daliri et al. 2024, arXiv 2408.07978",
                            "The text is plain sampling's own with this seed, token for token."),
    "block": Formula("block verification", "keep the longest block i with u_i < h_i = s / (s + 1 - r_i); r_i = min(r_(i-1) p / q, 1), "
                     "s = sum of max(r_i p - q, 0); the last of K: h_K = r_K", "Sun et al. 2024, arXiv 2403.10444, Algorithm 2",
                     "Chains only. The text follows the target's distribution exactly, and no fewer tokens are accepted on average."),
    "typical": Formula("typical acceptance", "accept x if p(x) > min(0.09, 0.3 exp(-H(p)))", "Cai et al. 2024, arXiv 2401.10774",
                       "LOSSY: the text does not follow the target's distribution."),
    "expected_tokens": Formula("expected tokens per step", "(1 - alpha^(K+1)) / (1 - alpha)", f"{_LEVIATHAN}, equation 1",
                               "For a chain of K drafted tokens with the same alpha everywhere."),
    "regret": Formula("regret", "1 - speed of this run / speed of the best fixed draft length", _OURS,
                      "Tokens per measured cost, (1 + f sum of o r) / (1 + f sum of o (v(i+1) - v(i) + c)), from this run's own positions: an estimate. "
                      "Below zero: no fixed length would have been as fast."),
    "predicted_speed_up": Formula("predicted speed-up", "E / (K c + v(K+1) + o)", f"{_LEVIATHAN}, Theorem 3.8; verification measured",
                                  "Predicted, not measured. c: one drafted token, v: verifying K+1 tokens, o: overhead, in plain steps."),
    "step_times": Formula("time per step", "draft + verify + other; plain: time of the plain run for as many tokens at the same place", _OURS,
                          "Measured inside the engine. Time spent on writing the record is in none of them."),
    "survival": Formula("accepted to this depth", "steps that accepted at least i tokens / steps with a draft", _OURS,
                        "E = 1 + the sum of these, if every step has a draft."),
    "tokens_per_step_histogram": Formula("steps by tokens", "decode steps by the number of tokens that they emitted", _OURS,
                                         "Its mean is tokens per step."),
    "memory": Formula("memory", "weights: bytes of all tensors that the model holds; cache: entries at the end of the run x bytes per entry", _OURS,
                      "Activations and the runtime itself are not counted."),
    "verify_cost": Formula("cost of verifying", "v(M) = T(M) / T(1)", _OURS,
                           "T(M): one pass of the target over M tokens, measured on that machine; 1 would mean that checking is free."),
    "break_even": Formula("break-even", "E > K c + v(K+1) + o", f"from {_LEVIATHAN}, Theorem 3.8; verification measured",
                          "Tokens per step that pay for the step itself. E can be at most K + 1."),
    "what_if_tokens": Formula("tokens per step with another K", "decoded tokens / steps, the recorded guesses cut into steps of at most K + 1 tokens",
                              _OURS, "Exact where each guess depends on the text alone (a chain from a draft model or early exit; greedy or shared "
                              "noise) and the guess after a draft that was accepted whole is not needed; where it is, two bounds. "
                              "Otherwise an estimate: 1 + mean of min(accepted, K), and beyond the recorded K chance alpha for each guess."),
    "what_if_speed_up": Formula("speed-up with other costs", "U E / (K c + T(K+1) + o), the mean over the steps below the line", _OURS,
                                "Estimated. U: one plain step as measured; c: one drafted level; T(M) = T(1) v(M), T(1) = U - o; o: overhead. "
                                "Drafts that ended early by themselves stay as short."),
}
