"""Weights in huge pages, where the system has some.

A processor looks up where each page of memory lies. A forward of few tokens reads all weights once,
and with pages of 4 kB it waits as long for these lookups, in a virtual machine above all, as for
the weights. So the pages of weights are put together in place into huge ones (Linux 6.1 and later,
``madvise(2)``: ``MADV_COLLAPSE``).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from functools import cache

import torch

HUGE = 2**21
"""Bytes of a huge page."""
MIN_BYTES = 2**18
"""Bytes of a weight for which it pays."""
_MADV_COLLAPSE = 25


def collapse(weights: Iterable[torch.Tensor]) -> int:
    """Puts weights on a CPU into huge pages, as far as the system does it; returns how many there
    are then. Addresses and values stay. Takes about a second for some GB."""
    pages = set()
    for weight in weights:
        if weight.device.type == "cpu" and weight.nbytes >= MIN_BYTES:
            first = weight.data_ptr()
            pages |= set(range(first // HUGE, (first + weight.nbytes - 1) // HUGE + 1))
    return sum(_collapsed(page * HUGE) for page in pages)


def _collapsed(address: int) -> bool:
    """Whether the page there is a huge one now. One that belongs to a file, or of which the process
    has only a part, stays as it is."""
    advise = _advise()
    return advise is not None and not advise(address, HUGE, _MADV_COLLAPSE)


@cache
def _advise() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    found = ctypes.CDLL(None, use_errno=True).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found
