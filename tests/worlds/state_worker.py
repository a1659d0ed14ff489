"""A state worker process with a real broker. The test acts as the client and the other workers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from itertools import count
from typing import Any, Self

import zmq
from msgspec import msgpack, structs
from tokenbus.protocol.header import Header, decode_header, encode_header
from tokenbus.protocol.messages import PROTOCOL_VERSION, ModelInfo, WorkerStatus
from tokenbus.protocol.packing import pack, unpack
from tokenbus.protocol.worker_messages import Register, Role, Variable, VariableAnswer

from ..processes import Bus, Process, until

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
    """A connection that is closed at the end of its test."""

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
    """A client whose messages the test sends."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus.front)
        self.send(b"HELLO", {})

    def send(self, message_type: bytes, body: Any) -> None:
        self.socket.send_multipart([message_type, json.dumps(body).encode()])


class Worker(Dealer):
    """A registered worker."""

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
        self.send(b"REGISTER", msgpack.encode(register))
        self.receive(b"REGISTERED")

    def send(self, message_type: bytes, body: bytes, request: int = 0) -> None:
        self.socket.send_multipart(pack([message_type, encode_header(request), body]))

    def receive(self, message_type: bytes) -> tuple[Header, bytes]:
        """The next message of a type."""
        while True:
            frames = unpack(self.socket.recv_multipart())
            if frames[0] == message_type:
                return decode_header(frames[1]), frames[2]


class System:
    """A broker and a state worker. The test acts as a client, a GPU worker and a controller
    worker."""

    def __init__(self) -> None:
        # The leases are long, because the test's workers do not send heartbeats. The broker does
        # not wait for workers of an earlier run.
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
        """Starts the state worker, and waits until it has registered."""
        log = self.bus.folder / "state.log"
        self.state = Process("tokenbus.workers.state", log, self.bus.environment)
        self.bus.workers.append(self.state)
        until(lambda: self.status.pid == self.state.pid, 120.0, "the state worker is registered")
        return self.state

    @property
    def status(self) -> WorkerStatus:
        """The broker's report on the state worker, or ``_NOBODY`` if none is registered."""
        with self.bus.client() as client:
            states = [worker for worker in client.status().workers if worker.role == "state"]
        return max(states, key=lambda worker: worker.pid == self.state.pid, default=_NOBODY)

    def start_request(self) -> tuple[int, int]:
        """Starts a request and its controller; returns the request's id and its stream."""
        stream = next(self.streams)
        body = {"stream_id": stream, "model": "m", "prompt": [5], "controller": "mine"}
        self.client.send(b"GENERATE", body)
        request = self.gpu.receive(b"GENERATE")[0].request
        self.gpu.send(b"START", b"", request)
        self.controller.receive(b"START")
        return request, stream

    def send(self, op: Variable) -> None:
        """Sends an operation, without waiting for its answer."""
        self.controller.send(b"VARIABLE", msgpack.encode(op), op.request)

    def answers(self, wait_s: float) -> Iterator[bytes]:
        """Yields the answers to operations, without the marks of first and repeated answers, until
        no message arrives for ``wait_s`` seconds."""
        while self.controller.socket.poll(int(1000 * wait_s)):
            frames = unpack(self.controller.socket.recv_multipart())
            if frames[0] == b"VARIABLE_ANSWER":
                answer = msgpack.decode(frames[2], type=VariableAnswer)
                yield msgpack.encode(structs.replace(answer, repeated=False, first=False))

    def do(self, *ops: Variable) -> list[bytes]:
        """Sends operations, and sends them again until all are answered. Returns their answers, in
        the order of the operations."""
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
        """Sends an operation; returns its answer."""
        return msgpack.decode(self.do(op)[0], type=VariableAnswer)
