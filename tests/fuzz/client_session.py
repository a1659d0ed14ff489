"""The client's session as a fuzz target: a broker sends any messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
from tokenbus.clients.calls import Call, Ended
from tokenbus.clients.lanes import Step, hand_out
from tokenbus.clients.request_options import buffer_call, generate_call, status_call
from tokenbus.clients.session import ClientSession
from tokenbus.protocol.columns import pack_columns
from tokenbus.protocol.messages import SERVER_MESSAGES, Token

from .draws import Draws
from .target import Target

FROM_BROKER = list(SERVER_MESSAGES)
NUMBERS: list[Any] = [0, 1, 2.0, 0.5, -1, 1e300, float("nan"), float("inf"), None, 2**63, "1"]
CODES = ["worker_lost", "queue_full", "internal", "unknown_stream", "too_large", "none", ""]
MAX_EVENTS = 60
MAX_SENT = 200
"""Maximum number of messages that the client sends for one event."""


class Reader:
    """Reads the events of one call, and counts its ends."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.ends = 0
        call.take = self.take

    def take(self, events: Any) -> None:
        """Receives events of the call, in order."""
        for event in events:
            assert not self.ends, f"{event} after the end of the call"
            self.ends += isinstance(event, Ended)


class Play:
    """A session, with a clock."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.now = 0.0
        self.session = ClientSession("tcp://front", 10.0, self.now)
        self.session.connected(self.now)
        self.readers: list[Reader] = []
        self.connected = True

    def run(self) -> None:
        """Plays events until the input ends, and then ends the session. Every call must end,
        whatever the broker has sent."""
        for _ in range(MAX_EVENTS):
            if not self.draws.left:
                break
            self.draws.pick(EVENTS)(self)
            self._settle()
        self.session.bye()
        self._settle()
        for reader in self.readers:
            assert reader.ends == 1 or reader.call.ended

    # --- events ---------------------------------------------------------------------------------

    def submit(self) -> None:
        """The client begins a call."""
        draws = self.draws
        match draws.number() % 4:
            case 0:
                call = status_call(30.0)
            case 1:
                call = buffer_call("a", [1, 2], 30.0)
            case _:
                call = generate_call([1], {"timeout_s": 3.0} if draws.number() & 1 else {})
        call.retry_s = draws.pick([0.0, 5.0])
        call.stall_s = draws.pick([None, 2.0])
        self.readers.append(Reader(call))
        self.session.submit(call, self.now)

    def cancel(self) -> None:
        """The reader of a call is closed."""
        if self.readers:
            self.session.cancel(self.draws.pick(self.readers).call)

    def raw(self) -> None:
        """The broker sends arbitrary frames."""
        self._hear([self.draws.pick(FROM_BROKER), *self.draws.frames(3)])

    def known(self) -> None:
        """The broker sends a message whose fields have the right names and often the right
        types."""
        draws = self.draws
        given = draws.number()
        body: dict[str, Any] = {"stream_id": self._stream(), "message": "m", "event": "queued"}
        if given & 1:
            body |= {"version": 1, "encoding": draws.pick(["json", "msgpack", "x"])}
            body |= {"session": "token", "resumed": bool(given & 2)}
        if given & 4:
            body |= {"streams": [self._stream(), self._stream()]}
        if given & 8:
            body |= {"ping_s": draws.pick(NUMBERS), "expiry_s": draws.pick(NUMBERS)}
        if given & 16:
            body |= {"attached": draws.pick(NUMBERS), "n": draws.number(), "session": bool(given)}
        if given & 32:
            body |= {"code": draws.pick(CODES), "retry_after_s": draws.pick(NUMBERS)}
        if given & 64:
            body |= {"type": draws.pick(["BUFFER", "HELLO", "GENERATE", ""])}
            del body["stream_id"]
        self._hear([draws.pick(FROM_BROKER), msgspec.msgpack.encode(body)])

    def welcome(self) -> None:
        """The broker answers HELLO correctly."""
        body = {"version": 1, "encoding": "msgpack", "session": "t"}
        streams = [self._stream() for _ in range(self.draws.number() % 4)]
        resumed = {"resumed": True, "streams": streams} if streams else {}
        self._hear([b"WELCOME", msgspec.msgpack.encode(body | resumed)])

    def tokens(self) -> None:
        """The broker sends entries of existing or unknown streams, as a list or in columns."""
        draws = self.draws
        bodies = []
        for _ in range(1 + draws.number() % 2):
            entries = [self._entry() for _ in range(draws.number() % 6)]
            form = draws.number() % 4
            body: Any = pack_columns(entries, texts=form == 1) if form & 1 else entries
            bodies.append(msgspec.msgpack.encode(body))
        self._hear([b"TOKEN", *bodies])

    def connect(self) -> None:
        """The connection is lost, or a new one was opened."""
        if self.draws.number() & 1:
            self.session.disconnected(self.now)
        else:
            self.session.connected(self.now)

    def time(self) -> None:
        """Time passes."""
        self.now += self.draws.pick([0.1, 0.3, 2.0, 7.0, 40.0])
        self.session.on_time(self.now)
        self.session.lost(self.now)
        wait_s = self.session.wait_s(self.now)
        assert math.isfinite(wait_s)
        assert wait_s > 0, "the connection's thread would never wait"

    # --- inside ---------------------------------------------------------------------------------

    def _stream(self) -> int:
        readers = self.readers
        which = self.draws.number() % (len(readers) + 1)
        return readers[which].call.number if which < len(readers) else 77

    def _entry(self) -> Token:
        kind = self.draws.number()
        token = kind % 5
        entry = Token(
            token=None if kind & 64 else token,
            stream_id=self._stream(),
            logprob=None if kind & 64 else -1.0,
            finish_reason="stop" if kind & 32 else None,
            top_logprobs={token: -1.0},
            pos=kind % 3,
            seq=self.draws.pick([0, 0, 1, 2**31, 2**40]),
            live=kind >> 7,
            backtrack=self.draws.pick([0, 0, 0, 1, -1, 2**40]),
        )
        if kind & 16:
            entry.text = self.draws.pick(["", "a", "\ufffd"])
        return entry

    def _hear(self, frames: list[bytes]) -> None:
        self.session.on_frames(frames, self.now)

    def _settle(self) -> None:
        session = self.session
        assert len(session.outgoing) < MAX_SENT
        session.outgoing.clear()
        ready, session.ready = session.ready, []
        for part in ready:
            if isinstance(part, Step):
                hand_out([part])
            else:
                call, events = part
                call.take(events)


EVENTS: list[Callable[[Play], None]] = [
    Play.submit,
    Play.tokens,
    Play.known,
    Play.raw,
    Play.welcome,
    Play.time,
    Play.connect,
    Play.cancel,
    Play.submit,
    Play.tokens,
]


def run(data: bytes) -> None:
    """Plays a sequence of events at a client."""
    Play(Draws(data)).run()


def corpus() -> Iterator[bytes]:
    """Random sequences of events."""
    draw = Random(4)
    for size in (8, 40, 200, 800):
        for _ in range(12):
            yield draw.randbytes(size)


TARGET = Target(run, corpus, tuple(FROM_BROKER), max_bytes=1024)
