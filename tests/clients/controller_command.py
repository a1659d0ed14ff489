"""Runs the command ``tokenbus controller`` in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..processes import Bus, clean_environment, until, without_hint

TOKENBUS = str(Path(sys.executable).parent / "tokenbus")
PROMPT = "def add(a, b):"


def tokenbus(bus: Bus | None, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a subcommand of ``tokenbus controller`` to its end."""
    front = {"front": bus.front} if bus is not None else {}
    done = subprocess.run(
        [TOKENBUS, "controller", *arguments],
        env=clean_environment(**front) | more,
        cwd="/tmp",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    done.stderr = without_hint(done.stderr)
    return done


def start_long_run(bus: Bus, file: Path) -> subprocess.Popen[str]:
    """Starts a long run of the module in ``file``, and waits for the first text."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [TOKENBUS, "controller", "run", str(file), "--max-tokens", "1000", "--set",
             "ignore_eos=true", "--prompt", PROMPT],
            env=clean_environment(front=bus.front),
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        until(lambda: os.fstat(output.fileno()).st_size > 0, 300, "the first text")
    return process
