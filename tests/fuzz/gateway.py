"""The gateway's parsers as fuzz targets: HTTP, headers, the bodies of all interfaces,
WebSockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import msgspec
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from tokenbus.clients.gateway.aici.completions import AiciCompletion
from tokenbus.clients.gateway.aici.modules import SetTags
from tokenbus.clients.gateway.aici.runs import RunRequest
from tokenbus.clients.gateway.anthropic.bodies import Messages
from tokenbus.clients.gateway.bodies.leniency import Ignored
from tokenbus.clients.gateway.bodies.reading import Body, decode_body, read_body
from tokenbus.clients.gateway.connections.connection_memory import MAX_EARLY_BYTES
from tokenbus.clients.gateway.connections.http_protocol import http_protocol
from tokenbus.clients.gateway.connections.websocket_protocol import BoundedWebSocket
from tokenbus.clients.gateway.conversation.rendering import for_template
from tokenbus.clients.gateway.conversation.tools import calling
from tokenbus.clients.gateway.errors import ApiError
from tokenbus.clients.gateway.llama_cpp import LlamaRequest
from tokenbus.clients.gateway.ollama.bodies import ChatRequest as OllamaChat
from tokenbus.clients.gateway.ollama.bodies import GenerateRequest as OllamaGenerate
from tokenbus.clients.gateway.openai.chat_bodies import ChatRequest
from tokenbus.clients.gateway.openai.completion_bodies import CompletionRequest
from tokenbus.clients.gateway.openai.embeddings import EmbeddingsRequest
from tokenbus.clients.gateway.openai.rerank import RerankRequest, ScoreRequest
from tokenbus.clients.gateway.openai.response_bodies import ResponsesRequest
from tokenbus.clients.gateway.openai.response_input import read_items
from tokenbus.clients.gateway.openai.response_jobs import ResponseQuestion
from tokenbus.clients.gateway.openai.tokenize import DetokenizeRequest, TokenizeRequest
from tokenbus.clients.gateway.tunnels.plain_lmtp import PlainLmtp
from tokenbus.clients.gateway.tunnels.tunnel_requests import TunnelRequests
from tokenbus.clients.gateway.users.security import OriginCheck, keys_of
from tokenbus.clients.gateway.users.user_shares import UserShares
from tokenbus.protocol.errors import TokenbusError
from tokenbus.protocol.lines import error_line, line_frames
from tokenbus.protocol.messages import CLIENT_MESSAGES, SERVER_MESSAGES
from uvicorn.server import ServerState

from .draws import Draws, as_input
from .samples import sample, samples
from .target import Target

BODIES: list[type[Body]] = [
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    Messages,
    AiciCompletion,
    RunRequest,
    SetTags,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
    LlamaRequest,
    OllamaChat,
    OllamaGenerate,
]


# --- bodies ---------------------------------------------------------------------------------------


def run_bodies(data: bytes) -> None:
    """Decodes the body of a request, and processes it up to the first message to the bus."""
    draws = Draws(data)
    kind = draws.pick(BODIES)
    try:
        data = draws.rest()
        for ignored in (Ignored(), Ignored(strict=True)):
            body = decode_body(data, kind, ignored)
            assert all(" " <= c <= "~" for c in "".join(ignored.headers.values()))
            _use(body, ignored)
    except ApiError as error:
        refused = error.response("/v1/messages").status_code
    else:
        refused = 400
    assert 400 <= refused < 500


def _use(body: Body, ignored: Ignored) -> None:
    match body:
        case ChatRequest() | Messages():
            conversation = body.to_conversation({})
        case ResponsesRequest():
            items = read_items(body.input, ignored)
            conversation = ResponseQuestion(body, items, ignored).to_conversation({})
        case OllamaChat() | OllamaGenerate():
            conversation = body.to_conversation(ignored)
        case LlamaRequest():
            assert body.constraint is None or body.constraint.controller == "json_schema"
            return
        case EmbeddingsRequest():
            assert body.texts()
            return
        case _:
            return
    for_template(conversation.turns)
    calling(conversation.tools, conversation.rules.choice, conversation.rules.parallel)


def _bodies() -> Iterator[bytes]:
    draw = Random(6)
    for number, kind in enumerate(BODIES):
        for _ in range(4):
            yield bytes([number]) + msgspec.json.encode(sample(kind, draw))
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    }
    yield b"\0" + json.dumps(chat).encode()
    items = {"model": "m", "input": [{"role": "user", "content": "x"}], "instructions": "y"}
    yield b"\2" + json.dumps(items).encode()


# --- headers --------------------------------------------------------------------------------------


def run_headers(data: bytes) -> None:
    """Reads the headers that contain a key or the page from which a request comes."""
    names = [b"authorization", b"x-api-key", b"host", b"origin", b"sec-websocket-protocol"]
    raw = list(zip(names, Draws(data).frames(len(names)), strict=False))
    scope: Scope = {"type": "http", "headers": raw, "subprotocols": ["key.x"]}
    for key in keys_of(scope, Headers(scope=scope)):
        assert isinstance(key, str)
    for any_host in (False, True):
        OriginCheck(_answer, ["http://a.example"], any_host)._fault(Headers(scope=scope))


def _headers() -> Iterator[bytes]:
    yield as_input([b"Basic dXNlcjprZXk=", b"key", b"localhost:8080", b"http://localhost:8080"])
    yield as_input([b"Bearer key", b"", b"[::1]:80", b"null", b"key.x, lmtp"])
    yield as_input([b"Basic", b"", b"a.example", b"https://a.example"])


# --- lines of a WebSocket -------------------------------------------------------------------------


def run_websocket(data: bytes) -> None:
    """Handles text messages from a WebSocket, and the broker's answers to them."""
    plain = PlainLmtp()
    requests = TunnelRequests(UserShares(1000), "user", "name", ranks=False)
    draws = Draws(data)
    while draws.left:
        text = draws.frame().decode("utf-8", "replace")
        try:
            frames = line_frames(text, binary=True)
        except TokenbusError as error:
            error_line(error, text)
            continue
        plain.sent(frames)
        try:
            signed = requests.sent(frames)
        except TokenbusError:
            continue
        assert len(signed) == len(frames)
        if frames[0] in SERVER_MESSAGES:
            continue
        answer = [b"ERROR", b'{"code":"internal","message":"m","stream_id":1}']
        assert plain.line(answer) is not None
        requests.received(answer)


