"""The messages of a gateway's users, as the gateway sends them to the broker."""

from __future__ import annotations

import msgspec
from tokenbus.clients.gateway.tunnels.carried import carried
from tokenbus.protocol.messages import CARRIES_USERS, Hello


def test_a_user_cannot_keep_streams_after_the_end_of_the_websocket() -> None:
    """The gateway no longer counts the streams of a closed WebSocket."""
    said = Hello(keep_s=600.0, capabilities=["recover"])
    [_, body] = carried([b"HELLO", msgspec.json.encode(said)])
    sent = msgspec.json.decode(body, type=Hello)
    assert (sent.keep_s, sent.capabilities) == (0.0, ["recover", CARRIES_USERS])
