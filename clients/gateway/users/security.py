"""Checks API keys, and the origins of pages from which browsers send requests."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ....protocol.endpoints import is_loopback
from ..errors import ApiError
from ..pages import is_file_of_page
from .keys import ApiKeys
from .turns import current_tenant, current_user

OPEN_PATHS = frozenset({"/live", "/ready"})
"""Paths that need no API key, because the probes of a cluster do not have a key."""
SUBPROTOCOL = "tokenbus"
"""The WebSocket subprotocol that a browser sends together with the subprotocol ``key.<KEY>``."""


class RequireKey:
    """Refuses requests and WebSockets without a valid API key, except for ``OPEN_PATHS`` and the
    files of pages.

    A client sends the key as ``Authorization: Bearer KEY`` (OpenAI), ``x-api-key`` (Anthropic),
    ``api-key`` (AICI), or the password of Basic authentication, for which browsers prompt. A
    browser's WebSocket may send the subprotocol ``key.<KEY>``.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks the API key, then calls the next application."""
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or is_file_of_page(scope):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = [key for key in keys_of(scope, headers) if key]
        named = ((key, self._keys.name_of(key)) for key in given)
        key, name = next(((key, name) for key, name in named if name is not None), ("", None))
        if name is not None:
            scope["api_key_name"] = name
            scope["api_key_operator"] = self._keys.is_operator(key)
            current_user.set(f"key {name}")
            current_tenant.set(self._keys.tenant_of(name))
            return await self._app(scope, receive, send)
        what = "the API key is not valid" if given else "the API key is missing"
        page = scope["type"] == "http" and "text/html" in headers.get("accept", "")
        scheme = 'Basic realm="tokenbus", charset="UTF-8"' if page else "Bearer"
        error = ApiError(
            401,
            f"{what}; send a valid one as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": scheme},
        )
        return await refuse(error, scope, receive, send)


def keys_of(scope: Scope, headers: Headers) -> list[str]:
    """All API keys that a request contains; an element may be empty."""
    found = [headers.get("x-api-key", ""), headers.get("api-key", "")]
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        found.append(value.strip())
    elif scheme.lower() == "basic":
        found.append(_password(value))
    protocols: list[str] = scope.get("subprotocols", [])
    found += [p.removeprefix("key.") for p in protocols if p.startswith("key.")]
    return found


def _password(value: str) -> str:
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except ValueError:
        # The value is not valid base64, ASCII or UTF-8.
        return ""


class OriginCheck:
    """Refuses requests that a browser sends for pages of other sites.

    A browser sends the page's origin in ``Origin``. Pages of this gateway and of the ``allowed``
    origins (``*``: all) may send requests. If there are no API keys (``any_host`` is False),
    ``Host`` must be a loopback name. So a site cannot reach this gateway by a DNS entry of the site
    that names this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], any_host: bool) -> None:
        self._app = app
        self._allowed = frozenset(allowed)
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks origin and host, then calls the next application."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        error = self._fault(Headers(scope=scope))
        if error is not None:
            return await refuse(error, scope, receive, send)
        return await self._app(scope, receive, send)

    def _fault(self, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        if not self._any_host and host and not _is_local(host):
            return ApiError(
                403,
                f"the host {host!r} is not a loopback address; use 127.0.0.1 or localhost, or "
                "start the gateway with --api-keys",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None or self._allowed & {origin, "*"}:
            return None
        if host and _site(origin) == host.lower():
            return None
        return ApiError(
            403,
            f"pages of {origin!r} may not use this gateway; allow them with --cors {origin}",
            code="origin_not_allowed",
        )


@lru_cache(maxsize=16)
def _is_local(host: str) -> bool:
    """Whether the name in a ``Host`` header is a loopback name."""
    return is_loopback(host_name(host))


def _site(origin: str) -> str:
    """The host and port in an ``Origin`` header; empty if the header has no host."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def host_name(host: str) -> str:
    """The name or address in a ``Host`` header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request with an error, or closes a WebSocket before it is accepted."""
    if scope["type"] == "http":
        await error.response(scope["path"])(scope, receive, send)
    elif "websocket.http.response" in scope.get("extensions", {}):
        response = error.response()
        await send(
            {
                "type": "websocket.http.response.start",
                "status": error.status,
                "headers": response.raw_headers,
            }
        )
        await send({"type": "websocket.http.response.body", "body": bytes(response.body)})
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": error.message[:120]})
