"""Simulated workers: the real connection to the bus and the real lease, with a simulated model. The
test chooses when the bus thread and the worker's own thread run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

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
from tokenbus.protocol.transcript import decode_transcript, moves_of
from tokenbus.protocol.worker_messages import (
    Claim,
    Claimed,
    Journal,
    LiveRequest,
    Register,
    Registered,
    Released,
)
from tokenbus.transport.dealer import Peer
from tokenbus.workers import bus
from tokenbus.workers.bus import Bus, FromBus, refused_frames

from .network import Network, Pipe
from .streams import entry_at

CAPACITY = 3
KEEP_S = 60.0
"""Time for which a worker keeps an ended stream, in seconds."""
MODEL = ModelInfo(
    name="m", vocab_size=1000, context_length=99, eos_token_ids=[0], fingerprint="f", dtype="exact"
)


def _encoding(flags: int) -> Encoding:
    return "msgpack" if flags & Flag.MSGPACK else "json"


class Carrier:
    """The carrier of a worker's messages. It replaces a socket with its own thread."""

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
        """Sends the messages that the worker has posted."""
        while queue and self.pipe is not None:
            self.pipe.send(queue.popleft())

    def wake(self) -> None:
        """Called when messages may have been posted; sends them."""
        self.turn(0)

    def turn(self, most: int) -> int:
        """Runs a turn of the bus thread: receives up to ``most`` messages, and sends the posted
        messages. Opens another connection if the broker has been silent for too long. Returns the
        number of received messages."""
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
        """Sends the posted messages, and closes the connection."""
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
    """The position of the next token of each live sequence."""
    moved: System | None = None
    moves: int = 0
    link: int = 0
    """The number of the broker that has sent the request, or that has claimed it last."""
    ended_at: float = 0.0

    @property
    def form(self) -> int:
        """The flags in the header that give the encoding of bodies for the stream's client."""
        return self.header.flags & FORM


class Worker:
    """The base class of simulated workers."""

    role = ""

    def __init__(self, networks: Sequence[Network], name: str) -> None:
        self.network = networks[0]
        self.name = name
        self.stopped = False
        self.draining = False
        self.handed_over: set[int] = set()
        """The links to the brokers that have sent HANDOVER."""
        self.gone = False
        back = ",".join(f"sim://{n}" for n in range(len(networks)))
        self.bus = Bus(
            back,
            self._registration,
            lambda: (0, {}),
            link_of=self._link_of,
            elsewhere=self._elsewhere,
        )
        self.carriers: list[Carrier] = []
        for link in self.bus._links:
            assert isinstance(link._carrier, Carrier)
            self.carriers.append(link._carrier)
        self.bus.start()

    @property
    def carrier(self) -> Carrier:
        """The carrier of the worker's messages to the only broker, or to the first broker."""
        return self.carriers[0]

    @property
    def pipe(self) -> Pipe:
        """The worker's connection to the only broker, or to the first broker."""
        return self.pipes[0]

    @property
    def pipes(self) -> list[Pipe]:
        """The worker's connections, one to each broker."""
        return [carrier.pipe for carrier in self.carriers if carrier.pipe is not None]

    def kill(self, lost: int) -> None:
        """Kills the worker, as SIGKILL does. ``lost``: see ``Pipe.close``."""
        self.gone = True
        for pipe in self.pipes:
            pipe.close(lost)

    def drain(self) -> None:
        """Drains the worker, as SIGTERM does: it accepts no more requests, and leaves when its
        requests have ended or moved."""
        if not self.draining:
            self.draining = True
            self.bus.drain("asked to")

    def step(self) -> bool:
        """Runs a turn of the worker's own thread; returns whether the thread had work."""
        messages = self.bus.take(0)
        for message in messages:
            self.on_message(message)
        worked = self.work()
        if self.draining and self.links() <= self.handed_over:
            self.gone = True
            self.bus.close("drained")
        return bool(messages) or worked

    @property
    def idle(self) -> bool:
        """Whether the worker has no requests."""
        raise NotImplementedError

    def links(self) -> set[int]:
        """The links of the brokers whose requests the worker has."""
        raise NotImplementedError

    def on_message(self, message: FromBus) -> None:
        """Handles a message from a broker."""
        raise NotImplementedError

    def work(self) -> bool:
        """Computes one step; returns whether there was work."""
        raise NotImplementedError

    def _registration(self) -> Register:
        raise NotImplementedError

    def _link_of(self, request: int) -> int | None:
        raise NotImplementedError

    def _elsewhere(self, link: int) -> int:
        raise NotImplementedError


