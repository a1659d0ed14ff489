"""Matrix products with a model's weights. Each product uses the kernel that is fastest for its
number of rows.

On a CPU, torch's product of few rows and a matrix is far slower than the memory bandwidth allows.
PyTorch multiplies one row on a single thread, and reorders the weights for each product of several
rows. A ``Projection``

- splits the product of one row among the threads (``bmm`` over parts of the outputs). A weight with
  at least twice as many outputs as inputs is stored as ``[in, out]`` (*by input*), so that the
  product vectorizes over the outputs;
- for several rows, uses a second copy of the weights in oneDNN's order, if ``pack`` has made one.

Times in microseconds, with 2 threads and weights outside the caches:

| weights | rows | ``linear`` | ``Projection`` |
| --- | --- | --- | --- |
| 1376 x 256 | 1 | 229 | 62 |
| 1376 x 256 | 32 | 480 | 175 |
| 256 x 688 | 1 | 63 | 34 |
| 2560 x 2048 | 1 | 1,600 | 690 |
| 2560 x 2048 | 8 | 3,370 | 1,180 |
| 32000 x 256 | 1 | 4,170 | 950 |
| 32000 x 256 | 32 | 11,500 | 3,900 |
"""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch
from torch.nn.functional import linear

TYPICAL_ROWS = 32
"""The number of rows for which oneDNN optimizes the order of the packed weights."""
PART_OF_MEMORY = 0.25
"""Packed copies take at most this fraction of the available memory."""


class Projection:
    """``x @ weight.T + bias`` for ``x`` ``[rows, in]``; ``weight`` is ``[out, in]``.

    ``weight`` may be the transpose of a matrix in memory: see ``stored_by_input``.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        biases: Sequence[torch.Tensor] = (),
    ) -> None:
        """``biases``: the tensors of which ``bias`` is a copy, if ``bias`` joins several
        tensors."""
        self.weight = weight
        self.bias = bias
        self._biases = tuple(biases)
        self._packed: torch.Tensor | None = None
        self._splits = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._by_input = weight.t()
        self._parts: dict[int, torch.Tensor] = {}
        """The views of the weights that ``_split`` has made, by number of threads."""

    def pack(self, budget: int) -> int:
        """Makes a copy of the weights in oneDNN's order, if the weights can be packed and have at
        most ``budget`` bytes. Returns the size of the copy in bytes."""
        weight = self.weight
        if not can_be_packed(weight) or weight.nbytes > budget:
            return 0
        with torch.inference_mode():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(
                weight.detach().contiguous(), TYPICAL_ROWS
            )
        return weight.nbytes

    @torch.inference_mode()
    def refresh(self) -> None:
        """Makes the copies of weights and biases again, after these have been changed in place."""
        if self.bias is not None and self._biases:
            torch.cat(self._biases, out=self.bias)
        if self._packed is not None:
            self._packed = None
            self.pack(self.weight.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._splits and x.shape[0] == 1:
            return self._row(x)
        if self._packed is None:
            return linear(x, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return product

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual`` ``[rows, out]`` plus the product. ``residual`` may be overwritten and must
        not be used again."""
        if self._splits and x.shape[0] == 1:
            return self._row_added(residual, x)
        if self._packed is None:
            return residual.add_(linear(x, self.weight, self.bias))
        summed: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._packed, self.bias, "add"
        )
        return summed

    def _row(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._split()
        if len(parts) > 1:
            row = torch.bmm(x.expand(len(parts), 1, -1), parts).view(1, -1)
        else:
            row = torch.mm(x, self._by_input)
        return row if self.bias is None else row.add_(self.bias)

    def _row_added(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            residual = residual.add_(self.bias)
        parts = self._split()
        if len(parts) == 1:
            return residual.addmm_(x, self._by_input)
        total = residual.view(len(parts), 1, -1)
        return total.baddbmm_(x.expand(len(parts), 1, -1), parts).view(1, -1)

    def _split(self) -> torch.Tensor:
        """A view of the weights, ``[parts, in, out / parts]``. ``parts`` is the greatest divisor of
        ``out`` that is at most the number of threads."""
        threads = torch.get_num_threads()
        found = self._parts.get(threads)
        if found is None:
            out, width = self.weight.shape
            parts = next(n for n in range(threads, 0, -1) if out % n == 0)
            if self.weight.is_contiguous():
                found = self.weight.view(parts, -1, width).transpose(1, 2)
            else:
                found = self._by_input.view(width, parts, -1).transpose(0, 1)
            self._parts[threads] = found
        return found


def stored_by_input(weight: torch.Tensor) -> bool:
    """Whether the product of one row is faster if the weight ``[out, in]`` is stored as ``[in,
    out]``."""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and weight.shape[0] >= 2 * weight.shape[1]


def can_be_packed(weight: torch.Tensor) -> bool:
    """Whether a weight is a plain float32 or bfloat16 tensor on a CPU for which oneDNN has
    kernels."""
    # A quantized weight is a subclass of Tensor that reports the properties of a plain tensor.
    if type(weight.data) is not torch.Tensor or weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return weight.dtype == torch.float32 and available


def packing_budget() -> int:
    """Number of bytes that packed copies of weights may take now."""
    return int(psutil.virtual_memory().available * PART_OF_MEMORY)
