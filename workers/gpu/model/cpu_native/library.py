"""The native code of a CPU (``*.c`` in this folder).

The code is compiled when the package is built, for the kinds of processor that a machine may have.
"""

from __future__ import annotations

import logging
import platform
import sys
from ctypes import CDLL, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import torch

log = logging.getLogger(__name__)


@cache
def library() -> CDLL | None:
    """The native code for this machine; None if no code was compiled for it, or if the code cannot
    be loaded."""
    machine = platform.machine()
    processor = _processor(machine)
    path = Path(__file__).parent / f"decode-{machine}-{processor}.so"
    if sys.platform != "linux" or not processor or not path.exists():
        return None
    try:
        found = CDLL(str(path))
    except OSError as error:
        log.warning("%s cannot be loaded, so torch computes all steps: %s", path, error)
        return None
    found.decoder_forward.argtypes = [c_void_p, c_void_p]
    found.rows_reduce.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_void_p]
    found.rows_reduce.restype = None
    return found


def instruction_set() -> str:
    """The name of the instruction set that the native code uses, such as ``x86_64_v4``. Machines
    with equal names compute equal bits, because the order of sums depends only on the instruction
    set."""
    return _processor(platform.machine())


def _processor(machine: str) -> str:
    """The instruction set of the library that fits this processor; empty if the package is not
    compiled for this kind of processor."""
    if machine == "aarch64":
        return "generic"
    kinds = {"AVX2": "x86_64_v3", "AVX512": "x86_64_v4"}
    return kinds.get(torch.backends.cpu.get_cpu_capability(), "") if machine == "x86_64" else ""


def address(array: np.ndarray) -> int:
    """The address of the first entry of a contiguous array."""
    found: int = array.__array_interface__["data"][0]
    return found
