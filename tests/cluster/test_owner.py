"""How an actor in a Ray cluster treats the process of its worker, tested without a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.clients.cluster import owner as owner_module
from tokenbus.clients.cluster.owner import Owner
from tokenbus.clients.system.processes import alive

from ..processes import Bus, until

pytestmark = pytest.mark.process

PATIENCE_S = 120.0
STATE = "tokenbus.workers.state"


@pytest.fixture(scope="module")
def bus(processes: None) -> Iterator[Bus]:
    with Bus() as bus:
        yield bus


@pytest.fixture(autouse=True)
def on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "_node_id", lambda: "here")


def settings(bus: Bus, folder: Path) -> dict[str, str]:
    own = {k: v for k, v in bus.environment.items() if k.startswith("TOKENBUS_")}
    return own | {
        "TOKENBUS_RUN_DIR": str(folder),
        "TOKENBUS_BACK": f"ipc://{bus.folder}/back.sock",
    }


def workers(bus: Bus) -> list[int]:
    """The process ids of the registered workers."""
    with bus.client() as client:
        return [worker.pid for worker in client.status().workers]


def test_a_process_that_is_killed_is_started_again_and_a_retired_one_is_not(
    bus: Bus, tmp_path: Path
) -> None:
    owner = Owner(STATE, settings(bus, tmp_path), None)
    until(lambda: workers(bus) == [owner.report().pid], PATIENCE_S, "a registered worker")
    first = owner.report()
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: workers(bus) not in ([], [first.pid]), PATIENCE_S, "another worker")
    second = owner.report()
    assert (second.starts, second.exit_code, second.ended) == (2, -signal.SIGKILL, False)
    assert not second.retiring

    owner.retire()
    until(lambda: owner.report().ended, PATIENCE_S, "the worker has left")
    last = owner.report()
    assert (last.pid, last.starts, last.exit_code, last.retiring) == (0, 2, 0, True)
    until(lambda: workers(bus) == [], PATIENCE_S, "the broker knows that the worker has left")


def test_a_wrong_setting_is_no_reason_to_start_it_again(bus: Bus, tmp_path: Path) -> None:
    owner = Owner(STATE, settings(bus, tmp_path) | {"TOKENBUS_EXPIRY_S": "soon"}, None)
    until(lambda: owner.report().ended, PATIENCE_S, "the worker has ended")
    assert (owner.report().starts, owner.report().exit_code) == (1, 2)


def test_the_key_is_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    owner = Owner("no.such.module", {}, "secret")
    [file] = tmp_path.glob("*/worker.key")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("secret", 0o600)
    owner.retire()
    until(lambda: owner.report().ended, PATIENCE_S, "the worker has ended")
    assert not file.parent.exists()


def test_the_process_dies_with_its_owner(bus: Bus, tmp_path: Path) -> None:
    code = (
        "import sys, time; from tokenbus.clients.cluster.owner import Owner\n"
        "import tokenbus.clients.cluster.owner as module; module._node_id = lambda: 'here'\n"
        f"owner = Owner({STATE!r}, {settings(bus, tmp_path)!r}, None)\n"
        "while not owner.report().pid: time.sleep(0.01)\n"
        "print(owner.report().pid, flush=True); time.sleep(1000)\n"
    )
    actor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert actor.stdout is not None
    pid = int(actor.stdout.readline())
    assert alive(pid)
    actor.kill()
    actor.wait()
    actor.stdout.close()
    until(lambda: not alive(pid), PATIENCE_S, "the worker ends with its owner")
