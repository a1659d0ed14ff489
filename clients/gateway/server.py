"""The HTTP server of a gateway process: its socket, TLS, and how it ends."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import ssl
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ...protocol.endpoints import host_and_port, is_loopback
from ...protocol.settings import Settings
from .context import Gateway
from .http_protocol import http_protocol
from .lingering import Leaving

log = logging.getLogger(__name__)

BACKLOG = 2048
MAX_WEBSOCKET_BYTES = 24 * 1024 * 1024
"""Bytes of one WebSocket message: a controller module of 16 MiB in base64 fits."""
IDLE_MARGIN_S = 0.5
"""How much longer than uvicorn's limit an ending gateway waits for idle connections, in seconds."""
CHECK_S = 0.05
"""How often it checks for them, in seconds."""
READY_SEEN_S = 10.0
"""How long an ending gateway waits for a load balancer to notice it, in seconds."""


class BindError(Exception):
    """The gateway cannot listen on the address; ``in_use``: another process listens there."""

    def __init__(self, message: str, in_use: bool) -> None:
        super().__init__(message)
        self.in_use = in_use


def listen(settings: Settings) -> socket.socket:
    """The listening socket of the setting ``http``; raises BindError.

    Several gateways share the port by SO_REUSEPORT: clients use one address, and the kernel
    distributes connections over the processes that listen.
    """
    try:
        host, port = host_and_port(settings.http)
    except ValueError as error:
        raise BindError(f"http: {error}, or none", in_use=False) from None
    if not is_loopback(host) and not settings.api_keys:
        raise BindError(
            f"http: {settings.http} is not a loopback address, and there are no API keys; give "
            "--api-keys FILE ('tokenbus api-key NAME' makes a key), or listen on 127.0.0.1",
            in_use=False,
        )
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.gateways > 1:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise BindError(
            f"http: cannot listen on {settings.http}: {error.strerror}",
            in_use=error.errno == errno.EADDRINUSE,
        ) from None
    return listener


class GatewayServer(uvicorn.Server):
    """Serves ``app`` until SIGTERM or SIGINT, and lets running requests end.

    On the first signal ``/ready`` answers 503. If a load balancer polls it, connections are
    accepted until the balancer has received the 503, so that no request meets a closed port.
    SIGUSR2 has the same effect, but another process takes over and this one may take longer
    (``lingering.py``).
    """

    def __init__(self, app: Starlette, settings: Settings, leaving: Leaving | None = None) -> None:
        self._app = app
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=http_protocol(settings.max_connections),
            ws="websockets-sansio",
            ws_max_size=MAX_WEBSOCKET_BYTES,
            # A compressor for each connection takes about 300 KiB, and tokens are short.
            ws_per_message_deflate=False,
            lifespan="on",
            # With X-Forwarded-For, a caller could choose the user for whom it is counted.
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_certfile=settings.tls_cert or None,
            ssl_keyfile=settings.tls_key or None,
            timeout_graceful_shutdown=int(settings.drain_s),
            backlog=BACKLOG,
        )
        super().__init__(config)
        self._drain_s = settings.drain_s
        self._linger_s = settings.linger_s
        self._leaving = leaving
        self._leaves = False
        """Whether SIGUSR2 was received."""
        self._shares_port = settings.gateways > 1
        """Whether several gateways share the port, so that a probe may reach another process."""
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal: the first one drains, a further one ends at once."""
        gateway = getattr(self._app.state, "gateway", None)
        if self.should_exit or not isinstance(gateway, Gateway):
            self.should_exit = self.force_exit = True
        elif gateway.probed and not self._shares_port and not gateway.draining:
            self._loop.call_soon_threadsafe(self._drain, gateway)
        else:
            self.should_exit = True
        if isinstance(gateway, Gateway):
            gateway.draining = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves on these sockets until a signal."""
        self._loop = asyncio.get_running_loop()
        if self._leaving is not None:
            self._loop.add_signal_handler(signal.SIGUSR2, self._leave)
        await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends without failing a request. Connections that the kernel has accepted are served, and
        open ones get an answer to their next request, which announces that they are closed."""
        began = self._loop.time()
        await self._stop_listening(sockets or [])
        gateway: Gateway = self._app.state.gateway
        gateway.draining = gateway.shares.leaving = True
        gateway.tunnels.drain()
        if self._leaves and self._leaving is not None:
            log.info("its place is free; finishing what runs")
            self._leaving.leave()
            self._drain_s = self._linger_s
        # Until then uvicorn closes each idle connection.
        idle_s = min(self._drain_s, self.config.timeout_keep_alive + IDLE_MARGIN_S)
        waited_s = 0.0
        while not self.force_exit and waited_s < self._drain_s:
            # This comes first, because uvloop reports a connection shortly after it was accepted.
            await asyncio.sleep(CHECK_S)
            waited_s = self._loop.time() - began
            if not self.server_state.connections:
                break
            if waited_s > idle_s and not gateway.tunnels.busy:
                break
        left_s = self._drain_s - waited_s
        self.config.timeout_graceful_shutdown = max(1, int(left_s))
        await super().shutdown(sockets)

    async def _stop_listening(self, sockets: list[socket.socket]) -> None:
        """Closes the listening sockets; the kernel would reset the connections in their queues."""
        waiting = [connection for listener in sockets for connection in _accepted(listener)]
        for server in self.servers:
            server.close()
        for connection in waiting:
            await self._loop.connect_accepted_socket(
                self._protocol, connection, ssl=self.config.ssl
            )

    def _protocol(self) -> asyncio.Protocol:
        """The protocol object that uvicorn creates for each connection."""
        kind: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def _leave(self) -> None:
        if not self.should_exit:
            self._leaves = True
            self.handle_exit(signal.SIGTERM, None)

    def _drain(self, gateway: Gateway) -> None:
        self._draining = asyncio.ensure_future(self._until_seen(gateway))

    async def _until_seen(self, gateway: Gateway) -> None:
        log.info("draining: waiting until the readiness probe has seen it")
        try:
            await asyncio.wait_for(gateway.drain_seen.wait(), READY_SEEN_S)
        except TimeoutError:
            pass
        self.should_exit = True


def _accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """The connections in the queue of a listening socket."""
    listener.setblocking(False)
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        yield connection


def check_tls(settings: Settings) -> str | None:
    """The fault of the TLS files; None if they are valid, or if none are set."""
    if not settings.tls_cert and not settings.tls_key:
        return None
    if not settings.tls_cert or not settings.tls_key:
        return "tls_cert and tls_key belong together; one of them is missing"
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        return f"cannot use {settings.tls_cert} with {settings.tls_key}: {error}"
    return None
