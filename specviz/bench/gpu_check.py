"""`python -m specviz.bench gpu-check`: what this card makes of the engine, in one file that can be sent in. Needs no download.

Models of the shape of an 1B, an 8B and (as a drafter) a 0.6B model with random weights are made on the device in each precision. For each it
tells whether steps of several tokens agree with the plain forward, joined projections with separate ones and captured steps with others, what
T tokens cost beside one, how much of a step is spent on launching kernels, whether drafted text is plain text, with the same kernels for both
and without, and the memory. If the default model lies on this machine, its methods are measured too. It knows nothing of what a good result is.

Every part that fails is written down as such, and the next one goes on.
"""
from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..cost_trial import measure
from ..default_model import is_prepared
from ..engine.cache import KVCache
from ..engine.graph_backends import CudaBackend, TapeBackend
from ..engine.graphs import WARM_UPS, Backend
from ..engine.model import LanguageModel, Row
from ..gpu_model import Gpu, GpuSettings
from .gpu_launch import launch_overhead
from .gpu_steps import answers, judged, step_ms
from .prompts import BUNDLED, read, some
from .random_model import PRECISIONS, SHAPES, TOY_SHAPES, Shape, random_model

__all__ = ["check", "main"]

_TARGETS, _DRAFTER = ("1B", "8B"), "0.6B"
_PROMPT, _CHAIN = 48, 6          # tokens read first, and fed at once afterwards
_TREE = (-1, 0, 0, 1, 1, 2)      # parents of the tree that is fed: three branches of two or three tokens
_ANSWER = 48                     # tokens of the text that is decoded with drafts and without
_ARMS = ("prompt_lookup:5", "suffix:8", "suffix:auto")


