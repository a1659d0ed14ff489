"""Calls of tools that wait because the last worker that served the tool drains or was lost. This
worker or another one may register. A waiting call was not passed to any tool worker yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..protocol.errors import Code, UnavailableError
from ..protocol.shares import fits_share, max_share
from ..protocol.worker_messages import Call
from .request import Request
from .worker import RETRY_AFTER_S

MAX_WAITING = 256
"""Maximum number of waiting calls. Their arguments have up to 16 MiB together."""

CallId = tuple[int, int, int]
"""The id of a call: the request, the lineage of the sequence, and the number of the call's
operation."""


def id_of(call: Call) -> CallId:
    """The id of a call."""
    return call.request, call.lineage, call.count


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A call that waits."""

    request: Request
    call: Call
    owner: str

    @property
    def places(self) -> tuple[tuple[str, str | None], tuple[str, str | None]]:
        """The two counts in ``WaitingCalls._owned`` that include the call."""
        return (self.owner, None), (self.owner, self.request.fields.by)


class WaitingCalls:
    """The waiting calls, and the tools whose last worker was lost. ``wait_s``: for this number of
    seconds after the loss, calls of the tool wait."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._left: dict[str, float] = {}
        """By tool: the time at which its last worker was lost, in seconds."""
        self._calls: dict[CallId, WaitingCall] = {}
        self._owned: Counter[tuple[str, str | None]] = Counter()
        """Number of waiting calls, by owner and user. The user None stands for all users of the
        owner."""

    def __contains__(self, call: CallId) -> bool:
        return call in self._calls

    def lost(self, tools: Iterable[str], now: float) -> None:
        """Records that the last worker of these tools was lost."""
        self._left = {tool: at for tool, at in self._left.items() if self.has_left(tool, now)}
        self._left |= dict.fromkeys(tools, now)

    def has_left(self, tool: str, now: float) -> bool:
        """Whether the last worker of a tool was lost less than ``wait_s`` ago."""
        return now < self._left.get(tool, float("-inf")) + self._wait_s

    def add(self, waiting: WaitingCall) -> None:
        """Adds a call. Raises UnavailableError if too many calls wait."""
        own, of_user = (self._owned[place] for place in waiting.places)
        total = len(self._calls)
        fits = fits_share(own, total, MAX_WAITING)
        if fits and waiting.request.fields.by:
            fits = fits_share(of_user, own, max_share(own, total, MAX_WAITING))
        if not fits:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"no worker serves the tool {waiting.call.tool!r} at the moment, and {total} of "
                f"{MAX_WAITING} calls wait already, {own} of them for this client; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self._calls[id_of(waiting.call)] = waiting
        self._owned.update(waiting.places)

    def take(self, request: int | None = None) -> list[WaitingCall]:
        """Removes the calls of a request, or all calls; returns them in the order of their
        arrival."""
        if not self._calls:
            return []
        taken = [w for w in self._calls.values() if request in (None, w.request.id)]
        for waiting in taken:
            del self._calls[id_of(waiting.call)]
            for place in waiting.places:
                self._owned[place] -= 1
                if not self._owned[place]:
                    del self._owned[place]
        return taken
