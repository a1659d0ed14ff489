"""A broker that a test restarts, with real client sessions and leases, and simulated workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenbus.broker.core import Broker
from tokenbus.broker.outgoing import Outgoing, Side
from tokenbus.broker.settings import BrokerSettings
from tokenbus.clients.calls import Call, Ended
from tokenbus.clients.lanes import Step
from tokenbus.clients.request_options import generate_call
from tokenbus.clients.session import ClientSession
from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.header import (
    Flag,
    Header,
    decode_header,
    encode_header,
    encode_token_header,
)
from tokenbus.protocol.messages import Attach, Generate, ModelInfo, Msg, System, Token
from tokenbus.protocol.transcript import decode_transcript
from tokenbus.protocol.worker_messages import (
    Heartbeat,
    Journal,
    LiveRequest,
    Register,
    Registered,
)
from tokenbus.workers.lease import Lease

MODEL = ModelInfo(name="m", vocab_size=9, context_length=9, eos_token_ids=[0], fingerprint="f")


@dataclass
class Running:
    """A request at a worker."""

    header: Header
    stream_id: int
    frames: list[bytes]
    length: int
    sent: list[Token] = field(default_factory=list)
    moves: int = 0

    @property
    def ended(self) -> bool:
        return bool(self.sent) and self.sent[-1].finish_reason is not None


class Peer:
    """A client or a worker with a connection. ``name`` and the number of its connections so far
    identify the connection."""

    def __init__(self, world: World, name: str, side: Side) -> None:
        self.world, self.name, self.side = world, name, side
        self.connections = 0
        world.peers.append(self)

    @property
    def id(self) -> bytes:
        return f"\0{self.name}{self.connections}".encode()

    def receive(self, frames: list[bytes]) -> None: ...

    def outgoing(self) -> list[list[bytes]]:
        return []


class GpuWorker(Peer):
    """A worker that sends the tokens 100, 101, 102, … of each stream, one token per step."""

    def __init__(self, world: World, name: str = "gpu", role: str = "gpu") -> None:
        super().__init__(world, name, Side.BACK)
        self.role = role
        self.drops = True
        """Whether the worker at once drops the requests that the broker tells it to drop, and
        answers each CLAIM. A busy worker does so later."""
        self.running: dict[int, Running] = {}
        self.lease = Lease(self._registration, lambda _: Heartbeat(), world.now)
        self.out = self.lease.connected(world.now)
        self.got: list[tuple[bytes, Header, list[bytes]]] = []
        self.takes: int | None = None
        """Number of messages that the worker handles before it is busy; None if it is not busy."""
        self.held: list[list[bytes]] = []

    def catch_up(self) -> None:
        """Ends the busy state, and handles the messages that have arrived meanwhile."""
        self.takes, held, self.held = None, self.held, []
        for frames in held:
            self.receive(frames)

    def _registration(self) -> Register:
        live = [
            LiveRequest(request=r, session=one.header.address, stream_id=one.stream_id)
            for r, one in self.running.items()
        ]
        gpu = self.role == "gpu"
        return Register(
            name=self.name,
            role=self.role,  # type: ignore[arg-type]
            version=1,
            pid=1,
            host="h",
            capacity=4,
            models=[MODEL] if gpu else [],
            patterns=["mine"] if self.role == "controller" else [],
            default="m" if gpu else "",
            live=live,
        )

    def outgoing(self) -> list[list[bytes]]:
        out, self.out = self.out, []
        return out + self.lease.on_time(self.world.now)

    def receive(self, frames: list[bytes]) -> None:
        if self.takes is not None:
            self.takes -= 1
            if self.takes < 0:
                self.held.append(frames)
                return
        _, answers = self.lease.on_frames(frames, self.world.now)
        self.out += answers
        header = decode_header(frames[1])
        self.got.append((frames[0], header, frames[2:]))
        match frames[0]:
            case b"GENERATE":
                self._begin(header, frames[2:])
            case b"ATTACH":
                one = self.running[header.request]
                received = decode_as(Attach, frames[2]).received
                answer = Msg(stream_id=one.stream_id, attached=received, moves=one.moves)
                self._send(b"MSG", one, encode_body(answer, "msgpack"))
                self._tokens(one, one.sent[received:])
            case b"CANCEL":
                self.running.pop(header.request, None)
                self.out.append([b"TOKEN", encode_token_header([], [header.request])])
            case b"CLAIM" if self.drops:
                self.out.append([b"CLAIMED", encode_header(), frames[2]])
            case b"REGISTERED":
                answer = decode_as(Registered, frames[2])
                for request in answer.unknown if self.drops else []:
                    self.running.pop(request, None)
                for request in answer.wanted:
                    self._journal(self.running[request])

    def _begin(self, header: Header, frames: list[bytes]) -> None:
        sent: list[Token] = []
        moves = 0
        if header.flags & Flag.MOVED:
            *frames, last = frames
            transcript = decode_transcript(last)
            sent, moves = transcript.entries, transcript.moves
        body = decode_as(Generate, frames[0])
        one = Running(header, body.stream_id, frames, body.max_tokens, sent, moves)
        self.running[header.request] = one
        if moves:
            number = body.stream_id
            notice = System(event="moved", message="lost", stream_id=number, moves=moves)
            self._send(b"SYSTEM", one, encode_body(notice, "msgpack"))

    def _journal(self, one: Running) -> None:
        body = Journal(type="GENERATE", ended=one.ended, moves=one.moves)
        sent = encode_body(one.sent, "msgpack")
        self._send(b"JOURNAL", one, encode_body(body, "msgpack"), sent, *one.frames)

    def _send(self, kind: bytes, one: Running, *parts: bytes) -> None:
        header = encode_header(one.header.request, one.header.address, one.header.flags)
        self.out.append([kind, header, *parts])

    def _tokens(self, one: Running, tokens: list[Token]) -> None:
        finished = [one.header.request] if one.ended else []
        head = encode_token_header([one.header.address], finished)
        self.out.append([b"TOKEN", head, encode_body(tokens, "msgpack")])

    def step(self) -> None:
        """Sends another token of each stream. Ended streams are kept, as in a real worker."""
        for one in self.running.values():
            if one.ended:
                continue
            pos = len(one.sent)
            last = pos + 1 == one.length
            token = Token(
                token=100 + pos,
                stream_id=one.stream_id,
                logprob=-1.0,
                finish_reason="length" if last else None,
                pos=pos,
            )
            one.sent.append(token)
            self._tokens(one, [token])


class ClientPeer(Peer):
    """A client's session."""

    def __init__(self, world: World, name: str = "client", key: str = "") -> None:
        super().__init__(world, name, Side.FRONT)
        self.key = key
        self.session = ClientSession("front", 60.0, world.now)
        self.session.connected(world.now)
        self.tokens: dict[Call, list[int | None]] = {}
        self.ends: dict[Call, Any] = {}
        self.said: list[str] = []

    def receive(self, frames: list[bytes]) -> None:
        self.session.on_frames(frames, self.world.now)

    def outgoing(self) -> list[list[bytes]]:
        self.session.on_time(self.world.now)
        taken, self.session.outgoing = self.session.outgoing, []
        self.said += [frames[0].decode() for frames in taken]
        return [list(frames) for frames in taken]

    def generate(self, length: int = 8, **more: Any) -> Call:
        options: Any = {"model": "m", "max_tokens": length, **more}
        call = generate_call([1], options)
        self.session.submit(call, self.world.now)
        self.tokens[call] = []
        return call

    def take(self) -> None:
        ready, self.session.ready = self.session.ready, []
        for part in ready:
            assert not isinstance(part, Step), "these workers do not send columns"
            call, events = part
            self.tokens[call] += [e.token for e in events if isinstance(e, Token)]
            for event in events:
                if isinstance(event, Ended):
                    self.ends[call] = event.error


