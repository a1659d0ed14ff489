"""Compares the logs of sessions with a plain list of entries for each request."""

from __future__ import annotations

import random

from tokenbus.broker.recent import Recent
from tokenbus.broker.stream_log import StreamLog
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.columns import pack_columns, plain_entry
from tokenbus.protocol.header import encode_token_header
from tokenbus.protocol.messages import Token
from tokenbus.protocol.packing import pack

STREAMS = 5


class World:
    """Some sessions, their routed messages, and the expected content of their logs."""

    def __init__(self, seed: int, sessions: int = 3) -> None:
        self.rng = random.Random(seed)
        self.recent = Recent(1 << 27, 1 << 30)
        self.logs = [StreamLog(self.recent, 100 + n) for n in range(sessions)]
        self.json = [self.rng.random() < 0.5 for _ in range(sessions)]
        self.wanted: dict[int, list[Token]] = {}
        self.live: dict[tuple[int, int], int] = {}
        """The request of each live stream, by the session's index and the stream's id."""

    def turn(self, request: int) -> None:
        """Runs one random event."""
        rng = self.rng
        what, number = rng.random(), rng.randrange(len(self.logs))
        log, stream = self.logs[number], rng.randrange(STREAMS)
        live = self.live.get((number, stream))
        if what < 0.15 and live is None:
            self.live[number, stream] = request
            sent = self.entries(1, stream) if rng.random() < 0.3 else []
            self.wanted[request] = list(sent)
            body = encode_body(sent, "msgpack") if sent else b""
            log.begin(request, stream, 10, body)
        elif what < 0.25 and live is not None:
            log.remove(self.live.pop((number, stream)))
        elif what < 0.35:
            self.recent.distribute(rng.choice([1, 10, 1 << 40]))
        elif what < 0.37:
            entries = self.entries(3)
            self.recent.keep([self.logs[0].session], [self.body(0, entries)])
            self.routed(0, entries)
        elif what < 0.4 and live is not None:
            received = rng.randrange(len(self.wanted[live]) + 1)
            log.repeats(live, received)
            del self.wanted[live][received:]
        elif what < 0.45:
            entries = self.entries(2)
            log.append(self.body(number, entries))
            self.routed(number, entries)
        else:
            self.message(sorted(rng.sample(range(len(self.logs)), rng.randint(1, 2))))

    def message(self, numbers: list[int], size: int = 0) -> None:
        """Routes a worker's TOKEN with a body for each of these sessions. Some bodies are empty."""
        head = encode_token_header([self.logs[n].session for n in numbers])
        bodies = []
        for number in numbers:
            entries = self.entries(size or self.rng.choice([0, 1, 2, 40]))
            bodies.append(self.body(number, entries) if entries else b"")
            self.routed(number, entries)
        [packed] = pack([b"TOKEN", head, *bodies])
        self.recent.pending.append(packed)
        if self.rng.random() < 0.5:
            self.recent.settle()

    def entries(self, count: int, stream: int | None = None) -> list[Token]:
        rng = self.rng
        streams = [rng.randrange(STREAMS) if stream is None else stream for _ in range(count)]
        return [plain_entry(one, rng.randrange(999), -1.0, 0, 0) for one in streams]

    def body(self, number: int, entries: list[Token]) -> bytes:
        if self.json[number] and self.rng.random() < 0.5:
            return encode_body(entries, "json")
        columns = self.rng.random() < 0.5
        return encode_body(pack_columns(entries) if columns else entries, "msgpack")

    def routed(self, number: int, entries: list[Token]) -> None:
        for entry in entries:
            request = self.live.get((number, entry.stream_id))
            if request is not None:
                self.wanted[request].append(entry)

    def check(self) -> None:
        """Checks the content of each log."""
        for number, log in enumerate(self.logs):
            live = [request for (of, _), request in self.live.items() if of == number]
            assert log.entries(live) == {request: self.wanted[request] for request in live}

    def end(self) -> None:
        """Ends all requests, and checks that the logs are empty."""
        for (number, _), request in self.live.items():
            self.logs[number].remove(request)
        assert [log.size for log in self.logs] == [0] * len(self.logs)
        recent = self.recent
        assert (recent.size, recent.total, recent.logs) == (0, 0, {})
