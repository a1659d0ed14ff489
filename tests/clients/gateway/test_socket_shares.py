"""Limits, turns and priorities of a user also apply to the user's WebSockets.

The gateway identifies the user. A client cannot choose another user.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from tokenbus.clients.gateway.tunnels.tunnel_requests import TunnelRequests
from tokenbus.clients.gateway.users.user_shares import UserShares
from tokenbus.protocol.errors import RequestError
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection

from ...processes import Bus, Gateway, until
from ...websocket import connect
from .stepped import WAIT_S, SteppedWorker, stepped_worker

MOST = 6
GENERATE: dict[str, Any] = {"model": "stepped", "prompt": [5], "max_tokens": 1000}


@pytest.fixture(scope="module")
def narrow(processes: None) -> Iterator[tuple[Bus, SteppedWorker]]:
    """A bus, and its worker, which runs one request at a time."""
    with Bus() as bus, stepped_worker(f"ipc://{bus.folder}/back.sock", 1) as worker:
        bus.wait_for_models("stepped")
        yield bus, worker


@pytest.fixture(scope="module")
def wide(processes: None) -> Iterator[tuple[Gateway, SteppedWorker]]:
    """A gateway for up to ``MOST`` streams and connections, and a worker that runs all streams."""
    with Bus() as bus, stepped_worker(f"ipc://{bus.folder}/back.sock", 64) as worker:
        bus.wait_for_models("stepped")
        yield bus.start_gateway(max_streams=MOST, max_connections=MOST), worker


def place_of(gateway: Gateway) -> tuple[str, int]:
    place = urlsplit(gateway.url)
    return str(place.hostname), int(place.port or 0)


def web_socket(gateway: Gateway, address: str) -> ClientConnection:
    """A WebSocket from an address of this machine."""
    sock = socket.create_connection(place_of(gateway), WAIT_S, source_address=(address, 0))
    return connect(gateway.ws_url, sock=sock)


def ask(ws: ClientConnection, stream: int, kind: str = "GENERATE", **fields: Any) -> None:
    ws.send(f"{kind} {json.dumps({'stream_id': stream, **fields})}")


def post(
    gateway: Gateway, address: str, headers: dict[str, str] | None = None, **fields: Any
) -> HTTPConnection:
    """Sends a request for a completion from an address of this machine."""
    host, port = place_of(gateway)
    connection = HTTPConnection(host, port, timeout=WAIT_S, source_address=(address, 0))
    given = {"content-type": "application/json", **(headers or {})}
    connection.request("POST", "/v1/completions", json.dumps({**GENERATE, **fields}), given)
    return connection


def refusal(ws: ClientConnection) -> dict[str, Any]:
    """The next error, as a client receives it that has not sent HELLO: a list with one entry."""
    [entry] = json.loads(str(ws.recv(WAIT_S)).partition(" ")[2])
    assert isinstance(entry, dict)
    return entry


def test_a_header_does_not_choose_the_user(wide: tuple[Gateway, SteppedWorker]) -> None:
    gateway, worker = wide
    with ExitStack() as requests:
        for _ in range(MOST // 2):
            requests.callback(post(gateway, "127.0.0.1").close)
            worker.begun()
        forged = post(gateway, "127.0.0.1", {"x-forwarded-for": "192.0.2.1"})
        requests.callback(forged.close)
        assert forged.getresponse().status == 429
    for _ in range(MOST // 2):
        worker.cancelled()


def test_streams_of_web_sockets_count_as_those_of_their_user(
    wide: tuple[Gateway, SteppedWorker],
) -> None:
    gateway, worker = wide
    with web_socket(gateway, "127.0.0.2") as ws:
        for stream in range(1, 1 + MOST // 2):
            ask(ws, stream, **GENERATE)
        streams = [worker.begun() for _ in range(MOST // 2)]
        # If a refused message names a live stream, the gateway still counts this stream.
        ask(ws, 1, **GENERATE)
        assert refusal(ws)["code"] == "duplicate_stream"
        ask(ws, 2, kind="NONSENSE")
        assert refusal(ws)["code"] == "unknown_type"
        ask(ws, 9, **GENERATE, code=5, type=[])
        assert refusal(ws)["code"] == "client_limit"
        again = post(gateway, "127.0.0.2")
        assert again.getresponse().status == 429
        again.close()
        with web_socket(gateway, "127.0.0.3") as other:
            ask(other, 1, **GENERATE)
            worker.begun()
        worker.cancelled()
        streams[0].step(finish_reason="stop")
        assert json.loads(str(ws.recv(WAIT_S))[6:])[0]["finish_reason"] == "stop"
        ask(ws, 9, **GENERATE)
        worker.begun()
    for _ in range(MOST // 2):
        worker.cancelled()
    # The streams of the closed WebSocket no longer count.
    with ExitStack() as requests:
        for _ in range(MOST // 2):
            requests.callback(post(gateway, "127.0.0.2").close)
            worker.begun()
    for _ in range(MOST // 2):
        worker.cancelled()


def test_one_user_cannot_take_all_web_sockets(wide: tuple[Gateway, SteppedWorker]) -> None:
    gateway, _ = wide
    with ExitStack() as sockets:

        def opened(address: str) -> ClientConnection:
            ws = sockets.enter_context(web_socket(gateway, address))
            ask(ws, 1, kind="MODEL_INFO", model="stepped")
            return ws

        # WebSockets count from their beginning, even if they never send a message.
        for _ in range(MOST // 2):
            sockets.enter_context(web_socket(gateway, "127.0.0.4"))
        with pytest.raises(InvalidStatus, match="429"):
            opened("127.0.0.4")
        assert str(opened("127.0.0.5").recv(WAIT_S)).startswith("MSG")


def test_a_web_socket_does_not_choose_whose_its_requests_are(
    narrow: tuple[Bus, SteppedWorker],
) -> None:
    bus, worker = narrow
    gateway = bus.start_gateway()
    with web_socket(gateway, "127.0.0.2") as ws:
        ask(ws, 1, **GENERATE, by="127.0.0.9", group="another")
        stream = worker.begun()
        found = stream.generate
        assert (found.by, found.group == "another", len(found.group)) == ("127.0.0.2", False, 32)
        stream.step(finish_reason="stop")


def test_many_web_sockets_delay_another_user_by_one_turn(
    narrow: tuple[Bus, SteppedWorker],
) -> None:
    bus, worker = narrow
    gateway = bus.start_gateway()
    with bus.client() as client, ExitStack() as requests:

        def queued(count: int) -> None:
            until(lambda: client.status().queued == count, WAIT_S, f"{count} queued requests")

        requests.callback(post(gateway, "127.0.0.7").close)
        first = worker.begun()
        for number in range(5):
            ws = requests.enter_context(web_socket(gateway, "127.0.0.2"))
            ask(ws, 1, **GENERATE)
            queued(1 + number)
        requests.callback(post(gateway, "127.0.0.3").close)
        queued(6)
        served = []
        running = first
        for _ in range(6):
            running.step(finish_reason="stop")
            running = worker.begun()
            served.append(running.generate.by)
        running.step(finish_reason="stop")
    assert served.index("127.0.0.3") <= 1


def test_no_user_without_a_key_of_the_bus_goes_before_all_others(
    narrow: tuple[Bus, SteppedWorker],
) -> None:
    bus, worker = narrow
    gateway = bus.start_gateway()
    raised = post(gateway, "127.0.0.2", priority=-1)
    answer = raised.getresponse()
    assert answer.status == 403
    assert json.loads(answer.read())["error"]["param"] == "priority"
    raised.close()
    with web_socket(gateway, "127.0.0.2") as ws:
        ask(ws, 1, **GENERATE, priority=1)
        assert refusal(ws)["code"] == "not_allowed"
        ask(ws, 2, **GENERATE, priority=-1)
        stream = worker.begun()
        assert stream.generate.priority == -1
        stream.step(finish_reason="stop")


@pytest.mark.parametrize("kind", [b"GENERATE", b"EMBED", b"TAG", b"STATUS"])
def test_a_body_that_the_gateway_cannot_decode_is_not_passed_on(kind: bytes) -> None:
    """The broker can decode a body whose depth is a little above the limit of the gateway."""
    requests = TunnelRequests(UserShares(MOST), "ann", "ann", ranks=False)
    for ending in (b'"x":%b' % (b"[" * 2000 + b"]" * 2000), b'"stream_id":"1"'):
        with pytest.raises(RequestError):
            requests.sent([kind, b'{"by":"ben","stream_id":1,%b}' % ending])
    assert not requests.open


def test_a_field_of_another_type_does_not_choose_the_user() -> None:
    requests = TunnelRequests(UserShares(MOST), "address", "ann", ranks=False)
    [_, body] = requests.sent([b"TAG", b'{"stream_id":1,"priority":"x","by":"ben"}'])
    assert json.loads(body)["by"] == "ann"


def test_no_depth_of_a_body_chooses_the_user(narrow: tuple[Bus, SteppedWorker]) -> None:
    bus, _ = narrow
    gateway = bus.start_gateway()
    own = {**GENERATE, "by": "127.0.0.9", "priority": 1}
    with web_socket(gateway, "127.0.0.2") as ws:
        for depth in range(900, 1010, 2):
            body = json.dumps({"stream_id": depth, **own})[:-1]
            ws.send(f'GENERATE {body},"x":{"[" * depth}{"]" * depth}}}')
            message = str(ws.recv(WAIT_S))
            # The setting ``max_priority`` is the broker's, to which no such message may come.
            assert "max_priority" not in message
            assert "not_allowed" in message or "nested too deeply" in message
