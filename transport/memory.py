"""Addresses in memory: the bus within one process, without a socket.

A broker listens at ``memory://NAME``, and a ``Link`` is a connection to the broker.
``MemoryCarrier`` sends and receives the messages of a ``Peer`` over a link, as ``Dealer`` does over
a socket. Frames are passed by reference.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from ..protocol.frames import Frames
from .dealer import JOIN_S, PAUSES_S, AddressError, Peer
from .waiting import get_within

log = logging.getLogger(__name__)

SCHEME = "memory://"
PIPE = 256
"""Maximum number of messages from the broker that wait in a link. Further messages wait in the
broker's outbox, which is bounded."""


class Listener(Protocol):
    """The broker's end of an address. Any thread may call both methods."""

    def arrived(self, link: Link, frames: Frames) -> None:
        """Called when a message of ``link`` has arrived. May block until the broker has room for
        the message."""

    def closed(self, link: Link) -> None:
        """Called when the owner of ``link`` has closed it."""


_listeners: dict[str, Listener] = {}
_numbers = itertools.count(1)


def listen(address: str, listener: Listener) -> None:
    """Makes ``address`` available in this process; raises ValueError if another broker has this
    address."""
    if _listeners.setdefault(address, listener) is not listener:
        raise ValueError(f"another broker listens at {address}")


def unlisten(address: str) -> None:
    """Removes an address that ``listen`` made available."""
    _listeners.pop(address, None)


class Link:
    """A connection to the broker at ``address``. The broker identifies the connection by ``peer``.

    ``notify`` is called, on any thread, whenever a message of the broker has arrived, or the broker
    has closed the link. Raises AddressError if no broker of this process listens at ``address``.
    """

    def __init__(self, address: str, notify: Callable[[], None]) -> None:
        listener = _listeners.get(address)
        if listener is None:
            raise AddressError(f"{address!r} is not the address of a broker of this process")
        self._listener = listener
        self._notify = notify
        self._waiting: deque[Frames] = deque()
        # The id has the form of the routing ids that ZeroMQ itself assigns. Clients cannot choose
        # ids of this form.
        self.peer = b"\0" + next(_numbers).to_bytes(8, "big")
        self.broken = False
        """Whether the link is closed, by the broker or by its owner."""

    def send(self, frames: Frames) -> None:
        """Sends a message to the broker. If the link is broken, the message is lost."""
        if not self.broken:
            self._listener.arrived(self, frames)

    def take(self, max_messages: int = PIPE) -> list[Frames]:
        """The messages that have arrived, up to ``max_messages``."""
        taken: list[Frames] = []
        while self._waiting and len(taken) < max_messages:
            taken.append(self._waiting.popleft())
        return taken

    def close(self) -> None:
        """Closes the link; messages that were sent before still arrive."""
        if not self.broken:
            self.broken = True
            self._listener.closed(self)

    # --- the broker's end -----------------------------------------------------------------------

    def deliver(self, frames: Frames) -> bool:
        """Delivers a message from the broker; returns False if ``PIPE`` messages wait already."""
        if len(self._waiting) >= PIPE:
            return False
        self._waiting.append(frames)
        self._notify()
        return True

    def cut(self) -> None:
        """Closes the link from the broker's side."""
        self.broken = True
        self._notify()


class MemoryCarrier:
    """Connects ``peer`` to the broker at ``address``, with its own thread, as ``Dealer`` does.

    Raises AddressError if no broker of this process listens at ``address``.
    """

    def __init__(self, address: str, peer: Peer, name: str) -> None:
        self.address = address
        self._peer = peer
        self._name = name
        self._woken: SimpleQueue[None] = SimpleQueue()
        """The wake-ups of the thread. Unlike ``Event.set``, ``put`` of a ``SimpleQueue`` may be
        called by a finalizer that interrupts another ``put``."""
        self._closing = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        Link(address, self.wake)

    @property
    def started(self) -> bool:
        """Whether the thread was started."""
        return self._thread is not None

    @property
    def forked(self) -> bool:
        """Whether this object is a copy in a forked process, in which no thread serves the
        connection."""
        return os.getpid() != self._process

    def start(self) -> None:
        """Starts the thread, which opens the link."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Makes the connection's thread call the peer's ``outgoing`` soon. Any thread may call this
        method."""
        self._woken.put(None)

    def send(self, queue: deque[Frames]) -> None:
        """Wakes the connection's thread. The thread calls the peer's ``outgoing``, which must yield
        the messages of ``queue``, and sends these messages."""
        self.wake()

    def close(self) -> None:
        """Sends the peer's remaining messages, closes the link and ends the thread."""
        self._closing = True
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=JOIN_S)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "its thread failed"
        try:
            while not self._closing:
                try:
                    self._serve()
                except Exception as error:
                    log.warning(
                        "the connection to %s failed: %s",
                        self.address,
                        error,
                        exc_info=not isinstance(error, AddressError),
                    )
                if not self._closing:
                    self._peer.disconnected(time.monotonic())
                    time.sleep(PAUSES_S[0])
            reason = ""
        finally:
            self._peer.ended(reason)

    def _serve(self) -> None:
        """Serves one link until ``close``, until the link is broken or until the peer reports
        ``lost``."""
        link = Link(self.address, self.wake)
        try:
            self._peer.connected(time.monotonic())
            while self._exchange(link):
                pass
        finally:
            link.close()

    def _exchange(self, link: Link) -> bool:
        peer = self._peer
        messages = link.take()
        now = time.monotonic()
        if messages:
            peer.receive(messages, now)
        # The flag is read before ``outgoing`` is called. So all messages that were queued before
        # ``close`` are sent.
        closing = self._closing
        for frames in peer.outgoing(now):
            link.send(frames)
        if closing or link.broken or peer.lost(now):
            return False
        if len(messages) < PIPE:
            self._wait(peer.wait_s(now))
        return True

    def _wait(self, seconds: float) -> None:
        """Waits up to ``seconds`` for a wake-up, and removes all wake-ups that have arrived."""
        with contextlib.suppress(Empty):
            get_within(self._woken, max(seconds, 0.001))
            while True:
                self._woken.get_nowait()
