"""A request that is repeated with its idempotency key gets the answer of the first request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tokenbus.clients import Client
from tokenbus.clients.gateway.users.idempotency import MAX_NAMED, NamedClient, NamedRequests
from tokenbus.protocol.settings import load

from ...processes import Bus, Gateway, until
from .stepped import WAIT_S, SteppedWorker, stepped_worker

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5], "max_tokens": 99},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x", "max_output_tokens": 99},
    "/v1/messages": CHAT,
    "/v1/run": {"controller": "none", "controller_arg": "", "prompt": "x", "max_tokens": 99},
}


@pytest.fixture(scope="module")
def served(processes: None) -> Iterator[tuple[Bus, SteppedWorker]]:
    with (
        Bus(session_grace_s=600) as bus,
        stepped_worker(f"ipc://{bus.folder}/back.sock", 64) as worker,
    ):
        bus.wait_for_models("stepped")
        yield bus, worker


def post(
    gateway: Gateway,
    path: str,
    key: str,
    last_event: int | None = None,
    address: str = "127.0.0.1",
    **fields: Any,
) -> HTTPConnection:
    """Sends a request with an idempotency key."""
    place = urlsplit(gateway.url)
    connection = HTTPConnection(
        str(place.hostname), place.port, timeout=WAIT_S, source_address=(address, 0)
    )
    headers = {"content-type": "application/json", "idempotency-key": key}
    if last_event is not None:
        headers["last-event-id"] = str(last_event)
    body = {"model": "stepped", **BODIES[path], **fields}
    connection.request("POST", path, json.dumps(body), headers)
    return connection


def fewer_sessions(client: Client, than: int) -> bool:
    """Whether the broker has fewer than ``than`` sessions."""
    return client.status().sessions < than


def events(answer: HTTPResponse, most: int | None = None) -> list[tuple[int, bytes]]:
    """The numbers and the data of the next numbered events of an answer, at most ``most``."""
    found: list[tuple[int, bytes]] = []
    number = None
    while (most is None or len(found) < most) and (line := answer.readline()):
        if line.startswith(b"id: "):
            number = int(line[4:])
        elif line.startswith(b"data: ") and number is not None:
            found.append((number, line.strip()))
            number = None
    return found


def without_time(found: list[tuple[int, bytes]]) -> list[tuple[int, Any]]:
    """The events without the time at which the answer began."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            times = ("created", "created_at")
            return {k: plain(v) for k, v in value.items() if k not in times}
        return value

    decoded = [(n, data[6:]) for n, data in found]
    return [(n, plain(json.loads(d)) if d.startswith(b"{") else d) for n, d in decoded]


@pytest.mark.parametrize("path", BODIES)
def test_the_next_gateway_serves_the_same_request(
    served: tuple[Bus, SteppedWorker], path: str
) -> None:
    bus, worker = served
    first, second = bus.start_gateway(), bus.start_gateway()
    stream: dict[str, Any] = {} if path == "/v1/run" else {"stream": True}
    asked = post(first, path, "a", **stream)
    running = worker.begun()
    running.step(3)
    answer = asked.getresponse()
    before = events(answer, 3)
    first.process.kill()
    asked.close()
    running.step(2)
    for last_event in (None, before[-1][0]):
        again = post(second, path, "a", last_event, **stream)
        assert worker.attached() == running.request
        running.send_again()
        answer = again.getresponse()
        assert answer.status == 200
        skipped = 0 if last_event is None else last_event
        part = events(answer, 4 if last_event is None else 1)
        assert part[0][0] == 1 + skipped
        if last_event is None:
            assert without_time(part)[:3] == without_time(before)
            # A later connection with the same key takes over the stream from this connection.
            third = post(second, path, "a", **stream)
            assert worker.attached() == running.request
            running.send_again()
            assert events(third.getresponse(), 3) != []
            rest = answer.read()
            assert b"another connection" in rest or path == "/v1/run"
            again.close()
            again = third
            continue
        running.step(finish_reason="stop")
        assert events(answer)[-1][0] > part[-1][0]
        again.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_repetition_has_the_same_events_whatever_has_arrived_at_once(
    steered: Bus, path: str
) -> None:
    """The embedded model samples the tokens, and the request has no seed."""
    gateway = steered.start_gateway()
    more: dict[str, Any] = {"model": "embedded", "stream": True, "max_tokens": 300}
    asked = post(gateway, path, "f", **more)
    begun = events(asked.getresponse(), 4)
    gateway.process.kill()
    asked.close()
    gateway = steered.start_gateway()
    again = post(gateway, path, "f", **more)
    whole = events(again.getresponse())
    again.close()
    assert without_time(whole[:4]) == without_time(begun)
    assert [number for number, _ in whole] == list(range(1, 1 + len(whole)))
    half = len(whole) // 2
    rest = post(gateway, path, "f", last_event=half, **more)
    assert without_time(events(rest.getresponse())) == without_time(whole[half:])
    rest.close()


