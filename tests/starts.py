"""Which tests start processes. ``make test-quick`` leaves them out, and holds the others to it.

A test starts processes if it is marked ``process`` or uses the fixture ``processes``, directly or
through another fixture. Any other test that starts one fails, in every run.
"""

from __future__ import annotations

import multiprocessing.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
"""The audit events of a process that starts; ``multiprocessing`` has none for its own."""
INCIDENTAL = frozenset({"ldconfig", "gcc", "cc", "ld", "objdump", "uname", "lscpu"})
"""Programs that the standard library and torch run on their own account, to look for a shared
library or to name the processor."""
COMPILER = "tokenbus.workers.controller.backends.compiling.process"
"""A pattern that takes more than some milliseconds is compiled in this process: whether a test has
one depends on the machine."""

_forbidden_in: str | None = None
"""The test that runs and may not start processes."""


def check(what: object) -> None:
    """Fails the running test if it may not start processes."""
    if _forbidden_in is not None:
        pytest.fail(
            f"{_forbidden_in} starts a process ({what!r}) and is not marked `process`: mark it, or "
            "let the fixture that starts it use the fixture `processes`"
        )


@contextmanager
def only_if_marked(item: pytest.Item) -> Iterator[None]:
    """While a test runs: holds it to what it is marked with."""
    global _forbidden_in
    _forbidden_in = None if item.get_closest_marker("process") else item.nodeid
    try:
        yield
    finally:
        _forbidden_in = None


def watch() -> None:
    """Watches this process, for good."""
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
    """Whether a program is one that libraries run on their own account, or the compiler."""
    program, arguments = (*args, "", ())[:2]
    if isinstance(arguments, list) and COMPILER in arguments:
        return True
    return isinstance(program, str) and program.rpartition("/")[2] in INCIDENTAL
