"""Tunnels from WebSockets to the broker. A tunnel passes on LMTP messages, and decodes only the
fields that it needs.

A WebSocket has its own connection to the broker from its first message on. All of LMTP therefore
works as on ZeroMQ, and each client has its own session. A client that has not sent ``HELLO``
receives messages in LMQL's form (``plain_lmtp.py``). A client sends text messages. It receives
binary messages if its ``HELLO`` has requested msgpack.

While a client does not read, its tunnel does not read from the broker, and the broker's bound for
slow clients applies. While the broker does not read, the tunnel does not read from the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

import zmq
from starlette.websockets import WebSocket, WebSocketDisconnect

from ....protocol.bodies import Encoding, decode_as, encode_body, encoding_of, error_body
from ....protocol.body_bounds import check_body, max_body_bytes
from ....protocol.endpoints import separate
from ....protocol.errors import (
    Code,
    ConnectionLostError,
    RequestError,
    TokenbusError,
    UnavailableError,
)
from ....protocol.frames import Frames
from ....protocol.keys import own_key
from ....protocol.lines import error_line, frames_binary, frames_line, line_frames
from ....protocol.messages import Hello
from ....protocol.settings import Settings
from ....protocol.shares import fits_share
from ....transport.async_dealer import AsyncDealer
from ....transport.dealer import Context
from ..connections.message_memory import MessageMemory
from ..errors import UserLimitError
from ..users.turns import current_tenant, current_user
from ..users.user_shares import UserShares
from .arrivals import Arrivals
from .broker_watch import BrokerWatch
from .carried import carried
from .open_streams import OpenStreams
from .plain_lmtp import PlainLmtp
from .tunnel_requests import TunnelRequests

log = logging.getLogger(__name__)

MAX_SOCKETS = 16_384
"""Maximum number of tunnels of one gateway process. Each tunnel has a session at a broker, and a
broker allows 10,000 sessions by default."""
LAST_MESSAGE_S = 5.0
"""Maximum time to send BYE to the broker after a WebSocket was closed, in seconds."""

INTERNAL_ERROR, SERVICE_RESTART, TRY_AGAIN_LATER = 1011, 1012, 1013
"""Close codes of the gateway's WebSockets (IANA's registry)."""


class Tunnels:
    """The tunnels of one gateway process. Created inside the process's event loop."""

    def __init__(self, settings: Settings, shares: UserShares) -> None:
        self._shares = shares
        self._max_sockets = min(settings.max_connections, MAX_SOCKETS)
        self._context: Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._open: set[Tunnel] = set()
        self._key = own_key(settings, "client")
        self._watches = [
            BrokerWatch(self._context, front, settings.session_timeout_s, self._lost, self._key)
            for front in separate(settings.front_endpoint)
        ]
        """A watch for each broker."""
        self._ending: set[asyncio.Task[None]] = set()
        self._draining = False

    @property
    def busy(self) -> bool:
        """Whether at least one WebSocket waits for an answer."""
        return any(tunnel.requests.open for tunnel in self._open)

    def drain(self) -> None:
        """Starts the drain: each WebSocket is closed when all of its requests are answered."""
        self._draining = True
        for tunnel in self._open:
            self._rested(tunnel)

    def _rested(self, tunnel: Tunnel) -> None:
        """Closes a WebSocket if it has no open requests and the gateway drains. Called when the
        drain starts, and when all requests of a WebSocket were answered."""
        if self._draining and not tunnel.requests.open:
            self._later(close(tunnel.websocket, SERVICE_RESTART, "the gateway is restarted"))

    async def serve(self, websocket: WebSocket) -> None:
        """Serves an accepted WebSocket until its end."""
        served = _Served(websocket)
        messages: MessageMemory = websocket.scope[MessageMemory.SCOPE_KEY]
        try:
            messages.begin(self._shares.memory, current_user.get())
            while await self._serve_next(served):
                messages.handled()
        except UnavailableError as error:
            await close(websocket, TRY_AGAIN_LATER, error.message)
        except zmq.ZMQError as error:
            log.warning("cannot connect a WebSocket to the broker: %s", error)
            await close(websocket, TRY_AGAIN_LATER, "the gateway cannot open a connection")
        except TimeoutError:
            log.warning("closed a WebSocket, because its broker cannot be watched")
            await close(websocket, TRY_AGAIN_LATER, "the gateway cannot reach the broker")
        except WebSocketDisconnect:
            pass
        finally:
            await served.arrivals.close()
            if served.tunnel is not None:
                self._open.discard(served.tunnel)
                await served.tunnel.close()
            messages.ended()

    async def _serve_next(self, served: _Served) -> bool:
        """Handles the next message. Returns False at the end of the WebSocket. No reference to the
        message is left afterwards."""
        message = await served.arrivals.next()
        if message["type"] != "websocket.receive":
            return False
        line = message.get("text")
        if line is None:
            await served.websocket.send_text(_refuse_binary())
            return True
        if served.tunnel is None:
            served.tunnel = self._connect(served.websocket)
            await served.arrivals.during(self._watch_of(served.tunnel).begun())
        await served.tunnel.send(line)
        return True

    async def close(self) -> None:
        """Frees the resources that the tunnels share. Called after the last tunnel has ended."""
        for watch in self._watches:
            await watch.close()
        await asyncio.to_thread(self._context.destroy, linger=0)

    def _connect(self, websocket: WebSocket) -> Tunnel:
        user = current_user.get()
        own = sum(tunnel.user == user for tunnel in self._open)
        if not fits_share(own, len(self._open), self._max_sockets):
            raise UserLimitError(
                Code.CLIENT_LIMIT,
                f"you have {own} open WebSockets, and this gateway allows {self._max_sockets} for "
                "all users together; close some",
            )
        for watch in self._watches:
            watch.start()
        # Chooses a broker that answers, if any does.
        answering = [watch.front for watch in self._watches if watch.answers]
        front = random.choice(answering or [watch.front for watch in self._watches])
        tenant = current_tenant.get()
        dealer = AsyncDealer(self._context, front, tenant or self._key)
        several = len(self._watches) > 1
        name = websocket.scope.get("api_key_name", "")
        requests = TunnelRequests(self._shares, user, name, ranks=tenant is not None)
        tunnel = Tunnel(websocket, dealer, self._rested, requests, several)
        tunnel.user, tunnel.front = user, front
        # With a tenant's key, the connection has the rights of the tenant, not of the gateway.
        tunnel.marks_users = tenant is None
        self._open.add(tunnel)
        return tunnel

    def _watch_of(self, tunnel: Tunnel) -> BrokerWatch:
        return next(watch for watch in self._watches if watch.front == tunnel.front)

    def _lost(self, front: str, what: str) -> None:
        """Ends all tunnels of a broker that was restarted or does not answer."""
        lost = [tunnel for tunnel in self._open if tunnel.front == front]
        log.warning("%s; %d WebSockets are closed", what, len(lost))
        for tunnel in lost:
            self._later(tunnel.lost(what))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class _Served:
    """A WebSocket that is being served."""

    def __init__(self, websocket: WebSocket) -> None:
        self.websocket = websocket
        self.arrivals = Arrivals(websocket)
        self.tunnel: Tunnel | None = None
        """The connection to the broker; None before the first message."""


