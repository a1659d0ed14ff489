"""Behaviour that only a system within one process has."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tokenbus.clients import AsyncClient, Client, ConnectionLostError, ServiceError
from tokenbus.inprocess import InProcess
from tokenbus.protocol.settings import Settings
from tokenbus.transport.dealer import AddressError

from ..processes import until

PROMPT = "def add(a, b):"


def test_the_python_client_works_as_with_any_address(system: InProcess) -> None:
    with Client(system.address) as client:
        stream = client.generate(PROMPT, max_tokens=20, controller="regex", controller_arg="[0-9]+")
        assert stream.text().isdecimal()
        assert client.status().sessions >= 1


@pytest.mark.anyio
async def test_so_does_the_asynchronous_one(system: InProcess) -> None:
    async with AsyncClient(system.address) as client:
        streams = [client.generate(PROMPT, max_tokens=5) for _ in range(5)]
        texts = {await stream.text() for stream in streams}
    assert len(texts) == 1


def test_a_closed_connection_ends_its_streams_and_its_reader(system: InProcess) -> None:
    connection = system.connect()
    connection.send('GENERATE {"stream_id": 1, "prompt": [1], "max_tokens": 900}')
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(connection))
    reader.start()
    connection.close()
    reader.join(300)
    assert not reader.is_alive()
    with pytest.raises(ConnectionLostError):
        connection.send("PING {}")
    with Client(system.address) as client:
        while client.status().streams:
            pass


def test_a_model_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(ServiceError, match="gpu worker"):
        InProcess(Settings(run_dir=str(tmp_path), model=str(tmp_path)), controllers=False).start()
    until(lambda: threading.active_count() <= before, 300.0, "the end of all threads")


def test_an_address_of_no_system_is_refused() -> None:
    with pytest.raises(AddressError, match="is not the address of a broker"):
        Client("memory://nowhere/front")
