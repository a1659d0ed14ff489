"""``make demo``'s program, from its start to its end."""

from __future__ import annotations

import subprocess
import sys
import time

from tokenbus.clients.system.processes import alive

from ..processes import clean_environment


def _tokenbus_processes() -> set[int]:
    done = subprocess.run(["pgrep", "-f", "tokenbus"], capture_output=True, text=True, check=False)
    return {int(pid) for pid in done.stdout.split()}


def test_the_demo_shows_everything_within_a_minute_and_leaves_nothing() -> None:
    before = _tokenbus_processes()
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tokenbus.clients.demo"],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - started < 60
    for shown in ("one stream", "eight at once", "log-probability", "Go on:", "nothing is left"):
        assert shown in done.stdout
    assert [pid for pid in _tokenbus_processes() - before if alive(pid)] == []
