"""``benchmarks/gpu_check.py``: its stages run on a CPU, and it reports those that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"
STAGES = range(1, 9)
pytestmark = pytest.mark.process


def check(results: Path, *arguments: str, **environment: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of a run, and the lines of its results."""
    command = [sys.executable, str(SCRIPT), "--results", str(results), *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, timeout=570)
    return done.returncode, [json.loads(line) for line in results.read_text().splitlines()]


@pytest.mark.parametrize("stages", [STAGES[:4], STAGES[4:]])
def test_each_stage_passes_on_a_cpu_and_writes_its_figures(stages: range, tmp_path: Path) -> None:
    chosen = [part for stage in stages for part in ("--stage", str(stage))]
    status, lines = check(tmp_path / "results.jsonl", "--dry", *chosen)
    assert status == 0, lines
    for stage in stages:
        *figures, last = [line for line in lines if line["stage"] == stage]
        assert (last["name"], last["value"]) == ("stage", "passed")
        assert len(figures) > 1


def test_without_a_gpu_the_first_stage_fails_and_says_why(tmp_path: Path) -> None:
    status, lines = check(
        tmp_path / "results.jsonl", "--stage", "1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"
    )
    assert status == 1
    found = {line["name"]: line["value"] for line in lines}
    assert "torch does not find a CUDA device" in found["error"]
    assert found["stage"] == "the stage ended with exit status 1"