class Tunnel:
    """One WebSocket's connection to the broker."""

    user = ""
    """The user of the WebSocket. The creator sets ``user`` and ``front``."""
    front = ""
    """The address of the tunnel's broker."""

    def __init__(
        self,
        websocket: WebSocket,
        dealer: AsyncDealer,
        rested: Callable[[Tunnel], None],
        requests: TunnelRequests,
        several: bool,
    ) -> None:
        """``rested`` is called when all requests of the WebSocket were answered. ``several``:
        whether the system has several brokers."""
        self._several = several
        self.marks_users = True
        """Whether the connection has the gateway's rights. If so, the client's messages are
        checked, and HELLO and STATUS are marked as a user's (``carried.py``)."""
        self.websocket = self._websocket = websocket
        self.requests = requests
        self._rested = rested
        self._dealer = dealer
        self._plain: PlainLmtp | None = PlainLmtp()
        """The converter to LMQL's form; None after the broker has answered a HELLO."""
        self._encoding: Encoding = "json"
        """The encoding of the broker's answers."""
        self._delivery = asyncio.create_task(self._deliver())

    async def send(self, line: str) -> None:
        """Sends a client's message to the broker, or answers the message with an error."""
        try:
            frames = line_frames(line, binary=True)
        except RequestError as error:
            await self._websocket.send_text(error_line(error, line))
            return
        try:
            check_body(frames[0], frames[1])
            if self.marks_users:
                frames = carried(frames)
            frames = self.requests.sent(frames)
        except TokenbusError as error:
            await self._refuse(error, frames)
            return
        if self._several and frames[0] == b"HELLO":
            frames = _from_elsewhere(frames)
        if self._plain is not None:
            self._plain.sent(frames)
        await self._dealer.send(frames)

    async def _refuse(self, error: TokenbusError, frames: Frames) -> None:
        """Answers a client's message with an ERROR, as the broker would."""
        is_decoded = len(frames[1]) <= max_body_bytes(frames[0])
        stream = OpenStreams.named(frames[1]) if is_decoded else None
        body = error_body(error, stream, frames[0])
        refusal = [b"ERROR", encode_body(body, self._encoding)]
        if self._plain is not None:
            self._plain.sent(frames)
        await self._pass_on(refusal)

    async def lost(self, what: str) -> None:
        """Reports to the client that the broker was restarted or does not answer, and closes the
        WebSocket. ``what``: which of the two happened, in words."""
        error = ConnectionLostError(Code.CONNECTION_LOST, what)
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await self._websocket.send_text(error_line(error, ""))
        await close(self._websocket, SERVICE_RESTART, what)

    async def close(self) -> None:
        """Handles the end of the WebSocket. If the client has not sent HELLO, the broker ends its
        session and its streams. A session that began with HELLO can be resumed."""
        self._delivery.cancel()
        self.requests.close()
        try:
            async with asyncio.timeout(LAST_MESSAGE_S):
                await self._dealer.send([b"BYE", b'{"keep":true}'])
        except TimeoutError:
            log.warning("cannot send the notice of a closed WebSocket to the broker")
        finally:
            self._dealer.close(linger_ms=int(1000 * LAST_MESSAGE_S))

    async def _deliver(self) -> None:
        """Sends the broker's messages to the client, as fast as the client reads."""
        try:
            while True:
                for frames in await self._dealer.receive():
                    if frames[0] == b"WELCOME":
                        self._plain = None
                        self._encoding = encoding_of(frames[1])
                    await self._pass_on(frames)
                    if self.requests.open:
                        self.requests.received(frames)
                        if not self.requests.open:
                            self._rested(self)
        except WebSocketDisconnect:
            pass
        except Exception:
            log.exception("closed a WebSocket, because a message to it failed")
            await close(self._websocket, INTERNAL_ERROR, "the gateway failed; its log says why")

    async def _pass_on(self, frames: Frames) -> None:
        """Sends a message of the broker to the client, in the form that the client has chosen."""
        plain = self._plain
        if plain is None and encoding_of(frames[1]) == "msgpack":
            await self._websocket.send_bytes(frames_binary(frames))
            return
        line = frames_line(frames) if plain is None else plain.line(frames)
        if line is not None:
            await self._websocket.send_text(line)


async def close(websocket: WebSocket, code: int, reason: str) -> None:
    """Closes a WebSocket unless it is already closed."""
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await websocket.close(code, reason[:120])


def _from_elsewhere(frames: Frames) -> Frames:
    """Marks a HELLO that resumes a session, because the session may be at another broker."""
    try:
        hello: Hello = decode_as(Hello, frames[1])
    except RequestError:
        return frames
    hello.elsewhere = hello.session is not None
    return [frames[0], encode_body(hello, encoding_of(frames[1]))]


def _refuse_binary() -> str:
    what = "the message is binary; a client must send text: '<TYPE> <JSON>'"
    return error_line(RequestError(Code.BAD_MESSAGE, what), "")
