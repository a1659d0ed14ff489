"""Failures that a restart does not end: a full disk, a clock that jumps, a deleted run directory, a
lack of descriptors, a stopped broker. Running streams continue, and end like undisturbed streams.

Each process of the system may have 64 open descriptors, and has a wall clock that the test sets.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tokenbus.clients import TokenbusError, UnavailableError, request_options

from ..processes import Bus, until
from ..workers.controller.wasm.hostile.guests import guest
from ..worlds.odd_failures import (
    BOUND_S,
    COUNTS,
    DESCRIPTORS,
    PROMPT,
    Clock,
    Reader,
    System,
    limited,
)


@pytest.fixture(scope="module")
def system(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    clock = Clock(tmp_path_factory.mktemp("clock"))
    settings: dict[str, Any] = {"heartbeat_s": 0.2, "expiry_s": 15, "session_expiry_s": 15}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in clock.environment.items():
            patch.setenv(name, value)
        bus = Bus(**settings)
    with bus:
        system = System(bus, clock)
        yield system
        system.client.close()


# --- a full disk ----------------------------------------------------------------------------------


def test_streams_wait_for_a_full_disk_under_the_state_worker(system: System) -> None:
    failures = system.load("state")["log_failures"]
    with system.undisturbed():
        size = (system.bus.folder / "state" / "log").stat().st_size
        # The kernel refuses writes beyond this size, as on a full disk.
        with limited(system.state, resource.RLIMIT_FSIZE, size + 100):
            # This stream writes variables even if the streams of ``undisturbed`` have ended.
            reader = Reader(system.stream("counts"))
            until(lambda: system.load("state")["log_failures"] > failures, BOUND_S, "a failure")
        [sequence] = reader.whole()
        assert sequence.tokens == system.reference.tokens


def test_an_upload_to_a_full_disk_is_refused_and_changes_nothing(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_options, "STORE_RETRY_S", 0.0)
    other = guest(pages=3)
    before = system.client.controllers()
    with system.undisturbed(), limited(system.controller, resource.RLIMIT_FSIZE, 100):
        for _ in range(2):
            with pytest.raises(UnavailableError) as refused:
                system.client.upload_controller(other, "other")
            assert refused.value.code == "store_failed"
            assert "free space on its disk" in refused.value.message
        with pytest.raises(UnavailableError):
            system.client.tag_controller("counts", "more")
        assert system.client.controllers() == before
    stored = system.client.upload_controller(other, "other")
    assert system.stream("other", max_tokens=5).wait()[0].finish_reason == "length"
    system.client.delete_controller(stored.module)


# --- a clock that jumps ---------------------------------------------------------------------------


def test_a_wall_clock_that_jumps_an_hour_and_back_changes_nothing(system: System) -> None:
    lost = system.client.status().counters["workers_lost"]
    for hours in (1, -1, 0):
        with system.undisturbed():
            system.clock.jump(3600 * hours)
            stored = system.client.upload_controller(guest(pages=4 + hours), "hourly")
            assert stored.uploaded == pytest.approx(time.time() + 3600 * hours, abs=BOUND_S)
            timed = system.stream(None, timeout_s=BOUND_S).wait()
            assert timed[0].tokens == system.plain.tokens
    status = system.client.status()
    assert status.counters["workers_lost"] == lost
    assert len(status.workers) == 3


# --- no descriptors -------------------------------------------------------------------------------


@contextlib.contextmanager
def connections(address: str, count: int) -> Iterator[None]:
    """For the ``with`` block, opens ``count`` connections to an address, and sends nothing on
    them."""
    place = urlsplit(address)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            opened = stack.enter_context(socket.socket())
            opened.settimeout(BOUND_S)
            opened.connect((place.hostname, place.port))
        yield


def test_a_broker_without_descriptors_serves_those_that_are_connected(system: System) -> None:
    with contextlib.ExitStack() as later, system.undisturbed():
        with connections(system.bus.front, 2 * DESCRIPTORS):
            newcomer = later.enter_context(system.bus.client(patience_s=BOUND_S))
            reader = Reader(system.stream(None, newcomer))
            assert system.stream(None).wait()[0].tokens == system.plain.tokens
        # The client that could not connect does so when the broker has free descriptors again.
        [sequence] = reader.whole()
        assert sequence.tokens == system.plain.tokens


def test_a_gateway_without_descriptors_answers_when_it_has_some_again(system: System) -> None:
    body = {"model": "embedded", "prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    url = f"{system.gateway.url}/v1/completions"
    first = httpx.post(url, json=body, timeout=BOUND_S).json()
    place, content = urlsplit(url), json.dumps(body).encode()
    kept = HTTPConnection(str(place.hostname), place.port, timeout=BOUND_S)
    with contextlib.closing(kept), system.undisturbed():
        # The gateway closes a connection without a request after 5 s. So this request has begun.
        kept.putrequest("POST", place.path)
        kept.putheader("content-type", "application/json")
        kept.putheader("content-length", str(len(content)))
        kept.endheaders(content[:1])
        with connections(system.gateway.url, 2 * DESCRIPTORS):
            kept.send(content[1:])
            assert json.load(kept.getresponse())["choices"] == first["choices"]
    until(lambda: system.gateway.answers, BOUND_S, "a gateway that answers")
    assert httpx.post(url, json=body, timeout=BOUND_S).json()["choices"] == first["choices"]


def test_workers_without_descriptors_go_on(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        for worker in (system.gpu, system.state, system.controller):
            stack.enter_context(limited(worker, resource.RLIMIT_NOFILE, 3))
        with system.undisturbed(), monkeypatch.context() as at_once:
            at_once.setattr(request_options, "STORE_RETRY_S", 0.0)
            with pytest.raises(TokenbusError):
                system.client.upload_controller(guest(pages=9), "other")
        # A stream that begins now works too: without shared memory, masks are sent in messages.
        [sequence] = system.stream("counts").wait()
        assert sequence.tokens == system.reference.tokens
    system.client.upload_controller(guest(pages=9), "other")


# --- a broker that stands still -------------------------------------------------------------------


def test_a_broker_that_stands_still_loses_nothing(system: System) -> None:
    with system.undisturbed():
        system.bus.broker.send(signal.SIGSTOP)
        try:
            # The broker is stopped for longer than any lease lasts.
            stopped = time.monotonic()
            until(lambda: time.monotonic() - stopped > 20.0, BOUND_S, "20 s")
        finally:
            system.bus.broker.send(signal.SIGCONT)
    assert system.stream("counts").wait()[0].tokens == system.reference.tokens


# --- a run directory that is deleted --------------------------------------------------------------


def test_a_deleted_run_directory_is_made_again(system: System) -> None:
    folder = system.bus.folder
    with system.undisturbed():
        # The folder is renamed before it is deleted, because the processes create missing files
        # again.
        gone = folder.with_name(folder.name + "-gone")
        folder.rename(gone)
        shutil.rmtree(gone)
        until((folder / "back.sock").exists, BOUND_S, "a socket for workers")
        until((folder / "state" / "log").exists, BOUND_S, "a log of variables")
        # The new log has the variables of the running streams.
        system.state.kill()
        system.state = system.bus.start_other("state")
        until(
            lambda: system.state.pid in [w.pid for w in system.client.status().workers],
            BOUND_S,
            "another state worker",
        )
    # The modules of the deleted folder are gone, and can be uploaded again.
    system.client.upload_controller(COUNTS, "counts")
    [sequence] = system.stream("counts").wait()
    assert sequence.tokens == system.reference.tokens
