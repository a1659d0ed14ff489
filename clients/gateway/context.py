"""Objects that all interfaces of a gateway process share: settings, clients of the bus, models."""

from __future__ import annotations

import asyncio

from starlette.requests import HTTPConnection

from ...protocol.keys import OwnKey
from ...protocol.model_names import Aliases
from ...protocol.settings import Settings
from .. import AsyncClient
from .connections.connection_shares import ConnectionShares
from .models import ModelTable
from .stored.responses import StoredResponses
from .templates.templates import Templates
from .traffic import Counts
from .tunnels.tunnels import Tunnels
from .users.idempotency import NamedRequests
from .users.turns import Turns, current_tenant
from .users.user_shares import SharedClient, UserShares


class Gateway:
    """The state of one gateway process. Created inside the process's event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.shares = UserShares(settings.max_streams)
        self.programs = self.shares.programs
        self.connections = ConnectionShares(settings.max_connections)
        self._own = SharedClient(settings.front_endpoint, self.shares, settings.max_unread)
        self._tenants: dict[str, SharedClient] = {}
        """The bus clients of tenants, by the public part of the tenant's CURVE key."""
        self._operators: dict[str, AsyncClient] = {}
        """The bus clients for the operator's HTTP requests. The key is the public part of the CURVE
        key with which the client connects; an empty string stands for the gateway's own CURVE
        key."""
        self.named = NamedRequests(settings)
        self.models = ModelTable(self._own, Aliases(settings.served_model_name))
        self.traffic = Counts()
        self.templates = Templates(settings.trust_request_chat_template)
        self.large_bodies = Turns()
        """The lock for the decoding of large bodies. Users take turns (``bodies.body_turn``)."""
        self.large_answers = Turns()
        """The lock for composing large answers (``counter.compose``)."""
        self.stored = StoredResponses(settings.run_folder)
        self.tunnels = Tunnels(settings, self.shares)
        """The WebSockets of LMTP, each with its own connection to the broker."""
        self.draining = False
        """Whether the process has received a signal to end. It then finishes its requests."""
        self.probed = False
        """Whether ``/ready`` was requested, probably by a load balancer."""
        self.drain_seen = asyncio.Event()
        """Set when the gateway has answered ``/ready`` with 503 after the signal to end."""

    @property
    def client(self) -> SharedClient:
        """The bus client for the current task's request. All HTTP requests of a tenant share one
        client. All requests whose API key has no tenant share one client. It connects with the
        gateway's own key."""
        key = current_tenant.get()
        if key is None:
            return self._own
        client = self._tenants.get(key.public)
        if client is None:
            settings = self.settings
            client = SharedClient(settings.front_endpoint, self.shares, settings.max_unread, key)
            self._tenants[key.public] = client
        return client

    def operator_client(self, key: OwnKey | None) -> AsyncClient:
        """The bus client for requests of the operator. It connects with ``key``, or with the
        gateway's own key if ``key`` is None. The broker decides by this key whether it accepts the
        requests."""
        name = "" if key is None else key.public
        client = self._operators.get(name)
        if client is None:
            client = AsyncClient(self.settings.front_endpoint, wait_for_room=False, key=key)
            self._operators[name] = client
        return client

    async def close(self) -> None:
        """Closes the stored responses, the template processes, the tunnels and the bus clients. The
        streams of the bus clients end. The streams of background responses do not end: they have
        their own sessions, and another gateway continues them."""
        await self.stored.close()
        await self.templates.close()
        await self.tunnels.close()
        for client in (self._own, *self._tenants.values(), *self._operators.values()):
            await client.close()


def gateway_of(connection: HTTPConnection) -> Gateway:
    """The gateway that serves this request or WebSocket."""
    gateway = connection.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway
