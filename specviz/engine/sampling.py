"""From logits to the distribution that the user asked for, and the random numbers that draw from it. It knows nothing of drafts."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from .verify import PointMass

__all__ = ["KeyedNoise", "SamplingParams", "SharedNoise", "argmax", "distribution", "penalized", "points", "shaped"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to end.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: keep tokens with at least this share of the top probability.
    repetition_penalty: 1 is off (Keskar et al. 2019, arXiv 1909.05858, section 4.1, as in transformers). seed: any integer.
    max_new_tokens: the answer's length limit. stop: strings that end the answer and are not part of it. ignore_eos: for measuring.

    Raises InputError for a value out of range.
    """
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise InputError(f"{name} is {getattr(self, name)!r}; expected {expected}.")
        check(self.temperature == 0 or 0.001 <= self.temperature <= 10, "temperature", "0 (greedy) or a number from 0.001 to 10")
        check(self.top_k >= 0, "top_k", "0 (off) or a positive whole number")
        check(0 < self.top_p <= 1, "top_p", "a number above 0, at most 1 (off)")
        check(0 <= self.min_p < 1, "min_p", "a number from 0 (off) to below 1")
        check(0 < self.repetition_penalty <= 10, "repetition_penalty", "a number above 0, at most 10; 1 is off")
        check(self.max_new_tokens >= 1, "max_new_tokens", "at least 1")
        check(all(self.stop), "stop", "strings that are not empty")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def distribution(logits: Tensor, params: SamplingParams, histories: Sequence[Sequence[int]] | None = None) -> Tensor:
    """The distributions that the next tokens are drawn from, [T, V], float32 or better; greedy rows are one-hot.

    logits: [T, V]. histories: for each row the tokens before it (prompt, answer and the path to the node), needed when a repetition
    penalty is set. The order is that of transformers: penalty, temperature, top-k, top-p, min-p.
    """
    return shaped(penalized(logits, params, histories), params)


def penalized(logits: Tensor, params: SamplingParams, histories: Sequence[Sequence[int]] | None = None) -> Tensor:
    """The logits after everything that depends on the text so far, [T, V], float32 or better. Arguments as in `distribution`."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if params.repetition_penalty == 1:
        return logits
    assert histories is not None and len(histories) == len(logits), "a penalty needs each row's history"
    logits = logits.clone()
    for row, history in zip(logits, histories):
        seen = torch.tensor(sorted(set(history)), dtype=torch.long).to(row.device, non_blocking=True)
        values = row[seen]
        row[seen] = torch.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
    return logits


def argmax(x: Tensor) -> Tensor:
    """As `x.argmax(-1)`: of equals the first, and what is no number before all others. NumPy takes a tenth of the time (measured with torch 2.13)."""
    return x.argmax(-1) if x.device.type != "cpu" or x.dtype == torch.bfloat16 else torch.as_tensor(x.numpy().argmax(-1))


def points(logits: Tensor) -> tuple[list[PointMass], bool]:
    """What `shaped` gives for greedy decoding, one for each row of [T, V] penalized logits, and whether they are numbers."""
    best = argmax(logits)
    return [PointMass(token) for token in best.tolist()], bool(logits.gather(-1, best[:, None]).isfinite().all())


def shaped(logits: Tensor, params: SamplingParams) -> Tensor:
    """Penalized logits, [T, V], through temperature, top-k, top-p and min-p to probabilities."""
    if params.greedy:
        return torch.zeros_like(logits).scatter_(-1, argmax(logits)[:, None], 1)
    scores = logits / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        floor = scores.topk(params.top_k, -1).values[:, -1:]
        scores = scores.masked_fill(scores < floor, float("-inf"))
    if params.top_p < 1:
        ordered, order = scores.sort(-1)                      # rising, so that ties fall the way transformers lets them
        tail = ordered.softmax(-1).cumsum(-1) <= 1 - params.top_p
        tail[:, -1] = False
        scores = scores.masked_fill(tail.scatter(-1, order, tail), float("-inf"))
    probs = scores.softmax(-1)
    if params.min_p > 0:
        probs = probs.where(probs >= params.min_p * probs.amax(-1, keepdim=True), 0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


# Purposes of a random number. Plain, bonus and correction draws are one purpose: the token at a position has one source of noise.
_TOKEN, _ACCEPT, _DRAFT = 1, 2, 3
_MASK = (1 << 64) - 1


def _mix(*parts: int) -> int:
    """A 64-bit hash of small integers (splitmix64, Steele et al. 2014), so that every key starts an unrelated stream."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state ^= state >> 27
        state = state * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