class World:
    """A broker, which a test can kill and start again, and its peers."""

    def __init__(self, **settings: Any) -> None:
        self.now = 100.0
        self.settings = BrokerSettings(**settings)
        self.peers: list[Peer] = []
        self.boot = 0
        self.broker: Broker | None = None
        self.start()

    def kill(self) -> None:
        self.run()
        self.broker = None

    def start(self) -> None:
        """Starts a new broker, to which every peer has a new connection."""
        self.boot += 1
        self.broker = Broker(self.settings, boot=self.boot, now=self.now)
        for peer in self.peers:
            peer.connections += 1

    def remove(self, peer: Peer) -> None:
        self.peers.remove(peer)
        if self.broker is not None:
            self._route(self.broker.on_gone(peer.side, peer.id, self.now))

    def run(self, *only: Peer) -> None:
        """Delivers the messages of ``only``, or of all peers, and the broker's answers, until no
        messages are left. If no broker runs, the messages are lost."""
        moved = True
        while moved:
            moved = False
            for peer in only or tuple(self.peers):
                for frames in peer.outgoing():
                    moved = True
                    if self.broker is None:
                        continue
                    if isinstance(peer, ClientPeer):
                        self._route(self.broker.on_client(peer.id, frames, self.now, peer.key))
                    else:
                        self._route(self.broker.on_worker(peer.id, frames, self.now))
        for peer in self.peers:
            if isinstance(peer, ClientPeer):
                peer.take()

    def _route(self, messages: list[Outgoing]) -> None:
        for message in messages:
            for peer in self.peers:
                if (peer.side, peer.id) == (message.side, message.peer):
                    peer.receive(list(message.frames))

    def pass_time(self, seconds: float, *only: Peer) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            if self.broker is not None:
                self._route(self.broker.tick(self.now))
            self.run(*only)


def steps(world: World, gpu: GpuWorker, count: int) -> None:
    for _ in range(count):
        gpu.step()
        world.run()


def begun(length: int = 8, sent: int = 3, **settings: Any) -> tuple[World, GpuWorker, ClientPeer]:
    """A world with a stream of ``length`` tokens, of which ``sent`` have been sent."""
    world = World(**settings)
    gpu, client = GpuWorker(world), ClientPeer(world)
    world.run()
    client.generate(length, retry_s=0)
    world.run()
    steps(world, gpu, sent)
    return world, gpu, client
