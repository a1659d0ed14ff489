"""Runs modules in guest processes of a whole system. The tokens do not change if these processes
die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.clients.cli.status import isolation_lines

from ....processes import Bus, children, until, zygotes
from ....worlds.killed_workers import BOUND_S, PROMPT, System


@pytest.fixture(scope="module")
def system(processes: None) -> Iterator[System]:
    with Bus(heartbeat_s=0.2, session_grace_s=0.5, expiry_s=5, guest_processes=4) as bus:
        bus.start_worker()
        bus.wait_for_models("embedded")
        with bus.client() as client:
            yield System(bus, client)


def guests(system: System) -> list[int]:
    """The ids of the guest processes of the controller worker."""
    [worker] = system.controllers
    return [guest for zygote in zygotes(worker.pid) for guest in children(zygote)]


@pytest.mark.parametrize("controller", ["calm", "counts"])
def test_streams_continue_when_their_process_is_killed(system: System, controller: str) -> None:
    readers = system.streams(6, controller, retry_s=0)
    for _ in range(3):
        [killed] = guests(system)
        os.kill(killed, signal.SIGKILL)
        # A controller fails if its process and the replacement both die during one call. So
        # another stream uses the replacement before the next kill.
        system.stream(controller, max_tokens=30).wait()
        until(lambda pid=killed: pid not in guests(system), BOUND_S, "the process has ended")  # type: ignore[misc]
    system.check_ends(*readers)
    system.wait_until_free()


def test_streams_continue_when_the_parent_of_all_processes_is_killed(system: System) -> None:
    readers = system.streams(6, retry_s=0)
    [zygote] = zygotes(system.controllers[0].pid)
    os.kill(zygote, signal.SIGKILL)
    system.check_ends(*readers)
    system.wait_until_free()


def test_the_status_names_the_missing_layers(system: System) -> None:
    status = system.client.status()
    [worker] = [each for each in status.workers if each.role == "controller"]
    [title, *layers] = isolation_lines(status)
    assert title.startswith(f"{worker.name} runs clients' controllers without these layers")
    assert layers == [f"  {layer}" for layer in worker.missing_layers]
    assert "  a user of their own (set guest_user: tokenbus up --guest-user NAME)" in layers


def test_guest_processes_end_with_their_worker(system: System) -> None:
    [reader] = system.streams(1, retry_s=0)
    [pid] = guests(system)
    system.controllers[0].kill()
    until(lambda: not Path(f"/proc/{pid}").exists(), BOUND_S, "the process has ended")
    system.with_controllers(1)
    system.check_ends(reader)


def test_sessions_without_keys_have_processes_of_their_own(system: System) -> None:
    readers = system.streams(2, retry_s=0)
    with system.bus.client() as client:
        stream = client.generate(PROMPT, controller="calm", max_tokens=20, retry_s=0)
        stream.wait()
        assert len(guests(system)) == 2
    system.check_ends(*readers)
