"""The output of ``tokenbus up`` without a terminal, as under an init system."""

from __future__ import annotations

import itertools
import time

import pytest
from tokenbus.clients.system.screen import PlainScreen
from tokenbus.clients.system.supervisor import ProcessState
from tokenbus.clients.system.watch import Picture, Shown

STREAMS = ("0 streams, 0 tokens/s", "3 streams, 511 tokens/s", "2 streams, 480 tokens/s")


def picture(load: str, doing: str = "up", pid: int = 7) -> Picture:
    process = ProcessState("broker", "RUNNING", pid, "broker")
    return Picture([Shown(process, doing == "up", doing)], load)


def test_lines_say_what_has_changed_and_no_rates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    minutes = itertools.count(step=60)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(minutes)))
    screen = PlainScreen()
    for load in STREAMS:
        screen.show(picture(load))
    screen.show(picture(STREAMS[0], "starting", 8))
    screen.close()
    assert capsys.readouterr().out.splitlines() == [
        "broker: up (process 7)",
        "broker: starting (process 8)",
    ]
