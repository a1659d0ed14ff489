"""Commands to a supervisord that does not answer, a second system in a run directory, and the exits
of processes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.clients.system import supervisor
from tokenbus.clients.system.faults import SystemFault
from tokenbus.clients.system.rolling import in_order
from tokenbus.clients.system.run_dir import RunDir
from tokenbus.clients.system.supervisor import Control, ProcessState
from tokenbus.clients.system.up import run_system
from tokenbus.protocol.settings import Settings

from .foreground import short_folder


@pytest.fixture
def still() -> Iterator[RunDir]:
    """A run directory whose supervisord socket accepts connections but never answers."""
    for folder in short_folder():
        run_dir = RunDir(Path(folder))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(run_dir.supervisor_socket))
            listening.listen()
            yield run_dir


def test_a_supervisord_that_stands_still_is_not_waited_for(
    still: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ANSWER_S", 0.1, raising=False)
    answers: list[object] = []
    control = Control(still)
    thread = threading.Thread(
        target=lambda: answers.extend([control.pid(), control.processes()]), daemon=True
    )
    thread.start()
    thread.join(300.0)
    assert answers == [None, None]


def test_a_second_system_in_a_run_directory_is_refused_by_its_folder_and_not_by_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Control, "pid", lambda self: 71)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        front = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        settings = Settings(run_dir=str(tmp_path), front=front)
        remedy = f"already runs in .*; stop it with: tokenbus down --run-dir {tmp_path};"
        with pytest.raises(SystemFault, match=remedy):
            run_system(settings, [], lambda client: [])


def test_the_command_that_stops_a_system_in_the_default_run_directory_has_no_flag() -> None:
    assert RunDir.of(Settings()).down_command == "tokenbus down"


def test_exits_have_the_code_or_the_signal_and_are_read_once(tmp_path: Path) -> None:
    system = supervisor.Supervisor(Settings(run_dir=str(tmp_path)))
    system.run_dir.make()
    system.run_dir.supervisor_log.write_text(
        "2026-11-27 04:00:00,001 WARN exited: gateway (exit status 1; not expected)\n"
        "2026-11-27 04:00:00,002 INFO spawned: 'gateway' with pid 7\n"
        "2026-11-27 04:00:00,003 WARN exited: broker (terminated by SIGSEGV (core dumped); not "
        "expected)\n"
        "2026-11-27 04:00:00,004 WARN exited: gpu-worker-0 (exit status 0; not expected)\n"
        "2026-11-27 04:00:00,005 WARN stopped: gateway (terminated by SIGKILL)\n"
    )
    exits = system.exits()
    assert [str(exited) for exited in exits if exited.code != 0] == [
        "gateway: exited with code 1; it will be restarted",
        "broker: killed by SIGSEGV (core dumped); it will be restarted",
    ]
    assert [exited.name for exited in exits if exited.code == 0] == ["gpu-worker-0"]
    assert system.exits() == []
    # supervisord has rotated its log.
    system.run_dir.supervisor_log.write_text(
        "2026-11-27 04:00:01,001 WARN exited: broker (exit status 1; not expected)\n"
    )
    assert [exited.name for exited in system.exits()] == ["broker"]


def test_broker_and_state_worker_are_replaced_first_and_the_gateways_last() -> None:
    names = ["broker", "cluster", "gateway", "gpu-worker", "state-worker", "tool-worker"]
    found = in_order(ProcessState(name, "RUNNING", 1, name) for name in names)
    assert [process.name for process in found] == [
        "broker", "state-worker", "gpu-worker", "tool-worker", "gateway", "cluster"
    ]  # fmt: skip
