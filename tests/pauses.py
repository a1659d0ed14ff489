"""Runs a command, and stops random processes of the command, each for a random time.

Use: ``python -m tests.pauses make test``, or ``make test-paused``. Stops lead to orders of
events that otherwise occur only on a slow or busy machine. So a test that relies on one order fails
sooner. The log has the time and the length of each stop. A test that
itself stops a process can fail, because this program may continue that process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "PAUSED_TESTS"
"""The environment variable that identifies the processes of the command."""
INTERVAL_S = 0.1
STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE}


def processes(mark: str) -> Iterator[psutil.Process]:
    """The running processes of the command, except pytest, make and shells, which wait for all
    others."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) != mark or process.status() in STOPPED:
                continue
            words = process.cmdline()
            if (
                words
                and "pytest" not in words
                and Path(words[0]).name not in {"make", "sh", "bash"}
            ):
                yield process


def pause(mark: str, rng: random.Random, options: argparse.Namespace, command: list[str]) -> int:
    """Runs the command and stops its processes for a while; returns the command's exit code."""
    running = subprocess.Popen(command, env=os.environ | {MARK: mark})
    ends: dict[psutil.Process, float] = {}
    try:
        with options.log.open("w", buffering=1) as log:
            while running.poll() is None:
                for process in [p for p, end in ends.items() if end <= time.monotonic()]:
                    _send(process, signal.SIGCONT)
                    del ends[process]
                found = [p for p in processes(mark) if p not in ends]
                # Stops another process only if the number of stopped processes is below ``at_once``
                # and below the number of running processes.
                room = len(ends) < min(options.at_once, len(found))
                if room and rng.random() < options.share:
                    process, seconds = rng.choice(found), options.longest * rng.random() ** 2
                    ends[process] = time.monotonic() + seconds
                    _send(process, signal.SIGSTOP)
                    with contextlib.suppress(psutil.Error):
                        what = " ".join(process.cmdline())[:200]
                        print(f"{time.ctime()} {process.pid} {seconds:.2f} s: {what}", file=log)
                time.sleep(INTERVAL_S)
    finally:
        for process in ends:
            _send(process, signal.SIGCONT)
    return running.wait()


def _send(process: psutil.Process, number: signal.Signals) -> None:
    """Sends a signal, unless the process has ended."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def main() -> int:
    """Runs the command that the arguments give; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=float, default=2.5, help="longest pause, in seconds")
    parser.add_argument("--at-once", type=int, default=2, help="most processes stopped at a time")
    parser.add_argument("--share", type=float, default=0.5, help="chance of a stop, every 0.1 s")
    parser.add_argument("--log", type=Path, default=Path("build/pauses.log"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("which command? For example: make test")
    options.log.parent.mkdir(parents=True, exist_ok=True)
    return pause(secrets.token_hex(8), random.Random(options.seed), options, options.command)


if __name__ == "__main__":
    sys.exit(main())