def test_an_answer_that_is_whole_comes_from_the_same_request(
    served: tuple[Bus, SteppedWorker],
) -> None:
    bus, worker = served
    first, second = bus.start_gateway(), bus.start_gateway()
    asked = post(first, "/v1/completions", "b")
    running = worker.begun()
    running.step(3)
    first.process.kill()
    asked.close()
    again = post(second, "/v1/completions", "b")
    assert worker.attached() == running.request
    running.send_again()
    running.step(finish_reason="stop")
    assert json.loads(again.getresponse().read())["choices"][0]["text"] == "xxxx"
    again.close()


def test_a_request_that_the_broker_has_no_more_runs_again_with_its_seed(
    served: tuple[Bus, SteppedWorker],
) -> None:
    bus, worker = served
    gateway = bus.start_gateway()
    found = []
    with bus.client() as client:
        for _ in range(2):
            asked = post(gateway, "/v1/completions", "c")
            running = worker.begun()
            sessions = client.status().sessions
            running.step(finish_reason="stop")
            found.append((running.generate.seed, json.loads(asked.getresponse().read())["id"]))
            asked.close()
            # Until the session of the request has ended, the broker still has the answer.
            until(partial(fewer_sessions, client, sessions), WAIT_S, "the session's end")
    assert found[0] == found[1]
    assert found[0][0] is not None


def test_a_key_is_one_user_s_and_for_one_body(served: tuple[Bus, SteppedWorker]) -> None:
    bus, worker = served
    gateway = bus.start_gateway()
    asked = post(gateway, "/v1/completions", "d", stream=True)
    running = worker.begun()
    running.step(1)
    answer = asked.getresponse()
    assert len(events(answer, 1)) == 1
    for fields in ({"stream": True, "max_tokens": 98}, {"stream": False}):
        other = post(gateway, "/v1/completions", "d", **fields)
        refused = other.getresponse()
        assert refused.status == 409
        assert json.loads(refused.read())["error"]["code"] == "idempotency_key_reused"
        other.close()
    # Another user's request with this key is a separate request with another seed.
    stranger = post(gateway, "/v1/completions", "d", address="127.0.0.2", stream=True)
    own = worker.begun()
    assert own.request != running.request
    assert own.generate.seed != running.generate.seed
    own.step(finish_reason="stop")
    assert len(events(stranger.getresponse())) == 2
    stranger.close()
    running.step(finish_reason="stop")
    assert len(events(answer)) == 2
    asked.close()


def test_another_body_at_another_gateway_leaves_the_request_as_it_is(
    served: tuple[Bus, SteppedWorker],
) -> None:
    bus, worker = served
    first, second = bus.start_gateway(), bus.start_gateway()
    asked = post(first, "/v1/completions", "e")
    running = worker.begun()
    running.step(1)
    other = post(second, "/v1/completions", "e", max_tokens=98)
    refused = other.getresponse()
    assert (refused.status, b"already used for a request" in refused.read()) == (409, True)
    other.close()
    first.process.kill()
    asked.close()
    again = post(second, "/v1/completions", "e")
    assert worker.attached() == running.request
    running.send_again()
    running.step(finish_reason="stop")
    assert json.loads(again.getresponse().read())["choices"][0]["text"] == "xx"
    again.close()


def test_one_user_cannot_have_all_sessions_of_named_requests(tmp_path: Path) -> None:
    rooms = NamedRequests(load(run_dir=str(tmp_path)))
    given = [rooms.enter(f"token {number}", 0, "ann") for number in range(MAX_NAMED)]
    assert given.count(True) == MAX_NAMED // 2
    assert rooms.enter("another", 0, "bob")
    rooms.leave("token 0", "ann")
    assert rooms.enter("token 0", 1, "bob")
    # The secret is stored in the run directory.
    assert NamedRequests(load(run_dir=str(tmp_path))).secret == rooms.secret
    assert (tmp_path / "gateway-secret").stat().st_mode & 0o777 == 0o600


def test_a_session_that_cannot_be_opened_takes_no_room(tmp_path: Path) -> None:
    rooms = NamedRequests(load(run_dir=str(tmp_path)))

    def make(token: str) -> NamedClient:
        raise OSError("no descriptor is left")

    for _ in range(MAX_NAMED):
        named = rooms.of("key", None)
        assert named is not None
        named.read("/v1/completions", b"{}")
        with pytest.raises(OSError, match="no descriptor"):
            named.client(make)


@pytest.mark.parametrize(
    "headers",
    [{"idempotency-key": "x" * 300}, {"last-event-id": "3"}],
)
def test_headers_that_name_nothing_are_refused(
    served: tuple[Bus, SteppedWorker], headers: dict[str, str]
) -> None:
    bus, _ = served
    gateway = bus.start_gateway()
    place = urlsplit(gateway.url)
    connection = HTTPConnection(str(place.hostname), place.port, timeout=WAIT_S)
    body = json.dumps({"model": "stepped", **BODIES["/v1/completions"]})
    connection.request(
        "POST", "/v1/completions", body, {"content-type": "application/json", **headers}
    )
    refused = connection.getresponse()
    assert (refused.status, json.loads(refused.read())["error"]["code"]) == (400, "invalid_header")
    connection.close()
