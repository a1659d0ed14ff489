"""The state worker as a process, over a real broker; the workers around it speak by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Self

import pytest
import zmq
from msgspec import msgpack, structs
from tokenbus.protocol.header import Header, decode_header, encode_header, encode_token_header
from tokenbus.protocol.messages import PROTOCOL_VERSION, ModelInfo, WorkerStatus
from tokenbus.protocol.packing import pack, unpack
from tokenbus.protocol.worker_messages import Register, Role, Variable, VariableAnswer

from ...processes import Bus, Process, clean_environment, until

pytestmark = pytest.mark.process

AGAIN_S = 0.3

_NOBODY = WorkerStatus(
    name="",
    role="state",
    pid=0,
    host="",
    state="",
    models=[],
    requests=0,
    capacity=0,
    heartbeat_age_s=0.0,
)


class Dealer:
    """A connection that closes with its test."""

    def __init__(self, endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 300_000)
        self.socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(0)


class Client(Dealer):
    """A client that starts and cancels streams with a controller."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus.front)
        self.say(b"HELLO", {})

    def say(self, word: bytes, body: Any) -> None:
        self.socket.send_multipart([word, json.dumps(body).encode()])


class Worker(Dealer):
    """A worker that has registered."""

    def __init__(self, bus: Bus, role: Role, **more: Any) -> None:
        super().__init__(f"ipc://{bus.folder}/back.sock")
        register = Register(
            name=f"{role} by hand",
            role=role,
            version=PROTOCOL_VERSION,
            pid=os.getpid(),
            host="here",
            capacity=100,
            **more,
        )
        self.say(b"REGISTER", msgpack.encode(register))
        self.hear(b"REGISTERED")

    def say(self, word: bytes, body: bytes, request: int = 0) -> None:
        self.socket.send_multipart(pack([word, encode_header(request), body]))

    def hear(self, word: bytes) -> tuple[Header, bytes]:
        """The next message of that type."""
        while True:
            frames = unpack(self.socket.recv_multipart())
            if frames[0] == word:
                return decode_header(frames[1]), frames[2]


class System:
    """A broker, a state worker, and by hand: a client, a GPU worker and a controller worker."""

    def __init__(self) -> None:
        # The workers by hand send no heartbeats.
        # This broker has no earlier run whose variables are to be kept for a while.
        self.bus = Bus(expiry_s=600, recover_s=0.1)
        self.state = self.start_state_worker()
        self.client = Client(self.bus)
        model = ModelInfo(
            name="m", vocab_size=9, context_length=9, eos_token_ids=[0], fingerprint="f"
        )
        self.gpu = Worker(self.bus, "gpu", models=[model], default="m")
        self.controller = Worker(self.bus, "controller", patterns=["mine"])
        self.streams = count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for dealer in (self.client, self.gpu, self.controller):
            dealer.__exit__()
        self.bus.__exit__()

    def start_state_worker(self) -> Process:
        """Starts it, again after it was killed, and waits until it has registered."""
        log = self.bus.folder / "state.log"
        self.state = Process("tokenbus.workers.state", log, self.bus.environment)
        self.bus.workers.append(self.state)
        until(lambda: self.status.pid == self.state.pid, 120.0, "the state worker is there")
        return self.state

    @property
    def status(self) -> WorkerStatus:
        """The broker's report on the state worker."""
        with self.bus.client() as client:
            states = [worker for worker in client.status().workers if worker.role == "state"]
        return max(states, key=lambda worker: worker.pid == self.state.pid, default=_NOBODY)

    def start_request(self) -> tuple[int, int]:
        """A request whose controller has started: its id, and its stream."""
        stream = next(self.streams)
        body = {"stream_id": stream, "model": "m", "prompt": [5], "controller": "mine"}
        self.client.say(b"GENERATE", body)
        request = self.gpu.hear(b"GENERATE")[0].request
        self.gpu.say(b"START", b"", request)
        self.controller.hear(b"START")
        return request, stream

    def send(self, op: Variable) -> None:
        """An operation, unanswered."""
        self.controller.say(b"VARIABLE", msgpack.encode(op), op.request)

    def answers(self, wait_s: float) -> Iterator[bytes]:
        """The answers that come, as they are the first time, until none came for ``wait_s``."""
        while self.controller.socket.poll(int(1000 * wait_s)):
            frames = unpack(self.controller.socket.recv_multipart())
            if frames[0] == b"VARIABLE_ANSWER":
                answer = msgpack.decode(frames[2], type=VariableAnswer)
                yield msgpack.encode(structs.replace(answer, repeated=False))

    def do(self, *ops: Variable) -> list[bytes]:
        """The answers to operations, as they come; what is not answered is sent again."""
        waiting = {(op.request, op.lineage, op.count): op for op in ops}
        answered: dict[tuple[int, int, int], bytes] = {}
        deadline = time.monotonic() + 300.0
        while waiting:
            assert time.monotonic() < deadline
            for op in waiting.values():
                self.send(op)
            for body in self.answers(AGAIN_S):
                answer = msgpack.decode(body, type=VariableAnswer)
                name = answer.request, answer.lineage, answer.count
                if waiting.pop(name, None) is not None:
                    answered[name] = body
                if not waiting:
                    break
        return [answered[op.request, op.lineage, op.count] for op in ops]

    def one(self, op: Variable) -> VariableAnswer:
        """The answer to an operation."""
        return msgpack.decode(self.do(op)[0], type=VariableAnswer)


