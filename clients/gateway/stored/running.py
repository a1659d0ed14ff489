"""The background responses that one gateway process generates. A background response is generated
by a task, even if no client is connected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Running:
    """The tasks of this process that generate responses, by user and id."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._begun: dict[tuple[str, str], asyncio.Future[bytes]] = {}
        """The futures that the method ``begun`` returns, by user and id."""
        self._changed: dict[tuple[str, str], asyncio.Event] = {}
        """The flag that the readers of a response wait for, by user and id. When the response has
        new events or has ended, the flag is set and removed from this dict."""

    def start(
        self, user: str, id: str, work: Coroutine[Any, Any, None], begun: asyncio.Future[bytes]
    ) -> None:
        """Starts a task that runs ``work``, which generates a response of ``user``. The task gets a
        copy of the caller's context variables. ``begun``: the future that receives the response as
        it is first stored (status ``queued``), or the error if the response cannot begin."""
        key = user, id
        task = asyncio.ensure_future(work)
        self._tasks[key], self._begun[key] = task, begun
        task.add_done_callback(lambda _: self._ended(key))

    def begun(self, user: str, id: str) -> asyncio.Future[bytes] | None:
        """The future that receives the response as it is first stored (``start``); None if this
        process does not generate the response."""
        return self._begun.get((user, id))

    def changes(self, user: str, id: str) -> asyncio.Event | None:
        """A flag that is set when the response has new events or has ended; None if this process
        does not generate the response."""
        key = user, id
        return self._changed.setdefault(key, asyncio.Event()) if key in self._tasks else None

    def notify(self, user: str, id: str) -> None:
        """Wakes the tasks that wait for new events of a response."""
        changed = self._changed.pop((user, id), None)
        if changed is not None:
            changed.set()

    def cancel(self, user: str, id: str) -> None:
        """Cancels the task of a response, if this process has it."""
        task = self._tasks.get((user, id))
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Cancels all tasks, and waits until they have ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, key: tuple[str, str]) -> None:
        del self._tasks[key], self._begun[key]
        self.notify(*key)
