"""The Triton kernels in Triton's interpreter, on a CPU.

``make triton`` installs Triton and runs these tests with ``TRITON_INTERPRET=1``, which must be set
before Triton is imported for the first time.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"

installed = pytest.mark.skipif(not INSTALLED, reason="triton is not installed: make triton")
interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="the kernels run in Triton's interpreter: make triton"
)
