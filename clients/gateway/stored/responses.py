"""Gives the event loop access to the stored responses. Each call reads or writes the database on a
thread. Only one call runs at a time, and users take turns (``turns.py``)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import ApiError
from ..users.turns import Turns, current_user
from .database import Database
from .running import Running

log = logging.getLogger(__name__)

T = TypeVar("T")


class StoredResponses:
    """The stored responses, as one gateway process sees them. Each call is for the user of the
    current task."""

    def __init__(self, folder: Path) -> None:
        self.owner = secrets.token_hex(8)
        """A random name of this process, by which the database identifies the gateway that
        generates a response."""
        self.running = Running()
        self._folder = folder
        self._turns = Turns()
        self._database: Database | None = None

    async def call(self, work: Callable[[Database, str], T]) -> T:
        """Calls ``work`` with the database and the current user on a thread, and returns the
        result. Raises ApiError 503 if the database fails."""
        user = current_user.get()
        async with self._turns.of(user):
            # If the task is cancelled, its turn ends only after the thread has finished with the
            # database.
            working = asyncio.ensure_future(asyncio.to_thread(self._work, work, user))
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                await asyncio.wait((working,))
                raise
            except sqlite3.Error as error:
                log.error("the stored responses in %s cannot be used: %s", self._folder, error)
                raise ApiError(
                    503,
                    "responses cannot be stored or read at the moment; send store=false, or try "
                    "again later",
                    code="store_failed",
                    retry_after_s=5.0,
                ) from None

    def _work(self, work: Callable[[Database, str], T], user: str) -> T:
        if self._database is None:
            self._database = Database(self._folder)
        return work(self._database, user)

    async def close(self) -> None:
        """Stops the tasks that generate responses, so that other gateways continue the responses,
        and closes the database."""
        await self.running.close()
        if self._database is not None:
            await asyncio.to_thread(self._database.close)