@pytest.fixture
def system(processes: None) -> Iterator[System]:
    with System() as system:
        yield system


def counted(body: bytes) -> int:
    """The count of the operation that is answered."""
    return int(msgpack.decode(body, type=VariableAnswer).count)


def test_no_acknowledged_write_is_lost_when_the_worker_is_killed_again_and_again(
    system: System,
) -> None:
    request, _ = system.start_request()
    ops: list[Variable] = []
    answers: list[bytes] = []
    for first in (1, 1001, 2001):
        new = [
            Variable(request, 0, n, "append", "x", b"%d," % n) for n in range(first, first + 1000)
        ]
        for op in new:
            system.send(op)
        seen: dict[int, bytes] = {}
        for body in system.answers(5.0):
            seen[counted(body)] = body
            if len(seen) == 50:
                break
        system.state.kill()
        seen |= {counted(body): body for body in system.answers(0.1)}
        system.start_state_worker()
        again = system.do(*new)
        assert [seen.get(counted(body), body) for body in again] == again
        ops += new
        answers += again
    assert system.do(*ops) == answers
    now = system.one(Variable(request, 1, 1, "get", "x"))
    assert now.version == 3000
    # Each is there once, whenever it was sent and however often.
    written = (now.value or b"").removesuffix(b",").split(b",")
    assert sorted(map(int, written)) == list(range(1, 3001))


def test_a_request_that_is_over_leaves_nothing(system: System) -> None:
    (request, stream), (other, _) = system.start_request(), system.start_request()
    for i in range(10):
        assert system.one(Variable(request, 0, i, "set", f"x{i}", b"a")).written
    assert system.one(Variable(other, 0, 0, "set", "x0", b"b")).written
    until(lambda: system.status.load.get("variables") == 11, 120.0, "the heartbeat tells")
    assert system.status.load["requests"] == 2
    # What is not answered at once is asked again, and counted again.
    assert system.status.load["ops"] >= 11
    system.client.say(b"CANCEL", {"stream_id": stream})
    system.gpu.hear(b"CANCEL")
    end = encode_token_header([], [request])
    system.gpu.socket.send_multipart(pack([b"TOKEN", end]))
    until(lambda: system.status.load.get("variables") == 1, 120.0, "its variables are gone")
    assert "has ended" in str(system.one(Variable(request, 0, 50, "get", "x0")).error)
    assert system.one(Variable(other, 0, 1, "get", "x0")).value == b"b"


