"""Measures the broker's core without sockets, with many workers and live streams.

All measured systems have the same number of clients. Each worker has streams of ten clients. The
message of a step has one token for each of the ten clients. So small and large systems differ only
in the size of their tables.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
from tokenbus.broker.core import Broker, Message
from tokenbus.broker.garbage import bound_pauses
from tokenbus.broker.outgoing import Outgoing
from tokenbus.broker.session import Session
from tokenbus.broker.settings import BrokerSettings
from tokenbus.broker.worker import Worker
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.columns import pack_columns
from tokenbus.protocol.header import encode_header, encode_token_header
from tokenbus.protocol.messages import Hello, Token
from tokenbus.protocol.packing import pack
from tokenbus.protocol.worker_messages import Heartbeat, Register

SESSIONS = 1_000
"""Number of clients."""
GROUP = 10
"""Number of clients whose streams a worker has."""
PASS = 64
"""Number of messages that are passed to one call of the core, as in the server."""
PROMPT = b"".join(n.to_bytes(4, "little") for n in range(1000, 1256))
"""A prompt of 256 tokens, as an attachment."""
MICRO = 1e6


def resident_bytes() -> int:
    """The resident memory of this process, in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


class World:
    """A broker with ``num_workers`` workers, and ``per_worker`` live streams on each."""

    def __init__(self, num_workers: int, per_worker: int, seed: int = 0) -> None:
        bound_pauses()
        self.now = 1000.0
        self.num_workers, self.per_worker = num_workers, per_worker
        self._random = random.Random(seed)
        self._stream_ids = iter(range(1, 1 << 40))
        gc.collect()
        before = resident_bytes()
        settings = BrokerSettings(max_total_journal_bytes=1 << 40)
        self.broker = Broker(settings, boot=1, now=self.now)
        self._register()
        self._peers = [b"\0c%d" % n for n in range(SESSIONS)]
        self._join()
        gc.collect()
        empty = resident_bytes()
        self.submit_us: list[float] = []
        for turn in range(per_worker):
            for first in range(0, num_workers, PASS):
                numbers = range(first, min(first + PASS, num_workers))
                self._submit([self._session_of(n, turn) for n in numbers])
            self.pass_time(0.25)
        self.pass_time(3)
        gc.collect()
        self.memory_of_workers = (empty - before) / num_workers
        kept = self.broker.state.recent.total
        self.num_streams = len(self.broker.state.requests)
        self.bytes_per_stream = (resident_bytes() - empty - kept) / max(1, self.num_streams)
        self._messages = {w.id: self._step_of(w) for w in self._workers()}

    # --- measurements ---------------------------------------------------------------------------

    def token_us(self, messages: int, runs: int = 5) -> float:
        """Microseconds of CPU time to route the message of a step. The result is the minimum of
        several runs of ``messages`` messages from random workers."""
        workers = self._workers()
        found = []
        for _ in range(runs):
            chosen = [self._random.choice(workers) for _ in range(messages)]
            made = [(w.peer, [bytes(bytearray(self._messages[w.id]))]) for w in chosen]
            found.append(self._timed(self.broker.on_workers, made))
            self.pass_time(1)
        return min(found)

    def churn_us(self, times: int, runs: int = 5) -> tuple[float, float]:
        """Microseconds of CPU time to begin a request, and to end a request. Each is the minimum of
        several runs. In a run, the number of requests that begin and the number of requests that
        end are equal."""
        begin, end = [], []
        sessions = list(self.broker.state.sessions)
        for _ in range(runs):
            requests = self.broker.state.requests
            ids = self._random.sample(list(requests), min(times, len(requests) // 2))
            ended = []
            for number in ids:
                request = requests[number]
                assert request.worker is not None
                last = Token(
                    token=None,
                    stream_id=request.stream_id,
                    logprob=None,
                    finish_reason="stop",
                    live=0,
                )
                head = encode_token_header([request.session.id], [number])
                frames = pack([b"TOKEN", head, encode_body([last], "msgpack")])
                ended.append((request.worker.peer, frames))
            end.append(self._timed(self.broker.on_workers, ended))
            chosen = [self._random.choice(sessions) for _ in ids]
            begin.append(self._timed(self.broker.on_clients, self._requests(chosen)))
            self.pass_time(1)
        for worker in self._workers():
            self._messages[worker.id] = self._step_of(worker)
        return min(begin), min(end)

    def beat_us(self, runs: int = 3) -> float:
        """Microseconds of CPU time to handle a worker's heartbeat."""
        return min(self._timed(self.broker.on_workers, self._beats()) for _ in range(runs))

    def ticks_ms(self, seconds: float, messages: int) -> list[float]:
        """Milliseconds of CPU time of each tick during ``seconds``. Between two ticks, the core
        receives ``messages`` TOKEN messages. In each second, it also receives all heartbeats and
        PINGs."""
        workers, found = self._workers(), []
        ping = [b"PING", b'{"n": 1}']
        until, second = self.now + seconds, self.now
        while self.now < until:
            chosen = [self._random.choice(workers) for _ in range(messages)]
            for batch in _passes([(w.peer, [self._messages[w.id]]) for w in chosen]):
                self.broker.on_workers(batch, self.now)
            if self.now >= second:
                second += 1
                for batch in _passes(self._beats()):
                    self.broker.on_workers(batch, self.now)
                for batch in _passes([(peer, list(ping)) for peer in self._peers]):
                    self.broker.on_clients(batch, self.now)
            found += self.pass_time(0.25, beats=False)
        return found

    # --- parts of a measurement -----------------------------------------------------------------

    def pass_time(self, seconds: float, beats: bool = True) -> list[float]:
        """Advances the simulated time by ``seconds``, and runs the ticks in this time, as the
        server does. Returns the milliseconds of each tick. ``beats``: whether all workers and
        clients first send a heartbeat or a PING."""
        found = []
        until = self.now + seconds
        if beats:
            self.broker.on_workers(self._beats(), self.now)
            for session in self.broker.state.sessions:
                session.last_seen = self.now
        while self.now < until:
            self.now += self.broker.wait_s(self.now)
            began = time.thread_time()
            self.broker.tick(self.now)
            found.append((time.thread_time() - began) * 1000)
        return found

    def _timed(
        self, route: Callable[[list[Message], float], list[Outgoing]], messages: list[Message]
    ) -> float:
        used = 0.0
        for batch in _passes(messages):
            began = time.thread_time()
            route(batch, self.now)
            used += time.thread_time() - began
        return MICRO * used / len(messages)

    def _workers(self) -> list[Worker]:
        return list(self.broker.state.workers.values())

    def _register(self) -> None:
        for n in range(self.num_workers):
            body = Register(
                name=f"gpu-{n}",
                role="gpu",
                version=1,
                pid=n,
                host=f"host-{n // 8}",
                capacity=2 * self.per_worker + 16,
                patterns=["m"],
                default="m",
            )
            frames = [b"REGISTER", encode_header(), encode_body(body, "msgpack")]
            self.broker.on_worker(b"\0w%d" % n, frames, self.now)

    def _join(self) -> None:
        hello = Hello(encodings=("msgpack",), capabilities=["ping", "columns", "bodies"])
        body = encode_body(hello, "json")
        for peer in self._peers:
            self.broker.on_client(peer, [b"HELLO", body], self.now)

    def _session_of(self, worker: int, turn: int) -> Session:
        """The session for the next stream of a worker. ``worker``: the number of the worker. The
        broker is expected to choose this worker for the stream. ``turn``: number of the worker's
        earlier streams."""
        peer = self._peers[(worker * GROUP + turn % GROUP) % SESSIONS]
        return self.broker.state.sessions.by_peer[peer]

    def _requests(self, sessions: Sequence[Session]) -> list[Message]:
        made: list[Message] = []
        for session in sessions:
            body = {"stream_id": next(self._stream_ids), "model": "m", "max_tokens": 256}
            assert session.peer is not None
            prompt = bytes(bytearray(PROMPT))
            made.append((session.peer, [b"GENERATE", msgspec.msgpack.encode(body), prompt]))
        return made

    def _submit(self, sessions: Sequence[Session]) -> None:
        self.broker.on_clients(self._requests(sessions), self.now)

    def _step_of(self, worker: Worker) -> bytes:
        """The message of a worker's step: one token for each client."""
        by_session: dict[int, list[Token]] = {}
        for request in worker.requests.values():
            if len(by_session) == GROUP:
                break
            token = Token(
                token=1000,
                stream_id=request.stream_id,
                logprob=-1.25,
                finish_reason=None,
                top_logprobs={1000: -1.25},
                pos=20,
            )
            by_session.setdefault(request.session.id, [token])
        bodies = [encode_body(pack_columns(t), "msgpack") for t in by_session.values()]
        [message] = pack([b"TOKEN", encode_token_header(list(by_session)), *bodies])
        return message

    def _beats(self) -> list[Message]:
        load = {"running": 100.0, "waiting": 0.0, "kv_blocks_used": 1234.0, "kv_blocks": 8000.0}
        body = encode_body(Heartbeat(requests=100, step_age_s=0.01, load=load), "msgpack")
        frames = [b"HEARTBEAT", encode_header(), body]
        return [(w.peer, pack(frames)) for w in self._workers()]


def _passes(messages: list[Message]) -> Iterator[list[Message]]:
    for first in range(0, len(messages), PASS):
        yield messages[first : first + PASS]


def percentile(values: list[float], part: float) -> float:
    """The percentile ``part`` of a list of values; ``part`` is from 0.001 to 0.999."""
    return statistics.quantiles(values, n=1000)[round(part * 1000) - 1]
