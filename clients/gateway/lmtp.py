"""LMTP (docs/protocol.md) over WebSocket, at ``/``. Each text message is one line,
``<TYPE> <JSON>``."""

from __future__ import annotations

from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket

from .context import gateway_of
from .users.security import SUBPROTOCOL


def routes() -> list[BaseRoute]:
    """The route of the only path that LMQL uses."""
    return [WebSocketRoute("/", lmtp)]


async def lmtp(websocket: WebSocket) -> None:
    """Serves one WebSocket, from its opening handshake to its end."""
    chosen = SUBPROTOCOL if SUBPROTOCOL in websocket.scope["subprotocols"] else None
    await websocket.accept(chosen)
    await gateway_of(websocket).tunnels.serve(websocket)
