"""The command ``tokenbus controller``, run as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ..processes import Bus, clean_environment

TOKENBUS = str(Path(sys.executable).parent / "tokenbus")
PROMPT = "def add(a, b):"


def tokenbus(bus: Bus | None, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    front = {"front": bus.front} if bus is not None else {}
    return subprocess.run(
        [TOKENBUS, "controller", *arguments],
        env=clean_environment(**front) | more,
        cwd="/tmp",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def start_long_run(bus: Bus, file: Path) -> subprocess.Popen[str]:
    """A run that has begun and has not ended."""
    process = subprocess.Popen(
        [TOKENBUS, "controller", "run", str(file), "--max-tokens", "1000", "--set",
         "ignore_eos=true", "--prompt", PROMPT],
        env=clean_environment(front=bus.front),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(1)
    return process
