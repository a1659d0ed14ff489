"""A gateway gives its address to the next gateway, and finishes its streams in the meantime."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import psutil
import pytest
from websockets.exceptions import ConnectionClosed

from ...processes import Bus, Gateway, Process, free_port, until
from ...websocket import connect
from .stepped import Stepped, SteppedWorker, stepped_worker

pytestmark = pytest.mark.process

DRAIN_S = 0.2
"""Drain time in seconds. It is shorter than the streams here and than the start of a gateway."""
BODY = {"model": "stepped", "prompt": [5], "max_tokens": 100, "stream": True}


@pytest.fixture(scope="module")
def stepped(processes: None) -> Iterator[tuple[Bus, SteppedWorker]]:
    with Bus() as bus, stepped_worker(f"ipc://{bus.folder}/back.sock", 100) as worker:
        bus.wait_for_models("stepped")
        yield bus, worker


@pytest.fixture
def kept() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(bus: Bus, kept: ExitStack, http: str) -> tuple[Gateway, psutil.Process]:
    """Starts a gateway with ``--lingers``. Returns it and its child process, which serves."""
    log = bus.folder / f"lingering-{free_port()}.log"
    environment = bus.environment | {"TOKENBUS_HTTP": http, "TOKENBUS_DRAIN_S": str(DRAIN_S)}
    process = Process("tokenbus.clients.gateway", log, environment, arguments=["--lingers"])
    kept.callback(process.kill)
    gateway = Gateway(process, f"http://{http}")
    until(lambda: gateway.answers, 300.0, "a gateway that answers")
    [serving] = psutil.Process(process.pid).children()
    kept.callback(end, serving)
    return gateway, serving


def end(process: psutil.Process) -> None:
    if process.is_running():
        process.kill()


@contextmanager
def stream(door: Gateway, worker: SteppedWorker) -> Iterator[tuple[Stepped, Iterator[str]]]:
    """Starts a stream. Yields the request at the worker, and the events after the first token."""

    def begin() -> Stepped:
        running = worker.begun()
        running.step()
        return running

    url = f"{door.url}/v1/completions"
    with ThreadPoolExecutor(1) as thread:
        begun = thread.submit(begin)
        with httpx.stream("POST", url, json=BODY, timeout=120.0) as response:
            events = (line for line in response.iter_lines() if line)
            assert text([next(events)]) == "x"
            yield begun.result(), events


def text(events: Iterable[str]) -> str:
    chunks = [json.loads(e.removeprefix("data: ")) for e in events if e != "data: [DONE]"]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_a_stream_goes_on_while_the_next_gateway_serves_at_the_same_address(
    stepped: tuple[Bus, SteppedWorker], kept: ExitStack
) -> None:
    bus, worker = stepped
    http = f"127.0.0.1:{free_port()}"
    old, serving = start(bus, kept, http)
    with stream(old, worker) as (running, events), connect(old.ws_url) as idle:
        idle.send('STATUS {"stream_id": 1}')
        idle.recv(120)
        old.process.send(signal.SIGUSR2)
        assert old.process.wait(300.0) == 0
        with pytest.raises(ConnectionClosed):
            idle.recv(120)
        new, _ = start(bus, kept, http)
        with stream(new, worker) as (second, others):
            running.step(3)
            second.step(2, "length")
            assert list(others)[-1] == "data: [DONE]"
        running.step(2, "length")
        rest = list(events)
        assert text(rest) == "xxxxx"
        assert rest[-1] == "data: [DONE]"
    serving.wait(300.0)
    assert new.answers


def test_on_sigterm_both_of_its_processes_end(
    stepped: tuple[Bus, SteppedWorker], kept: ExitStack
) -> None:
    bus, worker = stepped
    door, serving = start(bus, kept, f"127.0.0.1:{free_port()}")
    with stream(door, worker) as (_, events):
        door.process.send(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            list(events)
    assert door.process.wait(300.0) == 0
    assert not serving.is_running()


def test_a_gateway_that_is_killed_leaves_no_process_behind(
    stepped: tuple[Bus, SteppedWorker], kept: ExitStack
) -> None:
    bus, _ = stepped
    door, serving = start(bus, kept, f"127.0.0.1:{free_port()}")
    door.process.send(signal.SIGKILL)
    serving.wait(300.0)
