"""Connections of a simulated bus: queues that may lose their last messages, and a broker that may
die.

As with ZeroMQ, the messages of a connection arrive in order or not at all. If a connection breaks,
its socket opens another one with another routing id, and does not notify its owner. The broker
notices the break when it sends to the old routing id. If a connection breaks while the broker is
stopped, the broker notices the break when it continues.
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
        """``before``: the socket that this socket replaces."""
        self._network = network
        self.side = side
        self.up: deque[Frames] = deque()
        self.down: deque[Frames] = deque()
        self.peer = b""
        self.open = True
        self.cut: bool = before is not None and before.cut
        """Whether the link is cut at present: no message passes in either direction, on this socket
        or on a socket that replaces it."""
        network.connect(self)

    def send(self, frames: Sequence[bytes]) -> None:
        """Sends a message to the broker."""
        if self.open:
            self.up.append(list(frames))

    def arrive(self, most: int) -> int:
        """Delivers up to ``most`` messages of this socket to the broker; returns their number."""
        return self._network.arrive(self, most)

    def close(self, lost: int) -> None:
        """Closes the socket, because its process has died or closed it. The last ``lost`` messages
        that were sent to the broker do not arrive."""
        if self.cut:
            # The broker receives neither the sent messages nor the end of the connection.
            self.up.clear()
            self.open = False
            self._network.pipes.remove(self)
            return
        self._lose(lost)
        self.open = False
        self._network.disconnect(self)

    def break_off(self, lost: int) -> None:
        """Breaks the connection; the socket opens another one. ``lost``: as in ``close``."""
        self._lose(lost)
        self._network.disconnect(self)
        self._network.connect(self)

    def _lose(self, lost: int) -> None:
        self.down.clear()
        for _ in range(min(lost, len(self.up))):
            self.up.pop()
        self._network.arrive(self, len(self.up))


class Network:
    """One broker, its connections, and its clock. ``number``: the number of the broker in the
    system."""

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
        """Whether the broker's process is stopped. Messages to it then wait."""
        self._left: list[tuple[Pipe, bytes, deque[Frames]]] = []
        """Connections that were closed while the broker was stopped, with the messages on them that
        had not arrived."""
        self.start_broker()

    # --- the broker -----------------------------------------------------------------------------

    def start_broker(self) -> None:
        """Starts a broker, to which all sockets connect."""
        self.broker = Broker(self.settings, boot=next(self._boots), now=self.now)
        self.recovered_at = self.now + self.settings.recover_s
        for pipe in self.pipes:
            self.connect(pipe)

    def kill_broker(self) -> None:
        """Kills the broker. The messages that it has received are lost; the messages that it has
        sent may still arrive."""
        self.broker = None
        self.stopped = False
        self._left.clear()
        self.restarts += 1
        self._connected.clear()

    def go_on(self) -> None:
        """Lets a stopped broker continue. It first handles the messages on the connections that
        were closed meanwhile, and then notices that these connections are closed."""
        self.stopped = False
        left, self._left = self._left, []
        for pipe, peer, frames in left:
            for message in frames:
                self._take(pipe.side, peer, message)
        for pipe, peer, _ in left:
            if self.broker is not None:
                self._route(self.broker.on_gone(pipe.side, peer, self.now))

    def tick(self, seconds: float) -> None:
        """Lets time pass at the broker."""
        self.now += seconds
        if self.broker is not None and not self.stopped:
            self._route(self.broker.tick(self.now))

    # --- connections ----------------------------------------------------------------------------

    def connect(self, pipe: Pipe) -> None:
        """Gives a socket a connection with a new routing id."""
        if pipe not in self.pipes:
            self.pipes.append(pipe)
        if self.broker is not None:
            pipe.peer = b"\0" + next(self._ids).to_bytes(4, "big")
            self._connected[pipe.peer] = pipe

    def disconnect(self, pipe: Pipe) -> None:
        """Ends a connection, without notice to the broker."""
        if self.stopped and self._connected.get(pipe.peer) is pipe:
            self._left.append((pipe, pipe.peer, pipe.up.copy()))
            pipe.up.clear()
        self._connected.pop(pipe.peer, None)
        if not pipe.open:
            self.pipes.remove(pipe)

    def arrive(self, pipe: Pipe, most: int) -> int:
        """Delivers up to ``most`` messages of a connection to the broker; returns their number."""
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
