"""What all doors of a gateway process share: its settings, its client of the bus, its models."""

from __future__ import annotations

import asyncio

from starlette.requests import HTTPConnection

from ...protocol.settings import Settings
from .models import ModelTable
from .templates import Templates
from .traffic import Counts
from .tunnels import Tunnels
from .user_shares import SharedClient, UserShares


class Gateway:
    """One gateway process. Made inside the event loop that serves it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.shares = UserShares(settings.max_streams)
        self.client = SharedClient(settings.front, self.shares, settings.max_unread)
        """The connection to the broker that all requests over HTTP share."""
        self.models = ModelTable(self.client)
        self.traffic = Counts()
        self.templates = Templates()
        self.tunnels = Tunnels(settings)
        """The WebSockets of LMTP, each with a connection of its own."""
        self.draining = False
        """The process was asked to end: running requests are finished."""
        self.probed = False
        """Somebody asks for readiness, as a load balancer does."""
        self.drain_seen = asyncio.Event()
        """Such a probe was answered while draining."""

    async def close(self) -> None:
        """Ends the session at the broker, and with it what still runs."""
        await self.templates.close()
        await self.tunnels.close()
        await self.client.close()


def gateway_of(connection: HTTPConnection) -> Gateway:
    """The gateway that serves this request or WebSocket."""
    gateway = connection.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway
