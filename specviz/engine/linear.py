"""How one linear layer runs on a CPU: fp32 or bf16 with prepacked weights, int8 with a scale per row, or torch's own.

It knows nothing of models beyond their `nn.Linear` modules, and nothing of attention, caches or decoding.

The property that matters here is row independence: a row's result must not depend on the rows computed with it, or text decoded with
drafts would differ from text decoded without. Every packed layer is tried for it when it is made, because it depends on the processor.
The packing operators are private to torch (checked with 2.13); where they are missing or fail, `F.linear` takes their place.
"""
from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import InputError
from .native.kernel import MOST_INPUTS, CompiledProduct, find_kernel, padded_to_tiles

__all__ = ["Int8Linear", "PRECISIONS", "PackedLinear", "PlainLinear", "describe", "describe_machine", "fuse", "make_linear",
           "replace_linears"]

PRECISIONS = ("fp32", "bf16", "int8")
_LONG = 1024                   # inner dimensions beyond this are added in another order for one row than for several (oneDNN with AVX512)
_HINT = 4                        # rows the packing is laid out for; 1 would lose row independence and all gain beyond one row
_SMALLEST = 16                   # layers with fewer outputs (routers of mixtures) are left alone: nothing to win, much to lose
_TINY = 1e-30


class PlainLinear(nn.Module):
    """torch's own linear, for dtypes that are not packed (float64) and where packing fails. Rows depend on each other's number."""
    kernel, row_independent = "torch", False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.precision = "fp32" if weight.dtype == torch.float32 else str(weight.dtype).removeprefix("torch.")

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """A linear whose weights oneDNN has laid out once, in fp32 or bf16; [..., K] -> [..., N] in fp32.

    row_independent: rows are bitwise the same whatever is computed with them. To get there, a single row may be computed as two equal
    ones (with AVX512, oneDNN adds a long inner dimension in another order for one row), and many bf16 rows in blocks.
    Raises RuntimeError where the operators do not work; `make_linear` then takes `PlainLinear`.
    """
    kernel = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        limits = _row_limits(weight.shape[0], weight.shape[1], dtype, torch.get_num_threads())
        self.row_independent = limits is not None
        self._min_rows, self._max_rows = limits or (1, None)
        self._dtype = dtype
        self.precision = "fp32" if dtype == torch.float32 else "bf16"
        self._weight = _pack(weight.detach().to(dtype))
        self._bias = None if bias is None else bias.detach().to(dtype)
        self._call = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            return self.forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        if self._max_rows is not None and x.shape[0] > self._max_rows:
            return torch.cat([self.forward(part) for part in x.split(self._max_rows)])
        num_rows = x.shape[0]
        if num_rows < self._min_rows:
            x = x.expand(self._min_rows, -1)
        if self._dtype != x.dtype:
            x = x.to(self._dtype)
        y = self._call(x, self._weight, self._bias, "none", [], "")
        if num_rows < self._min_rows:
            y = y[:num_rows]
        return y if self._dtype == torch.float32 else y.float()


