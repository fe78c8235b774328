"""Makes a Llama-like model easier to hold in int8 by moving large activations into the weights. It knows nothing of kernels.

A few input channels of a linear are far larger than the rest, and a scale per row must stretch over them. Dividing the channel by s and
multiplying the weight's column by s changes nothing in exact arithmetic and evens both out: SmoothQuant, Xiao et al. 2023,
arXiv 2211.10438, equation 4. The division costs nothing at run time: it goes into the norm, or into the layer that made the channel.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CALIBRATION_TEXT", "input_sizes", "smoothing_scales"]

CALIBRATION_TEXT = '''The library opens at nine. Most visitors come in the morning, when the reading room is quiet and the light is good; in the \
afternoon children arrive with their schoolbooks. "Where can I find the maps?" asked an old man. They are on the second floor, next to the \
newspapers.
def mean(values):
    """Return the arithmetic mean."""
    total = 0.0
    for value in values:
        total += value
    return total / len(values)
1. Mix 250 g of flour with two eggs. 2. Add milk, salt and a little sugar. 3. Let it rest for 30 minutes.
Le musée est fermé le lundi. Das Wetter bleibt morgen kühl. The result is x = (3 + 4) * 2 = 14.'''
_NUM_RANDOM = 192


@torch.inference_mode()
def input_sizes(model: Any, token_ids: Tensor | None = None) -> dict[nn.Module, Tensor]:
    """The root mean square of every input channel of every linear of the decoder layers, over one forward; linear -> [K].

    token_ids: int64 [T], at best `CALIBRATION_TEXT` as the model's tokenizer reads it; None takes random tokens, which serve less well.
    Runs on one thread, so that the same weights come out however many threads are chosen later.
    """
    if token_ids is None:
        token_ids = torch.randint(model.config.vocab_size, (_NUM_RANDOM,), generator=torch.Generator().manual_seed(0))
    sizes: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        sizes[module] = args[0].flatten(0, -2).square().mean(0).sqrt()

    handles = [module.register_forward_pre_hook(note) for layer in model.model.layers for module in layer.modules() if type(module) is nn.Linear]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model.model(token_ids[None], use_cache=False)
    finally:
        torch.set_num_threads(num_threads)
        for handle in handles:
            handle.remove()
    return sizes


def smoothing_scales(size: Tensor, weight: Tensor, strength: float) -> Tensor:
    """What to divide the input channels by and multiply the weight's columns with, [K], mean 1.

    size: [K] from `input_sizes`. weight: [N, K]. strength: 0 evens out the weights, 1 the activations.
    """
    scales = size.clamp_min(1e-5) ** strength / weight.abs().amax(0).clamp_min(1e-5) ** (1 - strength)
    return scales / scales.mean()
