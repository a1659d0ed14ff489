"""Clients that disconnect in the middle of a stream or stop reading it do not delay other clients.

The GPU worker sends a token only when a test calls ``step``, so that the order of events is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cached_property
from http.client import HTTPConnection, HTTPResponse
from socket import SHUT_RDWR, create_connection
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from websockets.exceptions import InvalidStatus

from ...processes import Bus, Gateway, until
from ...websocket import connect
from .stepped import WAIT_S, SteppedWorker, stepped_worker

pytestmark = pytest.mark.process

MAX_CONNECTIONS = 12
MAX_UNREAD = 2000
CAPACITY = 4
HALF_A_REQUEST = (
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"expect: 100-continue\r\ncontent-length: 4000\r\n\r\n"
)
"""A request without its body. The gateway sends a 100 when the application reads the body."""


@pytest.fixture(scope="module")
def quiet(processes: None) -> Iterator[Bus]:
    """A broker without a worker. Its queue has no room."""
    with Bus(max_queued=0) as bus:
        yield bus


@pytest.fixture(scope="module")
def worker(quiet: Bus) -> Iterator[SteppedWorker]:
    with stepped_worker(f"ipc://{quiet.folder}/back.sock", CAPACITY) as worker:
        quiet.wait_for_models("stepped")
        yield worker


@pytest.fixture(scope="module")
def served(quiet: Bus, worker: SteppedWorker) -> Gateway:
    """A gateway of the broker at which ``worker`` is registered."""
    return quiet.start_gateway(max_connections=MAX_CONNECTIONS, max_unread=MAX_UNREAD)


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
    """An HTTP request on its own connection. Its answer is read only when the test reads events."""

    def __init__(self, gateway: Gateway, path: str, **fields: Any) -> None:
        address = urlsplit(gateway.url)
        self._connection = HTTPConnection(str(address.hostname), address.port, timeout=WAIT_S)
        body = json.dumps(BODIES[path] | fields)
        headers = {"content-type": "application/json"}
        self._connection.request("POST", path, body, headers)

    @cached_property
    def answer(self) -> HTTPResponse:
        """The HTTP response. The first access waits for its status and headers."""
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
    # No other token follows, so no failed write can show the gateway that the client has left.
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


# --- clients that do not read ---------------------------------------------------------------------


def test_a_client_that_does_not_read_ends_its_own_stream_and_delays_no_other(
    worker: SteppedWorker, served: Gateway
) -> None:
    slow = Request(served, "/v1/completions", stream=True)
    unread = worker.begun()
    unread.step()
    assert next(slow.events())["choices"][0]["text"] == "x"
    other = Request(served, "/v1/completions", stream=True)
    read = worker.begun()
    read.step()
    texts = other.events()
    next(texts)
    # The kernel buffers a few megabytes for a connection.
    while not worker.was_cancelled(unread):
        assert unread.sent < 200_000, "entries for a client that does not read are unbounded"
        unread.step(200, text="x" * 200)
        read.step()
        assert next(texts)["choices"][0]["text"] == "x"
    assert unread.sent > MAX_UNREAD
    assert worker.cancelled() == unread.request
    unread.step(1, "cancelled")
    read.step(1, "length")
    *_, end = texts
    assert end["choices"][0]["finish_reason"] == "length"
    # When the client reads again, it receives the kept entries and the error.
    *_, last = slow.events()
    assert last["error"]["code"] == "slow_client"
    assert f"more than {MAX_UNREAD} entries" in last["error"]["message"]
    slow.leave()
    other.leave()


# --- too many clients -----------------------------------------------------------------------------


def test_beyond_the_most_connections_only_probes_are_answered(
    worker: SteppedWorker, served: Gateway
) -> None:
    address = urlsplit(served.url)
    with ExitStack() as stack:
        # Each of these users has only one request, so none of them exceeds its share.
        for number in range(MAX_CONNECTIONS):
            source = (f"127.0.1.{number}", 0)
            busy = stack.enter_context(
                create_connection((address.hostname, address.port), WAIT_S, source)
            )
            busy.sendall(HALF_A_REQUEST)
            assert b" 100 " in busy.recv(4096)
        refused = httpx.get(f"{served.url}/v1/models", timeout=WAIT_S)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_connections"
        with pytest.raises(InvalidStatus, match="503"):
            connect(served.ws_url)
        assert httpx.get(f"{served.url}/live", timeout=WAIT_S).status_code == 200
    until(
        lambda: httpx.get(f"{served.url}/v1/models", timeout=WAIT_S).status_code == 200,
        WAIT_S,
        "room for another connection",
    )


def test_connections_without_a_request_make_room_for_new_ones(
    worker: SteppedWorker, served: Gateway
) -> None:
    address = urlsplit(served.url)
    with ExitStack() as stack:
        idle = []
        for _ in range(4 * MAX_CONNECTIONS):
            connection = create_connection((address.hostname, address.port), WAIT_S)
            idle.append(stack.enter_context(connection))
            connection.sendall(b"G")
        assert httpx.get(f"{served.url}/v1/models", timeout=WAIT_S).status_code == 200
        with suppress(ConnectionError):
            assert idle[0].recv(4096) == b""


def test_one_user_cannot_occupy_all_connections_with_requests(
    worker: SteppedWorker, served: Gateway
) -> None:
    address = urlsplit(served.url)
    with ExitStack() as stack:
        answers = []
        for _ in range(2 * MAX_CONNECTIONS):
            connection = create_connection(
                (address.hostname, address.port), WAIT_S, ("127.0.2.1", 0)
            )
            stack.enter_context(connection)
            connection.sendall(HALF_A_REQUEST)
            answers.append(connection.recv(4096).split(b" ")[1])
        assert answers[: MAX_CONNECTIONS // 2] == [b"100"] * (MAX_CONNECTIONS // 2)
        assert set(answers[MAX_CONNECTIONS // 2 :]) == {b"429"}
        assert httpx.get(f"{served.url}/v1/models", timeout=WAIT_S).status_code == 200


def test_the_openai_package_waits_while_the_queue_is_full(
    quiet: Bus, worker: SteppedWorker, served: Gateway
) -> None:
    def client(max_retries: int) -> openai.OpenAI:
        url = f"{served.url}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=max_retries, timeout=WAIT_S)

    requests = [Request(served, "/v1/completions") for _ in range(CAPACITY)]
    running = [worker.begun() for _ in requests]
    with pytest.raises(openai.InternalServerError) as refused:
        client(0).completions.create(model="stepped", prompt=[5])
    assert (refused.value.status_code, refused.value.code) == (503, "queue_full")
    assert int(refused.value.response.headers["retry-after"]) >= 1
    with quiet.client() as bus, ThreadPoolExecutor(1) as threads:
        before = bus.status().counters["refused"]
        asked = threads.submit(client(8).completions.create, model="stepped", prompt=[5])
        until(lambda: bus.status().counters["refused"] > before, WAIT_S, "another refusal")
        for stream in running:
            stream.step(1, "length")
        worker.begun().step(1, "length")
        assert asked.result(WAIT_S).choices[0].text == "x"
    for request in requests:
        assert request.answer.status == 200
        request.leave()
