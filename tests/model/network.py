"""Connections of a simulated bus: queues that lose what is in them, and a broker that may die.

As with ZeroMQ, the messages of a connection arrive in their order or not at all. A connection that
breaks is opened again by the socket itself, under another routing id, without notice to its owner;
the broker notices only when it sends to the old one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from tokenbus.broker.core import Broker
from tokenbus.broker.outgoing import Outgoing, Side
from tokenbus.broker.settings import BrokerSettings

from ..broker.invariants import check

Frames = list[bytes]


class Pipe:
    """One socket of a client or worker, and its connection to the broker."""

    def __init__(self, network: Network, side: Side, before: Pipe | None = None) -> None:
        """``before``: the one that it replaces."""
        self._network = network
        self.side = side
        self.up: deque[Frames] = deque()
        self.down: deque[Frames] = deque()
        self.peer = b""
        self.open = True
        self.cut: bool = before is not None and before.cut
        """Nothing passes for the moment, in either direction, nor where another one replaces it."""
        network.connect(self)

    def send(self, frames: Sequence[bytes]) -> None:
        """Sends a message to the broker."""
        if self.open:
            self.up.append(list(frames))

    def arrive(self, most: int) -> int:
        """Up to this many of its messages arrive at the broker; how many did."""
        return self._network.arrive(self, most)

    def close(self, lost: int) -> None:
        """The process is gone, or has closed its socket: the last ``lost`` messages on their way to
        the broker are lost too."""
        if self.cut:
            # Neither what was sent arrives at the broker, nor that this was closed.
            self.up.clear()
            self.open = False
            self._network.pipes.remove(self)
            return
        self._lose(lost)
        self.open = False
        self._network.disconnect(self)

    def break_off(self, lost: int) -> None:
        """The connection is lost; the socket opens another one."""
        self._lose(lost)
        self._network.disconnect(self)
        self._network.connect(self)

    def _lose(self, lost: int) -> None:
        self.down.clear()
        for _ in range(min(lost, len(self.up))):
            self.up.pop()
        self._network.arrive(self, len(self.up))


class Network:
    """One broker, the connections to it, and the time. ``number``: that of the broker, among the
    brokers of the system."""

    def __init__(self, settings: BrokerSettings, number: int = 0) -> None:
        self.settings = settings
        self.now = 1000.0
        self._ids = itertools.count(1)
        self._boots = itertools.count(1 + 1000 * number)
        self.pipes: list[Pipe] = []
        self._connected: dict[bytes, Pipe] = {}
        self.broker: Broker | None = None
        self.restarts = 0
        self.stopped = False
        """The broker's process stands still: what is sent to it waits."""
        self._left: list[tuple[Pipe, bytes, deque[Frames]]] = []
        """Connections that were closed meanwhile, and what had been sent on them."""
        self.start_broker()

    # --- the broker -----------------------------------------------------------------------------

    def start_broker(self) -> None:
        """A broker starts, and sockets find it."""
        self.broker = Broker(self.settings, boot=next(self._boots), now=self.now)
        self.recovered_at = self.now + self.settings.recover_s
        for pipe in self.pipes:
            self.connect(pipe)

    def kill_broker(self) -> None:
        """The broker dies, with all that it has received; what it has sent may still arrive."""
        self.broker = None
        self.stopped = False
        self._left.clear()
        self.restarts += 1
        self._connected.clear()

    def go_on(self) -> None:
        """A broker that was stopped goes on: it takes what was sent on connections that are closed,
        and then notices that some are."""
        self.stopped = False
        left, self._left = self._left, []
        for pipe, peer, frames in left:
            for message in frames:
                self._take(pipe.side, peer, message)
        for pipe, peer, _ in left:
            if self.broker is not None:
                self._route(self.broker.on_gone(pipe.side, peer, self.now))

    def tick(self, seconds: float) -> None:
        """Time passes at the broker."""
        self.now += seconds
        if self.broker is not None and not self.stopped:
            self._route(self.broker.tick(self.now))

    # --- connections ----------------------------------------------------------------------------

    def connect(self, pipe: Pipe) -> None:
        """A socket gets a connection, under a routing id of its own."""
        if pipe not in self.pipes:
            self.pipes.append(pipe)
        if self.broker is not None:
            pipe.peer = b"\0" + next(self._ids).to_bytes(4, "big")
            self._connected[pipe.peer] = pipe

    def disconnect(self, pipe: Pipe) -> None:
        """A connection is lost, which the broker is not told of."""
        if self.stopped and self._connected.get(pipe.peer) is pipe:
            self._left.append((pipe, pipe.peer, pipe.up.copy()))
            pipe.up.clear()
        self._connected.pop(pipe.peer, None)
        if not pipe.open:
            self.pipes.remove(pipe)

    def arrive(self, pipe: Pipe, most: int) -> int:
        """Up to this many messages of a connection arrive at the broker; how many did."""
        count = 0
        while count < most and pipe.up and self.broker is not None and not self.stopped:
            if self._connected.get(pipe.peer) is not pipe:
                break
            self._take(pipe.side, pipe.peer, pipe.up.popleft())
            count += 1
        return count

    def _take(self, side: Side, peer: bytes, frames: Frames) -> None:
        if self.broker is None:
            return
        if side is Side.FRONT:
            self._route(self.broker.on_clients([(peer, frames)], self.now))
        else:
            self._route(self.broker.on_worker(peer, frames, self.now))

    def _route(self, messages: Sequence[Outgoing]) -> None:
        broker = self.broker
        assert broker is not None
        gone = []
        for message in messages:
            pipe = self._connected.get(message.peer)
            if pipe is not None:
                assert pipe.side is message.side
                pipe.down.append(list(message.frames))
            else:
                gone.append(message)
        for message in gone:
            self._route(broker.on_gone(message.side, message.peer, self.now, message.frames))
        check(broker)
