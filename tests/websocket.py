"""WebSocket clients whose time limits only bound a hang."""

from __future__ import annotations

from functools import partial

from websockets.asyncio import client as asynchronous
from websockets.sync import client as synchronous

WAIT_S = 300.0
"""Maximum duration of a handshake, in seconds. By default it is 10 s, which a gateway on a busy
machine can exceed."""

# Without pings, no client closes a connection because an answer to a ping took longer than 20 s.
connect = partial(synchronous.connect, open_timeout=WAIT_S, ping_interval=None)
connect_async = partial(asynchronous.connect, open_timeout=WAIT_S, ping_interval=None)
