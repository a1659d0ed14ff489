"""Tokenizes short texts in the event loop, and long texts on threads. Users take turns.

The event loop tokenizes at most one short text in each pass. Without this bound, a hundred requests
with many texts each would block every pass for a tenth of a second.

A *lane* runs one piece of work at a time. Long texts have two lanes: one for texts of a few
kilobytes, and one for texts of several megabytes. So a text of a few kilobytes does not wait for a
much longer text. Long conversations are prepared in a third lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from ...protocol.text_bounds import SEGMENT_CHARS
from .loop_time import LoopTime
from .users.turns import Turns, current_user, on_thread

T = TypeVar("T")

MAX_LOOP_ITEMS = 64
"""Maximum number of messages of a conversation that the event loop prepares. A longer conversation
is prepared on a thread."""
MAX_PREPARE_S = 0.002
"""Maximum time in one pass of the event loop for preparing conversations and schemas, in seconds.
A request may have hundreds of schemas."""


_LISTS = ("content", "summary", "output", "tool_calls", "tools")
"""The fields of messages, items and tools whose elements ``num_items`` counts."""


def num_items(*lists: Iterable[Any] | None) -> int:
    """Number of a request's messages, items or tools, and of their parts, calls and tools. The time
    to translate the request to a conversation depends on this number. Counting stops above
    ``MAX_LOOP_ITEMS``."""
    count = 0
    for one in (item for items in lists for item in items or ()):
        read = one.get if isinstance(one, dict) else partial(getattr, one)
        fields = (read(name, None) for name in _LISTS)
        count += 1 + sum(len(field) for field in fields if isinstance(field, list))
        if count > MAX_LOOP_ITEMS:
            break
    return count


class Tokenization:
    """Tokenizes texts, and prepares long conversations, in the lanes of one gateway process."""

    def __init__(self) -> None:
        self._lanes = (Turns(), Turns())
        self._short = Turns()
        self._conversations = Turns()
        self._preparing = LoopTime(MAX_PREPARE_S)

    async def run_short(self, work: Callable[[], T]) -> T:
        """Runs ``work`` for a short text in the event loop, in the current user's turn; returns its
        result. Before ``work`` runs, the event loop serves other requests."""
        async with self._short.of(current_user.get()):
            await asyncio.sleep(0)
            return work()

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Runs ``work`` on a thread in the current user's turn; returns its result. ``size``: the
        number of characters that ``work`` encodes, or of tokens that it decodes."""
        return await on_thread(self._lanes[size > SEGMENT_CHARS], work)

    async def prepare(self, num_items: int, work: Callable[[], T]) -> T:
        """Runs ``work`` on the items of a conversation or a schema, and returns its result. If
        there are more than ``MAX_LOOP_ITEMS`` items, ``work`` runs on a thread in the current
        user's turn, and does not wait for tokenizations."""
        if num_items <= MAX_LOOP_ITEMS:
            return await self._preparing.run(work)
        return await on_thread(self._conversations, work)