class GpuWorker(Worker):
    """A GPU worker with the simulated model."""

    role = "gpu"

    def __init__(self, networks: Sequence[Network], name: str) -> None:
        self.streams: dict[int, Stream] = {}
        self._ended: dict[int, Stream] = {}
        """Streams that have ended, by request. The worker still reports them for ``KEEP_S``."""
        self._steps = 0
        super().__init__(networks, name)

    @property
    def idle(self) -> bool:
        return not self.streams

    def links(self) -> set[int]:
        return {stream.link for stream in self.streams.values()}

    def _link_of(self, request: int) -> int | None:
        stream = self._reported().get(request)
        return stream.link if stream is not None else None

    def _elsewhere(self, link: int) -> int:
        return sum(stream.link != link for stream in self.streams.values())

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
        number, link = message.header.request, message.link
        match message.type:
            case b"GENERATE":
                self._request(message)
            case b"CANCEL":
                if self._has(number, link):
                    self._cancel(number, decode_as(Cancel, message.body, "msgpack"))
            case b"ATTACH":
                if self._has(number, link):
                    self._attach(message.header, decode_as(Attach, message.body, "msgpack"))
            case b"REGISTERED":
                self._registered(decode_as(Registered, message.body, "msgpack"), link)
            case b"CLAIM":
                self._claim(decode_as(Claim, message.body, "msgpack").session, link)
            case b"HANDOVER":
                self.handed_over.add(link)
            case bus.LEASE_ENDED:
                pass
            case other:
                raise AssertionError(f"a GPU worker got {other!r}")

    def _has(self, number: int, link: int) -> bool:
        """Whether the worker runs a request of this link's broker."""
        return number in self.streams and self.streams[number].link == link

    def _request(self, message: FromBus) -> None:
        """Handles a request, which another broker may have sent before."""
        number, link = message.header.request, message.link
        known = self.streams.get(number)
        elsewhere = self._elsewhere(link)
        if known is not None:
            assert known.link != link, "a worker got a request twice"
            if moves_of(message.header, message.attachments) <= known.moves:
                self._leave_to_another([number], link)
                return
            self._leave_to_another([number], known.link)
        elif elsewhere and len(self.streams) >= CAPACITY:
            self.bus.post(refused_frames(message, elsewhere), link)
            return
        self._begin(message)

    def _claim(self, session: int, link: int) -> None:
        """Handles a CLAIM: the client of a session has connected to the broker of this link."""
        released: dict[int, list[int]] = {}
        for number, stream in self._reported().items():
            if stream.header.address != session:
                continue
            claimed = 0
            if stream.link != link:
                released.setdefault(stream.link, []).append(number)
                stream.link = link
                claimed = 2
                stream.moves += claimed
            self._send_journal(stream, claimed)
        for left, requests in released.items():
            self._leave_to_another(requests, left)
        body = encode_body(Claimed(session=session), "msgpack")
        self.bus.post([b"CLAIMED", encode_header(), body], link)

    def _leave_to_another(self, requests: list[int], link: int) -> None:
        body = encode_body(Released(requests=requests), "msgpack")
        self.bus.post([b"RELEASED", encode_header(), body], link)

    def _registered(self, answer: Registered, link: int) -> None:
        kept = self.bus.kept(answer, link)
        for number, stream in self._reported().items():
            if stream.link != link:
                continue
            if number in answer.unknown or (kept is not None and number not in kept):
                self.streams.pop(number, None)
                self._ended.pop(number, None)
        self.bus.registered(answer, link)
        for number in answer.wanted:
            wanted = self._reported().get(number)
            if wanted is None:
                body = encode_body(Journal(type="GENERATE", gone=True), "msgpack")
                self.bus.post([b"JOURNAL", encode_header(number), body], link)
            elif wanted.link != link:
                self._leave_to_another([number], link)
            else:
                self._send_journal(wanted)

    def _reported(self) -> dict[int, Stream]:
        """The running streams, and the streams that have ended in the last ``KEEP_S`` seconds."""
        now = self.network.now
        ended = {number: s for number, s in self._ended.items() if now - s.ended_at <= KEEP_S}
        return {**ended, **self.streams}

    def _send_journal(self, stream: Stream, claimed: int = 0) -> None:
        header = encode_header(stream.header.request, stream.header.address, stream.form)
        body = Journal(type="GENERATE", ended=not stream.next, moves=stream.moves, claimed=claimed)
        sent = encode_body(pack_columns(stream.sent), "msgpack")
        frames = [b"JOURNAL", header, encode_body(body, "msgpack"), sent, *stream.frames]
        self.bus.post(frames, stream.link)

    def _begin(self, message: FromBus) -> None:
        header, attachments = message.header, list(message.attachments)
        request: Generate = decode_as(Generate, message.body)
        stream = Stream(header, request, [message.body, *attachments], link=message.link)
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
            self.streams.pop(header.request, None)
            self.bus.post([b"TOKEN", encode_token_header([], [header.request])], message.link)
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
        received = min(attach.received, len(stream.sent))
        answer = Msg(stream_id=attach.stream_id, attached=received, moves=stream.moves)
        encoding = _encoding(flags)
        head = encode_header(header.request, stream.header.address)
        self.bus.post([b"MSG", head, encode_body(answer, encoding)], stream.link)
        missed = stream.sent[received:]
        if missed:
            head = encode_token_header([stream.header.address])
            self.bus.post([b"TOKEN", head, encode_body(missed, encoding)], stream.link)

    def work(self) -> bool:
        """Runs a step, which gives most of the sequences a token. The choice depends on the worker,
        so that workers send the tokens of sequences in different orders."""
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
        self.bus.post([b"SYSTEM", head, encode_body(notice, encoding)], stream.link)

    def _send(self, new: list[tuple[Stream, list[Token]]], ended: list[int]) -> None:
        """Sends the entries of a step, in one message to each broker."""
        for link in sorted({stream.link for stream, _ in new}):
            own = [(stream, entries) for stream, entries in new if stream.link == link]
            numbers = {stream.header.request for stream, _ in own}
            self._send_over(link, own, [number for number in ended if number in numbers])

    def _send_over(
        self, link: int, new: list[tuple[Stream, list[Token]]], ended: list[int]
    ) -> None:
        by_session: dict[tuple[int, int], list[Token]] = {}
        for stream, entries in new:
            by_session.setdefault((stream.header.address, stream.form), []).extend(entries)
        bodies = []
        for (_, form), entries in by_session.items():
            texts = bool(form & Flag.TEXTS)
            body = pack_columns(entries, texts) if form & Flag.COLUMNS else entries
            bodies.append(encode_body(body, _encoding(form)))
        head = encode_token_header([session for session, _ in by_session], ended)
        self.bus.post([b"TOKEN", head, *bodies], link)
