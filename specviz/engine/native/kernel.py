"""The compiled library as Python sees it: its structures, its functions, and the int8 product made of them. It knows nothing of models.

Whatever is passed is checked here: the C code trusts every pointer and every size.
"""
from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...folders import default_cache_dir
from .build import NoKernel, load

__all__ = ["CompiledProduct", "Guess", "Head", "Kernel", "Layer", "MOST_INPUTS", "Model", "Product", "Step", "find_kernel", "padded_to_tiles", "why_not"]

TILE = 64                        # outputs that are computed together
MOST_INPUTS = 65536              # 255 * 127 times as many still fit 32 bits
_ROWS = 16                       # rows are given in room for whole groups of so many
_LARGE_PAGE = 2 << 20
_SWITCH = "SPECVIZ_KERNEL"       # "off" in the environment: do without


class Product(Structure):
    """See products.h."""
    _fields_ = [*((name, c_void_p) for name in ("weights", "scales", "sums", "bias")), ("num_out", c_int32), ("num_in", c_int32)]


class Layer(Structure):
    """See decoder.c."""
    _fields_ = [*((name, Product) for name in ("qkv", "out", "gate_up", "down")),
                *((name, c_void_p) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
                ("scaling", c_float), ("window", c_int32)]


class Model(Structure):
    """See decoder.c."""
    _fields_ = [("layers", POINTER(Layer)), ("final_norm", c_void_p), ("epsilon", c_float),
                *((name, c_int32) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate", "widest"))]


class Step(Structure):
    """See decoder.c."""
    _fields_ = [*((name, c_void_p) for name in ("hidden", "cos", "sin", "positions", "rows", "slots", "prefixes", "extras_from", "extras",
                                                "keys", "values", "capacities", "taps", "normed")),
                *((name, c_int32) for name in ("num_tokens", "num_layers", "longest")), ("scratch", c_void_p)]


class Head(Structure):
    """See decoder.c."""
    _fields_ = [*((name, Product) for name in ("from_token", "from_state", "vocabulary")), ("embeddings", c_void_p)]


class Guess(Structure):
    """See decoder.c."""
    _fields_ = [*((name, c_void_p) for name in ("tokens", "states", "wanted", "logits", "sums", "best")),
                *((name, c_int32) for name in ("num_wanted", "num_best"))]


class Kernel:
    """A loaded library. name: what was compiled, such as "AVX512 VNNI AMX". Raises NoKernel if these structures are not its own."""

    def __init__(self, library: ctypes.CDLL) -> None:
        try:
            library.specviz_kernel.restype, library.specviz_kernel.argtypes = c_char_p, []
            library.specviz_sizes.restype, library.specviz_sizes.argtypes = c_int64, []
            library.specviz_scratch.restype, library.specviz_scratch.argtypes = c_int64, [POINTER(Model), c_int32, c_int32]
            library.specviz_step.restype, library.specviz_step.argtypes = None, [POINTER(Model), POINTER(Step), c_int32]
            library.specviz_guess.restype = None
            library.specviz_guess.argtypes = [POINTER(Model), POINTER(Step), POINTER(Head), POINTER(Guess), c_int32]
            library.specviz_product.restype = None
            library.specviz_product.argtypes = [POINTER(Product), *[c_void_p] * 4, c_int32, c_int32]
            library.specviz_large_pages.restype, library.specviz_large_pages.argtypes = None, [c_void_p, c_int64]
        except AttributeError as error:
            raise NoKernel(f"the compiled library lacks a function ({error})") from error
        sizes = 0
        for structure in (Product, Layer, Model, Step, Head, Guess):
            sizes = sizes * 1000 + ctypes.sizeof(structure)
        if library.specviz_sizes() != sizes:
            raise NoKernel("the compiler lays structures out in another way than Python")
        self.name: str = library.specviz_kernel().decode()
        self._large_pages = library.specviz_large_pages
        self.scratch_bytes, self.step, self.guess = library.specviz_scratch, library.specviz_step, library.specviz_guess
        self.product = library.specviz_product

    def memory(self, num_bytes: int) -> Tensor:
        """Bytes uint8 [num_bytes]; where they fill a large page they begin at one and lie in such where the system gives them."""
        if num_bytes < _LARGE_PAGE:
            return torch.empty(num_bytes, dtype=torch.uint8)
        room = -(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE
        whole = torch.empty(room + _LARGE_PAGE, dtype=torch.uint8)
        begin = -whole.data_ptr() % _LARGE_PAGE
        self._large_pages(whole.data_ptr() + begin, room)
        return whole[begin:begin + num_bytes]


class CompiledProduct:
    """An int8 linear in the library's layout: x float32 [T, K] -> [T, N], what `linear.Int8Linear` calls.

    quantized: int8 [N, K], -127 to 127. scales: float32 [N]. Raises RuntimeError for sizes it is not made for.
    """

    def __init__(self, kernel: Kernel, quantized: Tensor, scales: Tensor) -> None:
        num_out, num_in = quantized.shape
        if num_in % 4 or not 0 < num_in <= MOST_INPUTS or num_out < 1 or scales.shape != (num_out,):
            raise RuntimeError(f"a layer of {num_out} x {num_in} does not fit the compiled kernel")
        if quantized.dtype != torch.int8 or quantized.device.type != "cpu":
            raise RuntimeError("the compiled kernel takes int8 weights in main memory")
        num_tiles = -(-num_out // TILE)
        padded = quantized.new_zeros(num_tiles * TILE, num_in)
        padded[:num_out] = quantized
        self._weights = padded.view(num_tiles, TILE, num_in // 4, 4).transpose(1, 2).reshape(num_tiles, -1).contiguous()
        self._sums = padded.sum(1, dtype=torch.int32).mul_(-128)
        self._scales = padded_to_tiles(scales)
        self.num_out, self.num_in = num_out, num_in
        self.kernel = kernel
        self._fields = self.fields()

    @property
    def num_bytes(self) -> int:
        """Of the packed weights."""
        return self._weights.nbytes

    def move(self, memory: Tensor) -> None:
        """Keep the packed weights in other memory, uint8 [num_bytes], from now on; `fields` handed out before are no longer valid."""
        target = memory.view(torch.int8).view(self._weights.shape)
        assert target.data_ptr() % 64 == 0
        self._weights = target.copy_(self._weights)
        self._fields = self.fields()

    def fields(self, bias: Tensor | None = None) -> Product:
        """What the library reads; it is valid as long as this object and `bias`, float32 [num_tiles * 64], live."""
        assert bias is None or bias.shape == self._scales.shape and bias.dtype == torch.float32
        return Product(self._weights.data_ptr(), self._scales.data_ptr(), self._sums.data_ptr(), None if bias is None else bias.data_ptr(),
                       self.num_out, self.num_in)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            return self(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        x = x.contiguous()
        num_rows = x.shape[0]
        assert x.shape[1] == self.num_in and x.dtype == torch.float32 and x.device.type == "cpu"
        out = x.new_empty(num_rows, self.num_out)
        if num_rows:
            rows = torch.empty(-(-num_rows // _ROWS) * _ROWS * self.num_in, dtype=torch.uint8)
            row_scales = torch.empty(num_rows)
            self.kernel.product(byref(self._fields), x.data_ptr(), out.data_ptr(), rows.data_ptr(), row_scales.data_ptr(), num_rows,
                                 torch.get_num_threads())
        return out


def padded_to_tiles(vector: Tensor) -> Tensor:
    """float32 [N], with zeros up to whole tiles of outputs."""
    return torch.cat([vector.float(), vector.new_zeros(-len(vector) % TILE).float()])


@cache
def _found(folder: Path) -> Kernel | NoKernel:
    try:
        return Kernel(load(folder))
    except NoKernel as problem:
        return problem


def _attempt() -> Kernel | NoKernel:
    if os.environ.get(_SWITCH, "").lower() in ("off", "0", "no"):
        return NoKernel(f"{_SWITCH}={os.environ[_SWITCH]} switches it off")
    return _found(default_cache_dir() / "kernels")


def find_kernel() -> Kernel | None:
    """This machine's kernel, compiled when first asked for; None if there is none, see `why_not`."""
    found = _attempt()
    return found if isinstance(found, Kernel) else None


def why_not() -> str:
    """Why there is no compiled kernel, without a full stop; "" if there is one."""
    found = _attempt()
    return "" if isinstance(found, Kernel) else str(found)
