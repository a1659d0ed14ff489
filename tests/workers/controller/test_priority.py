"""Processes that run or compile clients' code have a low priority; in long calls, a lower one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.workers.controller import priority
from tokenbus.workers.controller.priority import CLIENT_NICENESS, LOW_NICENESS, STARVED_S, Priority

from ...processes import until
from .guests.remote_guests import CALM, Sequence, running, stop

pytestmark = pytest.mark.process

GROUPED = Path("/proc/self/autogroup").exists()
"""Whether the kernel divides CPU time among sessions."""
LOWERS = """
from tokenbus.workers.controller.priority import lower_priority
lower_priority()
print("lowered", flush=True)
input()
"""


def niceness(pid: int) -> tuple[int, int | None]:
    """The nice values of a process and of its session; None if sessions have none."""
    grouped = None
    if GROUPED:
        grouped = int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    return os.getpriority(os.PRIO_PROCESS, pid), grouped


def lowered(value: int) -> tuple[int, int | None]:
    """The nice values after ``value`` was set."""
    return value if priority._MAY_RAISE else CLIENT_NICENESS, value if GROUPED else None


@pytest.fixture
def pid() -> Iterator[int]:
    """A process with a lowered priority."""
    with subprocess.Popen(
        [sys.executable, "-c", LOWERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"lowered\n"
        yield process.pid
        process.kill()


def test_a_process_becomes_a_session_with_a_low_priority(pid: int) -> None:
    assert os.getsid(pid) == pid
    assert niceness(pid)[0] == CLIENT_NICENESS
    assert niceness(pid)[1] in (CLIENT_NICENESS, None)


def test_the_priority_is_lowered_from_a_long_call_until_no_call_runs(pid: int) -> None:
    watched = Priority(pid)
    becomes(watched, pid, CLIENT_NICENESS, 1.0, 0.01)
    becomes(watched, pid, CLIENT_NICENESS, 0.0, 1.0)
    becomes(watched, pid, LOW_NICENESS, 0.9, 1.0)
    becomes(watched, pid, LOW_NICENESS, 0.0, 0.01)
    becomes(watched, pid, CLIENT_NICENESS, 0.0, None)


def test_a_call_that_gets_little_cpu_time_has_the_usual_priority_again(pid: int) -> None:
    watched = Priority(pid)
    becomes(watched, pid, LOW_NICENESS, 0.9, 1.0)
    becomes(watched, pid, CLIENT_NICENESS, 0.02, STARVED_S + 1)
    becomes(watched, pid, CLIENT_NICENESS, 0.9, STARVED_S + 2)


def test_a_value_that_the_kernel_refuses_is_set_later(
    pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> None:
        monkeypatch.undo()
        raise BlockingIOError(f"{path} does not accept {text} now")

    watched = Priority(pid)
    monkeypatch.setattr(Path, "write_text", refuse)
    becomes(watched, pid, LOW_NICENESS, 0.9, 1.0)


def becomes(watched: Priority, pid: int, value: int, share: float, call_s: float | None) -> None:
    """Calls ``watch`` until the process has a nice value."""

    def set_again() -> bool:  # The kernel may refuse a value that is set soon after another.
        watched.watch(share, call_s)
        return niceness(pid) == lowered(value)

    until(set_again, 60, f"a nice value of {value}")


def test_a_process_that_has_ended_is_left_alone(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    Priority(1 << 22).watch(1.0, 1.0)
    Priority(pid).watch(1.0, 1.0)


def test_a_guest_process_has_a_lower_priority_during_a_long_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call is long because its process is stopped."""
    monkeypatch.setattr(priority, "MIN_SHARE", -1.0)
    monkeypatch.setattr(priority, "STARVED_S", 1e9)
    with running() as runtime:
        sequence = Sequence(runtime.program(CALM))
        pid = stop(sequence)
        call = threading.Thread(target=sequence.round)
        call.start()
        until(lambda: niceness(pid) == lowered(LOW_NICENESS), 60, "a lower priority")
        os.kill(pid, signal.SIGCONT)
        call.join()
        until(lambda: niceness(pid) == lowered(CLIENT_NICENESS), 60, "the usual priority")
