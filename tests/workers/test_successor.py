"""A process asks supervisord whether supervisord will start another process in its place."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.workers.successor import successor_comes

from ..processes import until
from ..system.foreground import short_folder

pytestmark = pytest.mark.process

WAIT_S = 120.0
PROGRAM = """
import os, signal, subprocess, sys
from tokenbus.workers import successor

successor.ASK_S = 120.0

def comes(number, frame):
    code = "from tokenbus.workers import successor as s; s.ASK_S = 120; print(s.successor_comes())"
    of_child = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    with open("answers", "a") as answers:
        print(os.getpid(), successor.successor_comes(), of_child, file=answers)
    sys.exit(0)

signal.signal(signal.SIGTERM, comes)
open("started", "a").write(f"{os.getpid()}\\n")
while True:
    signal.pause()
"""
CONF = """
[supervisord]
nodaemon=true
pidfile=%(here)s/pid
logfile=%(here)s/log
[unix_http_server]
file=%(here)s/sock
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[supervisorctl]
serverurl=unix://%(here)s/sock
[program:asks]
command={python} program.py
directory=%(here)s
startsecs=0
stopwaitsecs=300
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in which supervisord runs the program."""
    for folder in short_folder():
        (folder / "program.py").write_text(PROGRAM)
        (folder / "conf").write_text(CONF.format(python=sys.executable))
        yield folder


@pytest.fixture
def supervisord(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real supervisord with one program. At SIGTERM, the program writes the results of
    ``successor_comes`` to a file and exits."""
    process = subprocess.Popen(
        [sys.executable, "-m", "supervisor.supervisord", "-c", folder / "conf"],
        stdout=subprocess.DEVNULL,
    )
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)


def lines(folder: Path, name: str, number: int) -> list[str]:
    """Waits until a file has at least ``number`` lines; returns its lines."""
    file = folder / name
    until(lambda: file.exists() and file.read_text().count("\n") >= number, WAIT_S, name)
    return file.read_text().split("\n")[:-1]


def test_a_successor_comes_unless_supervisord_is_ending(
    folder: Path, supervisord: subprocess.Popen[bytes]
) -> None:
    lines(folder, "started", 1)
    control = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(folder / "conf")]
    subprocess.run([*control, "restart", "asks"], check=True, timeout=WAIT_S)
    first, second = lines(folder, "started", 2)
    supervisord.send_signal(signal.SIGTERM)
    assert supervisord.wait(WAIT_S) == 0
    # A child of the program has the same environment, but supervisord does not restart the child.
    assert lines(folder, "answers", 2) == [f"{first} True False", f"{second} None None"]


def test_none_comes_without_supervisord(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SERVER_URL", "GROUP_NAME", "PROCESS_NAME"):
        monkeypatch.delenv(f"SUPERVISOR_{name}", raising=False)
    assert not successor_comes()
    monkeypatch.setenv("SUPERVISOR_SERVER_URL", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("SUPERVISOR_GROUP_NAME", "gpu-worker")
    monkeypatch.setenv("SUPERVISOR_PROCESS_NAME", "gpu-worker-0")
    assert not successor_comes()
