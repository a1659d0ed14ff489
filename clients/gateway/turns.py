"""A lock that users take in turns. If a user has many requests, another user waits for at most one
of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from ...protocol.keys import OwnKey

current_user: ContextVar[str] = ContextVar("tokenbus_user", default="")
"""The user of the current task's request: the name of an API key, or the address of a client."""

current_tenant: ContextVar[OwnKey | None] = ContextVar("tokenbus_tenant", default=None)
"""The CURVE key with which the current task's request is sent to the broker. None stands for the
gateway's own key."""


class Turns:
    """A lock for one event loop. Users take turns; the requests of one user are served in order of
    arrival."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """The waiting requests of each user. The first user has the next turn."""

    @asynccontextmanager
    async def of(self, user: str) -> AsyncIterator[None]:
        """Waits for the turn of ``user``, which lasts until the end of the block."""
        await self._acquire(user)
        try:
            yield
        finally:
            self._pass_on()

    async def _acquire(self, user: str) -> None:
        if not self._taken:
            self._taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            user, own = next(iter(self._waiting.items()))
            turn = own.popleft()
            if not own:
                del self._waiting[user]
            if turn.done():
                continue
            if own:
                self._waiting.move_to_end(user)
            turn.set_result(None)
            return
        self._taken = False
