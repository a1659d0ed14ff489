"""Chooses a model's forward: the fastest backend whose logits equal those of the model itself
except for rounding."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from .backend import ForwardBackend
from .cpu_native.backend import CpuBackend, native_decoder
from .cpu_native.head import packed_head
from .cpu_native.threads import ThreadChooser
from .device_traits import traits_of
from .fused.backend import FusedBackend
from .fused.projections import packing_budget
from .kv_cache import Layout
from .loader import LoadedModel
from .step_tensors import StepTensors
from .transformers.backend import (
    TransformersBackend,
    attention_name,
    compiled_backend,
    keeps_logits,
)
from .triton.backend import triton_backend

log = logging.getLogger(__name__)


class ForwardOptions(NamedTuple):
    """The settings that decide how a model's forwards are computed."""

    compiled: bool = False
    """Whether forwards may run through torch.compile. torch.compile is used only if the compiled
    logits equal the model's own logits, and the model has one rank. The first step that needs a new
    compiled form is slow."""
    fixed_threads: bool = False
    """Whether every forward on a CPU uses all threads of torch. If not, a forward uses fewer
    threads when this is faster."""
    exact: bool = True
    """Whether to use kernels that compute the same bits for a row in every batch. Not every backend
    has such kernels."""


def choose_backend(
    loaded: LoadedModel, tensors: StepTensors, layout: Layout, options: ForwardOptions
) -> ForwardBackend:
    """The forward of a loaded model on its device."""
    loaded.model.set_attn_implementation(attention_name(layout))
    base = _of_torch(loaded, tensors, layout, options.compiled)
    if not traits_of(loaded.device).host_memory:
        return base
    native, threads, why_not_exact = None, None, base.why_not_exact
    if isinstance(base, FusedBackend):
        if not layout.in_place:
            native, why_not_exact = native_decoder(loaded.name, base, layout)
        if not options.exact:
            why_not_exact = why_not_exact or "the setting exact is off"
        if why_not_exact:
            base.decoder.pack(packing_budget())
    if loaded.ranks is None and not options.fixed_threads:
        threads = ThreadChooser(torch.get_num_threads())
    return CpuBackend(base, native, threads, why_not_exact)


def _of_torch(
    loaded: LoadedModel, tensors: StepTensors, layout: Layout, compiled: bool
) -> ForwardBackend:
    """The forward that is computed by operations of torch or by kernels of Triton."""
    model = loaded.model
    if loaded.ranks is not None:
        if compiled:
            log.warning("%s runs without torch.compile, as it has several ranks", loaded.name)
        return TransformersBackend(tensors, model)
    if compiled:
        found = compiled_backend(loaded.name, model, tensors, layout)
        if found is not None:
            return found
    if not keeps_logits(model):
        return TransformersBackend(tensors, model)
    if loaded.decoder is None:
        return TransformersBackend(tensors, model, packed_head(model))
    if layout.kernel == "triton" or (layout.in_place and loaded.device.type == "cuda"):
        return triton_backend(tensors, loaded.decoder, layout, model.dtype)
    return FusedBackend(tensors, loaded.decoder, layout)
