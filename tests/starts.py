"""Checks that only marked tests start processes. ``make test-quick`` leaves out the marked tests.

A test may start processes if it is marked ``process`` or uses the fixture ``processes``, directly
or through another fixture. Any other test that starts a process fails, in every run.
"""

from __future__ import annotations

import multiprocessing.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
"""The audit events that report the start of a process. ``multiprocessing`` starts processes without
an audit event, so ``watch`` wraps its function."""
INCIDENTAL = frozenset({"ldconfig", "gcc", "cc", "ld", "objdump", "uname", "lscpu"})
"""Programs that any test may start: the standard library and torch run them to find a shared
library or the name of the processor."""
COMPILER = "tokenbus.workers.controller.backends.compiling.process"
"""A process that any test may start. It compiles a pattern whose compilation takes longer than a
few milliseconds, so it depends on the machine whether a test starts the process."""

_forbidden_in: str | None = None
"""The running test, if it may not start processes; otherwise None."""


def check(what: object) -> None:
    """Fails the running test if it may not start processes."""
    if _forbidden_in is not None:
        pytest.fail(
            f"{_forbidden_in} starts a process ({what!r}) and is not marked `process`: mark it, or "
            "let the fixture that starts it use the fixture `processes`"
        )


@contextmanager
def only_if_marked(item: pytest.Item) -> Iterator[None]:
    """For the ``with`` block, in which a test runs: forbids starts of processes, unless the test is
    marked ``process``."""
    global _forbidden_in
    _forbidden_in = None if item.get_closest_marker("process") else item.nodeid
    try:
        yield
    finally:
        _forbidden_in = None


def watch() -> None:
    """Checks each start of a process, until this process ends."""
    spawn = multiprocessing.util.spawnv_passfds

    def spawnv_passfds(path: Any, args: Any, passfds: Any) -> int:
        check(args)
        return spawn(path, args, passfds)

    multiprocessing.util.spawnv_passfds = spawnv_passfds
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in EVENTS and _forbidden_in is not None and not _incidental(args):
        check(args[:2])


def _incidental(args: tuple[Any, ...]) -> bool:
    """Whether any test may start the program: one of ``INCIDENTAL``, or ``COMPILER``."""
    program, arguments = (*args, "", ())[:2]
    if isinstance(arguments, list) and COMPILER in arguments:
        return True
    return isinstance(program, str) and program.rpartition("/")[2] in INCIDENTAL
