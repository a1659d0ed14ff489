"""Receives the messages of a WebSocket, even while the gateway waits for another event.

Starlette reports the end of a WebSocket only to a caller of ``receive``. If the gateway waited for
another event without calling ``receive``, it would not detect that the client has disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from typing import Any

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

MAX_EARLY_CHARS = 65_536
"""When all unread text messages together have this number of characters, ``Arrivals.during`` stops
receiving."""
MAX_EARLY = 64
"""When this number of messages is unread, ``Arrivals.during`` stops receiving."""
NO_STATUS = 1005
"""Close code of a WebSocket that was closed without a code (RFC 6455)."""


class Arrivals:
    """The messages of an accepted WebSocket, in their order."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._early: deque[Message] = deque()
        """Messages that ``during`` has received and ``next`` has not returned yet."""
        self._receiving: asyncio.Task[Message] | None = None
        """The task that receives the next message, if ``during`` has started one."""

    async def next(self) -> Message:
        """The next message; the last one has the type ``websocket.disconnect``."""
        if self._early:
            return self._early.popleft()
        if self._receiving is None:
            return await self._websocket.receive()
        message = await self._receiving
        self._receiving = None
        return message

    async def during(self, work: Coroutine[Any, Any, None]) -> None:
        """Waits until ``work`` is done, and receives messages during this time. If ``work`` fails,
        raises its error. If the client disconnects before the end of ``work``, cancels ``work`` and
        raises WebSocketDisconnect."""
        working = asyncio.create_task(work)
        try:
            while not working.done() and self._has_room:
                if self._receiving is None:
                    self._receiving = asyncio.create_task(self._websocket.receive())
                await asyncio.wait((working, self._receiving), return_when=asyncio.FIRST_COMPLETED)
                if self._receiving.done():
                    message, self._receiving = self._receiving.result(), None
                    if message["type"] != "websocket.receive":
                        self._early.clear()
                        raise WebSocketDisconnect(message.get("code", NO_STATUS))
                    self._early.append(message)
            await working
        finally:
            working.cancel()

    async def close(self) -> None:
        """If the task that receives the next message is still running, cancels this task."""
        if self._receiving is not None:
            self._receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError, RuntimeError):
                await self._receiving

    @property
    def _has_room(self) -> bool:
        chars = sum(len(message.get("text") or "") for message in self._early)
        return len(self._early) < MAX_EARLY and chars < MAX_EARLY_CHARS
