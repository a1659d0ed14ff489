"""The HTTP server of a gateway process: its socket, its TLS files, and its shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import ssl
from contextlib import suppress
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from ....protocol.endpoints import host_and_port, is_loopback
from ....protocol.settings import Settings
from ..context import Gateway
from .handshakes import Handshakes, TlsListener, accepted
from .http_protocol import http_protocol
from .lingering import Leaving
from .websocket_protocol import BoundedWebSocket

log = logging.getLogger(__name__)

BACKLOG = 2048
MAX_WEBSOCKET_BYTES = 24 * 1024 * 1024
"""Maximum size of a WebSocket message in bytes. A controller module of 16 MiB fits, encoded in
base64."""
IDLE_MARGIN_S = 0.5
"""uvicorn closes an idle connection after ``timeout_keep_alive``. A draining gateway waits for this
time plus this number of seconds, and then no longer waits for idle connections."""
CHECK_S = 0.05
"""Interval between checks for open connections, in seconds."""
READY_SEEN_S = 10.0
"""A draining gateway waits at most this number of seconds until a load balancer has received a 503
from ``/ready``."""


class BindError(Exception):
    """The gateway cannot listen on its address. ``in_use``: whether another process listens
    there."""

    def __init__(self, message: str, in_use: bool) -> None:
        super().__init__(message)
        self.in_use = in_use


def listen(settings: Settings) -> socket.socket:
    """The listening socket of the setting ``http``; raises BindError.

    Several gateways share the port with SO_REUSEPORT. Clients use one address, and the kernel
    distributes the connections over the listening processes.
    """
    try:
        host, port = host_and_port(settings.http)
    except ValueError as error:
        raise BindError(f"http: {error}, or none", in_use=False) from None
    if not is_loopback(host) and not settings.api_keys:
        raise BindError(
            f"http: {settings.http} is not a loopback address, so the gateway needs API keys; make "
            "one with 'tokenbus api-key NAME' and add --api-keys FILE, or listen on 127.0.0.1",
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
    """Serves ``app`` until SIGTERM or SIGINT, then finishes the running requests.

    After the first signal, the gateway drains: ``/ready`` answers 503. If a load balancer polls
    ``/ready``, and only this gateway listens on the port, the gateway still accepts connections
    until the load balancer has received the 503. This wait takes at most ``READY_SEEN_S``. So the
    load balancer does not send requests to a closed port. SIGUSR2 has the effect of SIGTERM with
    two differences: a successor takes over the port, and this process has ``linger_s`` to finish
    its requests (``lingering.py``).
    """

    def __init__(self, app: Starlette, settings: Settings, leaving: Leaving | None = None) -> None:
        self._app = app
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=http_protocol(settings.max_connections),
            ws=BoundedWebSocket,
            ws_max_size=MAX_WEBSOCKET_BYTES,
            # Compression is off: it needs 300 KiB per connection, and messages are mostly short.
            ws_per_message_deflate=False,
            lifespan="on",
            # With X-Forwarded-For, a client could choose the user whose share its requests use.
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
        """Whether several gateways share the port. If so, another process may answer the requests
        of a load balancer."""
        self._draining: asyncio.Task[None] | None = None
        self._handshakes: Handshakes | None = None
        """The TLS handshakes in progress; None if the gateway does not use TLS."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal. The first signal starts the drain. During the wait for a load balancer,
        a further signal ends this wait. After this wait, a further signal ends the process."""
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections on these sockets."""
        context = self.config.ssl
        if context is None or sockets is None:
            await super().startup(sockets)
            return
        await super().startup([])
        handshakes = self._handshakes = Handshakes(context, self._protocol)
        self.servers = [cast(Any, TlsListener(listener, handshakes)) for listener in sockets]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shuts down when the running requests have ended, but at the latest after ``drain_s``, or
        after ``linger_s`` if SIGUSR2 was received. Connections that the kernel has accepted are
        served. The next answer on an open connection has ``connection: close``. After this answer,
        the connection is closed."""
        began = self._loop.time()
        await self._stop_listening(sockets or [])
        gateway: Gateway = self._app.state.gateway
        gateway.draining = gateway.shares.leaving = True
        gateway.tunnels.drain()
        if self._leaves and self._leaving is not None:
            log.info("the successor may start; finishing the running requests")
            self._leaving.leave()
            self._drain_s = self._linger_s
        # After this time, uvicorn has closed all idle connections.
        idle_s = min(self._drain_s, self.config.timeout_keep_alive + IDLE_MARGIN_S)
        waited_s = 0.0
        while not self.force_exit and waited_s < self._drain_s:
            # The pause precedes the first check, because uvloop may have accepted connections that
            # are not yet in ``connections``.
            await asyncio.sleep(CHECK_S)
            waited_s = self._loop.time() - began
            if not (self.server_state.connections or self._is_shaking_hands):
                break
            if waited_s > idle_s and not gateway.tunnels.busy:
                break
        left_s = self._drain_s - waited_s
        self.config.timeout_graceful_shutdown = max(1, int(left_s))
        await super().shutdown(sockets)

    async def _stop_listening(self, sockets: list[socket.socket]) -> None:
        """Accepts the connections in the queues of the listening sockets, then closes the sockets.
        If these connections were not accepted, the kernel would reset them."""
        waiting: list[socket.socket] = []
        for listener in sockets:
            with suppress(OSError):
                waiting.extend(accepted(listener))
        for server in self.servers:
            server.close()
        for connection in waiting:
            if self._handshakes is not None:
                self._handshakes.begin(connection)
            else:
                await self._loop.connect_accepted_socket(self._protocol, connection)

    @property
    def _is_shaking_hands(self) -> bool:
        return self._handshakes is not None and self._handshakes.busy

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
        log.info("draining: waiting until the readiness probe has received the 503")
        with suppress(TimeoutError):
            await asyncio.wait_for(gateway.drain_seen.wait(), READY_SEEN_S)
        self.should_exit = True


def check_tls(settings: Settings) -> str | None:
    """The error in the TLS files; None if they are valid or not set."""
    if not settings.tls_cert and not settings.tls_key:
        return None
    if not settings.tls_cert or not settings.tls_key:
        return "one of tls_cert and tls_key is missing; set both"
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        return f"cannot use {settings.tls_cert} with {settings.tls_key}: {error}"
    return None
