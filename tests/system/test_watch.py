"""The display of each process of a system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from socket import gethostname

import pytest
from tokenbus.clients.system.run_dir import RunDir
from tokenbus.clients.system.supervisor import Control, ProcessState
from tokenbus.clients.system.watch import Watcher
from tokenbus.protocol.messages import Status, WorkerStatus
from tokenbus.protocol.settings import Settings


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[Watcher]:
    watcher = Watcher(Control(RunDir(tmp_path)), Settings())
    yield watcher
    watcher.close()


def status(*workers: tuple[str, int]) -> Status:
    """A status with these workers, each given as its role and its process id."""
    registered = [
        WorkerStatus(
            name=f"{role}-{pid}",
            role=role,
            pid=pid,
            host=gethostname(),
            state="ready",
            models=[],
            requests=0,
            capacity=1,
            heartbeat_age_s=0.0,
        )
        for role, pid in workers
    ]
    return Status(version="1", uptime_s=1.0, sessions=0, streams=0, queued=0, workers=registered)


@pytest.mark.parametrize(
    ("state", "workers", "serves", "doing"),
    [
        ("RUNNING", [("state", 8)], True, "stands by"),
        ("RUNNING", [("state", 7)], True, "up"),
        ("STARTING", [("state", 8)], False, "starting"),
        ("RUNNING", [("controller", 8)], False, "starting"),
    ],
)
def test_a_second_state_worker_stands_by(
    watcher: Watcher, state: str, workers: list[tuple[str, int]], serves: bool, doing: str
) -> None:
    process = ProcessState("state-worker-1", state, 7, "state-worker")
    shown = watcher._shown(process, status(*workers))
    assert (shown.serves, shown.doing) == (serves, doing)


def test_a_worker_that_has_left_the_broker_is_not_starting(watcher: Watcher) -> None:
    process = ProcessState("controller-worker-0", "RUNNING", 7, "controller-worker")
    looks = (status(), status(("controller", 7)), status())
    shown = [watcher._shown(process, look).doing for look in looks]
    assert shown == ["starting", "up", "not registered any more"]
