"""Each tenant has a guest process, up to a bound on all processes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from tokenbus.protocol.errors import ControllerError, UnavailableError
from tokenbus.workers.controller.guests import launcher
from tokenbus.workers.controller.guests import table as table_module
from tokenbus.workers.controller.guests.table import DEATHS_S, MAX_DEATHS, Deaths

from ....processes import until
from ..played import WORDS, Steered
from .remote_guests import CALM, Sequence, running

pytestmark = pytest.mark.process


def test_tenants_take_turns_if_there_are_fewer_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "KEEP_S", 0.0)
    with running(most=1) as runtime:
        sequences = [Sequence(runtime.program(CALM, f"tenant {n}")) for n in range(3)]
        for round_ in range(2, 5):
            for each in sequences:
                each.round()
                assert each.allowed() == [round_]
                assert len(runtime.table.pids()) == 1


def test_a_tenant_is_refused_while_all_processes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MAX_WAIT_S", 0.0)
    monkeypatch.setattr(table_module, "KEEP_S", 3600.0)
    monkeypatch.setattr(table_module, "TURN_S", 3600.0)
    with running(most=1) as runtime:
        Sequence(runtime.program(CALM, "first"))
        with pytest.raises(UnavailableError, match="this worker runs 1 guest processes"):
            Sequence(runtime.program(CALM, "second"))


def test_a_tenant_waits_until_a_process_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MAX_WAIT_S", 60.0)
    monkeypatch.setattr(table_module, "KEEP_S", 3600.0)
    monkeypatch.setattr(table_module, "TURN_S", 3600.0)
    with running(most=1) as runtime:
        first = Sequence(runtime.program(CALM, "first"))
        made: list[Sequence] = []
        thread = threading.Thread(target=lambda: made.append(Sequence(runtime.program(CALM, "b"))))
        thread.start()
        first.controller.close()
        thread.join(60)
        assert made[0].allowed() == [1]


def test_a_tenant_does_not_wait_for_ever_while_others_use_all_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_module, "KEEP_S", 3600.0)
    monkeypatch.setattr(table_module, "TURN_S", 0.0)
    with running(most=2) as runtime:
        first, second, third = (Sequence(runtime.program(CALM, name)) for name in "abc")
        left = runtime.table.pids()
        assert len(left) == 2
        assert second.controller._process.pid in left  # type: ignore[attr-defined]
        # The sequence whose process was ended is replayed.
        for each in (first, second, third):
            each.round()
            assert each.allowed() == [2]


def test_a_process_is_started_although_its_parent_ends_meanwhile() -> None:
    with running() as runtime:
        first = runtime.table._launcher
        # While the parent process is stopped, it does not read the request for a process.
        os.kill(first.pid, signal.SIGSTOP)
        made: list[Sequence] = []
        thread = threading.Thread(target=lambda: made.append(Sequence(runtime.program(CALM))))
        thread.start()
        until(lambda: bool(first._spawning), 60, "a request for a process")
        os.kill(first.pid, signal.SIGKILL)
        thread.join(60)
        assert made[0].allowed() == [1]
        assert runtime.table._launcher is not first


def test_a_process_without_controllers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "IDLE_S", 0.0)
    with running() as runtime:
        sequence = Sequence(runtime.program(CALM))
        assert runtime.table.pids()
        sequence.controller.close()
        until(lambda: not runtime.table.pids(), 60, "the process has ended")


def test_a_module_is_refused_after_three_deaths_in_a_minute() -> None:
    now = 100.0
    deaths = Deaths(lambda: now)
    for _ in range(MAX_DEATHS):
        deaths.check("tenant", "module")
        deaths.add("tenant", "module")
        now += 10
    with pytest.raises(ControllerError, match="the module is refused for 30 s") as caught:
        deaths.check("tenant", "module")
    assert caught.value.code == "quarantined"
    deaths.check("tenant", "another")
    deaths.check("another", "module")
    now = 100 + DEATHS_S + 1
    deaths.check("tenant", "module")


def test_each_tenant_and_vocabulary_has_a_process() -> None:
    with running() as runtime:
        made = [runtime.program(CALM, "many"), runtime.program(CALM, "more")]
        pids = {Sequence(each).controller._process.pid for each in (*made, *made)}  # type: ignore[attr-defined]
        assert len(pids) == 2
        steered = Steered(made[0], [*WORDS, b"another"])
        assert steered.controller._process.pid not in pids  # type: ignore[attr-defined]


def test_a_failed_fork_ends_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    monkeypatch.setattr(launcher, "_ZYGOTE", f"{__package__}.refused_fork")
    with running(most=2) as runtime:
        first = Sequence(runtime.program(CALM, "first"))
        [pid] = runtime.table.pids()
        program = runtime.program(CALM, "second")
        with pytest.raises(UnavailableError, match="no process for the controller"):
            Sequence(program)
        first.round()
        assert first.allowed() == [2]
        assert Sequence(program).allowed() == [1]
        assert pid in runtime.table.pids()