class Int8Linear(nn.Module):
    """A linear with int8 weights, scaled per output, and int8 activations, scaled per row; [..., K] -> [..., N] in fp32.

    Every row is divided by its own largest magnitude, so rows are independent; sums are exact integers. Our compiled kernel comes first.
    Where torch's would saturate pairs of products (AVX2 without VNNI), weights keep to +-63 instead of +-127, which cannot saturate; so
    results differ between kernels. Raises RuntimeError where no kernel works.
    """
    precision, row_independent = "int8", True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.kernel, limit = _int8_kernel(_own_kernel(weight.shape[1]))
        weight = weight.detach().float()
        scales = weight.abs().amax(1).clamp_min(_TINY) / limit
        quantized = (weight / scales[:, None]).round().clamp(-limit, limit).to(torch.int8)
        self._call = _maker(self.kernel)(quantized, scales)
        self._bias = None if bias is None else bias.detach().float()

    @property
    def compiled(self) -> CompiledProduct | None:
        """The packed weights, where our own kernel computes this layer."""
        return self._call if isinstance(self._call, CompiledProduct) else None

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def padded_bias(self) -> Tensor | None:
        """The bias as the compiled library reads it, for `CompiledProduct.fields`."""
        return None if self._bias is None else padded_to_tiles(self._bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self._call(x)
        return y if self._bias is None else y.add_(self._bias)


def make_linear(linear: nn.Linear, precision: str) -> nn.Module:
    """The module that computes `linear` in "fp32", "bf16" or "int8"; the next better one where the processor lacks the operators.

    Weights that are not float32 are left to torch.

    Raises InputError for another precision.
    """
    if precision not in PRECISIONS:
        raise InputError(f"Precision {precision!r} is not one of {', '.join(PRECISIONS)}.")
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return PlainLinear(weight, bias)
    attempts: list[Callable[[], nn.Module]] = [lambda: PackedLinear(weight, bias)]
    if precision == "int8" and weight.shape[0] >= _SMALLEST:
        attempts.insert(0, lambda: Int8Linear(weight, bias))
    elif precision == "bf16":
        attempts.insert(0, lambda: PackedLinear(weight, bias, torch.bfloat16))
    for attempt in attempts:
        try:
            return attempt()
        except (RuntimeError, AttributeError, NotImplementedError):
            continue
    return PlainLinear(weight, bias)


def fuse(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear whose output is the outputs of several linears of the same input, side by side."""
    first = linears[0]
    fused = nn.Linear(first.in_features, sum(linear.out_features for linear in linears), any(linear.bias is not None for linear in linears),
                      device="meta")
    fused.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    if fused.bias is not None:
        fused.bias = nn.Parameter(torch.cat([first.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
                                             for linear in linears]), requires_grad=False)
    return fused


def replace_linears(model: Any, precision: str, head_precision: str | None = None) -> None:
    """Swap every `nn.Linear` of a loaded transformers model, in place; the originals are freed. An embedding tied to the head stays.

    head_precision: for the LM head, whose rounding shows in the text most; `precision` if None. Subclasses (bitsandbytes) are left alone.
    """
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, make_linear(child, (head_precision or precision) if child is head else precision))


def describe(model: nn.Module, head: nn.Module | None = None) -> dict[str, Any]:
    """What is active in a model: precision, head_precision, kernel, isa, row_independent. Mixed kernels are joined with " + ".

    head: the LM head; by default what the model calls its output embeddings.
    """
    if head is None and hasattr(model, "get_output_embeddings"):
        head = model.get_output_embeddings()
    ours = [module for module in model.modules() if isinstance(module, (PlainLinear, PackedLinear, Int8Linear))]
    others = [module for module in model.modules() if isinstance(module, nn.Linear)]
    body = Counter(module.precision for module in ours if module is not head)
    return {
        "precision": " + ".join(name for name, _ in body.most_common()) or "torch",
        "head_precision": getattr(head, "precision", "torch"),
        "kernel": " + ".join(sorted({module.kernel for module in ours} | ({"torch"} if others else set()))),
        "isa": describe_machine()["isa"],
        "row_independent": bool(ours) and not others and all(module.row_independent for module in ours),
    }


@cache
def describe_machine() -> dict[str, Any]:
    """What the processor offers: "isa", torch's level with the int8 extensions that decide which kernels run, such as "AVX512 VNNI AMX"."""
    words = [torch.backends.cpu.get_cpu_capability()]
    for name, word in (("_is_vnni_supported", "VNNI"), ("_is_avx512_bf16_supported", "BF16"), ("_is_amx_tile_supported", "AMX")):
        if words[0].startswith("AVX512") and getattr(torch.cpu, name, bool)():
            words.append(word)
    return {"isa": " ".join(words)}


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _HINT)


@cache
@torch.inference_mode()
def _row_limits(num_out: int, num_in: int, dtype: torch.dtype, num_threads: int) -> tuple[int, int | None] | None:
    """(least, most) rows per call between which a packed layer of this shape treats rows alike; None if there are no such limits."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, num_in, generator=generator).repeat(-(-min(num_out, 16384) // 64), 1)[:min(num_out, 16384)]
    packed = _pack(weight.to(dtype))
    rows = torch.randn(256, num_in, generator=generator).to(dtype)

    def run(start: int, count: int) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows[start:start + count], packed, None, "none", [], "")

    # Rounded to bf16, sums in another order look alike but for one in some ten thousand, which a trial of 16 rows would miss.
    for least in (2,) if dtype == torch.bfloat16 and num_in > _LONG else (1, 2):
        alone = torch.cat([run(start, least) for start in range(0, 16, least)])
        if all(torch.equal(run(0, count), alone[:count]) for count in range(least, 17)):
            blocks = torch.cat([run(start, 16) for start in range(0, 256, 16)])
            alike = all(torch.equal(run(0, count), blocks[:count]) for count in (48, 256))
            return least, None if alike and dtype == torch.float32 else 16      # AMX rounds a few bf16 sums of large blocks otherwise
    return None


def _onednn(quantized: Tensor, scales: Tensor) -> Any:
    """The operator that torch's compiler uses: plain int8 tensors in, fp32 out."""
    call = torch.ops.onednn.qlinear_pointwise.default
    packed = torch.ops.onednn.qlinear_prepack(quantized, None)
    scales, zeros = scales.clone(), torch.zeros(len(scales), dtype=torch.int32)

    def run(x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True).mul_(1 / 127).clamp_min_(_TINY)
        rows = (x / largest).round_().to(torch.int8)
        return call(rows, 1.0, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "").mul_(largest)
    return run


def _fbgemm(quantized: Tensor, scales: Tensor) -> Any:
    """fbgemm quantizes the scaled rows itself, which saves operators; it wants torch's quantized tensors, which are on their way out."""
    call = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.quantized.engine = "fbgemm"
        try:
            weight = torch._make_per_channel_quantized_tensor(quantized, scales.double(), torch.zeros(len(scales), dtype=torch.long), 0)
            packed = torch.ops.quantized.linear_prepack(weight, None)
        finally:
            torch.backends.quantized.engine = engine

    def run(x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True).clamp_min_(_TINY)
        return call(x / largest, 1 / 127, 128, packed).mul_(largest)
    return run


_INT8_KERNELS = {"onednn int8": _onednn, "fbgemm int8": _fbgemm}


def _own_kernel(num_in: int) -> str:
    """The name of our compiled kernel, "" where there is none or a layer of so many inputs does not fit it."""
    kernel = find_kernel() if num_in % 4 == 0 and num_in <= MOST_INPUTS else None
    return f"compiled, {kernel.name}" if kernel else ""


def _maker(name: str) -> Callable[[Tensor, Tensor], Any]:
    """What makes a layer's call from int8 weights [N, K] and scales [N]."""
    return _INT8_KERNELS.get(name) or partial(CompiledProduct, find_kernel())


@cache
@torch.inference_mode()
def _int8_kernel(own: str = "") -> tuple[str, int]:
    """The kernel to use and the largest weight that cannot saturate in it. own: the name of the compiled one, which is tried first.

    With AMX oneDNN is faster for two rows and more; otherwise fbgemm is (measured). Each is tried: on rows that saturate a 16-bit
    sum of two products, and for a row alone against the same row among others.
    """
    names = list(_INT8_KERNELS) if "AMX" in describe_machine()["isa"] else list(_INT8_KERNELS)[::-1]
    names = [own, *names] if own else names
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 128, generator=generator)
    rows[3] *= 8
    failures = []
    for name in names:
        try:
            for limit in (127, 63):
                largest = _maker(name)(torch.full((64, 128), limit, dtype=torch.int8), torch.full((64,), 1 / limit))
                if (largest(torch.ones(2, 128)) - 128).abs().max() < 1:
                    run = _maker(name)(torch.randint(-limit, limit, (64, 128), generator=generator).to(torch.int8), torch.full((64,), 0.01))
                    if torch.equal(run(rows), torch.cat([run(rows[i:i + 1]) for i in range(8)])):
                        return name, limit
            failures.append(f"{name}: saturates or mixes rows")
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            failures.append(f"{name}: {error}")
    raise RuntimeError("; ".join(failures))
