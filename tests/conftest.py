"""What tests of several folders share: one running bus with the embedded model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from tokenbus.clients import Client

from .processes import Bus


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tells in how many places a kernel's last bits decided between two tokens."""
    shapes = sys.modules.get("tests.workers.gpu.shapes")
    if shapes is not None:
        terminalreporter.write_line(f"tokens that differed by a tie of logits: {len(shapes.ties)}")
        for tie in shapes.ties:
            terminalreporter.write_line(f"  {tie}")


@pytest.fixture(scope="session")
def bus() -> Iterator[Bus]:
    """A broker and a GPU worker with the embedded model, for tests that leave them as they are."""
    with Bus() as bus:
        bus.start_worker()
        bus.wait_for_models("embedded")
        yield bus


@pytest.fixture
def client(bus: Bus) -> Iterator[Client]:
    """A client of that bus."""
    with bus.client() as client:
        yield client


@pytest.fixture
def anyio_backend() -> str:
    """What asynchronous tests run on."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TOKENBUS_")]:
        monkeypatch.delenv(name)
