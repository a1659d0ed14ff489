"""Counts the connections that each user occupies with requests and WebSockets.

A new connection does not replace a connection with a request in progress (``idle_connections.py``).
So each user may have only a share of such connections.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ....protocol.errors import Code, UnavailableError
from ....protocol.shares import Shares
from ..errors import UserLimitError, from_tokenbus
from ..traffic import PROBES
from ..users.security import refuse
from ..users.turns import current_user
from .connection_memory import ConnectionMemory


class ConnectionShares:
    """The connections of one gateway process that its users occupy with HTTP requests and
    WebSockets. All users together may occupy ``max_connections``."""

    def __init__(self, max_connections: int) -> None:
        self._shares = Shares(max_connections)

    def take(self, user: str) -> None:
        """Counts a connection of a user; raises UserLimitError."""
        if not self._shares.fits(user):
            raise UserLimitError(
                Code.CLIENT_LIMIT,
                f"you have {self._shares.of(user)} open requests and WebSockets, and this gateway "
                f"allows {self._shares.capacity} for all users together; close some",
            )
        self._shares.take(user)

    def give_back(self, user: str) -> None:
        """Stops counting a connection of a user."""
        self._shares.give_back(user)


class CountConnections:
    """ASGI middleware that counts HTTP requests, except probes, and WebSockets. If the user has too
    many, or if the memory of their connections exceeds the user's share, the request or the
    handshake of the WebSocket is answered with an error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts the request or the WebSocket, then calls the next application."""
        if scope["type"] == "lifespan" or scope["path"] in PROBES:
            return await self._app(scope, receive, send)
        gateway = scope["app"].state.gateway
        shares: ConnectionShares = gateway.connections
        memory: ConnectionMemory | None = scope.get(ConnectionMemory.SCOPE_KEY)
        user = current_user.get()
        try:
            if memory is not None:
                memory.known(gateway.shares.memory, user)
            shares.take(user)
        except UnavailableError as error:
            return await refuse(from_tokenbus(error), scope, receive, send)
        try:
            return await self._app(scope, receive, send)
        finally:
            shares.give_back(user)
