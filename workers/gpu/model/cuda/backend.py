"""The forward on CUDA: CUDA graphs compute decode steps, and another backend computes all other
steps."""

from __future__ import annotations

import torch

from ...engine.packing import Packed
from ..backend import ForwardBackend
from ..step_tensors import Context
from .graphs import DecodeGraphs


class CudaBackend(ForwardBackend):
    """Runs each step that consists only of decodes as a CUDA graph of ``base``. ``base`` itself
    runs all other steps."""

    def __init__(self, base: ForwardBackend, graphs: DecodeGraphs) -> None:
        super().__init__(base.tensors)
        self.why_no_graphs = graphs.why
        self.why_no_kernels = base.why_no_kernels
        self.why_not_exact = base.why_not_exact
        self.num_graphs = len(graphs)
        self.base = base
        self._graphs = graphs

    def refresh(self) -> None:
        """Makes the copies of weights again, after the model's weights have been changed in place.
        The copies keep the addresses that the graphs read."""
        self.base.refresh()

    def compute(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """The logits at ``rows``, without a graph."""
        return self.base.compute(ids, positions, rows, context)

    @torch.inference_mode()
    def forward(self, packed: Packed, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of a step, computed by a graph if the step fits into a graph."""
        if not self._graphs.fit(packed):
            return super().forward(packed, drawn)
        logits = self._graphs.run(packed, self.tensors.ids(packed, drawn))
        # The logits are copied, because a deferred sequence may still need them when the next
        # replay overwrites them.
        return logits.to(torch.float32, copy=True)
