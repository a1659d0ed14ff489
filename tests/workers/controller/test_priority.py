"""Processes that run or compile clients' code have a low priority; in long calls, a lower one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenbus.workers.controller import priority
from tokenbus.workers.controller.priority import (
    CLIENT_NICENESS,
    HEAVY_CHECKS,
    LOW_NICENESS,
    STARVED_S,
    Priority,
)

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
OF_LEADER = f"""
import os, subprocess, sys
os.setsid()
process = subprocess.Popen([sys.executable, "-c", {LOWERS!r}], stdout=subprocess.PIPE)
print(process.stdout.readline().decode().strip(), process.pid, flush=True)
process.wait()
"""


class Seen(NamedTuple):
    """The priority of a process, as the kernel reports it."""

    nice: int
    policy: int
    of_session: int | None
    """The nice value of the session; None if the process does not lead a session, or if sessions
    have no nice values."""


def seen(pid: int) -> Seen:
    """The priority of a process."""
    of_session = None
    if GROUPED and os.getsid(pid) == pid:
        of_session = int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    return Seen(os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid), of_session)


def expected(pid: int, low: bool) -> Seen:
    """The usual priority of a process, or its priority during a long call."""
    of_session = LOW_NICENESS if low else CLIENT_NICENESS
    return Seen(
        CLIENT_NICENESS,
        os.SCHED_IDLE if low and priority._MAY_RAISE else os.SCHED_OTHER,
        of_session if GROUPED and os.getsid(pid) == pid else None,
    )


@pytest.fixture(params=["in the session", "of a leader"])
def pid(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process with a lowered priority. The process that starts it leads a session or not."""
    code = LOWERS if request.param == "in the session" else OF_LEADER
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        said, *numbers = process.stdout.readline().split()
        assert said == b"lowered"
        lowered = int(numbers[0]) if numbers else process.pid
        yield lowered
        with suppress(ProcessLookupError):
            os.kill(lowered, signal.SIGKILL)


def test_a_process_gets_a_low_priority_and_a_group_or_a_session(
    pid: int, request: pytest.FixtureRequest
) -> None:
    assert os.getpgid(pid) == pid
    assert (seen(pid).nice, seen(pid).policy) == (CLIENT_NICENESS, os.SCHED_OTHER)
    if "leader" in request.node.name or not priority._MAY_RAISE:
        assert os.getsid(pid) == pid
    elif os.getsid(0) != os.getpid():
        assert os.getsid(pid) == os.getsid(0)


def test_the_priority_is_lowered_from_a_long_call_until_no_call_runs(pid: int) -> None:
    watched = Priority(pid)
    becomes(watched, pid, False, 1.0, 0.01)
    becomes(watched, pid, False, 0.0, 1.0)
    becomes(watched, pid, True, 0.9, 1.0)
    becomes(watched, pid, True, 0.0, 0.01)
    becomes(watched, pid, False, 0.0, None)


def test_a_call_that_gets_little_cpu_time_has_the_usual_priority_again(pid: int) -> None:
    watched = Priority(pid)
    becomes(watched, pid, True, 0.9, 1.0)
    becomes(watched, pid, True, 0.9, STARVED_S + 1)
    becomes(watched, pid, False, 0.02, STARVED_S + 2)
    becomes(watched, pid, False, 0.15, STARVED_S + 3)


def test_the_calls_of_a_busy_process_together_weigh_as_much_as_one(pid: int) -> None:
    watched = Priority(pid)
    shared = priority._MAY_RAISE and os.getsid(pid) != pid
    watched.watch(0.5, 0.01, 64)
    assert seen(pid).nice == CLIENT_NICENESS
    watched.watch(1.5, 0.01, 64)
    assert seen(pid).nice == CLIENT_NICENESS + 14 * shared
    # The nice value stays for a while, so it does not depend on a moment without calls.
    for _ in range(HEAVY_CHECKS - 1):
        watched.watch(0.1, 0.01, 64)
        assert seen(pid).nice == CLIENT_NICENESS + 14 * shared
    watched.watch(0.1, 0.01, 64)
    assert seen(pid).nice == CLIENT_NICENESS


def test_the_nice_value_grows_with_the_number_of_calls(pid: int) -> None:
    watched = Priority(pid)
    shared = priority._MAY_RAISE and os.getsid(pid) != pid
    for calls, more in ((1, 0), (2, 4), (8, 10), (64, 14), (300, 14), (0, 0)):
        watched.watch(1.5, 0.01, calls)
        assert seen(pid).nice == CLIENT_NICENESS + more * shared


def test_a_value_that_the_kernel_refuses_is_set_later(
    pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(of: int, value: int) -> None:
        monkeypatch.undo()
        raise BlockingIOError(f"the session {of} does not accept {value} now")

    watched = Priority(pid)
    monkeypatch.setattr(priority, "_set_autogroup", refuse)
    becomes(watched, pid, True, 0.9, 1.0)


def becomes(watched: Priority, pid: int, low: bool, share: float, call_s: float | None) -> None:
    """Calls ``watch`` until the process has the expected priority."""

    def set_again() -> bool:  # The kernel may refuse a value that is set soon after another.
        watched.watch(share, call_s)
        return seen(pid) == expected(pid, low)

    until(set_again, 60, f"the priority {expected(pid, low)}, not {seen(pid)}")


def test_a_long_call_of_this_process_has_a_lower_priority() -> None:
    """The main thread computes until its policy has changed."""
    code = """
import os, threading
from tokenbus.workers.controller import priority
priority.MIN_SHARE, priority.STARVED_S = -1.0, 1e9
priority.lower_priority()
with priority.long_call():
    main = threading.get_native_id()
    if priority._MAY_RAISE:
        while os.sched_getscheduler(main) != os.SCHED_IDLE: pass
assert os.sched_getscheduler(main) == os.SCHED_OTHER
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_process_that_has_ended_is_left_alone(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # It may be a child of a child.
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
        until(lambda: seen(pid) == expected(pid, low=True), 60, "a lower priority")
        os.kill(pid, signal.SIGCONT)
        call.join()
        until(lambda: seen(pid) == expected(pid, low=False), 60, "the usual priority")
