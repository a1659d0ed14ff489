"""Decides which worker's copy of a stream is right.

Several workers may have a copy of one stream. For example, a worker is cut off and the stream moves
to another worker. Or a process is paused, a broker is restarted, or a client goes to another
broker. In all these cases, a worker reports its copy in a JOURNAL, and the same rule applies:

- The copy with the greatest ``Progress`` is right. The others are dropped (``fences.py``).
- A copy that is behind its client is not right.
- A stream to which its client is attached, or that has ended, stays as it is.

The functions of this module only decide. ``adoption.py`` and ``returns.py`` carry out the decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..protocol.worker_messages import Journal
from .lifecycle import RequestState


class Progress(NamedTuple):
    """How far a copy of a stream has come, or how much of the stream a client has received.

    Moves come first: two copies may order the entries of different sequences differently, so the
    copy that has moved more often is right even if it has fewer entries.
    """

    moves: int
    """How often the stream has moved to another worker. The part that this broker's CLAIM has added
    is subtracted, because a CLAIM adds it to all copies."""
    entries: int


class Verdict(Enum):
    """The decision about a copy that a worker has reported."""

    CONTINUE = "continue"
    """The request returns to the worker. The client receives the entries that were not routed."""
    ADOPT = "adopt"
    """The broker adopts the copy. The copy replaces an earlier copy at another worker, if any."""
    MOVE = "move"
    """The worker has lost the request, so the request moves to another worker."""
    FORGET = "forget"
    """The request has ended for its client, and now at its worker too."""
    IGNORE = "ignore"
    """Nothing has to be done."""
    DROP = "drop"
    """The worker must drop its copy."""
    INCONSISTENT = "inconsistent"
    """The entries of the copy do not continue the entries that were routed. The worker counts as
    lost."""


@dataclass(frozen=True, slots=True)
class Known:
    """The knowledge of the broker about a stream of which a worker reports a copy. According to the
    broker, this worker does not have the stream."""

    awaited: bool
    """Whether workers may still report streams of the session."""
    cancelled: bool
    """Whether the client has cancelled the stream."""
    other: Progress | None
    """The copy that the broker has from an earlier report, if any. The copy may have ended."""
    attached: bool
    """Whether the broker has a live copy to which the client is, or was, attached."""
    over: bool
    """Whether this broker has routed, or begun to route, the end of the stream to its client."""
    client: Progress | None
    """The entries that the client has received, as its held ATTACH says; None without such an
    ATTACH."""
    complete: bool
    """Whether this run of the broker has opened the session. Its tables then have all live streams
    of the session."""
    reused: bool
    """Whether another request of the session has the ``stream_id``."""


def judge(copy: Progress, ended: bool, known: Known) -> Verdict:
    """Decides about a copy of a stream that the broker does not have at the reporting worker.
    ``ended``: whether the copy has ended."""
    if ended and (known.over or copy == known.other):
        # If this broker stops before the client has the end, the next broker needs the copy.
        return Verdict.IGNORE
    if not known.awaited or known.cancelled or known.complete or known.reused:
        return Verdict.DROP
    if known.attached or known.over:
        return Verdict.DROP
    if known.other is not None and copy <= known.other:
        return Verdict.DROP
    if known.client is not None and is_behind(copy, ended, known.client):
        return Verdict.DROP
    return Verdict.ADOPT


def judge_return(state: RequestState, routed: Progress, copy: Journal, entries: int) -> Verdict:
    """Decides about a copy at the worker that has the request. ``state``: the state of the request.
    ``routed``: the entries that were routed, and all moves. ``entries``: the number of
    entries of the copy."""
    if state is RequestState.ENDED and (copy.gone or copy.ended):
        return Verdict.FORGET
    if state is not RequestState.RETURNING:
        return Verdict.IGNORE
    if copy.gone:
        return Verdict.MOVE
    if copy.moves != routed.moves or entries < routed.entries:
        return Verdict.INCONSISTENT
    return Verdict.CONTINUE


def is_behind(copy: Progress, ended: bool, client: Progress) -> bool:
    """Whether the client has received more of a stream than a copy has. Another worker has then
    continued the stream. ``ended``: whether the copy has ended. A client that has all entries of
    such a copy would also have its end, so the client's entries are those of another copy."""
    return copy < client or (ended and copy.entries <= client.entries)
