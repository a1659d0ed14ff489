"""One interface for all the ways to compute the forward of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ..engine.packing import Packed
from .step_tensors import Context, StepTensors


class ForwardBackend(ABC):
    """Computes the forward of one model on one rank.

    ``tensors`` copies the inputs of a step to the device.
    """

    why_no_graphs = ""
    """The reason why CUDA graphs cannot capture ``compute``; empty if they can."""
    why_no_kernels = ""
    """The reason why the Triton kernels do not compute the layers; empty if they do."""
    why_not_exact = "the kernels of its device were not compared in batches of all sizes"
    """The reason why the bits of a row's logits may depend on the other rows of a step; empty if
    they do not."""
    num_graphs = 0
    """The number of batch sizes that have a CUDA graph."""

    def __init__(self, tensors: StepTensors) -> None:
        self.tensors = tensors

    @abstractmethod
    def compute(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """The logits ``[num_rows, vocab]`` of some of a step's tokens.

        ``ids`` and ``positions`` ``[num_tokens]``: the ids and positions of the packed tokens of
        the step. ``rows`` ``[num_rows]``: the indices of the tokens whose logits are computed.
        """

    @torch.inference_mode()
    def forward(self, packed: Packed, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of ``packed.rows``, as float32 ``[num_rows, vocab]``.

        ``drawn``: the tokens that the previous step has drawn. They replace the ids that were
        unknown when the step was packed.
        """
        return self.compute(*self.tensors.inputs(packed, drawn)).float()

    def refresh(self) -> None:
        """Makes all copies of weights again, after the model's weights have been changed in
        place."""
        return

    def reads_blocks(self, num_tokens: int, num_sequences: int) -> bool:
        """Whether a step of this size reads keys and values from their blocks, and not from
        mirrors, which are contiguous copies (``engine/packing.py``)."""
        return False
