"""Simulates eight workers without a model. The broker's core and the block managers are real.

Time is simulated too. An arrival, a worker's step and a tick are events in one queue.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from tokenbus.broker.core import Broker
from tokenbus.broker.outgoing import Outgoing, Side
from tokenbus.broker.settings import BrokerSettings
from tokenbus.protocol.bodies import encode_body, pack_tokens, unpack_tokens
from tokenbus.protocol.header import decode_header, encode_header, encode_token_header
from tokenbus.protocol.messages import Hello, Token
from tokenbus.protocol.pages import join_keys
from tokenbus.protocol.worker_messages import Heartbeat, Pages, Register
from tokenbus.workers.gpu.engine.block_manager import BlockManager, BlockTable
from tokenbus.workers.gpu.engine.pages import PageLog

MODEL = "m"
WORKERS = 8
BLOCK_SIZE = 16
NUM_BLOCKS = 4_096
"""Number of blocks of a worker: 65,520 tokens, or 8 GB of KV cache for a model of 8B."""
BATCHED_TOKENS = 2_048
PREFILL_S = 1 / 16_000
"""Seconds to compute a prompt token."""
STEP_S = 0.012
"""Seconds of a step without prompt tokens, in which the weights are read once."""
MAX_RUNNING = 64
PAGES_EVERY_S = 0.1
TICK_S = 0.25
CLIENT = b"\0client"


@dataclass(slots=True, eq=False)
class Stream:
    """A request of the workload. ``arrived`` and ``first_token`` are simulated times, in
    seconds."""

    prompt: list[int]
    num_output: int
    arrived: float = 0.0
    first_token: float = 0.0
    number: int = 0


@dataclass(slots=True, eq=False)
class _Sequence:
    """A stream on its worker."""

    request: int
    session: int
    stream: Stream
    tokens: list[int]
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0


class SimulatedWorker:
    """A worker with continuous batching, chunked prefill and prefix reuse. The time of a prefill is
    proportional to its tokens."""

    def __init__(self, number: int) -> None:
        self.number, self.peer = number, b"\0w%d" % number
        self.log = PageLog(MODEL, BLOCK_SIZE)
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, self.log)
        self.waiting: deque[_Sequence] = deque()
        self.running: list[_Sequence] = []
        self.prefilled = 0
        self.busy = False
        self.reported_at = 0.0

    def schedule(self) -> tuple[list[tuple[_Sequence, int]], float]:
        """The number of tokens of each sequence in the next step, and the seconds of the step."""
        room, chunks = BATCHED_TOKENS, []
        for sequence in self.running:
            wanted = len(sequence.tokens) - sequence.computed
            taken = min(wanted, room)
            if taken and self._reserve(sequence, taken):
                chunks.append((sequence, taken))
                room -= taken
        while self.waiting and room and len(self.running) < MAX_RUNNING:
            sequence = self.waiting[0]
            hit = self.blocks.match(sequence.table, sequence.tokens, len(sequence.tokens) - 1)
            needed = self.blocks.blocks_for(len(sequence.tokens) + sequence.stream.num_output)
            spare = self.blocks.num_available - needed + len(sequence.table.blocks)
            if spare < len(self.running):
                self.blocks.free(sequence.table)
                break
            sequence.computed = hit
            taken = min(len(sequence.tokens) - hit, room)
            if not self._reserve(sequence, taken):
                self.blocks.free(sequence.table)
                break
            self.running.append(self.waiting.popleft())
            chunks.append((sequence, taken))
            room -= taken
        prompts = sum(n for _, n in chunks if n > 1)
        self.prefilled += prompts
        return chunks, STEP_S + PREFILL_S * prompts

    def _reserve(self, sequence: _Sequence, count: int) -> bool:
        end = sequence.computed + count
        return self.blocks.reserve(sequence.table, sequence.computed, end) is not None

    def finish(self, chunks: list[tuple[_Sequence, int]], now: float) -> list[_Sequence]:
        """Ends a step. If all tokens of a sequence are computed, appends a token to it. Returns the
        sequences that have ended."""
        ended = []
        for sequence, count in chunks:
            sequence.computed += count
            self.blocks.commit(sequence.table, sequence.tokens, sequence.computed)
            if sequence.computed < len(sequence.tokens):
                continue
            stream = sequence.stream
            stream.first_token = stream.first_token or now
            generated = len(sequence.tokens) - len(stream.prompt)
            # The token depends only on the text, as with a greedy model.
            sequence.tokens.append((sequence.tokens[-1] * 31 + len(sequence.tokens)) % 50_000)
            if generated + 1 >= stream.num_output:
                self.blocks.free(sequence.table)
                self.running.remove(sequence)
                ended.append(sequence)
        return ended


class RoutingWorld:
    """The simulated system and its event queue."""

    def __init__(self, route_by_prefix: bool) -> None:
        settings = BrokerSettings(route_by_prefix=route_by_prefix, max_streams=100_000)
        self.now = 0.0
        self.broker = Broker(settings, boot=1, now=0.0)
        self.workers = {w.peer: w for w in map(SimulatedWorker, range(WORKERS))}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._ended: dict[int, Callable[[Stream, list[int]], None]] = {}
        self.ended_at = 0.0
        """The time at which the last stream ended."""
        for worker in self.workers.values():
            body = Register(
                name=f"w{worker.number}",
                role="gpu",
                version=1,
                pid=worker.number,
                host="h",
                capacity=100_000,
                patterns=[MODEL],
                default=MODEL,
            )
            self._from_worker(worker, b"REGISTER", encode_body(body, "msgpack"))
        hello = encode_body(Hello(encodings=("msgpack",)), "json")
        self._route(self.broker.on_client(CLIENT, [b"HELLO", hello], 0.0))

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Adds an event to the queue."""
        heapq.heappush(self._events, (when, next(self._count), what))

    def run(self) -> None:
        """Runs until all streams have ended and the queue has no further arrival."""
        self._tick()
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def submit(self, stream: Stream, ended: Callable[[Stream, list[int]], None]) -> None:
        """Sends a request from a client. When the stream ends, ``ended`` is called with the stream
        and all of its tokens."""
        number = len(self._streams) + 1
        stream.arrived, stream.number = self.now, number
        self._streams[number], self._ended[number] = stream, ended
        body = msgspec.msgpack.encode({"stream_id": number, "model": MODEL})
        frames = [b"GENERATE", body, pack_tokens(stream.prompt)]
        self._route(self.broker.on_client(CLIENT, frames, self.now))

    @property
    def prefilled(self) -> int:
        """Number of computed prompt tokens."""
        return sum(worker.prefilled for worker in self.workers.values())

    # --- events ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._route(self.broker.tick(self.now))
        if int(self.now / TICK_S) % 4 == 0:
            for worker in self.workers.values():
                self._from_worker(worker, b"HEARTBEAT", encode_body(Heartbeat(), "msgpack"))
        if self._ended or self._events:
            self.at(self.now + TICK_S, self._tick)

    def _route(self, messages: Sequence[Outgoing]) -> None:
        for message in messages:
            if message.side is Side.BACK and message.frames[0] == b"GENERATE":
                worker = self.workers[message.peer]
                header = decode_header(message.frames[1])
                fields = msgspec.msgpack.decode(message.frames[2])
                stream = self._streams[fields["stream_id"]]
                tokens = unpack_tokens(message.frames[3])
                worker.waiting.append(
                    _Sequence(header.request, header.address, stream, list(tokens))
                )
                self._begin(worker)

    def _begin(self, worker: SimulatedWorker) -> None:
        if worker.busy or not (worker.waiting or worker.running):
            return
        chunks, seconds = worker.schedule()
        worker.busy = True
        self.at(self.now + seconds, lambda: self._finish(worker, chunks))

    def _finish(self, worker: SimulatedWorker, chunks: list[tuple[_Sequence, int]]) -> None:
        worker.busy = False
        ended = worker.finish(chunks, self.now)
        if worker.log.changed and self.now - worker.reported_at >= PAGES_EVERY_S:
            worker.reported_at = self.now
            came, went = map(join_keys, worker.log.take())
            body = encode_body(Pages(), "msgpack")
            self._from_worker(worker, b"PAGES", body, came, went)
        for sequence in ended:
            number, self.ended_at = sequence.stream.number, self.now
            last = Token(token=1, stream_id=number, logprob=-1.0, finish_reason="length", live=0)
            head = encode_token_header([sequence.session], [sequence.request])
            frames = [b"TOKEN", head, encode_body([last], "msgpack")]
            self._route(self.broker.on_worker(worker.peer, frames, self.now))
            self._ended.pop(number)(sequence.stream, sequence.tokens)
        self._begin(worker)

    def _from_worker(self, worker: SimulatedWorker, kind: bytes, *rest: bytes) -> None:
        frames = [kind, encode_header(), *rest]
        self._route(self.broker.on_worker(worker.peer, frames, self.now))
