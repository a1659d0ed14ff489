"""Counts the requests of one WebSocket towards the share of its user.

The fields ``group`` and ``by`` of a request name its user, and users take turns at the broker. A
client could name any user in these fields. So the gateway adds its own values at the end of each
body. If a field is repeated, every reader uses the last value.
"""

from __future__ import annotations

import json

from ....protocol.bodies import decode_as
from ....protocol.errors import Code, RequestError
from ....protocol.frames import Frames
from ..users.user_shares import MAX_NAME, UserShares, check_priority
from .open_streams import ANSWERED, NamedStream, OpenStreams

QUEUED = frozenset({b"GENERATE", b"SCORE", b"MODEL_INFO", b"TOKENIZER", b"EMBED"})
"""Types of requests that wait in the broker's queue, in which users take turns."""
STORED = frozenset({b"UPLOAD", b"TAG", b"TAGS", b"DELETE"})
"""Types of requests about modules and tags. Their ``by`` is the name of the API key."""
_SPACE = b" \t\r\n"


class _Ranked(NamedStream):
    priority: int = 0


class TunnelRequests:
    """The open requests of one WebSocket.

    ``user``: the user to whom the requests count. ``name``: the name of the API key, or an empty
    string if there is no key. ``ranks``: whether the gateway's connection to the broker for this
    WebSocket uses a tenant's CURVE key. If it does, the broker checks the priorities of requests by
    this key. If it does not, this class checks them.
    """

    def __init__(self, shares: UserShares, user: str, name: str, ranks: bool) -> None:
        self._shares = shares
        self._user = user
        self._name = name
        self._ranks = ranks
        self.open = OpenStreams()
        self._taken = 0

    def sent(self, frames: Frames) -> Frames:
        """Counts a client's message if its type is in ``ANSWERED``, and returns the frames to send
        to the broker; raises TokenbusError.

        A body that the gateway cannot decode is refused here. The broker might be able to decode
        it, because the allowed depth of nested lists depends on the depth of the Python call stack.
        """
        kind = frames[0]
        if kind not in ANSWERED:
            return frames
        fields: NamedStream = decode_as(_Ranked if kind in QUEUED else NamedStream, frames[1])
        stream = fields.stream_id
        if isinstance(fields, _Ranked) and not self._ranks:
            check_priority(fields.priority)
        if stream is not None and kind != b"ATTACH" and stream in self.open:
            raise RequestError(
                Code.DUPLICATE_STREAM,
                f"stream {stream} is still running; give each live stream its own id",
                path="$.stream_id",
            )
        frames = self._signed(frames)
        if stream is not None and stream not in self.open:
            self._shares.take_of_socket(self._user)
            self._taken += 1
        self.open.sent(kind, stream)
        return frames

    def received(self, frames: Frames) -> None:
        """Handles a message from the broker to the client."""
        if self.open:
            self.open.received(frames)
            self._settle(len(self.open))

    def close(self) -> None:
        """Handles the end of the WebSocket."""
        self._settle(0)

    def _settle(self, count: int) -> None:
        self._shares.give_back_of_socket(self._user, self._taken - count)
        self._taken = count

    def _signed(self, frames: Frames) -> Frames:
        """The frames with the gateway's own ``group`` and ``by``."""
        kind, body, *attached = frames
        if (kind not in QUEUED and kind not in STORED) or not body:
            return frames
        by = self._user[:MAX_NAME] if kind in QUEUED else self._name[:MAX_NAME]
        own = json.dumps({"group": self._shares.group, "by": by})[1:].encode()
        begun = body.rstrip(_SPACE)[:-1].rstrip(_SPACE)
        separator = b"" if begun.endswith(b"{") else b","
        return [kind, b"%b%b%b" % (begun, separator, own), *attached]
