"""The output of ``tokenbus up`` without a terminal, as under an init system."""

from __future__ import annotations

import io
import itertools
import time

import pytest
from rich.console import Console
from tokenbus.clients.system.screen import LiveScreen, PlainScreen
from tokenbus.clients.system.supervisor import ProcessState
from tokenbus.clients.system.watch import Picture, Shown, load_line
from tokenbus.protocol.messages import Status

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


def test_the_foot_of_the_table_fits_into_80_columns() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80)
    screen = LiveScreen(console, "tcp://127.0.0.1:65535")
    screen.show(picture("10 streams, 2,345 tokens/s"))
    screen.close()
    assert "Ctrl-C: stop" in output.getvalue()


def test_one_stream_is_not_several() -> None:
    status = Status(version="1", uptime_s=1.0, sessions=1, streams=1, queued=0, workers=[])
    assert load_line(status) == "1 stream, 0 tokens/s"
