"""Entries that a worker still sends of streams that another worker has now.

Bodies of TOKEN are passed on unread, by session, because a worker with a lease has only streams of
its own. After a restart of the broker, a worker may report streams that have continued elsewhere.
Until it has dropped them, its bodies for their sessions are decoded, and their entries are removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ..protocol.bodies import decode_as, encode_body, encoding_of
from ..protocol.columns import TokenBody, TokenColumns, column_entries


def without_withdrawn(
    frames: Sequence[bytes], sessions: Sequence[int], withdrawn: Mapping[int, Set[int]]
) -> list[bytes]:
    """The frames of a worker's TOKEN without the entries of ``withdrawn`` streams. ``sessions`` are
    those of its bodies, which begin at the third frame. A body without remaining entries becomes
    empty.

    Raises RequestError if a body is malformed.
    """
    kept = list(frames)
    for i, session in enumerate(sessions, 2):
        if session in withdrawn:
            kept[i] = _without(frames[i], withdrawn[session])
    return kept


def _without(body: bytes, streams: Set[int]) -> bytes:
    read: TokenBody = decode_as(TokenBody, body)
    entries = column_entries(read) if isinstance(read, TokenColumns) else read
    own = [entry for entry in entries if entry.stream_id not in streams]
    if len(own) == len(entries):
        return body
    return encode_body(own, encoding_of(body)) if own else b""
