"""Probes of a gateway. A gateway that ends finishes its requests. No request fails in a rolling
restart."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from ...processes import Bus, Gateway, free_port, until
from ...websocket import connect

pytestmark = pytest.mark.process

PROMPT = "def add(a, b):"


def get(door: Gateway, path: str) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(door.url + path, timeout=300.0)
    return answer.status_code, answer.json()


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": "embedded",
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **fields,
    }


def test_a_gateway_that_serves_is_live_ready_and_healthy(gateway: Gateway) -> None:
    assert get(gateway, "/live") == (200, {"status": "live"})
    for path in ("/ready", "/health", "/health_generate"):
        # The answer is 503 if the broker does not answer within two seconds.
        until(lambda p=path: get(gateway, p) == (200, {"status": "ready"}), 300.0, path)  # type: ignore[misc]


@pytest.mark.process
def test_without_a_worker_or_a_broker_it_is_live_and_not_ready() -> None:
    with Bus() as bus:
        door = bus.start_gateway()
        reason = "no GPU worker is ready"
        until(lambda: get(door, "/ready")[1].get("reason") == reason, 300.0, reason)
        assert get(door, "/ready")[0] == 503
        assert get(door, "/health")[0] == 503
        bus.broker.kill()
        status, answer = get(door, "/ready")
        assert status == 503
        assert answer["reason"].startswith("the broker does not answer")
        assert get(door, "/live")[0] == 200
        assert "tokenbus:up 0.0" in httpx.get(f"{door.url}/metrics", timeout=300.0).text


def events(response: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in response.iter_lines() if line)


def test_a_draining_gateway_is_not_ready_and_finishes_what_runs(steered: Bus) -> None:
    door = steered.start_gateway()
    # A gateway that was probed does not close its port before a probe has received a 503.
    until(lambda: get(door, "/ready")[0] == 200, 300.0, "a gateway that is ready")
    with httpx.stream(
        "POST", f"{door.url}/v1/completions", json=body(150, stream=True), timeout=120.0
    ) as response:
        received = events(response)
        first = next(received)
        door.process.send(signal.SIGTERM)
        until(lambda: get(door, "/ready")[0] == 503, 300.0, "a probe that fails")
        rest = list(received)
    assert rest[-1] == "[DONE]"
    reasons = [json.loads(e)["choices"][0]["finish_reason"] for e in (first, *rest[:-1])]
    assert reasons[-1] == "length"
    assert door.process.wait(300.0) == 0


def test_a_websocket_is_closed_when_its_streams_have_ended(steered: Bus) -> None:
    door = steered.start_gateway()
    with connect(door.ws_url) as busy, connect(door.ws_url) as idle:
        idle.send('STATUS {"stream_id": 1}')
        idle.recv(120)
        request = {"stream_id": 7, "prompt": PROMPT, "max_tokens": 150, "ignore_eos": True}
        busy.send(f"GENERATE {json.dumps(request)}")
        entries = tokens(busy.recv(120))
        door.process.send(signal.SIGTERM)
        with pytest.raises(ConnectionClosed) as closed:
            idle.recv(120)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
        while entries[-1]["finish_reason"] is None:
            entries += tokens(busy.recv(120))
        with pytest.raises(ConnectionClosed) as closed:
            busy.recv(120)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
    assert len(entries) == 150
    assert entries[-1]["finish_reason"] == "length"
    assert door.process.wait(300.0) == 0


def tokens(line: str | bytes) -> list[dict[str, Any]]:
    kind, _, rest = str(line).partition(" ")
    assert kind == "TOKEN", line
    entries: list[dict[str, Any]] = json.loads(rest)
    return entries


class Load:
    """Several threads that each send one request after another, until ``stop``."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self._stopping = threading.Event()
        self.failures: list[str] = []
        requests = (self._fresh, self._fresh, self._kept, self._kept, self._streamed)
        kinds = {f"{i} {request.__name__}": request for i, request in enumerate(requests)}
        self.done = dict.fromkeys(kinds, 0)
        self._threads = [
            threading.Thread(target=self._run, args=(name, request))
            for name, request in kinds.items()
        ]
        for thread in self._threads:
            thread.start()

    def wait_for_more(self, each: int) -> None:
        """Waits until each thread has received ``each`` more answers."""
        wanted = {name: count + each for name, count in self.done.items()}
        until(
            lambda: self.failures or all(self.done[n] >= count for n, count in wanted.items()),
            120.0,
            f"{each} more answers on each thread",
        )

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(120.0)

    def _run(self, name: str, request: Callable[[httpx.Client], None]) -> None:
        with httpx.Client(timeout=120.0) as client:
            while not self._stopping.is_set():
                try:
                    request(client)
                    self.done[name] += 1
                except Exception as error:
                    self.failures.append(f"{name}: {error!r}")
                    return

    def _fresh(self, client: httpx.Client) -> None:
        """Sends a request on a new connection."""
        httpx.post(self._url, json=body(2), timeout=120.0).raise_for_status()

    def _kept(self, client: httpx.Client) -> None:
        """Sends a request on the connection of the previous request."""
        client.post(self._url, json=body(2)).raise_for_status()

    def _streamed(self, client: httpx.Client) -> None:
        with client.stream("POST", self._url, json=body(30, stream=True)) as response:
            *_, last = events(response)
        assert last == "[DONE]"


def test_a_rolling_restart_of_two_gateways_on_one_port_fails_no_request(steered: Bus) -> None:
    address = f"127.0.0.1:{free_port()}"

    def start() -> Gateway:
        door = steered.start_gateway(http=address, gateways=2)
        # An answer at this address may come from the other gateway, so the log is checked.
        until(lambda: "listening on" in door.process.log, 120.0, "a gateway that listens")
        return door

    running = [start(), start()]
    load = Load(running[0].url)
    try:
        load.wait_for_more(2)
        for old in running:
            old.process.send(signal.SIGTERM)
            load.wait_for_more(2)
            assert old.process.wait(300.0) == 0
            start()
            load.wait_for_more(2)
    finally:
        load.stop()
    assert load.failures == []
