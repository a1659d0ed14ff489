"""Misbehaving clients at a real broker and worker: only the client that misbehaves receives an
error. Streams continue if workers vanish or stop."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from tokenbus.broker.in_flight import MAX_IN_FLIGHT_BYTES
from tokenbus.broker.server import BrokerServer
from tokenbus.broker.sockets import BindError, listen_again
from tokenbus.clients import Client
from tokenbus.clients.operator import Operator
from tokenbus.protocol.messages import CLIENT_MESSAGES

from ..counts import rounds
from ..processes import Bus, free_port, until

pytestmark = pytest.mark.process

MB = 2**20


class Raw:
    """A client whose messages the test writes itself."""

    def __init__(self, front: str, **options: int) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 300_000)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name.upper()), value)
        self.socket.connect(front)

    def send(self, message_type: bytes, body: Any) -> None:
        """Sends a message."""
        encoded = body if isinstance(body, bytes) else msgspec.json.encode(body)
        self.socket.send_multipart([message_type, encoded])

    def receive(self, message_type: bytes) -> Any:
        """The body of the next message of this type."""
        while True:
            frames = self.socket.recv_multipart()
            if frames[0] == message_type:
                return msgspec.json.decode(frames[1])

    def close(self) -> None:
        self.socket.close(0)


@pytest.fixture
def raw(bus: Bus) -> Iterator[Raw]:
    raw = Raw(bus.front)
    raw.send(b"HELLO", b"{}")
    raw.receive(b"WELCOME")
    yield raw
    raw.close()


@pytest.fixture
def neighbour(client: Client) -> Iterator[None]:
    """A stream of another client, which must not be affected."""
    wanted = client.generate("import os", max_tokens=100, ignore_eos=True).tokens()
    stream = client.generate("import os", max_tokens=100, ignore_eos=True)
    yield
    assert stream.tokens() == wanted


@pytest.mark.parametrize(
    ("message_type", "body", "code", "path"),
    [
        (b"FLY", b"{}", "unknown_type", None),
        (b"GENERATE", b'{"stream_id": 1, ', "bad_message", None),
        (b"GENERATE", b'{"stream_id": 1, "model": "\xff"}', "bad_message", None),
        (b"GENERATE", {"stream_id": "one"}, "invalid_field", "$.stream_id"),
        (b"GENERATE", {"prompt": [1]}, "invalid_field", "$"),
        (b"GENERATE", {"stream_id": 1, "prompt": [1, "a"]}, "invalid_field", "$.prompt[1]"),
        (b"GENERATE", {"stream_id": 1, "prompt": [5], "max_tokens": "x"}, "invalid_field",
         "$.max_tokens"),
        (b"GENERATE", {"stream_id": 1, "prompt": [5], "temperature": -0.5}, "invalid_field",
         "$.temperature"),
        (b"GENERATE", {"stream_id": 1, "prompt": [5], "top_p": 0}, "invalid_field", "$.top_p"),
        (b"GENERATE", {"stream_id": 1, "prompt": [5, 4096]}, "token_out_of_range", "$.prompt[1]"),
        (b"GENERATE", {"stream_id": 1, "prompt": []}, "empty_prompt", "$.prompt"),
        (b"GENERATE", {"stream_id": 1, "prompt": ""}, "empty_prompt", "$.prompt"),
        (b"GENERATE", {"stream_id": 1, "prompt": [5] * 1024}, "prompt_too_long", "$.prompt"),
        (b"GENERATE", {"stream_id": 1, "prompt": [5], "model": "gpt-9"}, "unknown_model",
         "$.model"),
        (b"GENERATE", {"stream_id": 1, "prompt": [5], "controller": "none"}, "no_worker", None),
        (b"SCORE", {"stream_id": 1, "prompt": [5], "scored": []}, "invalid_field", "$.scored"),
        (b"SCORE", {"stream_id": 1, "prompt": [5], "scored": [9999]}, "token_out_of_range",
         "$.scored[0]"),
        (b"ATTACH", {"stream_id": 9, "received": 0}, "unknown_stream", None),
        (b"REGISTER", b"{}", "unknown_type", None),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(
    raw: Raw, neighbour: None, message_type: bytes, body: Any, code: str, path: str | None
) -> None:
    raw.send(message_type, body)
    error = raw.receive(b"ERROR")
    assert (error["code"], error.get("path")) == (code, path)
    assert len(error["message"]) > 10
    # The stream has ended, but the connection continues, and the stream's id may be used again.
    raw.send(b"GENERATE", {"stream_id": 1, "prompt": [5, 6], "max_tokens": 1})
    assert raw.receive(b"TOKEN")[-1]["finish_reason"] in ("length", "stop")


def test_a_duplicate_stream_id_is_refused(raw: Raw, neighbour: None) -> None:
    request = {"stream_id": 1, "prompt": [5], "max_tokens": 400, "ignore_eos": True, "n": 16}
    raw.send(b"GENERATE", request)
    raw.send(b"GENERATE", request)
    assert raw.receive(b"ERROR")["code"] == "duplicate_stream"
    ended = 0
    while ended < 16:
        ended += sum(entry["finish_reason"] is not None for entry in raw.receive(b"TOKEN"))


def test_a_body_of_100_megabytes_is_refused(raw: Raw, neighbour: None) -> None:
    raw.send(b"GENERATE", b'{"stream_id": 1, "prompt": "' + b"a" * 100 * MB + b'"}')
    error = raw.receive(b"ERROR")
    assert error["code"] == "too_large"
    assert str(16 * MB) in error["message"]


def test_a_client_that_vanishes_frees_what_it_had(bus: Bus, client: Client) -> None:
    connections: list[Raw] = []

    def running() -> bool:
        """Begins eight streams on a new connection; returns whether eight streams run. If some have
        already ended, ``until`` calls this again."""
        connections.append(gone := Raw(bus.front))
        for stream in range(8):
            gone.send(
                b"GENERATE",
                {"stream_id": stream, "prompt": [5], "max_tokens": 1000, "ignore_eos": True},
            )
        gone.receive(b"TOKEN")
        return client.status().streams >= 8

    until(running, 120.0, "eight streams")
    for gone in connections:
        gone.close()
    until(lambda: client.status().streams == 0, 120.0, "the client's streams ended")


def test_the_streams_of_a_client_that_stops_reading_end_and_the_others_continue() -> None:
    streams = 16
    with Bus(max_pending_bytes=64 * 1024) as bus:
        bus.start_worker()
        bus.wait_for_models("embedded")
        # The receive window is small, so the broker soon notices unread messages.
        lazy = Raw(bus.front, rcvhwm=2, rcvbuf=4096)
        for stream in range(streams):
            lazy.send(
                b"GENERATE",
                {
                    "stream_id": stream,
                    "prompt": [5, stream + 1],
                    "max_tokens": 1000,
                    "ignore_eos": True,
                    # The temperature is high, because drafts of a repetitive text would put many
                    # tokens into few messages.
                    "temperature": 2.0,
                    "top_logprobs": 128,
                    "text": True,
                },
            )
        with bus.client() as other:

            def slow() -> bool:
                # ZeroMQ closes a connection that is silent for 20 s.
                lazy.send(b"CANCEL", {"stream_id": 999})
                return other.status().counters["slow_clients"] > 0

            until(slow, 300.0, "the client is slow")
            broker = psutil.Process(bus.broker.pid).memory_info().rss
            assert broker < 250 * MB
            assert len(other.generate([5], max_tokens=20, ignore_eos=True).tokens()) == 20
            errors: set[int] = set()
            while len(errors) < streams:
                errors.add((error := lazy.receive(b"ERROR"))["stream_id"])
                assert error["code"] == "slow_client"
            until(lambda: other.status().streams == 0, 120.0, "the client's streams ended")
        lazy.close()


def test_the_streams_of_workers_that_vanish_or_stop_go_on_at_others() -> None:
    with Bus(expiry_s=5) as bus:
        vanishes = bus.start_worker()
        bus.wait_for_models("embedded")
        with bus.client() as client:
            options: Any = {"max_tokens": 600, "ignore_eos": True, "retry_s": 0}
            wanted = client.generate([5], **options).tokens()
            stream = client.generate([5], **options)
            entries = iter(stream)
            next(entries)
            vanishes.kill()
            bus.workers.clear()
            stops = bus.start_worker()
            for entry in entries:
                if entry.pos > 300:
                    break
            stops.send(signal.SIGSTOP)
            bus.workers.clear()
            bus.others.append(stops)
            bus.start_worker()
            list(entries)
            assert stream.tokens() == wanted
            # The tokens that the stopped worker still sends do not reach the client.
            stops.send(signal.SIGCONT)
            until(lambda: len(client.status().workers) == 2, 120.0, "the worker registers again")
            streams = [client.generate([5], **options) for _ in range(4)]
            assert [stream.tokens() for stream in streams] == [wanted] * 4
            # A draining worker hands its stream over.
            live = None
            while live is None:
                stream = client.generate([5], **options)
                entries = iter(stream)
                next(entries)
                # No stream is found if it has already ended.
                live = next(iter(client.status(streams=True).live), None)
            assert Operator(client).drain_worker(live.worker) in (0, 1)
            list(entries)
            assert stream.tokens() == wanted
            assert [w.name for w in client.status().workers] != [live.worker]


def _random_message(rng: random.Random) -> list[bytes]:
    # A valid PAUSE would stop the streams of later tests.
    words = [*(word for word in CLIENT_MESSAGES if word != b"PAUSE"), b"", b"TOKEN", b"REGISTER"]
    words.append(rng.randbytes(4))
    bodies = [
        b"{}",
        b"",
        rng.randbytes(rng.randrange(60)),
        b'{"stream_id": 1, "received": 0, "name": "b", "n": 1}',
        b'{"stream_id": %d}' % rng.randrange(-5, 5),
        b'{"stream_id": %d, "prompt": %s}' % (rng.randrange(9), rng.randbytes(9).hex().encode()),
        msgspec.msgpack.encode({"stream_id": rng.randrange(9), "prompt": [1]}),
    ]
    extra = [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(3))]
    return [rng.choice(words), rng.choice(bodies), *extra][: rng.randrange(1, 6)]


@pytest.mark.long
def test_random_frames_leave_the_broker_up_with_memory_flat(bus: Bus) -> None:
    rng = random.Random(1)
    pool = [_random_message(rng) for _ in range(rounds(1000, 5000))]
    per_round = sum(map(len, pool))
    broker = psutil.Process(bus.broker.pid)
    sizes = []
    frames = 0
    with bus.client() as client:
        while frames < rounds(200_000, 1_000_000):
            raw = Raw(bus.front)
            for _ in range(8):
                for message in pool:
                    raw.socket.send_multipart(message)
                    while raw.socket.poll(0):
                        raw.socket.recv_multipart()
                frames += per_round
            raw.close()
            assert client.status().streams >= 0
            sizes.append(broker.memory_info().rss)
        client_tokens = client.generate([5], max_tokens=3, ignore_eos=True).tokens()
    assert len(client_tokens) == 3
    assert bus.broker.alive
    assert sizes[-1] - sizes[len(sizes) // 4] < 8 * MB, sizes


def test_only_loopback_and_ipc_are_listened_on(bus: Bus) -> None:
    for front in (f"tcp://0.0.0.0:{free_port()}", f"tcp://*:{free_port()}", "tcp://192.0.2.1:1"):
        with pytest.raises(BindError, match=r"loopback"):
            BrokerServer(front, f"ipc://{bus.folder}/other.sock")


def test_a_broker_that_cannot_listen_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "back.sock").mkdir()
    with pytest.raises(BindError, match=r"back\.sock"):
        BrokerServer(f"ipc://{tmp_path}/front.sock", f"ipc://{tmp_path}/back.sock")
    assert os.listdir(tmp_path) == ["back.sock"]


def test_a_socket_that_cannot_listen_again_leaves_no_file(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        (tmp_path / "front.sock").mkdir()
        with pytest.raises(IsADirectoryError):
            listen_again(socket, f"ipc://{tmp_path}/front.sock", 1)
    assert os.listdir(tmp_path) == ["front.sock"]


def test_the_broker_survives_its_own_restart_and_clients_reconnect() -> None:
    with Bus() as bus:
        bus.start_worker()
        bus.wait_for_models("embedded")
        with bus.client(patience_s=300) as client:
            options: Any = {"max_tokens": 600, "ignore_eos": True, "retry_s": 300}
            wanted = client.generate([5, 6], **options).tokens()
            stream = client.generate([5, 6], **options)
            entries = iter(stream)
            next(entries)
            os.kill(bus.broker.pid, signal.SIGKILL)
            bus.broker.wait()
            bus.start_broker()
            for _ in entries:
                pass
            assert stream.tokens() == wanted


@pytest.mark.usefixtures("neighbour")
def test_a_worker_takes_all_large_requests_though_they_exceed_the_bound(bus: Bus, raw: Raw) -> None:
    size = 8 * MB
    count = 2 * MAX_IN_FLIGHT_BYTES // size
    raw.socket.send_multipart([b"BUFFER", b'{"name": "b"}', bytes(size)])
    for stream in range(count):
        raw.send(b"GENERATE", {"stream_id": stream, "buffers": ["b"]})
    answers = [raw.receive(b"ERROR") for _ in range(count)]
    assert {answer["code"] for answer in answers} == {"prompt_too_long"}
    assert sorted(answer["stream_id"] for answer in answers) == list(range(count))
