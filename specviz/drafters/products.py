"""The matrix products of a drafting head: int8 in the compiled kernel where the target's own run there, and as the weights are elsewhere.

It knows nothing of heads. A draft is a guess, so rounding its weights may cost a little acceptance and never exactness.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from ..engine.linear import Int8Linear
from ..engine.model import LanguageModel

__all__ = ["Product", "product", "products", "runs_compiled"]

Product = Callable[[Tensor], Tensor]               # [..., K] -> [..., N]


def runs_compiled(target: LanguageModel) -> bool:
    """Whether the target's own products run in the compiled kernel."""
    return "compiled" in target.linears.get("kernel", "")


def product(weight: Tensor, bias: Tensor | None, target: LanguageModel, *, is_exact: bool = False) -> Product:
    """weight: [N, K] on the target's device and in its dtype. bias: [N]. is_exact: never rounded."""
    if runs_compiled(target) and not is_exact:
        try:
            if (rounded := Int8Linear(weight, bias)).compiled is not None:
                return rounded
        except RuntimeError:                       # a size that the kernel is not made for
            pass
    return partial(F.linear, weight=weight, bias=bias)


def products(weights: Mapping[str, Tensor], target: LanguageModel) -> dict[str, Product]:
    """By name, without ".weight": every matrix among a head's weights, with its bias where it has one. Embeddings are none.

    An EAGLE head's `fc` is not rounded here: it reads an embedding beside a state many times as large, which would leave nothing of it in
    int8. Where the head's whole pass is compiled, it is rounded in two parts (`compiled_eagle.halves`).
    """
    names = [name.removesuffix(".weight") for name, tensor in weights.items() if name.endswith(".weight") and tensor.dim() == 2]
    return {name: product(weights[name + ".weight"], weights.get(name + ".bias"), target, is_exact=name == "fc")
            for name in names if name != "embed_tokens"}
