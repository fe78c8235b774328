"""Makes a loaded model ready for one CUDA device: joined projections, a quantized head where asked for, steps that are captured.

It knows nothing of files, requests or drafting. Target and draft model are made by one `Gpu`, whose graphs share their memory.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .engine.fused import fuse_projections, quantize_head
from .engine.graph_backends import CudaBackend
from .engine.graphs import Backend, StaticSteps
from .engine.model import LanguageModel

__all__ = ["Gpu", "GpuSettings", "SAME_SHAPE"]

SAME_SHAPE = 8                   # tokens that every step of few is padded to where all are to run the same kernels: one, and seven drafted


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """graphs: capture steps and replay them. same_kernels: pad plain steps and short drafts to one shape, so that their tokens can be
    compared one by one; plain decoding then costs what a step of `SAME_SHAPE` tokens costs. quantize_head: the LM head too, where layers are
    quantized. fuse: join projections."""
    graphs: bool = True
    same_kernels: bool = False
    quantize_head: bool = False
    fuse: bool = True


class Gpu:
    """One device. backend: what captures; tests give a tape."""

    def __init__(self, device: torch.device | str, settings: GpuSettings = GpuSettings(), backend: Backend | None = None) -> None:
        self.settings = settings
        self._backend = backend or (CudaBackend(device) if settings.graphs or settings.same_kernels else None)

    def language_model(self, model: PreTrainedModel, quantization: str = "none", num_tokens: int | None = None, *,
                       is_draft: bool = False) -> LanguageModel:
        """Take a model over. quantization: how its layers are packed already, see `placement.QUANTIZATIONS`. is_draft: nobody compares what
        it says, so it is never padded."""
        settings = self.settings
        num_joined = fuse_projections(model) if settings.fuse else 0
        head = quantization.removesuffix("-double") if settings.quantize_head and quantization != "none" else ""
        if head:
            quantize_head(model, head, model.get_input_embeddings().weight.dtype)
        static, same = None, settings.same_kernels and not is_draft
        if self._backend is not None:
            static = StaticSteps(self._backend, settings.graphs, SAME_SHAPE if same else 1)
        made = LanguageModel(model, num_tokens=num_tokens, exact=False, static=static)
        made.linears = {**made.linears, "joined": num_joined, "head_precision": head or made.linears["precision"],
                        "graphs": settings.graphs, "same_kernels": same}
        return made
