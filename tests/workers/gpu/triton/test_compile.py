"""The Triton kernels compile for an H100 on a machine without a GPU, and their shared memory fits
into a multiprocessor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import installed

pytestmark = [installed, pytest.mark.process]

SHARED_BYTES = 227 * 1024
"""Bytes of shared memory of a multiprocessor of an H100 that a program may use."""
ROOT = Path(__file__).parents[4]


def test_the_kernels_of_bfloat16_models_compile_for_an_h100(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.gpu.triton.compile", "90", "bfloat16"],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 4 * 3 + 2
    for one in found:
        assert one["shared"] <= SHARED_BYTES, one
        assert one["spilled"] == 0, one
        if one["kernel"] in ("split_kernel", "prefill_kernel"):
            # Tensor cores compute the products, and keys are copied during the products.
            assert one["products"], one
            assert one["asynchronous"], one
