"""Training one drafter on stored texts: batches, schedule, averaged weights, checkpoints. It knows nothing of what a drafter is inside.

Everything follows from the recipe's seed and the step's number, so a run that was interrupted ends with the same weights as one that was not.
"""
from __future__ import annotations

import json
import math
import os
import random
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from ..errors import InputError
from .heads import NETS, Batch, Given, Net
from .store import Text

__all__ = ["RECIPES", "Batches", "draft_vocabulary", "fit", "likely_tokens", "read_recipe"]

RECIPES = Path(__file__).parent / "recipes"
_DEFAULTS: dict[str, Any] = {"seed": 0, "steps": 600, "rate": 1e-3, "last_rate": 0.05, "warm_up": 0.08, "batch_tokens": 1536, "clip": 1.0,
                             "weight_decay": 0.01, "average": 0.995, "prompt_weight": 0.0, "mixed": True, "start_texts": 400}


def read_recipe(name: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A drafter's recipe: one of those that come with specviz, or a TOML file, over the common settings. Raises InputError."""
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    try:
        recipe = _DEFAULTS | tomllib.loads(path.read_text(encoding="utf-8")) | dict(changes or {})
    except (OSError, ValueError) as error:
        raise InputError(f"The recipe {name} cannot be read ({error}); name one of {', '.join(NETS)} or a .toml file.") from error
    if recipe.get("kind") not in NETS:
        raise InputError(f"The recipe {name} is for {recipe.get('kind')!r}; expected one of {', '.join(NETS)}.")
    return recipe


def draft_vocabulary(texts: Sequence[Text], size: int, vocab_size: int, always: Sequence[int] = range(17)) -> np.ndarray:
    """The ids, sorted, that the target writes most often; prompts count an eighth, for what is copied from them. always: forced in."""
    counts = np.zeros(vocab_size)
    for text in texts:
        written = np.zeros(len(text.tokens), bool)
        for start, end in text.answers:
            written[start:end] = True
        np.add.at(counts, text.tokens.astype(np.int64), np.where(written, 1.0, 0.125))
    counts[[i for i in always if i < vocab_size]] = np.inf
    return np.sort(np.argsort(-counts, kind="stable")[:size])


class Batches:
    """Texts of similar length side by side, in an order drawn anew for each pass over the data.

    hidden_size: width of one state; the texts' states hold the final one and, behind it, those of the exit layer. teacher: what the target
    finds likely, one pair of arrays per text (`likely_tokens`); without it batches are for measuring only.
    """

    def __init__(self, texts: Sequence[Text], num_tokens: int, seed: int, hidden_size: int, device: torch.device, *, prompt_weight: float = 0.0,
                 max_length: int = 512, teacher: Sequence[tuple[np.ndarray, np.ndarray]] | None = None) -> None:
        self._teacher = teacher
        self._texts, self._seed, self._size, self._device = texts, seed, hidden_size, device
        self._prompt_weight, self._max_length = prompt_weight, max_length
        self._skipped = _common_beginning([text.tokens for text in texts])      # the system prompt teaches nothing
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
        self._groups: list[list[int]] = [[]]
        for i in order:
            length = min(len(texts[i].tokens), max_length)
            if self._groups[-1] and length * (len(self._groups[-1]) + 1) > num_tokens:
                self._groups.append([])
            self._groups[-1].append(i)

    def __len__(self) -> int:
        return len(self._groups)

    def at(self, step: int) -> Batch:
        """The batch of a training step."""
        order = list(range(len(self)))
        random.Random(f"{self._seed} {step // len(self)}").shuffle(order)
        rows = self._groups[order[step % len(self)]]
        return self.make([self._texts[i] for i in rows], None if self._teacher is None else [self._teacher[i] for i in rows])

    def make(self, texts: Sequence[Text], teacher: Sequence[tuple[np.ndarray, np.ndarray]] | None = None) -> Batch:
        length = min(self._max_length, max(len(text.tokens) for text in texts))
        width = texts[0].states.shape[1]
        tokens, weights = torch.zeros(len(texts), length, dtype=torch.long), torch.zeros(len(texts), length)
        states = torch.zeros(len(texts), length, width)
        for row, text in enumerate(texts):
            n = min(length, len(text.tokens))
            tokens[row, :n] = torch.from_numpy(text.tokens[:n].astype(np.int64))
            states[row, :n] = torch.from_numpy(text.states[:n].astype(np.float32))
            weights[row, self._skipped:n] = self._prompt_weight
            for start, end in text.answers:
                weights[row, start:end] = 1.0
            weights[row, n:] = 0.0
        states = states.to(self._device)
        exits = states[..., self._size:2 * self._size] if width >= 2 * self._size else None
        likely = probs = None
        if teacher is not None:
            likely = torch.zeros(len(texts), length, teacher[0][0].shape[1], dtype=torch.long)
            probs = torch.zeros(likely.shape)
            for row, (ids, shares) in enumerate(teacher):
                n = min(length, len(ids))
                likely[row, :n], probs[row, :n] = torch.from_numpy(ids[:n].astype(np.int64)), torch.from_numpy(shares[:n].astype(np.float32))
            likely, probs = likely.to(self._device), probs.to(self._device)
            outside = probs[..., 0] == 0                       # the target said something that no draft can say: nothing to learn there
            weights = weights.to(self._device)
            weights[:, 1:] = weights[:, 1:].masked_fill(outside[:, :-1], 0.0)
        return Batch(tokens.to(self._device), states[..., :self._size], exits, weights.to(self._device), likely, probs)


@torch.inference_mode()
def likely_tokens(texts: Sequence[Text], given: Given, count: int = 32) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per text, at every place the target's most probable next tokens among the draft's, uint16 [n, k] places in `draft_ids` and float16
    [n, k] shares that add up to 1; all shares are 0 where the text goes on with a token that is not among them."""
    found = []
    rows, is_known = given.rows, torch.zeros(len(given.head), dtype=torch.bool)
    is_known[given.draft_ids.cpu()] = True
    mixed = torch.bfloat16 if rows.device.type == "cpu" and torch.cpu._is_avx512_bf16_supported() else rows.dtype
    rows = rows.to(mixed)
    for text in texts:
        states = torch.from_numpy(text.states[:, :given.config.hidden_size].astype(np.float32)).to(rows.device, mixed)
        best = (states @ rows.T).float().topk(count, -1)
        shares = best.values.softmax(-1).cpu()
        goes_on = is_known[torch.from_numpy(text.tokens[1:].astype(np.int64))]
        shares[:-1] *= goes_on[:, None]
        found.append((best.indices.cpu().numpy().astype(np.uint16), shares.numpy().astype(np.float16)))
    return found


def _common_beginning(sequences: Sequence[np.ndarray]) -> int:
    shortest = min(map(len, sequences))
    first = sequences[0][:shortest]
    same = np.ones(shortest, bool)
    for sequence in sequences[1:200]:
        same &= sequence[:shortest] == first
    return shortest if same.all() else int(same.argmin())


def fit(recipe: Mapping[str, Any], given: Given, texts: Sequence[Text], folder: Path, *, report: Callable[[int, float, tuple[float, ...]], None],
        stop_at: int | None = None, checkpoint_s: float = 120.0, begin_with: Mapping[str, Tensor] | None = None,
        is_published: bool = False) -> Net:
    """Train a drafter by its recipe; the checkpoint in `folder` is gone on with. Returns it with the averaged weights.

    report: step, loss and agreement per depth, at every step. stop_at: end early, with a checkpoint, as an interruption would. begin_with:
    weights of an earlier run in place of the recipe's start; is_published: as an export names and scales them. Raises InputError for a
    checkpoint or weights of another shape or recipe.
    """
    torch.manual_seed(recipe["seed"])
    device = given.embeddings.device
    net = NETS[recipe["kind"]](given, recipe).to(device)
    batches = Batches(texts, recipe["batch_tokens"], recipe["seed"], given.config.hidden_size, device, prompt_weight=recipe["prompt_weight"],
                      teacher=likely_tokens(texts, given))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "checkpoint.pt"
    matrices = [parameter for parameter in net.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in net.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": recipe["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
                                  lr=recipe["rate"], betas=(0.9, 0.95))
    first = 0
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        if saved["recipe"] != json.dumps(recipe, sort_keys=True):
            raise InputError(f"{path} was made with another recipe; delete it, or take another folder.")
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        average, first = saved["average"], saved["step"]
        torch.set_rng_state(saved["random"].cpu())
    else:
        if begin_with is None or is_published:
            net.start(_first_batches(batches, recipe))         # before published weights too: it measures the scales of a drafter's inputs
        try:
            if begin_with is not None:
                (net.load_published if is_published else net.load_state_dict)(begin_with)
        except (RuntimeError, KeyError) as error:
            raise InputError(f"The run to begin with is no {recipe['kind']} of this shape ({str(error)[:200]}).") from error
        average = {name: parameter.detach().clone() for name, parameter in net.state_dict().items()}
    last = recipe["steps"] if stop_at is None else min(stop_at, recipe["steps"])
    mixed = bool(recipe["mixed"]) and (device.type != "cpu" or torch.cpu._is_avx512_bf16_supported())
    saved_at = time.monotonic()
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = recipe["rate"] * _schedule(step, recipe)
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            loss = net.loss(batches.at(step))
        if loss.value.requires_grad:                               # or nothing in this batch is to be learnt: all answers lie behind the longest text
            optimizer.zero_grad(set_to_none=True)
            loss.value.backward()
            clip_grad_norm_(net.parameters(), recipe["clip"])
            optimizer.step()
        keep = min(recipe["average"], (1 + step) / (10 + step))
        with torch.no_grad():
            for name, parameter in net.state_dict().items():
                average[name].lerp_(parameter, 1 - keep)
        report(step, float(loss.value.detach()), loss.agreement)
        if step + 1 == last or time.monotonic() - saved_at > checkpoint_s:
            saved_at = time.monotonic()
            state = {"recipe": json.dumps(recipe, sort_keys=True), "net": net.state_dict(), "optimizer": optimizer.state_dict(), "average": average,
                     "step": step + 1, "random": torch.get_rng_state()}
            torch.save(state, path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)
    net.load_state_dict(average)
    return net.eval()


def _first_batches(batches: Batches, recipe: Mapping[str, Any]) -> list[Batch]:
    """Enough of them, drawn by the seed, for a start in closed form."""
    found: list[Batch] = []
    for i in random.Random(recipe["seed"]).sample(range(len(batches)), len(batches)):
        found.append(batches.at(i))
        if sum(len(batch.tokens) for batch in found) >= recipe["start_texts"]:
            break
    return found


def _schedule(step: int, recipe: Mapping[str, Any]) -> float:
    """Warm-up, then a cosine down to `last_rate` of the rate."""
    warm = min(1.0, (step + 1) / max(1.0, recipe["warm_up"] * recipe["steps"]))
    return warm * (recipe["last_rate"] + (1 - recipe["last_rate"]) * 0.5 * (1 + math.cos(math.pi * step / recipe["steps"])))
