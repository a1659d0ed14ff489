"""Shared by all interfaces of a gateway process: its settings, its client of the bus, its
models."""

from __future__ import annotations

import asyncio

from starlette.requests import HTTPConnection

from ...protocol.settings import Settings
from .idempotency import NamedRequests
from .models import ModelTable
from .templates import Templates
from .traffic import Counts
from .tunnels import Tunnels
from .turns import current_tenant
from .user_shares import SharedClient, UserShares


class Gateway:
    """One gateway process. Made inside the event loop that serves it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.shares = UserShares(settings.max_streams)
        self._own = SharedClient(settings.front_endpoint, self.shares, settings.max_unread)
        self._tenants: dict[str, SharedClient] = {}
        """By public key: those of API keys that have one."""
        self.named = NamedRequests(settings)
        self.models = ModelTable(self._own)
        self.traffic = Counts()
        self.templates = Templates(settings.trust_request_chat_template)
        self.tunnels = Tunnels(settings, self.shares)
        """The WebSockets of LMTP, each with a connection of its own."""
        self.draining = False
        """The process was asked to end: running requests are finished."""
        self.probed = False
        """Somebody asks for readiness, as a load balancer does."""
        self.drain_seen = asyncio.Event()
        """Such a probe was answered while draining."""

    @property
    def client(self) -> SharedClient:
        """The connection to the broker that all requests over HTTP of a tenant share: of the tenant
        of the current task's API key, or else the gateway's own."""
        key = current_tenant.get()
        if key is None:
            return self._own
        client = self._tenants.get(key.public)
        if client is None:
            settings = self.settings
            client = SharedClient(settings.front_endpoint, self.shares, settings.max_unread, key)
            self._tenants[key.public] = client
        return client

    async def close(self) -> None:
        """Ends the session at the broker, and with it what still runs."""
        await self.templates.close()
        await self.tunnels.close()
        for client in (self._own, *self._tenants.values()):
            await client.close()


def gateway_of(connection: HTTPConnection) -> Gateway:
    """The gateway that serves this request or WebSocket."""
    gateway = connection.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway
