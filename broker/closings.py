"""Notices that a connection of the workers' socket has closed, as that of a worker that was killed.

A ROUTER does not report this: a send to the peer fails from then on, but which peer it is shows
only there. libzmq's monitor reports that some connection has closed at once, with a descriptor that
no peer can be found by. So this has all workers sent something then (``probe``), which fails for
the one that is gone. The monitor's event may come before a send fails, by as long as ZeroMQ's
thread waits for a core, so it is done again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

PROBES_S = (0.0, 0.01, 0.1, 1.0)
"""When workers are sent something after a connection has closed: each so long after the one before.
Connections that close meanwhile begin the series again, and cause no more than one in the shortest
of these intervals."""


class Closings:
    """Watches one bound socket on a running event loop."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        probe: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._watched = socket
        self._probe = probe
        self._loop = loop
        self._left = 0
        """Probes that are still to be made."""
        self._timer: asyncio.TimerHandle | None = None
        address = f"inproc://closings-{id(self)}"
        socket.monitor(address, zmq.EVENT_DISCONNECTED)
        self._events: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        # Without a bound: ZeroMQ's thread waits where there is no room for an event.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(address)
        loop.add_reader(self._events.fileno(), self._look)
        self._look()

    def close(self) -> None:
        """Ends the watch; before the socket itself is closed."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._events.fileno())
        self._watched.monitor(None, 0)
        self._events.close(0)

    def _look(self) -> None:
        closed = False
        try:
            while True:
                self._events.recv_multipart(zmq.NOBLOCK)
                closed = True
        except zmq.Again:
            pass
        if closed:
            self._left = len(PROBES_S)
            if self._timer is None:
                self._later()

    def _later(self) -> None:
        after_s = PROBES_S[len(PROBES_S) - self._left]
        self._timer = self._loop.call_later(after_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._left -= 1
        self._probe()
        if self._left and self._timer is None:
            self._later()
