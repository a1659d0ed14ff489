"""Counts the tokens of a request, and bounds the log-probabilities that its answer contains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from msgspec import UNSET

from ....protocol.errors import Code
from ....protocol.messages import Token
from ..errors import ApiError
from ..users.turns import Turns, on_thread

MAX_ALTERNATIVES = 524_288
"""Maximum number of log-probabilities of alternatives in one answer. The gateway composes each
alternative in about 2 to 4 µs, and stores all alternatives of an answer until its end."""
MAX_ON_LOOP = 4_096
"""The event loop composes an answer with at most this number of alternatives; a thread composes
larger answers."""

T = TypeVar("T")


class Counter:
    """Counts the tokens of all streams of a request."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.completion = 0
        self.alternatives = 0
        """Number of log-probabilities of alternatives to tokens."""

    def add(self, entries: Iterable[Token]) -> None:
        """Adds the numbers of ``entries``. Tokens that an entry removes are subtracted."""
        for entry in entries:
            if entry.prompt_tokens:
                self.prompt += entry.prompt_tokens
                self.cached += entry.cached_tokens
            if entry.top_logprobs is not UNSET:
                self.alternatives += len(entry.top_logprobs)
            if isinstance(entry.kept, list):
                self.add_ids(len(entry.kept))
            self.completion += (entry.token is not None) - entry.backtrack

    def add_ids(self, count: int) -> None:
        """Adds ``count`` token ids of the answer to ``alternatives``. Eight ids count as one
        alternative, because an id without a text takes less time and memory than an alternative."""
        self.alternatives += count // 8


def check_alternatives(count: int) -> None:
    """Raises ApiError 400 if an answer has too many alternatives to its tokens."""
    if count > MAX_ALTERNATIVES:
        raise ApiError(
            400,
            f"the answer has at least {count} log-probabilities of alternatives; at most "
            f"{MAX_ALTERNATIVES} are allowed; ask for fewer logprobs, tokens or choices",
            code=Code.TOO_LARGE,
            param="logprobs",
        )


async def compose(turns: Turns, alternatives: int, make: Callable[[], T]) -> T:
    """The result of ``make``, which composes a part of an answer with ``alternatives``
    alternatives. If ``make`` would block the event loop for too long, it runs on a thread, in the
    user's turn (``Gateway.large_answers``)."""
    return make() if alternatives <= MAX_ON_LOOP else await on_thread(turns, make)
