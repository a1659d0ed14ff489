"""A hub and an empty cache, for the commands that run in this process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import constants
from tokenbus.clients.cli.hub import download
from tokenbus.clients.cli.hub.download import Hub

from .hub_server import HubServer


@pytest.fixture(scope="session")
def hub_process() -> Iterator[HubServer]:
    """A hub that serves the tests of this process one after another."""
    with HubServer() as server:
        yield server


@pytest.fixture
def hub(hub_process: HubServer) -> HubServer:
    """A hub without models."""
    for table in (hub_process.repositories, hub_process.cuts, hub_process.broken):
        table.clear()
    hub_process.requests.clear()
    return hub_process


@pytest.fixture
def cache(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty cache of ``hub``, which the commands of this process use."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(download, "Hub", partial(Hub, hub.url, str(folder)))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder
