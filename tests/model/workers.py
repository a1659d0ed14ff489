"""Simulated workers: the real connection to the bus and the real lease, around a model that is
exact. The bus thread and the worker's own thread run in turns that the test chooses."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tokenbus.broker.outgoing import Side
from tokenbus.protocol.bodies import Encoding, decode_as, encode_body
from tokenbus.protocol.columns import pack_columns
from tokenbus.protocol.frames import Frames
from tokenbus.protocol.header import FORM, Flag, Header, encode_header, encode_token_header
from tokenbus.protocol.messages import (
    PROTOCOL_VERSION,
    Attach,
    Cancel,
    Generate,
    ModelInfo,
    Msg,
    System,
    Token,
)
from tokenbus.protocol.transcript import decode_transcript
from tokenbus.protocol.worker_messages import Journal, LiveRequest, Register, Registered
from tokenbus.transport.dealer import Peer
from tokenbus.workers.bus import Bus, FromBus

from .network import Network, Pipe
from .streams import entry_at

CAPACITY = 3
KEEP_S = 60.0
"""For how long a worker keeps streams that have ended, in seconds."""
MODEL = ModelInfo(
    name="m", vocab_size=1000, context_length=99, eos_token_ids=[0], fingerprint="f", dtype="exact"
)


def _encoding(flags: int) -> Encoding:
    return "msgpack" if flags & Flag.MSGPACK else "json"


class Carrier:
    """The carrier of a worker's messages, in place of a socket with a thread."""

    def __init__(self, network: Network, peer: Peer) -> None:
        self._network = network
        self._peer = peer
        self.pipe: Pipe | None = None
        self.started = True
        self.forked = False

    def start(self) -> None:
        """Opens a connection, on which the worker registers."""
        self.pipe = Pipe(self._network, Side.BACK, self.pipe)
        self._peer.connected(self._network.now)
        self.turn(0)

    def send(self, queue: deque[Frames]) -> None:
        """Sends what the worker has posted."""
        while queue and self.pipe is not None:
            self.pipe.send(queue.popleft())

    def wake(self) -> None:
        """There may be something to send."""
        self.turn(0)

    def turn(self, most: int) -> int:
        """A turn of the bus thread: takes up to this many messages, and sends; how many it took."""
        pipe, now = self.pipe, self._network.now
        assert pipe is not None
        taken = [pipe.down.popleft() for _ in range(min(most, len(pipe.down)))]
        if taken:
            self._peer.receive(taken, now)
        for frames in self._peer.outgoing(now):
            pipe.send(frames)
        if self._peer.lost(now):
            pipe.close(0)
            self.start()
        return len(taken)

    def close(self) -> None:
        """The worker leaves."""
        self.turn(0)
        assert self.pipe is not None
        self.pipe.close(0)


@dataclass
class Stream:
    """A request at a GPU worker."""

    header: Header
    request: Generate
    frames: list[bytes]
    sent: list[Token] = field(default_factory=list)
    next: dict[int, int] = field(default_factory=dict)
    """The position of the next token of each sequence that is live."""
    moved: System | None = None
    moves: int = 0
    ended_at: float = 0.0

    @property
    def form(self) -> int:
        """How its client takes bodies."""
        return self.header.flags & FORM


