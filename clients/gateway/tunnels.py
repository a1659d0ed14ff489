"""Tunnels from WebSockets to the broker: LMTP passes through, undecoded.

A WebSocket has its own connection to the broker, from its first message on. So all of LMTP works as
on ZeroMQ, and the session is the client's own. A client without ``HELLO`` receives the form of
LMQL's client (``plain_lmtp.py``). The client's messages are text. It receives binary messages if it
has requested tokens in columns, which are msgpack.

Flow control: while a client does not read, its tunnel does not read from the broker, and the
broker's bound for slow clients applies. While the broker does not read, the tunnel does not read
from the client.
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

from ...protocol.bodies import Encoding, decode_as, encode_body, encoding_of, error_body
from ...protocol.body_bounds import check_body, max_body_bytes
from ...protocol.endpoints import separate
from ...protocol.errors import Code, ConnectionLostError, RequestError, TokenbusError
from ...protocol.frames import Frames
from ...protocol.keys import own_key
from ...protocol.lines import error_line, frames_binary, frames_line, line_frames
from ...protocol.messages import Hello
from ...protocol.settings import Settings
from ...protocol.shares import fits_share
from ...transport.async_dealer import AsyncDealer
from ...transport.dealer import Context
from .broker_watch import BrokerWatch
from .carried import carried
from .errors import UserLimitError
from .open_streams import OpenStreams
from .plain_lmtp import PlainLmtp
from .tunnel_requests import TunnelRequests
from .turns import current_tenant, current_user
from .user_shares import UserShares

log = logging.getLogger(__name__)

MAX_SOCKETS = 16_384
"""Maximum tunnels of one gateway process. A broker allows 10,000 sessions by default."""
LAST_MESSAGE_S = 5.0
"""How long the notice of a closed WebSocket may take to reach the broker, in seconds."""

INTERNAL_ERROR, SERVICE_RESTART, TRY_AGAIN_LATER = 1011, 1012, 1013
"""Close codes with which the gateway closes a WebSocket (IANA's registry)."""


class Tunnels:
    """The WebSockets of one gateway process. Created inside the event loop that serves it."""

    def __init__(self, settings: Settings, shares: UserShares) -> None:
        self._shares = shares
        self._most = min(settings.max_connections, MAX_SOCKETS)
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
        """Whether any WebSocket waits for answers."""
        return any(tunnel.requests.open for tunnel in self._open)

    def drain(self) -> None:
        """Handles the end of the gateway: closes each WebSocket as soon as all of its requests are
        answered."""
        self._draining = True
        for tunnel in self._open:
            self._rested(tunnel)

    def _rested(self, tunnel: Tunnel) -> None:
        """Called when a WebSocket may have no request left."""
        if self._draining and not tunnel.requests.open:
            self._later(close(tunnel.websocket, SERVICE_RESTART, "the gateway is restarted"))

    async def serve(self, websocket: WebSocket) -> None:
        """Carries an accepted WebSocket to its end."""
        tunnel: Tunnel | None = None
        try:
            while (message := await websocket.receive())["type"] == "websocket.receive":
                line = message.get("text")
                if line is None:
                    await websocket.send_text(_refuse_binary())
                    continue
                if tunnel is None:
                    tunnel = self._connect(websocket)
                    await self._watch_of(tunnel).begun()
                await tunnel.send(line)
        except UserLimitError as error:
            await close(websocket, TRY_AGAIN_LATER, error.message)
        except zmq.ZMQError as error:
            log.warning("a WebSocket cannot be carried to the broker: %s", error)
            await close(websocket, TRY_AGAIN_LATER, "the gateway has no connection left")
        except TimeoutError:
            log.warning("a WebSocket was closed, as its broker cannot be watched")
            await close(websocket, TRY_AGAIN_LATER, "the gateway cannot reach the broker")
        except WebSocketDisconnect:
            pass
        finally:
            if tunnel is not None:
                self._open.discard(tunnel)
                await tunnel.close()

    async def close(self) -> None:
        """Frees the resources that the tunnels share; called after the last one has ended."""
        for watch in self._watches:
            await watch.close()
        await asyncio.to_thread(self._context.destroy, linger=0)

    def _connect(self, websocket: WebSocket) -> Tunnel:
        user = current_user.get()
        own = sum(tunnel.user == user for tunnel in self._open)
        if not fits_share(own, len(self._open), self._most):
            raise UserLimitError(
                Code.CLIENT_LIMIT,
                f"you have {own} WebSockets of the {self._most} that this gateway has; close some",
            )
        for watch in self._watches:
            watch.start()
        # One of several brokers that has not been silent.
        answering = [watch.front for watch in self._watches if watch.answers]
        front = random.choice(answering or [watch.front for watch in self._watches])
        tenant = current_tenant.get()
        dealer = AsyncDealer(self._context, front, tenant or self._key)
        several = len(self._watches) > 1
        name = websocket.scope.get("api_key_name", "")
        requests = TunnelRequests(self._shares, user, name, ranks=tenant is not None)
        tunnel = Tunnel(websocket, dealer, self._rested, requests, several)
        tunnel.user, tunnel.front = user, front
        # A tenant's key itself determines the rights of its holder.
        tunnel.marks_users = tenant is None
        self._open.add(tunnel)
        return tunnel

    def _watch_of(self, tunnel: Tunnel) -> BrokerWatch:
        return next(watch for watch in self._watches if watch.front == tunnel.front)

    def _lost(self, front: str, what: str) -> None:
        """Ends all tunnels of a broker that has lost their connections."""
        lost = [tunnel for tunnel in self._open if tunnel.front == front]
        log.warning("%s; %d WebSockets are closed", what, len(lost))
        for tunnel in lost:
            self._later(tunnel.lost(what))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class Tunnel:
    """One WebSocket's connection to the broker."""

    user = ""
    """The user; set by the creator, as is ``front``."""
    front = ""
    """The address of its broker."""

    def __init__(
        self,
        websocket: WebSocket,
        dealer: AsyncDealer,
        rested: Callable[[Tunnel], None],
        requests: TunnelRequests,
        several: bool,
    ) -> None:
        """``rested`` is called when an answer may have been the last one. ``several``: whether
        there are several brokers."""
        self._several = several
        self.marks_users = True
        """Whether its connection has rights of the gateway that its user does not have."""
        self.websocket = self._websocket = websocket
        self.requests = requests
        self._rested = rested
        self._dealer = dealer
        self._plain: PlainLmtp | None = PlainLmtp()
        """The converter to LMQL's form; None once the broker has answered a HELLO."""
        self._encoding: Encoding = "json"
        """The encoding of the broker's answers."""
        self._delivery = asyncio.create_task(self._deliver())

    async def send(self, line: str) -> None:
        """Passes a client's message on, or answers it with an error."""
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
        """Answers a request that is not sent, in the same way as the broker."""
        is_decoded = len(frames[1]) <= max_body_bytes(frames[0])
        stream = OpenStreams.named(frames[1]) if is_decoded else None
        body = error_body(error, stream, frames[0])
        refusal = [b"ERROR", encode_body(body, self._encoding)]
        if self._plain is not None:
            self._plain.sent(frames)
        await self._pass_on(refusal)

    async def lost(self, what: str) -> None:
        """Ends a WebSocket whose streams the broker has lost."""
        error = ConnectionLostError(Code.CONNECTION_LOST, what)
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await self._websocket.send_text(error_line(error, ""))
        await close(self._websocket, SERVICE_RESTART, what)

    async def close(self) -> None:
        """Handles the end of the WebSocket. An anonymous session ends now, with its streams; a
        session that began with HELLO can be taken over."""
        self._delivery.cancel()
        self.requests.close()
        try:
            async with asyncio.timeout(LAST_MESSAGE_S):
                await self._dealer.send([b"BYE", b'{"keep":true}'])
        except TimeoutError:
            log.warning("the broker did not take the notice of a closed WebSocket")
        finally:
            self._dealer.close(linger_ms=int(1000 * LAST_MESSAGE_S))

    async def _deliver(self) -> None:
        """Passes on the broker's messages, at the pace of the client."""
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
            log.exception("a WebSocket was closed, as a message for it failed")
            await close(self._websocket, INTERNAL_ERROR, "the gateway failed; its log says why")

    async def _pass_on(self, frames: Frames) -> None:
        """Passes a message of the broker on, in the client's form."""
        plain = self._plain
        if plain is None and encoding_of(frames[1]) == "msgpack":
            await self._websocket.send_bytes(frames_binary(frames))
            return
        line = frames_line(frames) if plain is None else plain.line(frames)
        if line is not None:
            await self._websocket.send_text(line)


async def close(websocket: WebSocket, code: int, reason: str) -> None:
    """Closes a WebSocket, unless it is closed already."""
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await websocket.close(code, reason[:120])


def _from_elsewhere(frames: Frames) -> Frames:
    """A HELLO whose session may have been at another broker without the client's knowledge."""
    try:
        hello: Hello = decode_as(Hello, frames[1])
    except RequestError:
        return frames
    hello.elsewhere = hello.session is not None
    return [frames[0], encode_body(hello, encoding_of(frames[1]))]


def _refuse_binary() -> str:
    what = "the message is binary; what a client sends must be text, '<TYPE> <JSON>'"
    return error_line(RequestError(Code.BAD_MESSAGE, what), "")
