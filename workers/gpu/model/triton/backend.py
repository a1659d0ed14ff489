"""The forward of a decoder by the Triton kernels."""

from __future__ import annotations

import torch

from ..backend import ForwardBackend
from ..cuda.kernels import KERNELS
from ..fused.backend import FusedBackend
from ..fused.decoder import FusedDecoder
from ..kv_cache import Layout
from ..loader import FUSED_TOLERANCE, PROBE_TOLERANCE, difference
from ..probes import Probes
from ..step_tensors import Context, StepTensors
from . import ops
from .decoder import NotFusible, TritonDecoder


class TritonBackend(ForwardBackend):
    """Runs the layers of a decoder with few kernels, and with any attention that reads blocks in
    place. The constructor raises NotFusible if a layer has no kernel."""

    def __init__(self, tensors: StepTensors, decoder: FusedDecoder, layout: Layout) -> None:
        super().__init__(tensors)
        self._fused = decoder
        self._decoder = TritonDecoder(decoder)
        self._attend = KERNELS[layout.kernel].attend_stored

    def refresh(self) -> None:
        """Makes the decoder's copies of weights again, after the model's weights have been changed
        in place."""
        self._fused.refresh()

    def compute(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """The logits at ``rows``."""
        return self._decoder.forward(ids, positions, rows, context, self._attend)


def triton_backend(
    tensors: StepTensors, decoder: FusedDecoder, layout: Layout, dtype: torch.dtype
) -> TritonBackend | FusedBackend:
    """The decoder as a TritonBackend. If a layer does not have a kernel, or if the kernels change
    the logits by more than rounding, the decoder as a FusedBackend. ``why_no_kernels`` then has the
    reason."""
    probes, plain = Probes(tensors, layout), FusedBackend(tensors, decoder, layout)
    device = tensors.device
    if device.type == "cuda" and (missing := ops.why_missing(device)):
        plain.why_no_kernels = missing
        return plain
    limit = FUSED_TOLERANCE if dtype == torch.float32 else PROBE_TOLERANCE
    try:
        found = TritonBackend(tensors, decoder, layout)
        for packed in (probes.prompt(), probes.decode()):
            wanted = probes.logits(plain, packed).clone()
            distance = difference(probes.logits(found, packed), wanted)
            if not distance <= limit:
                raise NotFusible(f"the logits would differ by {distance:.3g} standard deviations")
        return found
    except Exception as error:
        plain.why_no_kernels = str(error)
        return plain
    finally:
        probes.clear()
