"""The forward of a ``FusedDecoder``, which needs few operations of torch."""

from __future__ import annotations

import torch

from ..backend import ForwardBackend
from ..cuda.kernels import KERNELS, writing
from ..kv_cache import Layout
from ..step_tensors import Context, StepTensors
from ..transformers.attention import attend
from .decoder import Attend, FusedDecoder


class FusedBackend(ForwardBackend):
    """Runs a ``FusedDecoder`` with the attention kernel for the layout of the KV cache."""

    def __init__(self, tensors: StepTensors, decoder: FusedDecoder, layout: Layout) -> None:
        super().__init__(tensors)
        self.decoder = decoder
        self._attend = attend_of(layout)

    def refresh(self) -> None:
        """Makes the decoder's copies of weights again, after the model's weights have been changed
        in place."""
        self.decoder.refresh()

    def compute(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """The logits at ``rows``."""
        return self.decoder.forward(ids, positions, rows, context, self._attend)


def attend_of(layout: Layout) -> Attend:
    """The attention over a KV cache of this layout, for a ``FusedDecoder``."""
    return writing(KERNELS[layout.kernel].attend_stored) if layout.in_place else attend