def _lines() -> Iterator[bytes]:
    for frames in samples(CLIENT_MESSAGES, "json", 2):
        line = b" ".join(frames)
        yield as_input([line, b"GENERATE {}", line])


# --- HTTP -----------------------------------------------------------------------------------------


class Connection(asyncio.Transport):
    """The transport of a client that reads everything."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.closed = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol: Any = protocol

    def write(self, data: Any) -> None:
        self.written += len(data)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


_ANSWER = TokenbusError("internal", "an answer")


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that reads requests in the same way as the gateway."""
    if scope["type"] == "websocket":
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        try:
            while True:
                await websocket.send_text(error_line(_ANSWER, await websocket.receive_text()))
        except (WebSocketDisconnect, KeyError):
            return
    request = Request(scope, receive)
    try:
        body: Body = await read_body(request, TokenizeRequest)
        response = ApiError(200, str(body)).response(request.url.path)
    except ApiError as error:
        response = error.response(request.url.path)
    await response(scope, receive, send)


@cache
def _server() -> tuple[asyncio.AbstractEventLoop, uvicorn.Config]:
    loop = asyncio.new_event_loop()
    config = uvicorn.Config(
        _answer,
        http=http_protocol(100),
        ws=BoundedWebSocket,
        lifespan="off",
        log_config=None,
        access_log=False,
        ws_per_message_deflate=False,
        ws_max_size=10_000,
    )
    config.load()
    return loop, config


def run_http(data: bytes) -> None:
    """Parses the bytes of a connection, which arrive in parts. The server must accept each part or
    close the connection."""
    loop, config = _server()
    loop.run_until_complete(_converse(config, data))


async def _converse(config: uvicorn.Config, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    failed: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failed.append(context))
    transport = Connection()
    kind: Any = config.http_protocol_class
    protocol = kind(config=config, server_state=ServerState(), app_state={}, _loop=loop)
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    for part in Draws(data).frames(12):
        if transport.closed:
            break
        transport.protocol.data_received(part)
        for _ in range(4):
            await asyncio.sleep(0)
    transport.protocol.connection_lost(None)
    for _ in range(6):
        await asyncio.sleep(0)
    assert not failed, failed[0]
    assert kind.early.free == MAX_EARLY_BYTES


def _conversations() -> Iterator[bytes]:
    body = b'{"model":"m","prompt":"x"}'
    post = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    sized = post + b"content-length: %d\r\n\r\n%s" % (len(body), body)
    chunked = post + b"transfer-encoding: chunked\r\n\r\n5\r\n" + body[:5] + b"\r\n0\r\n\r\n"
    upgrade = (
        b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    text = b"\x81\x85\0\0\0\0hello"
    yield as_input([sized])
    yield as_input([sized[:40], sized[40:], sized])
    yield as_input([chunked, sized])
    yield as_input([b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n", b"GET /x HTTP/1.0\r\n\r\n"])
    yield as_input([upgrade, text, b"\x88\x80\0\0\0\0"])
    yield as_input([upgrade + text, b"\x82\x81\0\0\0\0x", b"\x89\x80\0\0\0\0"])
    yield as_input([post + b"expect: 100-continue\r\ncontent-length: 5\r\n\r\n", b"12345"])


_WORDS = (
    b"transfer-encoding: chunked\r\n",
    b"content-length: ",
    b"upgrade: websocket\r\n",
    b"HTTP/1.1\r\n",
    b"\r\n\r\n",
)

GATEWAY = {
    "bodies": Target(run_bodies, _bodies),
    "headers": Target(run_headers, _headers, (b"Basic ", b"Bearer ", b"http://", b"[", b"]")),
    "websocket": Target(run_websocket, _lines, tuple(CLIENT_MESSAGES)),
    "http": Target(run_http, _conversations, _WORDS),
}
