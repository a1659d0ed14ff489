"""A broker that was restarted, with real client sessions and leases, and workers played by hand:
frames and times in, frames out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import msgpack
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
    Start,
    VocabularyName,
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
    """Whoever has a connection; ``name`` is that of the connection."""

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
    """A worker that gives the tokens 100, 101, 102, … of each stream, one a step."""

    def __init__(self, world: World, name: str = "gpu", role: str = "gpu") -> None:
        super().__init__(world, name, Side.BACK)
        self.role = role
        self.drops = True
        """Whether it drops the requests that it should drop; a busy one does so only later."""
        self.running: dict[int, Running] = {}
        self.lease = Lease(self._registration, lambda _: Heartbeat(), world.now)
        self.out = self.lease.connected(world.now)
        self.got: list[tuple[bytes, Header, list[bytes]]] = []
        self.takes: int | None = None
        """Messages that it handles before it is busy; None: all."""
        self.held: list[list[bytes]] = []

    def catch_up(self) -> None:
        """It is not busy any more."""
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
                self._say(b"MSG", one, encode_body(answer, "msgpack"))
                self._tokens(one, one.sent[received:])
            case b"CANCEL":
                self.running.pop(header.request, None)
                self.out.append([b"TOKEN", encode_token_header([], [header.request])])
            case b"CLAIM":
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
            self._say(b"SYSTEM", one, encode_body(notice, "msgpack"))

    def _journal(self, one: Running) -> None:
        body = Journal(type="GENERATE", ended=one.ended, moves=one.moves)
        sent = encode_body(one.sent, "msgpack")
        self._say(b"JOURNAL", one, encode_body(body, "msgpack"), sent, *one.frames)

    def _say(self, kind: bytes, one: Running, *parts: bytes) -> None:
        header = encode_header(one.header.request, one.header.address, one.header.flags)
        self.out.append([kind, header, *parts])

    def _tokens(self, one: Running, tokens: list[Token]) -> None:
        finished = [one.header.request] if one.ended else []
        head = encode_token_header([one.header.address], finished)
        self.out.append([b"TOKEN", head, encode_body(tokens, "msgpack")])

    def step(self) -> None:
        """One more token of each stream; what ends is kept, as a real worker does for a while."""
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
            assert not isinstance(part, Step), "these workers send no columns"
            call, events = part
            self.tokens[call] += [e.token for e in events if isinstance(e, Token)]
            for event in events:
                if isinstance(event, Ended):
                    self.ends[call] = event.error


class World:
    """A broker that may be missing, and its peers."""

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
        """A new broker, on which every peer has a new connection."""
        self.boot += 1
        self.broker = Broker(self.settings, boot=self.boot, now=self.now)
        for peer in self.peers:
            peer.connections += 1

    def remove(self, peer: Peer) -> None:
        self.peers.remove(peer)
        if self.broker is not None:
            self._route(self.broker.on_gone(peer.side, peer.id, self.now))

    def run(self, *only: Peer) -> None:
        """Carries messages, of these peers or of all, until nobody has any."""
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


def expected(length: int = 8) -> list[int | None]:
    return [100 + i for i in range(length)]


def steps(world: World, gpu: GpuWorker, count: int) -> None:
    for _ in range(count):
        gpu.step()
        world.run()


def begun(length: int = 8, sent: int = 3, **settings: Any) -> tuple[World, GpuWorker, ClientPeer]:
    """A world in which a stream has begun."""
    world = World(**settings)
    gpu, client = GpuWorker(world), ClientPeer(world)
    world.run()
    client.generate(length, retry_s=0)
    world.run()
    steps(world, gpu, sent)
    return world, gpu, client


def test_a_stream_goes_on_under_the_next_broker() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    # Computed meanwhile, and the first of it lost on the way.
    steps(world, gpu, 2)
    world.start()
    world.pass_time(4.0)
    assert client.tokens[call] == expected(5)
    steps(world, gpu, 3)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}
    assert client.said.count("GENERATE") == 1
    assert world.broker is not None
    assert world.broker.drained


def test_a_stream_that_ended_while_there_was_no_broker_is_delivered() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    steps(world, gpu, 5)
    world.start()
    world.pass_time(4.0)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}
    assert client.said.count("GENERATE") == 1


def test_a_stream_that_ends_before_its_client_is_back_is_delivered() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    world.start()
    world.pass_time(2.0, gpu)
    gpu.running[next(iter(gpu.running))].length = 4
    gpu.step()
    world.run(gpu)
    world.pass_time(4.0)
    assert client.tokens[call] == expected(4)
    assert client.ends == {call: None}


def test_an_attach_waits_for_the_worker_that_has_the_stream() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    world.start()
    world.pass_time(20.0, client)
    assert client.said[-1] == "PING"
    assert "ATTACH" in client.said
    assert call not in client.ends
    world.pass_time(4.0)
    steps(world, gpu, 5)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}


def test_a_stream_that_no_worker_reports_is_sent_again_and_no_entry_delivered_twice() -> None:
    world = World(recover_s=10.0)
    gpu, client = GpuWorker(world), ClientPeer(world)
    world.run()
    call = client.generate(retry_s=60)
    world.run()
    steps(world, gpu, 3)
    world.kill()
    world.remove(gpu)
    world.start()
    world.pass_time(5.0)
    assert "GENERATE" not in client.said[client.said.index("GENERATE") + 1 :]
    other = GpuWorker(world, "other")
    world.pass_time(8.0)
    steps(world, other, 8)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}


def test_a_request_of_which_nothing_has_arrived_is_sent_again_at_once() -> None:
    world = World()
    client = ClientPeer(world)
    gpu = GpuWorker(world)
    world.run()
    call = client.generate(retry_s=60)
    world.run()
    world.kill()
    world.start()
    other = GpuWorker(world, "other")
    world.pass_time(5.0, client, other)
    assert client.said.count("GENERATE") == 2
    world.pass_time(5.0)
    # What the first worker had begun is dropped.
    assert gpu.running == {}
    steps(world, other, 8)
    assert client.tokens[call] == expected()


def test_what_nobody_attaches_to_ends_with_the_time_for_it() -> None:
    world, gpu, client = begun(recover_s=10.0)
    world.kill()
    world.remove(client)
    world.start()
    world.pass_time(5.0)
    assert len(gpu.running) == 1
    world.pass_time(8.0)
    assert gpu.running == {}
    assert world.broker is not None
    assert world.broker.drained
    assert len(world.broker.session_table) == 0


def test_a_cancelled_stream_is_not_adopted() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    world.start()
    world.pass_time(4.0, client)
    client.session.cancel(call)
    world.pass_time(4.0)
    assert gpu.running == {}


def test_a_session_is_not_given_to_another_key() -> None:
    world = World()
    gpu, client = GpuWorker(world), ClientPeer(world, key="a")
    world.run()
    client.generate(retry_s=0)
    world.run()
    steps(world, gpu, 3)
    world.kill()
    world.start()
    client.key = "b"
    world.pass_time(4.0)
    steps(world, gpu, 1)
    [call] = client.tokens
    assert client.tokens[call] == expected(3)
    assert world.broker is not None
    [adopted] = world.broker.dispatcher.requests.values()
    assert adopted.session.token == ""


def test_after_that_time_a_worker_drops_what_it_reports() -> None:
    world, gpu, client = begun(recover_s=10.0)
    [call] = client.tokens
    world.kill()
    world.start()
    world.pass_time(11.0, client)
    assert client.ends[call].code == "connection_lost"
    world.pass_time(4.0)
    assert gpu.running == {}


def test_a_client_that_does_not_know_of_it_gets_a_new_session() -> None:
    world, _, client = begun()
    token = client.session._token
    world.kill()
    world.remove(client)
    world.start()
    assert world.broker is not None
    hello = msgpack.encode({"session": token, "encodings": ["msgpack"]})
    [answer] = world.broker.on_client(b"\0old", [b"HELLO", hello], world.now)
    welcome = msgpack.decode(answer.frames[1])
    assert welcome["session"] != token
    assert "resumed" not in welcome
    assert "recovering" not in welcome


def moved_away(gpu: GpuWorker, other: GpuWorker) -> None:
    """The streams of a worker, as they were two entries ago, are at another one too."""
    for request, one in gpu.running.items():
        other.running[request] = Running(
            one.header, one.stream_id, one.frames, one.length, one.sent[:-2]
        )


def test_of_two_workers_with_a_stream_the_one_with_more_of_it_is_taken() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    stale = GpuWorker(world, "stale")
    world.kill()
    moved_away(gpu, stale)
    world.start()
    world.pass_time(2.0, stale)
    world.pass_time(4.0)
    assert stale.running == {}
    stale.step()
    steps(world, gpu, 5)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}


def test_an_attach_to_more_than_was_reported_waits_for_the_worker_that_has_it() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    stale = GpuWorker(world, "stale")
    world.kill()
    moved_away(gpu, stale)
    world.start()
    world.pass_time(4.0, stale, client)
    steps(world, stale, 3)
    assert client.tokens[call] == expected(3)
    world.pass_time(4.0)
    assert stale.running == {}
    steps(world, gpu, 5)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}


def test_a_worker_that_was_cut_off_before_a_move_is_not_taken_though_it_has_more() -> None:
    """There the entries of several sequences came in another order, so that what the client has
    received cannot be counted in it."""
    for first in ("gpu", "stale"):
        world, stale, client = begun(sent=2)
        [call] = client.tokens
        gpu = GpuWorker(world, "gpu2")
        world.run()
        world.remove(stale)
        world.run()
        steps(world, gpu, 1)
        assert client.tokens[call] == expected(3)
        world.kill()
        # It comes back with what it computed while it was silent.
        world.peers.append(stale)
        stale.out = stale.lease.connected(world.now)
        [running] = stale.running.values()
        running.sent += [
            Token(token=99, stream_id=running.stream_id, logprob=-1.0, finish_reason=None, pos=p)
            for p in range(2, 6)
        ]
        world.start()
        order = (gpu, stale) if first == "gpu" else (stale, gpu)
        for peer in order:
            world.run(peer, client)
        world.pass_time(4.0)
        assert stale.running == {}
        steps(world, gpu, 5)
        assert client.tokens[call] == expected()
        assert client.ends == {call: None}


def test_what_a_worker_still_sends_of_a_stream_that_it_is_told_to_drop_reaches_nobody() -> None:
    """It computes on until it has handled that; the client has attached to the other worker."""
    for stale_first in (True, False):
        world, gpu, client = begun()
        [call] = client.tokens
        stale = GpuWorker(world, "stale")
        stale.drops = False
        world.kill()
        moved_away(gpu, stale)
        world.start()
        for peer in (stale, gpu) if stale_first else (gpu, stale):
            world.run(peer)
        world.pass_time(4.0)
        assert client.tokens[call] == expected(3)
        assert stale.running
        steps(world, stale, 3)
        steps(world, gpu, 5)
        assert client.tokens[call] == expected()
        assert client.ends == {call: None}


def test_an_adopted_stream_moves_with_all_that_was_sent_of_it() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    steps(world, gpu, 1)
    world.start()
    world.pass_time(4.0)
    steps(world, gpu, 1)
    other = GpuWorker(world, "other")
    world.run()
    world.remove(gpu)
    world.run()
    steps(world, other, 3)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}


def reconnect(world: World, gpu: GpuWorker) -> None:
    """A worker has a new connection, and has not registered yet."""
    assert world.broker is not None
    gone = gpu.id
    gpu.connections += 1
    world._route(world.broker.on_gone(gpu.side, gone, world.now))
    gpu.out = gpu.lease.connected(world.now)


def sent_twice(world: World, gpu: GpuWorker, by_another: bool) -> None:
    """After a restart of the broker, a worker that is cut off registers again with its stream,
    whose client is not back. The broker asks for the JOURNAL, and sends the stream to this worker,
    which has handled only the first of both. ``by_another``: the stream was at another one."""
    world.kill()
    world.start()
    world.pass_time(2.0, gpu)
    other = GpuWorker(world, "other")
    if by_another:
        world.run(gpu, other)
    reconnect(world, gpu)
    if by_another:
        other.step()
        world.run(other)
    world.remove(other)
    gpu.takes = 1
    world.run(gpu)
    assert b"GENERATE" in [frames[0] for frames in gpu.held]


@pytest.mark.parametrize("by_another", [False, True])
def test_tokens_of_an_attempt_that_was_replaced_are_not_kept(by_another: bool) -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    sent_twice(world, gpu, by_another)
    gpu.step()
    world.run(gpu)
    gpu.catch_up()
    for _ in range(2):
        gpu.step()
        world.run(gpu)
    last = GpuWorker(world, "last")
    world.run(last)
    world.remove(gpu)
    world.pass_time(4.0)
    steps(world, last, 8)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}


def test_the_end_of_an_attempt_that_was_replaced_ends_nothing() -> None:
    world, gpu, client = begun(length=4)
    [call] = client.tokens
    sent_twice(world, gpu, False)
    gpu.step()
    world.run(gpu)
    assert world.broker is not None
    assert len(world.broker.dispatcher.requests) == 1
    gpu.catch_up()
    world.pass_time(4.0)
    steps(world, gpu, 1)
    assert client.tokens[call] == expected(4)
    assert client.ends == {call: None}
    assert world.broker.drained


def test_the_controller_of_an_attempt_that_was_replaced_does_not_start() -> None:
    world = World()
    gpu, client = GpuWorker(world), ClientPeer(world)
    controller = GpuWorker(world, "controller", role="controller")
    world.run()
    client.generate(controller="mine", retry_s=0)
    world.run()
    steps(world, gpu, 3)
    sent_twice(world, gpu, False)
    [request] = gpu.running

    def start(attempt: int) -> None:
        body = Start(
            controller="mine",
            prompt=[1],
            max_tokens=8,
            model="m",
            vocabulary=VocabularyName(fingerprint="f", size=9, eos=[0]),
            attempt=attempt,
        )
        gpu.out.append([b"START", encode_header(request), encode_body(body, "msgpack")])

    start(1)
    world.pass_time(4.0)
    gpu.catch_up()
    start(2)
    world.pass_time(4.0)
    started = [body for kind, _, body in controller.got if kind == b"START"]
    assert [decode_as(Start, body[0], "msgpack").attempt for body in started] == [2]


def test_a_stream_that_its_worker_has_dropped_and_has_anew_is_delivered() -> None:
    """Each message of the new attempt reaches the client, as soon as the worker has dropped the
    earlier one."""
    world, gpu, client = begun()
    [call] = client.tokens
    sent_twice(world, gpu, True)
    world.pass_time(3.0)
    gpu.catch_up()
    world.run()
    steps(world, gpu, 5)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}
    assert client.said.count("GENERATE") == 1
    assert world.broker is not None
    [worker] = world.broker.dispatcher.workers.values()
    assert not worker.revoked
    assert not worker.withdrawn


def test_variables_stay_until_the_time_for_adoption_is_over() -> None:
    world, gpu, _ = begun(length=800, recover_s=10.0)
    state = GpuWorker(world, "state", role="state")
    [request] = gpu.running
    for number in (request, 7):
        state.running[number] = Running(Header(number), 0, [], 1)
    world.kill()
    world.start()
    world.pass_time(2.0, state)
    assert set(state.running) == {request, 7}
    world.pass_time(4.0)
    assert set(state.running) == {request, 7}
    world.pass_time(8.0)
    assert set(state.running) == {request}


def test_a_controller_starts_again_when_its_worker_and_the_client_are_back() -> None:
    world = World()
    gpu, client = GpuWorker(world), ClientPeer(world)
    controller = GpuWorker(world, "controller", role="controller")
    world.run()
    call = client.generate(controller="mine", retry_s=0)
    world.run()
    steps(world, gpu, 3)
    world.kill()
    world.start()
    world.pass_time(2.0, gpu)
    [request] = gpu.running
    start = Start(
        controller="mine",
        prompt=[1],
        max_tokens=8,
        model="m",
        vocabulary=VocabularyName(fingerprint="f", size=9, eos=[0]),
    )
    gpu.out.append([b"START", encode_header(request), encode_body(start, "msgpack")])
    world.pass_time(1.0, gpu, client)
    controller.got.clear()
    world.pass_time(2.0)
    assert [kind for kind, _, _ in controller.got if kind == b"START"] == [b"START"]
    steps(world, gpu, 5)
    assert client.tokens[call] == expected()


def test_the_answers_to_two_attaches_give_each_token_once() -> None:
    """The first one is answered on the connection that has replaced its own."""
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    world.start()
    world.pass_time(4.0, gpu, client)
    waiting, call.attaching = call.received, True
    steps(world, gpu, 1)
    for frames in gpu_answers(gpu, waiting), gpu_answers(gpu, waiting):
        for message in frames:
            client.session.on_frames(message, world.now)
    client.take()
    assert client.tokens[call] == expected(len(gpu_sent(gpu)))


def gpu_sent(gpu: GpuWorker) -> list[Token]:
    [one] = gpu.running.values()
    return one.sent


def gpu_answers(gpu: GpuWorker, received: int) -> list[list[bytes]]:
    """The answer to an ATTACH, as the broker passes it on."""
    [one] = gpu.running.values()
    answer = Msg(stream_id=one.stream_id, attached=received, moves=one.moves)
    missed = encode_body(one.sent[received:], "msgpack")
    return [[b"MSG", encode_body(answer, "msgpack")], [b"TOKEN", missed]]
