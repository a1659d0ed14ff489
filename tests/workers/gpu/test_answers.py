"""Whatever fails in a GPU worker: every request that it took ends with an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from tokenbus.clients import ServiceError
from tokenbus.workers.gpu.engine import Engine

from .in_process import InProcess, in_process

pytestmark = pytest.mark.process

BAD = [13, 13, 13]
"""The prompt with which something fails."""


@pytest.fixture(scope="module")
def shared(processes: None) -> Iterator[InProcess]:
    with in_process() as running:
        yield running


@pytest.fixture
def running(shared: InProcess) -> Iterator[InProcess]:
    """A worker that still serves after the test, and has nothing left of its requests."""
    yield shared
    assert shared.alive
    with shared.bus.client() as client:
        assert len(client.generate([5, 6], max_tokens=3, ignore_eos=True).tokens) == 3
    shared.wait_until_idle()


def fails_once(
    monkeypatch: pytest.MonkeyPatch, name: str, *, after: bool = False, requests: int = 0
) -> None:
    """Makes a method of the engine raise once, before or after its work: when it is next called
    while the engine has so many requests or more."""
    real = getattr(Engine, name)

    def failing(self: Engine, *args: Any, **kwargs: Any) -> Any:
        if len(self._live.requests) < requests:
            return real(self, *args, **kwargs)
        monkeypatch.setattr(Engine, name, real)
        if after:
            real(self, *args, **kwargs)
        raise ZeroDivisionError("by the test")

    monkeypatch.setattr(Engine, name, failing)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_generation_that_cannot_be_begun_is_answered(
    running: InProcess, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    fails_once(monkeypatch, "add", after=after)
    with running.bus.client() as client:
        stream = client.generate(BAD, max_tokens=3, timeout_s=300)
        with pytest.raises(ServiceError, match="by the test") as caught:
            stream.wait()
    assert caught.value.code == "internal"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_score_that_cannot_be_begun_is_answered(
    running: InProcess, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    fails_once(monkeypatch, "score", after=after)
    with running.bus.client() as client, pytest.raises(ServiceError, match="by the test"):
        client.score([5, 6], [7], timeout_s=300)


@pytest.mark.process
def test_a_request_that_cannot_be_begun_after_its_model_was_loaded_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with in_process(model="auto", allow=["embedded"]) as running, running.bus.client() as client:
        fails_once(monkeypatch, "add")
        with pytest.raises(ServiceError, match="by the test"):
            client.generate(BAD, model="embedded", max_tokens=3, timeout_s=300).wait()
        assert running.alive
        stream = client.generate([5, 6], model="embedded", max_tokens=3, ignore_eos=True)
        assert len(stream.tokens) == 3
        running.wait_until_idle()


@pytest.mark.parametrize("part", ["begin", "finish"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_step_that_fails_ends_its_streams_with_errors_and_the_worker_goes_on(
    running: InProcess, monkeypatch: pytest.MonkeyPatch, part: str, after: bool
) -> None:
    fails_once(monkeypatch, part, after=after, requests=3)
    with running.bus.client() as client:
        streams = [client.generate([7, n], max_tokens=900, ignore_eos=True) for n in range(3)]
        for stream in streams:
            with pytest.raises(ServiceError, match="computing a step of embedded") as caught:
                stream.wait()
            assert caught.value.code == "internal"


def test_a_cancellation_that_fails_ends_its_stream_all_the_same(
    running: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running.bus.client() as client:
        stream = client.generate([7], max_tokens=900, ignore_eos=True)
        entries = iter(stream)
        next(entries)
        fails_once(monkeypatch, "abort")
        stream.close()
        running.wait_until_idle()


def test_the_largest_top_k_keeps_all_tokens(running: InProcess) -> None:
    """Such a number does not fit into a tensor."""
    options: Any = {"max_tokens": 5, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    with running.bus.client() as client:
        wanted = client.generate([7], top_k=2**31, **options).tokens
        assert client.generate([7], top_k=2**64 - 1, **options).tokens == wanted


def test_a_controller_argument_that_cannot_be_sent_on_is_refused_by_name(
    running: InProcess,
) -> None:
    running.bus.start_other("controller")
    running.bus.wait_for_roles("controller")
    body = {
        "stream_id": 1,
        "prompt": [5],
        "controller": "regex",
        "controller_arg": {"number": 2**70},
    }
    socket: Any = zmq.Context.instance().socket(zmq.DEALER)
    with socket:
        socket.linger = 0
        socket.rcvtimeo = 60_000
        socket.connect(running.bus.front)
        socket.send_multipart([b"GENERATE", json.dumps(body).encode()])
        word, answer = socket.recv_multipart()
    error = json.loads(answer)
    assert (word, error["code"], error["path"]) == (b"ERROR", "invalid_field", "$.controller_arg")
