"""A broker without sockets. A test passes events to the broker, and reads the messages that the
broker sends to each client and each worker."""

from __future__ import annotations

from typing import Any

import msgspec
from tokenbus.broker.core import Broker
from tokenbus.broker.outgoing import Outgoing, Side
from tokenbus.broker.settings import BrokerSettings
from tokenbus.protocol.bodies import Encoding, encode_body
from tokenbus.protocol.columns import pack_columns
from tokenbus.protocol.header import (
    Flag,
    Header,
    decode_header,
    encode_header,
    encode_token_header,
)
from tokenbus.protocol.messages import Token
from tokenbus.protocol.worker_messages import Register, Registered


class Bench:
    """A broker with a simulated clock. The test names clients and workers.

    The broker does not wait for workers of an earlier run unless ``recover_s`` is given. Clients
    without keys may raise the priority up to 100 unless ``max_priority`` is given.
    """

    def __init__(self, **settings: Any) -> None:
        self.now = 100.0
        given = {"recover_s": 0.0, "max_priority": 100, **settings}
        self.broker = Broker(BrokerSettings(**given), boot=1, now=self.now)
        self.sent: list[Outgoing] = []
        self._msgpack: set[str] = set()
        """Clients that receive msgpack."""

    def client(
        self, name: str, kind: str, body: dict[str, Any] | None = None, key: str = ""
    ) -> list[tuple[str, Any]]:
        """Sends a message from a client; returns the messages to the client since the last call."""
        frames = [kind.encode(), msgspec.json.encode(body or {})]
        if kind == "HELLO":
            self._msgpack.discard(name)
            if (body or {}).get("encodings", [""])[0] == "msgpack":
                self._msgpack.add(name)
        return self._take(self.broker.on_client(peer_of(name), frames, self.now, key), name)

    def worker(self, name: str, **fields: Any) -> Registered:
        """Registers a worker; returns the broker's answer."""
        usual = {"role": "gpu", "capacity": 2, "patterns": ["m"], "default": "m", "host": "h"}
        given: dict[str, Any] = usual | fields
        register = Register(name=name, version=1, pid=1, **given)
        answers = self.send(name, "REGISTER", register)
        [answer] = [m.frames for m in answers if m.frames[0] == b"REGISTERED"]
        return msgspec.msgpack.decode(answer[2], type=Registered)

    def send(self, name: str, kind: str, body: Any, header: Header | None = None) -> list[Outgoing]:
        """Sends a message from a worker; returns the messages with which the broker reacts."""
        frames = [kind.encode(), encode_header(*(header or Header())), encode_body(body, "msgpack")]
        out = self.broker.on_worker(peer_of(name), frames, self.now)
        self.sent += out
        return out

    def tokens(
        self, name: str, to: Header, *entries: Token, final: bool = False, columns: bool = False
    ) -> list[Any]:
        """Sends a worker's TOKEN message for the stream whose GENERATE had the header ``to``."""
        finished = [to.request] if final else []
        head = encode_token_header([to.address], finished)
        body = pack_columns(entries) if columns else list(entries)
        encoding: Encoding = "msgpack" if to.flags & Flag.MSGPACK else "json"
        frames = [b"TOKEN", head, encode_body(body, encoding)]
        return self._note(self.broker.on_worker(peer_of(name), frames, self.now))

    def pass_time(self, seconds: float) -> None:
        """Advances the clock with a tick every 0.25 s."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            self.sent += self.broker.tick(self.now)

    def to_client(self, name: str) -> list[tuple[str, Any]]:
        """The types and bodies of the messages to a client since the last call."""
        return self._take([], name)

    def to_worker(self, name: str) -> list[tuple[str, Header]]:
        """The types and headers of the messages to a worker since the last call, except HEARTBEAT
        and REGISTERED."""
        mine = [m for m in self.sent if m.side is Side.BACK and m.peer == peer_of(name)]
        self.sent = [m for m in self.sent if m not in mine]
        found = [(m.frames[0].decode(), decode_header(m.frames[1])) for m in mine]
        return [m for m in found if m[0] not in ("HEARTBEAT", "REGISTERED")]

    def _note(self, out: list[Outgoing]) -> list[Outgoing]:
        self.sent += out
        return out

    def _take(self, out: list[Outgoing], name: str) -> list[tuple[str, Any]]:
        self.sent += out
        mine = [m for m in self.sent if m.side is Side.FRONT and m.peer == peer_of(name)]
        self.sent = [m for m in self.sent if m not in mine]
        decode = msgspec.msgpack.decode if name in self._msgpack else msgspec.json.decode
        return [(m.frames[0].decode(), decode(m.frames[1])) for m in mine]


def peer_of(name: str) -> bytes:
    return b"\0" + name.encode()


def generate(stream: int, **fields: Any) -> dict[str, Any]:
    return {"stream_id": stream, "model": "m", "prompt": [1], **fields}
