"""Whatever fails in a GPU worker, every request that the worker has accepted ends with an
answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tokenbus.clients import Client, RequestError, ServiceError
from tokenbus.workers.gpu.engine.engine import Engine
from tokenbus.workers.gpu.model import models
from tokenbus.workers.gpu.model.loader import load_model

from ...processes import until
from ...worlds.gpu_in_process import InProcess, in_process
from . import shapes

pytestmark = pytest.mark.process

BAD = [13, 13, 13]
"""The prompt of the request that fails."""


@pytest.fixture(scope="module")
def shared(processes: None) -> Iterator[InProcess]:
    with in_process() as running:
        yield running


@pytest.fixture
def running(shared: InProcess) -> Iterator[InProcess]:
    """A worker. Fails if, after the test, the worker does not serve or still has requests."""
    yield shared
    assert shared.alive
    with shared.bus.client() as client:
        assert len(client.generate([5, 6], max_tokens=3, ignore_eos=True).tokens()) == 3
    shared.wait_until_idle()


def fails_once(
    monkeypatch: pytest.MonkeyPatch, name: str, *, after: bool = False, requests: int = 0
) -> None:
    """Makes a method of the engine raise an exception once: at the first call while the engine has
    at least ``requests`` requests. ``after``: whether the method does its work before it raises."""
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
        assert len(stream.tokens()) == 3
        running.wait_until_idle()


@pytest.mark.parametrize("part", ["begin", "finish"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_step_that_fails_ends_its_streams_with_errors_and_the_worker_continues(
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
    """2**64 - 1 does not fit into a tensor of 64-bit integers."""
    options: Any = {"max_tokens": 5, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    with running.bus.client() as client:
        wanted = client.generate([7], top_k=2**31, **options).tokens()
        assert client.generate([7], top_k=2**64 - 1, **options).tokens() == wanted


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
    with connected(running) as socket:
        error = answer(socket, b"GENERATE", body, b"ERROR")
    assert (error["code"], error["path"]) == ("invalid_field", "$.controller_arg")


# --- while a model is loaded ----------------------------------------------------------------------


@pytest.mark.process
def test_a_stream_that_waits_for_its_model_is_picked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = threading.Event()

    def gated(*args: Any, **kwargs: Any) -> Any:
        assert loads.wait(300)
        return load_model(*args, **kwargs)

    monkeypatch.setattr(models, "load_model", gated)
    request = {"stream_id": 1, "model": "embedded", "prompt": [5], "max_tokens": 4}
    with in_process(model="auto", allow=["embedded"]) as running:
        with connected(running) as old:
            session = answer(old, b"HELLO", {}, b"WELCOME")["session"]
            answer(old, b"GENERATE", {**request, "ignore_eos": True}, b"SYSTEM")
        with connected(running) as new:
            welcome = answer(new, b"HELLO", {"session": session}, b"WELCOME")
            assert welcome["streams"] == [1]
            attached = answer(new, b"ATTACH", {"stream_id": 1, "received": 0}, b"MSG")
            assert attached["attached"] == 0
            loads.set()
            tokens: list[int] = []
            while len(tokens) < 4:
                tokens += [e["token"] for e in received(new, b"TOKEN")]
        running.wait_until_idle()


@pytest.mark.process
def test_code_of_a_checkpoint_that_exits_ends_its_own_load_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exits(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(models, "load_model", load_model)
        raise SystemExit(3)

    monkeypatch.setattr(models, "load_model", exits)
    with in_process(model="auto", allow=["embedded"]) as running, running.bus.client() as client:
        with pytest.raises(RequestError, match="SystemExit: 3") as caught:
            client.generate([5], model="embedded", timeout_s=300).wait()
        assert caught.value.code == "model_load_failed"
        stream = client.generate([5], model="embedded", max_tokens=3, ignore_eos=True)
        assert len(stream.tokens()) == 3


@pytest.mark.process
def test_models_that_were_in_use_when_another_was_loaded_are_evicted_later(
    tmp_path: Path,
) -> None:
    for shape in ("llama", "gpt2"):
        shapes.make(shape).save_pretrained(tmp_path / shape)
    names = ["embedded", str(tmp_path / "llama"), str(tmp_path / "gpt2")]
    with (
        in_process(model="auto", allow=names, max_models=1) as running,
        running.bus.client() as client,
    ):
        streams = [
            client.generate([5], model=name, max_tokens=50, ignore_eos=True) for name in names
        ]
        for stream in streams:
            assert len(stream.tokens()) == 50
        until(lambda: sum(map(len, loaded(client))) == 1, 300, "one model is left")


def loaded(client: Client) -> list[list[str]]:
    """The models that each worker has loaded."""
    return [worker.models for worker in client.status().workers]


def connected(running: InProcess) -> Any:
    """A DEALER socket that is connected to the broker's front socket."""
    socket: Any = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = 60_000
    socket.connect(running.bus.front)
    return socket


def received(socket: Any, kind: bytes) -> Any:
    """The body of the next message of this type."""
    while True:
        frames = socket.recv_multipart()
        if frames[0] == kind:
            return json.loads(frames[1])


def answer(socket: Any, kind: bytes, body: Any, answered: bytes) -> Any:
    """Sends a message; returns the body of the first answer of the type ``answered``."""
    socket.send_multipart([kind, json.dumps(body).encode()])
    return received(socket, answered)
