"""The four transports, each with one connection that its tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.clients import Client
from tokenbus.inprocess import InProcess
from tokenbus.protocol.settings import Settings

from .transports import Lmtp, Transport


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Iterator[InProcess]:
    """A system within this process."""
    folder: Path = tmp_path_factory.mktemp("run")
    with InProcess(Settings(run_dir=str(folder), capacity=8)) as system:
        yield system


@pytest.fixture(scope="session", params=["zeromq", "websocket", "stdio", "in-process"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    """One of the four transports. The tests run once with each transport."""
    name: str = request.param
    of: dict[str, tuple[str, ...]] = {
        "zeromq": ("steered",),
        "stdio": ("steered",),
        "websocket": ("steered", "gateway"),
        "in-process": ("system",),
    }
    parts = {part: request.getfixturevalue(part) for part in of[name]}
    transport = Transport(name, parts.get("steered"), parts.get("gateway"), parts.get("system"))
    yield transport
    transport.close()


@pytest.fixture(scope="session")
def lmtp(transport: Transport) -> Lmtp:
    """A connection with a session. The tests share the connection, so each test must receive all
    answers to its messages."""
    connection = transport.connect()
    connection.hello()
    return connection


@pytest.fixture(scope="session")
def client(transport: Transport) -> Iterator[Client]:
    """A Python client of the same system, from which tests get the expected results."""
    with Client(transport.address, patience_s=120.0) as client:
        yield client
