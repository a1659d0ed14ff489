"""The broker's core as a fuzz target: clients and workers send any messages, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
from tokenbus.broker.core import Broker
from tokenbus.broker.outgoing import Outgoing, Side
from tokenbus.broker.settings import BrokerSettings
from tokenbus.protocol.header import encode_header, encode_token_header
from tokenbus.protocol.messages import CLIENT_MESSAGES
from tokenbus.protocol.packing import pack
from tokenbus.protocol.worker_messages import TO_BROKER

from ..broker.invariants import check, check_empty
from .draws import Draws
from .target import Target

SETTINGS = BrokerSettings(
    max_sessions=4,
    max_queued=6,
    max_queued_bytes=2000,
    max_streams=4,
    max_buffer_bytes=64,
    max_total_buffer_bytes=100,
    max_buffers=3,
)
CLIENTS = [b"\0c0", b"\0c1", b"\0c2", b"own id"]
WORKERS = [b"\0w0", b"\0w1", b"\0w2"]
FROM_CLIENT = list(CLIENT_MESSAGES)
FROM_WORKER = list(TO_BROKER)
NUMBERS: list[Any] = [0, 1, 2, 3, -1, 2**63, 0.5, None, "1", float("nan"), 1e300]
MAX_EVENTS = 60


class Play:
    """A broker, and the ids and tokens that a client or a worker may know from earlier messages."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.now = 0.0
        self.broker = Broker(SETTINGS, boot=0, now=self.now)
        self.sent: list[Outgoing] = []

    def run(self) -> None:
        """Plays events until the input ends, and then closes all connections."""
        for _ in range(MAX_EVENTS):
            if not self.draws.left:
                break
            self.draws.pick(EVENTS)(self)
            check(self.broker)
        for side, peers in ((Side.FRONT, CLIENTS), (Side.BACK, WORKERS)):
            for peer in peers:
                self._out(self.broker.on_gone(side, peer, self.now))
        for _ in range(100):
            self.now += 2.0
            self._out(self.broker.tick(self.now))
            table = self.broker.state.sessions
            sessions = any(session.streams or session.log.ends for session in table)
            if not self.broker.state.requests and not sessions:
                break
        check(self.broker)
        check_empty(self.broker)

    # --- events ---------------------------------------------------------------------------------

    def client_raw(self) -> None:
        """A client sends arbitrary frames."""
        frames = [self.draws.pick(FROM_CLIENT), *self.draws.frames(3)]
        self._out(self.broker.on_client(self.draws.pick(CLIENTS), frames, self.now))

    def client_known(self) -> None:
        """A client sends a message whose fields have the right names and often the right types."""
        draws = self.draws
        message_type = draws.pick(FROM_CLIENT)
        body: dict[str, Any] = {"stream_id": draws.number() % 6}
        given = draws.number()
        if given & 1:
            body |= {"model": draws.pick(["m", "", "other"]), "name": draws.pick(["a", "b", ""])}
        if given & 2:
            body |= {"timeout_s": draws.pick(NUMBERS), "priority": draws.pick(NUMBERS)}
        if given & 4:
            body |= {"controller": draws.pick(["regex", "named", ""]), "tokens": [1, 2, 3]}
        if given & 8:
            body |= {"buffers": draws.pick([["a"], ["a", "b"], ["none"]]), "received": given}
        if given & 16:
            body |= {"session": self._token(), "keep": True, "metrics": True, "streams": True}
        if given & 32:
            body |= {"encodings": ["msgpack"]}
            body |= {"capabilities": ["ping", "ack", "bodies", "columns", "text_columns"]}
        if given & 64:
            body |= {"reason": "timeout", "module": "named", "tags": ["t"], "n": draws.number(2)}
            body |= {"ack": given % 5}
        attached = [draws.take(draws.number() % 20)] if given & 128 else []
        encode = draws.pick([msgspec.json.encode, msgspec.msgpack.encode])
        frames = [message_type, encode(body), *attached]
        self._out(self.broker.on_clients([(draws.pick(CLIENTS), frames)], self.now))

    def worker_raw(self) -> None:
        """A worker sends arbitrary frames, packed or not."""
        frames = self.draws.frames(4)
        self._out(self.broker.on_workers([(self.draws.pick(WORKERS), frames)], self.now))

    def register(self) -> None:
        """A worker registers: for the first time, again, or with the name of another worker."""
        draws = self.draws
        role = draws.pick(["gpu", "controller", "state", "none"])
        body = {
            "name": draws.pick(["a", "b", "c"]),
            "role": role,
            "version": 1 + (draws.number() == 9),
            "pid": 1,
            "host": "h",
            "capacity": draws.pick([1, 2, 9, 0]),
            "patterns": draws.pick([["m"], ["*"], ["regex"], [], ["["]]),
            "default": draws.pick(["m", ""]),
            "live": [{"request": self._request(), "session": self._session(), "stream_id": 1}],
        }
        self._work(b"REGISTER", encode_header(), msgspec.msgpack.encode(body))

    def worker_known(self) -> None:
        """A worker sends a message about an existing or earlier request or worker."""
        draws = self.draws
        message_type = draws.pick(FROM_WORKER)
        address = draws.pick([self._session(), self._worker(), 0, 2**64 - 1])
        flags = draws.pick([0, 1, 2, 3, 2**32 - 1])
        body = {
            "stream_id": draws.number() % 6,
            "name": "saved",
            "step_age_s": draws.pick(NUMBERS),
            "reason": "r",
            "load": {"running": draws.pick(NUMBERS)},
            "code": "internal",
            "message": "m",
            "requests": draws.pick([1, [1, 2], "x"]),
        }
        frames = [draws.take(draws.number() % 9) for _ in range(draws.number() % 3)]
        header = encode_header(self._request(), address, flags)
        self._work(message_type, header, msgspec.msgpack.encode(body), *frames)

    def tokens(self) -> None:
        """A worker sends the tokens of a step, for its own requests or for others."""
        draws = self.draws
        sessions = [self._session() for _ in range(draws.number() % 4)]
        ended = [self._request() for _ in range(draws.number() % 3)]
        bodies = [draws.take(draws.number() % 30) for _ in sessions]
        if draws.number() == 7:
            bodies.append(b"[]")
        self._work(b"TOKEN", encode_token_header(sessions, ended), *bodies)

    def gone(self) -> None:
        """A connection closes."""
        side, peers = self.draws.pick([(Side.FRONT, CLIENTS), (Side.BACK, WORKERS)])
        self._out(self.broker.on_gone(side, self.draws.pick(peers), self.now))

    def time(self) -> None:
        """Time passes."""
        self.now += self.draws.pick([0.25, 1.0, 5.5, 70.0, 4000.0])
        self._out(self.broker.tick(self.now))

    def full(self) -> None:
        """A message could not be sent, because the queue for its peer is full."""
        if self.sent:
            self._out(self.broker.on_full(self.sent[-1 - self.draws.number() % len(self.sent)]))

    def end(self) -> None:
        """The broker drains, or stops."""
        if self.draws.number() == 1:
            self._out(self.broker.drain())
        elif self.draws.number() == 2:
            self._out(self.broker.stop())

    # --- inside ---------------------------------------------------------------------------------

    def _work(self, *frames: bytes) -> None:
        peer = self.draws.pick(WORKERS)
        if self.draws.number() & 1:
            self._out(self.broker.on_worker(peer, list(frames), self.now))
        else:
            self._out(self.broker.on_workers([(peer, pack(frames))], self.now))

    def _out(self, messages: list[Outgoing]) -> None:
        for message in messages:
            assert message.frames
            assert all(isinstance(frame, bytes) for frame in message.frames)
        assert len(messages) < 500, f"one event led to {len(messages)} messages"
        self.sent = (self.sent + messages)[-50:]

    def _token(self) -> str:
        tokens = [session.token for session in self.broker.state.sessions]
        return self.draws.pick([*filter(None, tokens), "none"][:200])

    def _session(self) -> int:
        return self.draws.pick([*self.broker.state.sessions.by_id, 3][:200])

    def _request(self) -> int:
        return self.draws.pick([*self.broker.state.requests, 0, 5][:200])

    def _worker(self) -> int:
        return self.draws.pick([*self.broker.state.workers, 7][:200])


EVENTS: list[Callable[[Play], None]] = [
    Play.client_known,
    Play.client_known,
    Play.client_raw,
    Play.worker_raw,
    Play.register,
    Play.worker_known,
    Play.tokens,
    Play.gone,
    Play.time,
    Play.full,
    Play.end,
    Play.client_known,
]


def run(data: bytes) -> None:
    """Plays a sequence of events at a broker."""
    Play(Draws(data)).run()


def corpus() -> Iterator[bytes]:
    """Random sequences of events."""
    draw = Random(3)
    for size in (8, 40, 200, 800):
        for _ in range(12):
            yield draw.randbytes(size)


TARGET = Target(run, corpus, tuple(FROM_CLIENT), max_bytes=1024)
