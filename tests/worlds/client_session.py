"""A client's session without sockets. The test acts as the broker."""

from __future__ import annotations

from typing import Any

import msgspec
from tokenbus.clients.calls import Call, Ended, Event
from tokenbus.clients.lanes import Step
from tokenbus.clients.session import ClientSession
from tokenbus.protocol.errors import TokenbusError
from tokenbus.protocol.messages import Token

PATIENCE = 10.0


class Bench:
    """A session that has sent HELLO. The test acts as the broker."""

    def __init__(self, front: str = "tcp://front") -> None:
        self.now = 0.0
        self.session = ClientSession(front, PATIENCE, self.now)
        self.session.connected(self.now)

    def welcome(self, **fields: Any) -> None:
        body = {"version": 1, "encoding": "json", "session": "tok"} | fields
        self.receive("WELCOME", body)

    def receive(self, message_type: str, body: Any) -> None:
        """Passes a message of the broker to the session."""
        self.session.on_frames([message_type.encode(), msgspec.json.encode(body)], self.now)

    def tokens(self, call: Call, *tokens: int, last: bool = False, seq: int = 0) -> None:
        """Passes the next tokens of a call's sequence to the session. ``last``: whether the
        sequence ends."""
        first = call.counted.get(seq, 0)
        entries = [
            Token(token=t, stream_id=call.number, logprob=0.0, finish_reason=None, pos=first + i)
            for i, t in enumerate(tokens)
        ]
        for entry in entries:
            entry.seq = seq
        if last:
            entries[-1].finish_reason = "length"
        self.receive("TOKEN", entries)

    def submit(self, call: Call) -> Call:
        self.session.submit(call, self.now)
        return call

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.05)
            self.session.on_time(self.now)

    def sent(self) -> list[tuple[str, Any]]:
        """The session's messages since the last call."""
        taken, self.session.outgoing = self.session.outgoing, []
        return [(f[0].decode(), _decode(f[1])) for f in taken]

    def events(self, call: Call) -> list[Event]:
        """The events of a call since the last call of this method."""
        ready = [part for part in self.session.ready if not isinstance(part, Step)]
        assert len(ready) == len(self.session.ready), "this broker does not send columns"
        self.session.ready = [(c, e) for c, e in ready if c is not call]
        return [e for c, events in ready if c is call for e in events]


def _decode(body: bytes) -> Any:
    return msgspec.json.decode(body) if body[:1] in b"{[" else msgspec.msgpack.decode(body)


def ids(events: list[Event]) -> list[int | None]:
    return [e.token for e in events if isinstance(e, Token)]


def error_of(events: list[Event]) -> TokenbusError | None:
    [end] = [e for e in events if isinstance(e, Ended)]
    return end.error