class KeyedNoise:
    """Randomness keyed by (seed, absolute position, purpose, sibling), so that a run can be repeated and no two decisions share a number.

    Tokens are drawn by the Gumbel-max rule: argmax of p / e with e exponential. One instance serves one request. Probabilities on a CUDA
    device are drawn from there, with that device's generator: a seed gives other tokens than on a CPU.
    """
    _own_devices: tuple[str, ...] = ("cpu", "cuda")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def accepts(self, prob: float, position: int, sibling: int) -> tuple[bool, float | None]:
        """See `verify.Noise`. Certain outcomes need no number: u is None."""
        if prob <= 0 or prob >= 1:
            return prob >= 1, None
        u = (_mix(self._seed, position, _ACCEPT, sibling) >> 11) * 2.0**-53
        return u < prob, u

    def draw(self, probs: Tensor | PointMass, position: int) -> int:
        """See `verify.Noise`."""
        return self._draw(probs, _TOKEN, position, 0, 0)

    def margin(self, probs: Tensor, position: int) -> float | None:
        """How far the token that `draw` gives was ahead of the next best: log of the ratio of their p / e. None if no other is possible.

        A smaller change of any log-probability cannot change the draw.
        """
        best, second = self._race(probs, _TOKEN, position, 0, 0).topk(2).values.tolist()
        return math.log(best / second) if second > 0 else None

    def draw_draft(self, probs: Tensor, position: int, step: int, sibling: int = 0) -> int:
        """A token for a draft, [V]. Keyed by step as well: a position that is drafted twice gets fresh noise, or the law would change."""
        return self._draw(probs, _DRAFT, position, step, sibling)

    def draws(self, probs: Tensor, positions: Sequence[int]) -> Tensor:
        """What `draw` gives for each of several rows, [n, V] and their n positions, as int64 [n] on the device of the rows, without waiting
        for it."""
        noise = {position: self._noise(probs.shape[-1:], probs.device, _TOKEN, position, 0, 0) for position in set(positions)}
        return (probs.double() / torch.stack([noise[position] for position in positions])).argmax(-1)

    def queue_draft(self, probs: Tensor, position: int, step: int) -> Tensor:
        """The token of `draw_draft`, int64 [1] on the device of `probs`, without waiting for it where that can be."""
        return self._race(probs, _DRAFT, position, step, 0).argmax()[None].to(probs.device)

    def _draw(self, probs: Tensor | PointMass, purpose: int, position: int, step: int, sibling: int) -> int:
        if isinstance(probs, PointMass):
            return probs.token
        if probs.device.type == "cuda" and "cuda" in self._own_devices:       # one question to the device instead of three
            return int(self._race(probs, purpose, position, step, sibling).argmax())
        best = int(argmax(probs))
        if probs[best] >= 1:                                  # one-hot: greedy decoding draws nothing
            return best
        return int(self._race(probs, purpose, position, step, sibling).argmax())

    def _race(self, probs: Tensor, purpose: int, position: int, step: int, sibling: int) -> Tensor:
        device = probs.device if probs.device.type in self._own_devices else torch.device("cpu")
        return probs.to(device, torch.float64) / self._noise(probs.shape, device, purpose, position, step, sibling)

    def _noise(self, shape: Sequence[int], device: torch.device, purpose: int, position: int, step: int, sibling: int) -> Tensor:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        generator = self._generators[device].manual_seed(_mix(self._seed, position, purpose, step, sibling) >> 1)
        return torch.empty(tuple(shape), dtype=torch.float64, device=device).exponential_(generator=generator)


class SharedNoise(KeyedNoise):
    """One noise per position for drafts and target alike, so that a draft token often is the very token that the target draws.

    For rules that compare tokens only. Later siblings must be drawn without replacement: drawn from the same probabilities with the same
    noise they would repeat the first.
    """
    _own_devices = ("cpu",)                                   # target and drafts must meet the same noise, wherever their logits are

    def draw_draft(self, probs: Tensor, position: int, step: int, sibling: int = 0) -> int:
        """See `KeyedNoise`; neither step nor sibling changes the noise."""
        return self.draw(probs, position)

    def queue_draft(self, probs: Tensor, position: int, step: int) -> Tensor:
        return torch.tensor([self.draw(probs, position)], device=probs.device)
