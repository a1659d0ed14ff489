"""The C library's allocator, as a step on the CPU needs it."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Lets glibc keep what is freed, up to 1 GiB, for this process.

    Otherwise it returns each step's temporary tensors to the kernel, and every page of them faults
    again in the next step: a third of a step's time (32 sequences, vocabulary 32,000). Where the C
    library is another one, nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
