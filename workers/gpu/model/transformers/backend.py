"""The forward that transformers' own modules compute, with this engine's attention."""

from __future__ import annotations

import inspect
import logging
from contextlib import nullcontext
from typing import Any

import torch

from ..backend import ForwardBackend
from ..cpu_native.head import PackedHead
from ..cuda.kernels import function_name
from ..kv_cache import Layout
from ..loader import FUSED_TOLERANCE, PROBE_TOLERANCE, difference
from ..probes import Probes
from ..step_tensors import Context, StepTensors
from .attention import NAME, NAME_COMPILED

log = logging.getLogger(__name__)

MAX_COMPILED_VARIANTS = 64
"""Maximum number of compiled forms of one function; torch's default is 8. torch compiles a separate
form for zero, one and several rows of logits, and for one and several tokens. If methods of several
classes have the same decorator, they share the code of the decorator's wrapper. So torch counts
the forms of all these methods as forms of one function."""


class TransformersBackend(ForwardBackend):
    """Runs a transformers model. ``head``, if given, computes the model's output layer faster."""

    why_no_kernels = "its layers run as transformers' modules"
    why_not_exact = why_no_kernels

    def __init__(self, tensors: StepTensors, model: Any, head: PackedHead | None = None) -> None:
        super().__init__(tensors)
        self._model = model
        self._head = head
        self._keeps_logits = keeps_logits(model)
        if not self._keeps_logits:
            self.why_no_graphs = "the model computes the logits of all tokens"

    def refresh(self) -> None:
        """Makes the copy of the output layer again, after the model's weights have been changed in
        place."""
        if self._head is not None:
            self._head.refresh()

    def compute(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """The logits at ``rows``."""
        keep = {"logits_to_keep": rows} if self._keeps_logits else {}
        with self._head.applied() if self._head is not None else nullcontext():
            logits: torch.Tensor = self._model(
                input_ids=ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                packed_batch=context,
                **keep,
            ).logits[0]
        return logits if self._keeps_logits else logits[rows]


class CompiledBackend(TransformersBackend):
    """Runs a model through torch.compile. The first steps of each kind are slow."""

    def __init__(self, tensors: StepTensors, model: Any) -> None:
        super().__init__(tensors, model)
        self._model = compiled_model(model)
        self.why_no_graphs = "torch.compile runs the model"


def compiled_model(model: Any) -> Any:
    """A model or function through torch.compile.

    torch stores the C++ code that it generates, and later processes use the stored code. By
    default, the key of the stored code does not contain the width of the vectors. So a process that
    uses vectors of 16 floats could compile code that was generated for vectors of 8 floats. Such
    code has written past the end of its output. The option ``cpp.simdlen`` adds the width to the
    key.
    """
    # This import takes more than a second.
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return torch.compile(model, dynamic=True, options={"cpp.simdlen": pick_vec_isa().bit_width()})


def keeps_logits(model: Any) -> bool:
    """Whether a model can compute the logits of only the chosen tokens."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def attention_name(layout: Layout) -> str:
    """The name under which the attention of a layout is registered with transformers."""
    return function_name(layout.kernel) if layout.in_place else NAME


@torch.inference_mode()
def compiled_backend(
    name: str, model: Any, tensors: StepTensors, layout: Layout
) -> CompiledBackend | None:
    """Compiles a model through torch.compile. If the compiled model raises an exception, or if its
    logits differ from the model's own logits, returns None and logs the reason."""
    # This import takes more than a second.
    from torch._dynamo import config

    probes = Probes(tensors, layout)
    probed = (probes.prompt(), probes.decode())
    plain = TransformersBackend(tensors, model)
    wanted = [probes.logits(plain, packed).clone() for packed in probed]
    limit = FUSED_TOLERANCE if model.dtype == torch.float32 else PROBE_TOLERANCE
    config.recompile_limit = MAX_COMPILED_VARIANTS
    if not layout.in_place:
        model.set_attn_implementation(NAME_COMPILED)
    found, why = CompiledBackend(tensors, model), ""
    try:
        for packed, own in zip(probed, wanted, strict=True):
            distance = difference(probes.logits(found, packed), own)
            if not distance <= limit:
                why = f"its logits would differ by {distance:.3g} standard deviations"
    except Exception as error:
        why = f"it failed: {error}"
    probes.clear()
    if not why:
        return found
    log.warning("%s runs without torch.compile: %s", name, why)
    model.set_attn_implementation(attention_name(layout))
    return None
