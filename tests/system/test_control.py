"""Commands to a supervisord that stands still."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.clients.system import supervisor
from tokenbus.clients.system.run_dir import RunDir
from tokenbus.clients.system.supervisor import Control

from .foreground import short_folder


@pytest.fixture
def still() -> Iterator[RunDir]:
    """A run directory with a socket that accepts connections, on which nobody answers."""
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
