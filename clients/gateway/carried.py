"""The messages of users that a tunnel carries over the gateway's own connection to the broker.

Such a connection may do more than its users: on the broker's machine, or with the key of that
machine, a client is the operator. So no message of the operator passes, and each message that a
broker answers by who asks is marked as a user's. The mark is in every such message, as a connection
that is made again knows nothing of the messages before.
"""

from __future__ import annotations

from ...protocol.bodies import decode_as, encode_body, encoding_of
from ...protocol.errors import Code, RequestError
from ...protocol.frames import Frames
from ...protocol.messages import CARRIES_USERS, OPERATOR_MESSAGES, Hello, StatusRequest


def carried(frames: Frames) -> Frames:
    """A user's message as it goes to the broker; raises RequestError where it may not."""
    kind = frames[0]
    if kind in OPERATOR_MESSAGES:
        raise RequestError(
            Code.NOT_ALLOWED,
            f"{kind.decode()} is for the operator, and users of a gateway are not; send it from "
            "the broker's machine without the gateway, or with an API key whose tenant is the "
            "operator's key",
        )
    if kind == b"HELLO":
        hello: Hello = decode_as(Hello, frames[1])
        hello.capabilities = [*hello.capabilities, CARRIES_USERS]
        return [kind, encode_body(hello, encoding_of(frames[1])), *frames[2:]]
    if kind == b"STATUS":
        status: StatusRequest = decode_as(StatusRequest, frames[1])
        status.own = True
        return [kind, encode_body(status, encoding_of(frames[1])), *frames[2:]]
    return frames
