"""Clients that leave in the middle of a stream, or stop reading it, beside others that do not.

The tokens come from a GPU worker whose steps are the test's, so that no order is left to chance.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from http.client import HTTPConnection, HTTPResponse
from socket import SHUT_RDWR
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.sync.client import connect

from ...processes import Bus, Gateway
from .stepped import WAIT_S, SteppedWorker, stepped_worker

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def quiet(processes: None) -> Iterator[Bus]:
    """A broker without a worker."""
    with Bus() as bus:
        yield bus


@pytest.fixture(scope="module")
def worker(quiet: Bus) -> Iterator[SteppedWorker]:
    with stepped_worker(f"ipc://{quiet.folder}/back.sock") as worker:
        quiet.wait_for_models("stepped")
        yield worker


@pytest.fixture(scope="module")
def served(quiet: Bus, worker: SteppedWorker) -> Gateway:
    """A gateway in front of that worker."""
    return quiet.start_gateway()


BODIES: dict[str, Any] = {
    "/v1/completions": {"model": "stepped", "prompt": [5], "max_tokens": 100_000},
    "/v1/chat/completions": {"model": "stepped", "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"model": "stepped", "input": "x", "store": False},
    "/v1/messages": {
        "model": "stepped",
        "max_tokens": 100_000,
        "messages": [{"role": "user", "content": "x"}],
    },
}


class Request:
    """A request over HTTP on a connection of its own, whose answer is read as the test says."""

    def __init__(self, gateway: Gateway, path: str, **fields: Any) -> None:
        address = urlsplit(gateway.url)
        self._connection = HTTPConnection(str(address.hostname), address.port, timeout=WAIT_S)
        body = json.dumps(BODIES[path] | fields)
        headers = {"content-type": "application/json"}
        self._connection.request("POST", path, body, headers)

    @cached_property
    def answer(self) -> HTTPResponse:
        """The answer, once it has begun."""
        return self._connection.getresponse()

    def events(self) -> Iterator[Any]:
        """The data of the next events."""
        while line := self.answer.readline():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    def leave(self) -> None:
        """Closes the connection."""
        if "answer" in self.__dict__:
            self.answer.close()
        self._connection.close()


# --- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_cancels_its_stream_before_another_token(
    worker: SteppedWorker, served: Gateway, path: str
) -> None:
    request = Request(served, path, stream=True)
    stream = worker.begun()
    stream.step()
    assert next(request.events())
    request.leave()
    # No other token follows, whose way to the client could show that it has left.
    assert worker.cancelled() == stream.request
    stream.step(1, "cancelled")


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_before_its_answer_cancels_what_makes_it(
    worker: SteppedWorker, served: Gateway, path: str
) -> None:
    request = Request(served, path)
    stream = worker.begun()
    stream.step()
    request.leave()
    assert worker.cancelled() == stream.request
    stream.step(1, "cancelled")


@pytest.mark.parametrize("how", ["with a closing handshake", "without one"])
def test_a_websocket_that_closes_cancels_its_stream_before_another_token(
    worker: SteppedWorker, served: Gateway, how: str
) -> None:
    with connect(served.ws_url) as socket:
        socket.send('GENERATE {"stream_id": 1, "prompt": [5], "max_tokens": 1000}')
        stream = worker.begun()
        stream.step()
        assert "TOKEN" in str(socket.recv(WAIT_S))
        if how == "without one":
            socket.socket.shutdown(SHUT_RDWR)
    assert worker.cancelled() == stream.request
    stream.step(1, "cancelled")
