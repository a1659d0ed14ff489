"""A lock that users take in turns. If a user has many requests, another user waits for at most one
of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from ....protocol.keys import OwnKey

current_user: ContextVar[str] = ContextVar("tokenbus_user", default="")
"""The user of the current task's request: the name of an API key, or the address of a client."""

current_tenant: ContextVar[OwnKey | None] = ContextVar("tokenbus_tenant", default=None)
"""The CURVE key with which the current task's request is sent to the broker. None stands for the
gateway's own key."""

T = TypeVar("T")


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


async def on_thread(turns: Turns, work: Callable[[], T]) -> T:
    """Runs ``work`` on a thread in the current user's turn; returns its result.

    If the client disconnects, work that has not begun is dropped. Begun work cannot be stopped, and
    keeps the turn until it is done. So a lock never uses more than one thread, even if a client
    disconnects and sends its request again.
    """
    user = current_user.get()
    begun = False

    async def in_turn() -> T:
        nonlocal begun
        async with turns.of(user):
            begun = True
            return await asyncio.to_thread(work)

    asked = asyncio.create_task(in_turn())
    asked.add_done_callback(_retrieve)
    try:
        return await asyncio.shield(asked)
    except asyncio.CancelledError:
        if not begun:
            asked.cancel()
        raise


def _retrieve(asked: asyncio.Task[Any]) -> None:
    """Retrieves the task's exception. After the client has disconnected, no other code awaits the
    task, and asyncio would log "Task exception was never retrieved"."""
    if not asked.cancelled():
        asked.exception()