class Worker:
    """The state that simulated workers share."""

    role = ""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.stopped = False
        self.draining = False
        self.handed_over = False
        self.gone = False
        self.bus = Bus("sim://back", self._registration, lambda: (0, {}))
        carrier = self.bus._links[0]._carrier
        assert isinstance(carrier, Carrier)
        self.carrier = carrier
        self.bus.start()

    @property
    def pipe(self) -> Pipe:
        """Its connection."""
        assert self.carrier.pipe is not None
        return self.carrier.pipe

    def kill(self, lost: int) -> None:
        """SIGKILL."""
        self.gone = True
        self.pipe.close(lost)

    def drain(self) -> None:
        """SIGTERM: it takes nothing more, and leaves when it has nothing left."""
        if not self.draining:
            self.draining = True
            self.bus.drain("asked to")

    def step(self) -> bool:
        """A turn of its own thread; whether it did anything."""
        messages = self.bus.take(0)
        for message in messages:
            self.on_message(message)
        worked = self.work()
        if self.draining and (self.idle or self.handed_over):
            self.gone = True
            self.bus.close("drained")
        return bool(messages) or worked

    @property
    def idle(self) -> bool:
        """Whether it has nothing left."""
        raise NotImplementedError

    def on_message(self, message: FromBus) -> None:
        """A message of the broker's."""
        raise NotImplementedError

    def work(self) -> bool:
        """Computes for a while; whether there was anything to compute."""
        raise NotImplementedError

    def _registration(self) -> Register:
        raise NotImplementedError

    def post(self, kind: bytes, header: Header, body: Any, *more: bytes) -> None:
        """Sends a message whose body is msgpack."""
        frames = [kind, encode_header(*header), encode_body(body, "msgpack"), *more]
        self.bus.post(frames)


