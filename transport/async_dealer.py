"""A DEALER socket on an event loop, for programs that have many sockets at once.

A socket does not need a thread or a task of its own, because the loop watches the socket's
descriptor. One call of ``receive`` may return several messages. The number of waiting messages is
bounded in both directions, so each side can detect that the other side has stopped reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq

from ..protocol.frames import Frames
from ..protocol.keys import OwnKey
from .dealer import Context, open_dealer, receive, send

PIPE = 64
"""Maximum number of messages that ZeroMQ queues in each direction. Further messages wait at the
sender."""
TAKE_AT_ONCE = 64

_EVENTS, _POLLIN, _POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)


class AsyncDealer:
    """A connection to the broker at ``address``, on the running loop. One task may receive and one
    task may send.

    ZeroMQ reconnects by itself; the broker then sees a new connection. Raises AddressError if the
    address is not valid, and ZMQError if the process cannot open another descriptor or socket.
    """

    def __init__(self, context: Context, address: str, key: OwnKey | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = open_dealer(context, address, PIPE, key)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._receiver: asyncio.Future[None] | None = None
        self._sender: asyncio.Future[None] | None = None
        self._waited = True
        """Whether the last ``receive`` has waited for a message. Other tasks have run during this
        wait."""
        self._loop.add_reader(self._descriptor, self._look)

    async def receive(self) -> list[Frames]:
        """Waits until a message has arrived. Returns up to ``TAKE_AT_ONCE`` of the messages that
        have arrived, and at least one.

        Other tasks of the loop run between two calls, even if messages arrive faster than this
        method returns them.
        """
        if not self._waited:
            await asyncio.sleep(0)
        self._waited = False
        while not (messages := self._take()):
            self._receiver = self._loop.create_future()
            self._look()
            await self._receiver
            self._waited = True
        return messages

    async def send(self, frames: Sequence[bytes]) -> None:
        """Sends a message as soon as the queue has room for it."""
        while True:
            try:
                send(self._socket, frames)
                break
            except zmq.Again:
                self._sender = self._loop.create_future()
                self._look()
                await self._sender
        # A send can clear the descriptor's signal that a message has arrived. So the events are
        # read after each send.
        self._look()

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket. ZeroMQ still delivers queued messages in the background, for up to
        ``linger_ms``."""
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger=linger_ms)

    def _take(self) -> list[Frames]:
        messages: list[Frames] = []
        while len(messages) < TAKE_AT_ONCE:
            frames = receive(self._socket)
            if frames is None:
                break
            messages.append(frames)
        return messages

    def _look(self) -> None:
        """Wakes the tasks that wait in ``receive`` or ``send``, if they can continue now. Reading
        the socket's events resets the descriptor. After the next change, the descriptor is readable
        again."""
        events = int(self._socket.get(_EVENTS))
        if events & _POLLIN and self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)
        if events & _POLLOUT and self._sender is not None and not self._sender.done():
            self._sender.set_result(None)
