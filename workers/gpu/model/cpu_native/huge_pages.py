"""Moves weights into huge pages, if the system supports them.

A processor looks up the physical address of each memory page that it reads. A forward of few tokens
reads all weights once. With pages of 4 kB, the lookups can take as long as the reads, above all in
a virtual machine. So the pages of the weights are collapsed in place into huge pages (Linux 6.1 and
later, ``madvise(2)``: ``MADV_COLLAPSE``).
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
"""Smallest weight to collapse, in bytes."""
_MADV_COLLAPSE = 25


def collapse(weights: Iterable[torch.Tensor]) -> int:
    """Collapses weights on a CPU into huge pages, as far as the system supports it. Returns the
    number of huge pages. Addresses and values do not change. Takes about a second for several
    GB."""
    pages = set()
    for weight in weights:
        if weight.device.type == "cpu" and weight.nbytes >= MIN_BYTES:
            first = weight.data_ptr()
            pages |= set(range(first // HUGE, (first + weight.nbytes - 1) // HUGE + 1))
    return sum(_collapsed(page * HUGE) for page in pages)


def _collapsed(address: int) -> bool:
    """Collapses the memory of one huge page; returns whether it is a huge page afterwards. A page
    that belongs to a file, or is only partly mapped, is not changed."""
    advise = _advise()
    return advise is not None and not advise(address, HUGE, _MADV_COLLAPSE)


@cache
def _advise() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    found = ctypes.CDLL(None, use_errno=True).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found
