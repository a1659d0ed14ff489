"""No user may have all open requests of a gateway. A user with too many requests gets a 429."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from contextvars import copy_context
from http.client import HTTPConnection, HTTPResponse
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace
from tokenbus.clients import AsyncStream
from tokenbus.clients.gateway.errors import ApiError, UserLimitError
from tokenbus.clients.gateway.users.open_programs import OpenPrograms
from tokenbus.clients.gateway.users.turns import current_user
from tokenbus.clients.gateway.users.user_shares import SharedClient, UserShares
from tokenbus.protocol.errors import UnavailableError

from ...processes import Bus, Gateway
from ..test_columns import Unconnected, entries
from .stepped import WAIT_S, SteppedWorker, stepped_worker

MOST = 6


@pytest.fixture(scope="module")
def worker_and_gateway(processes: None) -> Iterator[tuple[SteppedWorker, Gateway]]:
    """A worker and a gateway that both have room for ``MOST`` streams."""
    with Bus(max_queued=1) as bus, stepped_worker(f"ipc://{bus.folder}/back.sock", MOST) as worker:
        bus.wait_for_models("stepped")
        yield worker, bus.start_gateway(max_streams=MOST)


def post(gateway: Gateway, path: str, address: str) -> HTTPConnection:
    """Sends a request from an address of this machine."""
    place = urlsplit(gateway.url)
    connection = HTTPConnection(
        str(place.hostname), place.port, timeout=WAIT_S, source_address=(address, 0)
    )
    chat = {"messages": [{"role": "user", "content": "x"}]}
    prompt: dict[str, Any] = chat if "messages" in path else {"prompt": [5]}
    body = {"model": "stepped", "max_tokens": 1000, **prompt}
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection


def read(answer: HTTPResponse) -> Any:
    return json.loads(answer.read())


def test_a_body_may_end_with_an_empty_part() -> None:
    shares = UserShares(MOST)
    with shares.request():
        shares.take_bytes(10)
        shares.take_bytes(0)
    with shares.request():
        shares.take_bytes(10)


def test_one_user_cannot_take_the_streams_of_the_others(
    worker_and_gateway: tuple[SteppedWorker, Gateway],
) -> None:
    worker, gateway = worker_and_gateway
    with ExitStack() as open_requests:

        def begin(address: str) -> None:
            open_requests.callback(post(gateway, "/v1/completions", address).close)
            worker.begun()

        for _ in range(MOST // 2):
            begin("127.0.0.1")
        refused = post(gateway, "/v1/completions", "127.0.0.1").getresponse()
        assert (refused.status, int(refused.headers["retry-after"]) >= 1) == (429, True)
        error = read(refused)["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "client_limit")
        refused = post(gateway, "/v1/messages", "127.0.0.1").getresponse()
        assert (refused.status, int(refused.headers["retry-after"]) >= 1) == (429, True)
        assert read(refused)["error"]["type"] == "rate_limit_error"
        # Requests of other users are served until the gateway has its maximum of streams.
        for number in range(2, 2 + MOST // 2):
            begin(f"127.0.0.{number}")
        refused = post(gateway, "/v1/completions", "127.0.0.9").getresponse()
        assert (refused.status, int(refused.headers["retry-after"]) >= 1) == (503, True)
        assert read(refused)["error"]["code"] == "queue_full"
        refused = post(gateway, "/v1/messages", "127.0.0.9").getresponse()
        assert (refused.status, read(refused)["error"]["type"]) == (503, "overloaded_error")
    for _ in range(MOST):
        worker.cancelled()


def as_user(name: str) -> None:
    current_user.set(name)


def test_the_share_of_an_ended_stream_is_given_back_before_its_request_ends() -> None:
    shares = UserShares(2)
    as_user("ann")
    with shares.request():
        shares.take_stream()
        for _ in range(3):
            shares.give_back_stream()
            shares.take_stream()
            shares.take_bytes(1)
        shares.give_back_stream()
        shares.give_back_stream()
    with shares.request():
        shares.take_stream()


def test_a_task_that_continues_after_its_request_gives_back_no_other_stream() -> None:
    shares = UserShares(4)
    as_user("ann")
    with shares.request():
        shares.take_stream()
        late = copy_context()
    shares.take_of_socket("ann")
    late.run(shares.give_back_stream)
    assert shares._users["ann"].streams == 1


def test_a_task_that_continues_after_its_request_adds_no_program() -> None:
    programs = OpenPrograms()
    as_user("ann")
    with programs.request("first"):
        late = copy_context()
    late.run(programs.add, cast(AsyncStream, object()))
    with pytest.raises(ApiError) as caught:
        programs.stream("first")
    assert caught.value.status == 404


@pytest.mark.anyio
async def test_the_outputs_of_a_program_count_until_its_request_ends() -> None:
    shares = UserShares(4, 1000)
    client = SharedClient("ipc:///not/there", shares, 100)
    connection = client._connection = Unconnected()
    as_user("ann")
    with shares.request():
        stream = client.generate([1])
        call = stream._call
        [first, second, third] = entries(0, 3)
        call.take([replace(first, logs="x" * 100, messages=["x" * 200])])
        assert shares.memory.free == 700
        call.take([second])
        assert connection.cancelled == []
        call.take([replace(third, messages=["x" * 500])])
        assert connection.cancelled == [call]
        with pytest.raises(UserLimitError):
            await stream.wait()
        assert stream.sequences[0].tokens == [0, 1]
    assert shares.memory.free == 1000


def test_a_request_gives_back_all_that_it_took() -> None:
    shares = UserShares(4, 1000)
    as_user("ann")
    with shares.request():
        shares.take_stream()
        shares.take_stream()
        shares.take_bytes(400)
        with pytest.raises(UserLimitError) as limit:
            shares.take_stream()
        assert limit.value.retry_after_s is not None
        with pytest.raises(UserLimitError):
            shares.take_bytes(201)
        as_user("bob")
        with shares.request():
            shares.take_stream()
            shares.take_bytes(600)
            as_user("cyd")
            with shares.request(), pytest.raises(UnavailableError) as full:
                shares.take_bytes(1)
            assert not isinstance(full.value, UserLimitError)
    as_user("ann")
    with shares.request():
        shares.take_bytes(1000)
        shares.take_stream()
    assert not shares._users