def test_a_request_that_nobody_knows_any_more_is_dropped_when_the_worker_registers(
    system: System,
) -> None:
    request, _ = system.start_request()
    assert system.one(Variable(request, 0, 1, "set", "x", b"a")).written
    invented = 7
    assert system.one(Variable(invented, 0, 1, "set", "x", b"a")).written
    system.state.kill()
    system.start_state_worker()
    assert "has ended" in str(system.one(Variable(invented, 0, 2, "get", "x")).error)
    assert system.one(Variable(request, 0, 2, "get", "x")).value == b"a"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({4: b"\xff\xfe"}, "not well-formed"),
        ({3: "delete"}, "not well-formed"),
        ({5: "text"}, "not well-formed"),
        ({0: 12345}, "has request 12345 in its body but request"),
    ],
)
def test_an_operation_that_is_wrong_is_answered_with_an_error(
    system: System, change: dict[int, Any], text: str
) -> None:
    request, _ = system.start_request()
    fields: list[Any] = [request, 0, 1, "set", "name", b"value", None]
    for index, value in change.items():
        fields[index] = value
    body = msgpack.encode(fields)
    if isinstance(fields[4], bytes):
        # A name is a str on the wire: these bytes stand where its characters would.
        body = body.replace(b"\xc4\x02\xff\xfe", b"\xa2\xff\xfe")
    system.controller.say(b"VARIABLE", body, request)
    header, answer = system.controller.hear(b"VARIABLE_ANSWER")
    assert header.request == request
    assert text in str(msgpack.decode(answer, type=VariableAnswer).error)
    system.controller.say(b"VARIABLE", b"no msgpack at all", request)
    assert system.one(Variable(request, 0, 2, "get", "name")).version == 0


def test_a_second_worker_of_the_folder_ends_with_a_clear_message(system: System) -> None:
    log = system.bus.folder / "second.log"
    second = Process("tokenbus.workers.state", log, system.bus.environment)
    assert second.wait() == 2
    assert f"is in use by another state worker, process {system.state.pid};" in second.log


def test_a_second_worker_that_stands_by_takes_over_when_the_first_is_killed(
    system: System,
) -> None:
    request, _ = system.start_request()
    assert system.one(Variable(request, 0, 1, "set", "x", b"a")).written
    log = system.bus.folder / "standby.log"
    with log.open("wb") as output:
        second = subprocess.Popen(
            [sys.executable, "-m", "tokenbus.workers.state", "--standby"],
            cwd=system.bus.folder,
            env=system.bus.environment,
            stdout=output,
            stderr=output,
        )
    try:
        until(lambda: "standing by" in log.read_text(), 120.0, "the second one stands by")
        system.state.kill()
        assert system.one(Variable(request, 0, 2, "append", "x", b"b")).written
        assert system.one(Variable(request, 0, 3, "get", "x")).value == b"ab"
        assert system.status.pid == second.pid
        second.terminate()
        assert second.wait(300.0) == 0
    finally:
        second.kill()
        second.wait()
        system.start_state_worker()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_and_the_next_one_goes_on(
    system: System, number: signal.Signals
) -> None:
    request, _ = system.start_request()
    assert system.one(Variable(request, 0, 1, "set", "x", b"a")).written
    system.state.send(number)
    assert system.state.wait() == 0
    system.start_state_worker()
    assert system.one(Variable(request, 0, 2, "get", "x")).value == b"a"


@pytest.mark.process
def test_a_wrong_setting_is_refused_by_name(tmp_path: Path) -> None:
    environment = clean_environment(log_level="loud")
    process = Process("tokenbus.workers.state", tmp_path / "log", environment)
    assert process.wait() == 2
    assert "tokenbus state worker: TOKENBUS_LOG_LEVEL" in process.log
