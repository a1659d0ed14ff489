"""Tokenizes long texts on threads, one text at a time. Users take turns.

Two lanes ensure that a text of a few kilobytes does not wait for a text of several megabytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ...protocol.text_bounds import SEGMENT_CHARS
from .turns import Turns, current_user

T = TypeVar("T")


class Tokenization:
    """The lanes of one gateway process."""

    def __init__(self) -> None:
        self._lanes = (Turns(), Turns())

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Runs ``work`` on a thread in the current user's turn; returns its result. ``size``: the
        number of characters to encode or tokens to decode.

        If the client disconnects, work that has not begun is dropped. Begun work occupies its lane
        until its end, so that a client that reconnects cannot run two texts at once.
        """
        turns = self._lanes[size > SEGMENT_CHARS]
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
    """Retrieves the error of a task, because its client may have disconnected."""
    if not asked.cancelled():
        asked.exception()
