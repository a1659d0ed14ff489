"""Detects that the broker was restarted or does not answer. A *tunnel* (``tunnels.py``) passes on
the messages between a WebSocket and the broker; it closes the WebSocket in this case.

ZeroMQ connects again by itself, without a report. If a WebSocket client sent no PINGs, it would
then wait forever for streams that a restarted broker does not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ....protocol.bodies import decode_as, encode_body
from ....protocol.frames import Frames
from ....protocol.keys import OwnKey
from ....protocol.messages import Hello, Ping, Pong, Welcome
from ....transport.async_dealer import AsyncDealer
from ....transport.dealer import Context

log = logging.getLogger(__name__)

PING_S = 1.0
"""Interval between PINGs until the broker's WELCOME sets the interval, in seconds."""


class BrokerWatch:
    """Watches the broker at ``front`` in a separate session. When this session ends, the watch
    calls ``lost`` with ``front`` and the reason, and begins a new session.

    The session ends if the broker answers that it does not have this session, or if the broker is
    silent for ``expiry_s`` seconds (a field of its WELCOME). Before the first WELCOME, the session
    ends after ``patience_s`` seconds of silence. ``key``: the CURVE key for the connection, or
    None.
    """

    def __init__(
        self,
        context: Context,
        front: str,
        patience_s: float,
        lost: Callable[[str, str], None],
        key: OwnKey | None = None,
    ) -> None:
        self._context = context
        self.front = front
        self.answers = True
        """Whether the broker answers. True at first. When a session ends, the value becomes False
        until the next WELCOME."""
        self._patience_s = patience_s
        self._lost = lost
        self._key = key
        self._task: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        """An event of the current session: set when the broker has sent WELCOME, or when the
        session has ended. Each session has a new event."""

    def start(self) -> None:
        """Starts the watch unless it has started."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def begun(self) -> None:
        """Waits until the broker has sent WELCOME, or until ``lost`` was called. Raises
        TimeoutError if neither happens in time, for example if the socket cannot be opened.

        A tunnel sends its first message only after this wait. If it sent a message earlier, and the
        broker was then restarted before the WELCOME, the watch would not report the restart.
        """
        async with asyncio.timeout(self._patience_s + 3 * PING_S):
            await self._begun.wait()

    async def close(self) -> None:
        """Stops the watch."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            try:
                dealer = AsyncDealer(self._context, self.front, self._key)
                try:
                    what = await self._session(dealer)
                finally:
                    dealer.close()
                self.answers = False
                begun, self._begun = self._begun, asyncio.Event()
                self._lost(self.front, what)
                begun.set()
            except Exception:
                log.exception("the broker cannot be watched; trying again")
                await asyncio.sleep(PING_S)

    async def _session(self, dealer: AsyncDealer) -> str:
        """Runs one session until it ends; returns the reason in words."""
        hello = Hello(client="tokenbus gateway", capabilities=["ping"])
        await dealer.send([b"HELLO", encode_body(hello, "json")])
        ping_s, expiry_s = PING_S, self._patience_s
        now = asyncio.get_running_loop().time
        received_at = now()
        while now() - received_at <= expiry_s:
            for frames in await _within(ping_s, dealer):
                received_at = now()
                if frames[0] == b"WELCOME":
                    welcome: Welcome = decode_as(Welcome, frames[1])
                    self.answers = True
                    self._begun.set()
                    ping_s, expiry_s = welcome.ping_s, welcome.expiry_s
                elif frames[0] == b"PONG" and not decode_as(Pong, frames[1]).session:
                    return f"the broker at {self.front} was restarted"
            await dealer.send([b"PING", encode_body(Ping(), "json")])
        return f"no broker answers at {self.front}"


async def _within(seconds: float, dealer: AsyncDealer) -> list[Frames]:
    """Waits for ``seconds``; returns the messages that arrived in that time."""
    frames: list[Frames] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                frames += await dealer.receive()
    return frames