class GpuWorker(Worker):
    """A worker that has the model."""

    role = "gpu"

    def __init__(self, network: Network, name: str) -> None:
        self.streams: dict[int, Stream] = {}
        self._ended: dict[int, Stream] = {}
        """Streams that have ended a moment ago."""
        self._steps = 0
        super().__init__(network, name)

    @property
    def idle(self) -> bool:
        return not self.streams

    def _registration(self) -> Register:
        return Register(
            name=self.name,
            role="gpu",
            version=PROTOCOL_VERSION,
            pid=1,
            host="h",
            capacity=CAPACITY,
            models=[MODEL],
            default="m",
            live=[
                LiveRequest(request=number, session=s.header.address, stream_id=s.request.stream_id)
                for number, s in self._reported().items()
            ],
        )

    def on_message(self, message: FromBus) -> None:
        header = message.header
        match message.type:
            case b"GENERATE":
                self._begin(message)
            case b"CANCEL":
                self._cancel(header.request, decode_as(Cancel, message.body, "msgpack"))
            case b"ATTACH":
                self._attach(header, decode_as(Attach, message.body, "msgpack"))
            case b"REGISTERED":
                self._registered(decode_as(Registered, message.body, "msgpack"))
            case b"CLAIM":
                self.bus.post([b"CLAIMED", encode_header(), message.body])
            case b"HANDOVER":
                self.handed_over = True
            case other:
                raise AssertionError(f"a GPU worker got {other!r}")

    def _registered(self, answer: Registered) -> None:
        kept = self.bus.kept(answer)
        for number in self._reported():
            if number in answer.unknown or (kept is not None and number not in kept):
                self.streams.pop(number, None)
                self._ended.pop(number, None)
        self.bus.registered(answer)
        for number in answer.wanted:
            if number in self._reported():
                self._send_journal(self._reported()[number])
            else:
                body = encode_body(Journal(type="GENERATE", gone=True), "msgpack")
                self.bus.post([b"JOURNAL", encode_header(number), body])

    def _reported(self) -> dict[int, Stream]:
        """The streams that a broker which was restarted is notified of."""
        now = self.network.now
        ended = {number: s for number, s in self._ended.items() if now - s.ended_at <= KEEP_S}
        return {**ended, **self.streams}

    def _send_journal(self, stream: Stream) -> None:
        header = encode_header(stream.header.request, stream.header.address, stream.form)
        body = Journal(type="GENERATE", ended=not stream.next, moves=stream.moves)
        sent = encode_body(pack_columns(stream.sent), "msgpack")
        self.bus.post([b"JOURNAL", header, encode_body(body, "msgpack"), sent, *stream.frames])

    def _begin(self, message: FromBus) -> None:
        header, attachments = message.header, list(message.attachments)
        request: Generate = decode_as(Generate, message.body)
        assert header.request not in self.streams, "a worker got a request twice"
        stream = Stream(header, request, [message.body, *attachments])
        stream.next = dict.fromkeys(range(request.n), 0)
        if header.flags & Flag.MOVED:
            transcript = decode_transcript(attachments.pop())
            stream.frames.pop()
            stream.sent, stream.moves = transcript.entries, transcript.moves
            for entry in stream.sent:
                stream.next[entry.seq] = entry.pos + 1
                if entry.finish_reason is not None:
                    del stream.next[entry.seq]
            stream.moved = System(
                event="moved",
                message=transcript.why,
                stream_id=request.stream_id,
                left=transcript.left,
                worker=self.name,
                pause_s=transcript.pause_s,
                moves=transcript.moves,
            )
        assert len(attachments) == 1, "the prompt is the only attachment"
        if not stream.next:
            self.bus.post([b"TOKEN", encode_token_header([], [header.request])])
            return
        self.streams[header.request] = stream

    def _cancel(self, number: int, cancel: Cancel) -> None:
        stream = self.streams.pop(number, None)
        if stream is None:
            return
        entries = [
            Token(
                token=None,
                stream_id=stream.request.stream_id,
                logprob=None,
                finish_reason=cancel.reason,
                pos=pos,
                seq=seq,
                live=len(stream.next) - i,
            )
            for i, (seq, pos) in enumerate(stream.next.items(), 1)
        ]
        self._send([(stream, entries)], [number])

    def _attach(self, header: Header, attach: Attach) -> None:
        stream = self.streams.get(header.request)
        if stream is None:
            return
        flags = header.flags & FORM
        stream.header = stream.header._replace(flags=flags)
        answer = Msg(stream_id=attach.stream_id, attached=attach.received, moves=stream.moves)
        encoding = _encoding(flags)
        head = encode_header(header.request, stream.header.address)
        self.bus.post([b"MSG", head, encode_body(answer, encoding)])
        missed = stream.sent[attach.received :]
        if missed:
            head = encode_token_header([stream.header.address])
            self.bus.post([b"TOKEN", head, encode_body(missed, encoding)])

    def work(self) -> bool:
        """A step: a token for most of the sequences, so that their order differs from worker to
        worker."""
        self._steps += 1
        new: list[tuple[Stream, list[Token]]] = []
        ended = []
        for number, stream in list(self.streams.items()):
            entries = [
                self._advance(stream, seq)
                for seq in list(stream.next)
                if len(stream.next) == 1 or (self._steps + seq + len(self.name)) % 3
            ]
            if not entries:
                continue
            if stream.moved is not None:
                self._notify(stream, stream.moved)
            new.append((stream, entries))
            if not stream.next:
                ended.append(number)
                del self.streams[number]
                stream.ended_at = self.network.now
                self._ended[number] = stream
        if new:
            self._send(new, ended)
        return bool(new)

    def _advance(self, stream: Stream, seq: int) -> Token:
        entry = entry_at(stream.request, seq, stream.next[seq])
        stream.next[seq] += 1
        if entry.finish_reason is not None:
            del stream.next[seq]
            entry.live = len(stream.next)
        stream.sent.append(entry)
        return entry

    def _notify(self, stream: Stream, notice: System) -> None:
        stream.moved = None
        encoding = _encoding(stream.form)
        head = encode_header(stream.header.request, stream.header.address)
        self.bus.post([b"SYSTEM", head, encode_body(notice, encoding)])

    def _send(self, new: list[tuple[Stream, list[Token]]], ended: list[int]) -> None:
        by_session: dict[tuple[int, int], list[Token]] = {}
        for stream, entries in new:
            by_session.setdefault((stream.header.address, stream.form), []).extend(entries)
        bodies = []
        for (_, form), entries in by_session.items():
            texts = bool(form & Flag.TEXTS)
            body = pack_columns(entries, texts) if form & Flag.COLUMNS else entries
            bodies.append(encode_body(body, _encoding(form)))
        head = encode_token_header([session for session, _ in by_session], ended)
        self.bus.post([b"TOKEN", head, *bodies])
