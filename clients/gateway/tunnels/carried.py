"""Checks and marks the messages that WebSocket clients send to the broker over the gateway's
connection.

The gateway's connection may have more rights than its users: the broker treats a client on its own
machine, or with the key of that machine, as the operator. So the gateway refuses messages that only
the operator may send. The effects of HELLO and STATUS depend on the sender's rights, so the gateway
marks them as messages of a user. The mark of a HELLO is valid only for one connection of ZeroMQ.
ZeroMQ may connect again, so each STATUS has a mark of its own.
"""

from __future__ import annotations

from ....protocol.bodies import decode_as, encode_body, encoding_of
from ....protocol.errors import Code, RequestError
from ....protocol.frames import Frames
from ....protocol.messages import CARRIES_USERS, OPERATOR_MESSAGES, Hello, StatusRequest


def carried(frames: Frames) -> Frames:
    """Marks a user's message if necessary; raises RequestError if the user may not send it."""
    kind = frames[0]
    if kind in OPERATOR_MESSAGES:
        raise RequestError(
            Code.NOT_ALLOWED,
            f"only the operator may send {kind.decode()}, not a user of a gateway; send it from "
            "the broker's machine without the gateway, or with an API key whose tenant is the "
            "operator's key",
        )
    if kind == b"HELLO":
        hello: Hello = decode_as(Hello, frames[1])
        hello.capabilities = [*hello.capabilities, CARRIES_USERS]
        # The gateway counts a user's requests only while the WebSocket is open. With ``keep_s``,
        # streams could continue without being counted, and use the share of all users of the
        # gateway at the broker.
        hello.keep_s = 0.0
        return [kind, encode_body(hello, encoding_of(frames[1])), *frames[2:]]
    if kind == b"STATUS":
        status: StatusRequest = decode_as(StatusRequest, frames[1])
        status.own = True
        return [kind, encode_body(status, encoding_of(frames[1])), *frames[2:]]
    return frames