def check(device: str, shapes: Mapping[str, Shape], precisions: Sequence[str] = PRECISIONS, *, until: float = float("inf"),
          contexts: Sequence[int] = (256, 1280), say: Callable[[str], None] = print, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """All parts on one device, as plain data. until: no part is begun after this time, and what is left out says so."""
    result: dict[str, Any] = {"format": "specviz-gpu-check", "version": 2, "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                              "environment": environment(device), "models": {}}

    def part(name: str, where: dict[str, Any], key: str, work: Callable[[], Any]) -> None:
        if clock() >= until:
            where[key] = {"left_out": "the time was over"}
            return
        begun = clock()
        try:
            where[key] = work()
        except Exception as error:               # one missing kernel must not hide what the others do
            where[key] = {"error": f"{type(error).__name__}: {str(error)[:500]}", "place": traceback.format_exc(limit=-2)[-800:]}
        say(f"{name}: {'failed' if 'error' in where[key] else 'done'} in {clock() - begun:.0f} s")
        _empty(device)

    drafter: list[LanguageModel] = []
    backend = CudaBackend(device) if torch.device(device).type == "cuda" else TapeBackend()

    def make_drafter() -> dict[str, Any]:
        model = random_model(shapes[_DRAFTER], "bf16", device)
        facts = {"launch": launch_overhead(model, device), "step_ms": {"separate": step_ms(LanguageModel(model, exact=False), contexts[0])}}
        drafter.append(Gpu(device, backend=backend).language_model(model))
        facts["step_ms"]["graphs"] = step_ms(drafter[0], contexts[0])
        return facts | {"graphs": graph_facts(drafter[0])}
    part(f"{_DRAFTER} drafter", result["models"], f"{_DRAFTER} bf16", make_drafter)
    for name in _TARGETS:
        for precision in precisions:
            part(f"{name} {precision}", result["models"], f"{name} {precision}",
                 lambda name=name, precision=precision: _target(shapes[name], precision, device, drafter[0] if drafter else None, contexts, backend))
    small = result["models"][f"{_DRAFTER} bf16"].get("step_ms")
    for facts in result["models"].values():
        if small and "joined" in facts.get("step_ms", {}):       # what one drafted token costs beside a plain step, both launched or both captured
            facts["c"] = {"launched": round(small["separate"]["1"] / facts["step_ms"]["joined"]["1"], 4),
                          "captured": round(small["graphs"]["1"] / facts["step_ms"]["graphs"]["1"], 4)}
    if shapes is not TOY_SHAPES and is_prepared():
        part("default model", result, "default_model", lambda: _real(device, True))
        part("default model without graphs", result, "default_model_without_graphs", lambda: _real(device, False))
    return result


def environment(device: str) -> dict[str, Any]:
    """Versions and the card."""
    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None
    facts: dict[str, Any] = {"system": platform.platform(), "python": platform.python_version(),
                             **{name: installed(name) for name in ("torch", "transformers", "bitsandbytes", "triton")}, "device": device}
    if torch.device(device).type == "cuda":
        card = torch.cuda.get_device_properties(device)
        facts |= {"card": card.name, "capability": f"{card.major}.{card.minor}", "memory_bytes": card.total_memory,
                  "processors": card.multi_processor_count, "cuda": torch.version.cuda}
    return facts


def _target(shape: Shape, precision: str, device: str, drafter: LanguageModel | None, contexts: Sequence[int], backend: Backend) -> dict[str, Any]:
    """One model in one precision: as it is, with projections joined, and with steps captured."""
    before = _allocated(device)
    _reset_peak(device)
    model = random_model(shape, precision, device)
    facts: dict[str, Any] = {"memory_bytes": _allocated(device) - before, "memory_making_bytes": _peak(device) - before,
                             "launch": launch_overhead(model, device)}
    tokens = torch.randint(3, shape.vocab_size, (_PROMPT + len(_TREE),), generator=torch.Generator().manual_seed(1)).tolist()
    reference = Reference(model, device)
    expected = {"chain": reference(tokens[:_PROMPT + _CHAIN])[-_CHAIN - 1:]}
    expected["tree"] = torch.stack([reference([*tokens[:_PROMPT], *(tokens[_PROMPT + node] for node in _path(node))])[-1] for node in range(len(_TREE))])
    target = LanguageModel(model, exact=False)
    facts["correctness"] = correctness(target, tokens, expected)
    separate = target_logits(target, tokens[:_PROMPT], [tokens[_PROMPT:_PROMPT + _CHAIN]], None)
    facts["step_ms"] = {"separate": step_ms(target, contexts[0])}
    target = Gpu(device, GpuSettings(graphs=False)).language_model(model, precision)
    joined = target_logits(target, tokens[:_PROMPT], [tokens[_PROMPT:_PROMPT + _CHAIN]], None)
    facts["joined"] = {"groups": target.linears["joined"], **_compared(joined, separate)}
    facts["memory_joined_bytes"] = _allocated(device) - before
    facts["step_ms"]["joined"] = step_ms(target, contexts[0])
    made = {settings.same_kernels: Gpu(device, settings, backend).language_model(model, precision)
            for settings in (GpuSettings(fuse=False), GpuSettings(fuse=False, same_kernels=True))}
    target = made[False]
    facts["graphs"] = {**_compared(_captured(target, tokens), joined), **graph_facts(target)}
    noise = facts["correctness"]["chain_against_one_by_one"]["difference"]
    facts["texts"] = {name: judged(answers(made[same], tokens[:_PROMPT], _ANSWER), noise)
                      for name, same in (("same_kernels_off", False), ("same_kernels_on", True))}
    del made
    facts["step_ms"]["graphs"] = step_ms(target, contexts[0])
    _reset_peak(device)
    trial = measure(target, drafter, contexts=contexts)
    while True:
        try:
            next(trial)
        except StopIteration as end:
            table = end.value
            break
    facts |= {"cost": table.to_json(), "v": {str(context): {str(size): round(table.v(size, context), 3) for size in table.num_tokens}
                                             for context in table.context_lengths},
              "c_drafter": None if table.draft_ms is None else round(table.draft_ms / table.verify_ms(1, contexts[0]), 4),
              "memory_running_bytes": _peak(device) - before, "num_captured": target.graphs.num_captured, "graph_failure": target.graphs.failure}
    return facts


def _captured(target: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """Logits behind the prompt and of the chain, once the chain's shape is captured."""
    for _ in range(WARM_UPS):
        target_logits(target, tokens[:_PROMPT], [tokens[_PROMPT:_PROMPT + _CHAIN]], None)
    return target_logits(target, tokens[:_PROMPT], [tokens[_PROMPT:_PROMPT + _CHAIN]], None)


def graph_facts(model: LanguageModel) -> dict[str, Any]:
    """Whether steps are captured: num_replayed, and the sentence if they could not be."""
    return {"num_replayed": model.graphs.num_replayed, "failure": model.graphs.failure}


class Reference:
    """The unmodified transformers forward, asked before the engine takes the model over."""

    def __init__(self, model: Any, device: str) -> None:
        self._model, self._device = model, device

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int]) -> Tensor:
        return self._model(input_ids=torch.tensor([list(tokens)], device=self._device), use_cache=False).logits[0].float()


def correctness(target: LanguageModel, tokens: Sequence[int], expected: Mapping[str, Tensor]) -> dict[str, Any]:
    """Logits of a chain and of a tree fed at once, and of the chain fed one by one, against the plain forward and each other.

    difference: largest absolute one, beside `scale`, the standard deviation of the logits. same_top: share of equal most probable tokens.
    top_two_gap: the smallest gap between the best two where they are not, which rounding alone explains if it is as small as `difference`.
    """
    chain = target_logits(target, tokens[:_PROMPT], [tokens[_PROMPT:_PROMPT + _CHAIN]], None)
    single = target_logits(target, tokens[:_PROMPT], [[token] for token in tokens[_PROMPT:_PROMPT + _CHAIN]], None)
    tree = target_logits(target, tokens[:_PROMPT], [tokens[_PROMPT:]], _TREE)
    return {"chain": _compared(chain, expected["chain"]), "one_by_one": _compared(single, expected["chain"]), "tree": _compared(tree[1:], expected["tree"]),
            "chain_against_one_by_one": _compared(chain, single), "scale": round(float(expected["chain"].std()), 4)}


def target_logits(target: LanguageModel, prompt: Sequence[int], pieces: Sequence[Sequence[int]], parents: Sequence[int] | None) -> Tensor:
    """Logits behind the prompt's last token and each fed one, [1 + n, V]; pieces are fed one forward after the other."""
    cache: KVCache = target.new_cache(256)
    row = cache.allocate()
    output, = target.forward([Row(row, list(prompt), num_logits=1)], cache)
    cache.keep(row, range(len(prompt)))
    found = [output.logits]
    for piece in pieces:
        output, = target.forward([Row(row, list(piece), parents)], cache)
        found.append(output.logits)
        cache.keep(row, range(len(piece)) if parents is None else ())
    return torch.cat(found).float()


def _compared(got: Tensor, expected: Tensor) -> dict[str, Any]:
    same = got.argmax(-1) == expected.argmax(-1)
    top = expected[~same].topk(2, -1).values
    return {"difference": float((got - expected).abs().max()), "same_top": round(float(same.float().mean()), 4),
            "top_two_gap": None if same.all() else float((top[:, 0] - top[:, 1]).max())}


def _path(node: int) -> list[int]:
    path = [node]
    while _TREE[path[-1]] >= 0:
        path.append(_TREE[path[-1]])
    return path[::-1]


def _real(device: str, graphs: bool) -> dict[str, Any]:
    """The default model with every method that needs nothing more: tokens/s, tokens per step, and whether the text is plain decoding's."""
    from ..options import Options
    from .ours import Ours
    ours = Ours(Options(device=device, quantization="none", browser=False, graphs=graphs), _ARMS)
    prompts = [ours.encode(prompt.text) for prompt in some(read(BUNDLED), 1)]
    found: dict[str, Any] = {"facts": ours.facts(), "arms": {}}
    for arm in ours.arms:
        ours.run(arm, prompts[0], 16)
    samples = {arm: [] for arm in ours.arms}
    for prompt in prompts:
        for arm in ours.arms:
            samples[arm].append(ours.run(arm, prompt, 64))
    for arm, each in samples.items():
        found["arms"][arm] = {
            "tokens_per_s": round(median(sample.num_decoded / sample.decode_s for sample in each), 2),
            "tokens_per_step": round(sum(s.num_decoded for s in each) / sum(s.num_steps for s in each), 3),
            "speed_up": round(median(plain.decode_s / sample.decode_s for sample, plain in zip(each, samples["plain"])), 3),
            "same_text": round(sum(sample.tokens == plain.tokens for sample, plain in zip(each, samples["plain"])) / len(each), 3)}
    return found


def _empty(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated(device) if torch.device(device).type == "cuda" else 0


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated(device) if torch.device(device).type == "cuda" else 0


def _reset_peak(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def summary(result: Mapping[str, Any]) -> str:
    """The result in a few lines for people."""
    lines = [f"{result['environment'].get('card', result['environment']['device'])}, torch {result['environment']['torch']}, "
             f"bitsandbytes {result['environment']['bitsandbytes']}"]
    for name, facts in result["models"].items():
        if "v" in facts:
            first = next(iter(facts["v"].values()))
            cost = facts["cost"]["verify_ms"][0][0]
            lines.append(f"{name}: T(1) {cost:.2f} ms, T(M)/T(1) " + ", ".join(f"{size}: {value:.2f}" for size, value in first.items())
                         + f"; chain and tree agree on {facts['correctness']['chain']['same_top']:.0%} and {facts['correctness']['tree']['same_top']:.0%}"
                         + f"; {facts['memory_bytes'] / 2 ** 30:.2f} GiB")
            lines.append(f"  a step of one token: separate {facts['step_ms']['separate']['1']:.2f} ms, joined {facts['step_ms']['joined']['1']:.2f}, "
                         f"captured {facts['step_ms']['graphs']['1']:.2f}; drafted text: {facts['texts']['same_kernels_off']['verdict']}, "
                         f"with the same kernels: {facts['texts']['same_kernels_on']['verdict']}"
                         + (f"; not captured: {facts['graph_failure']}" if facts["graph_failure"] else ""))
        elif "error" in facts:
            lines.append(f"{name}: {facts['error']}")
        elif "left_out" in facts:
            lines.append(f"{name}: not measured, {facts['left_out']}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specviz.bench gpu-check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help='"cuda", "cuda:1"; "cpu" only together with --tiny (default: cuda)')
    parser.add_argument("--tiny", action="store_true", help="toy shapes: tries the program, measures nothing of use")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), metavar="LIST", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin no new part after this time (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="where the result goes (default: %(default)s)")
    given, begun = parser.parse_args(argv), time.monotonic()
    is_cuda = given.device.split(":")[0] == "cuda"
    if is_cuda and not torch.cuda.is_available():
        print("There is no CUDA device that PyTorch can use here, so there is nothing to check. To try the program itself: --device cpu --tiny.",
              file=sys.stderr)
        return 2
    if not is_cuda and not given.tiny:
        print(f"On {given.device} the full shapes would take hours; add --tiny, which tries the program and measures nothing of use.", file=sys.stderr)
        return 2
    result = check(given.device, TOY_SHAPES if given.tiny else SHAPES, given.precisions.split(","), until=begun + 60 * given.minutes,
                   contexts=(16, 64) if given.tiny else (256, 1280), say=lambda line: print(line, flush=True))
    result["took_s"] = round(time.monotonic() - begun, 1)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(summary(result))
    print(f"Wrote {given.out}. This file is the gpu-check result: copy or send it as it is.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
