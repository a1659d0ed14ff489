"""Reduces whole rows of logits for sampling on a CPU, in one call of native code
(``model/cpu_native/rows.c``)."""

from __future__ import annotations

import numpy as np
import torch

from ..model.cpu_native.library import address, library


def reduce_rows(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray] | None:
    """Reduces the rows of ``logits`` ``[n, vocab]``; returns two arrays. The first, int64 ``[n]``,
    has the most likely token of each row. If several tokens are equally likely, it has the lowest
    id. The second, float64 ``[3, n]``, has the form of ``OnHost.numbers``: these tokens, their
    log-probabilities, and 1 for each row.

    A log-probability is NaN if the row contains NaN, or only -inf. Returns None if torch must
    reduce the rows. This is the case if the rows are not contiguous float32 on the CPU, or if this
    machine has no native code.
    """
    native = library()
    if native is None or logits.device.type != "cpu" or logits.dtype != torch.float32:
        return None
    if not logits.is_contiguous():
        return None
    count, size = logits.shape
    best = np.empty(count, dtype=np.int64)
    numbers = np.empty((3, count))
    native.rows_reduce(logits.data_ptr(), count, size, address(best), address(numbers))
    return best, numbers
