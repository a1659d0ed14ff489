"""The program of ``make demo``, which the test runs to its end."""

from __future__ import annotations

import subprocess
import sys
import uuid

import psutil
import pytest

from ..processes import clean_environment

pytestmark = pytest.mark.process

MARK = "DEMO_OF_THIS_TEST"


def _started_with(mark: str) -> list[str]:
    """The command lines of the live processes that have inherited the variable ``MARK``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def test_the_demo_shows_everything_and_leaves_nothing() -> None:
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "-m", "tokenbus.clients.demo"],
        env=clean_environment() | {MARK: mark},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in (
        "one stream",
        "eight streams at the same time",
        "log-probability",
        "a controller in a sandbox",
        "Next steps:",
        "all processes have ended",
    ):
        assert shown in done.stdout
    assert "http://127.0.0.1:8080" not in done.stdout  # Another system may use this port.
    assert _started_with(mark) == []
