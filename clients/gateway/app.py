"""Builds the application: the routes of all interfaces, access checks, and error handlers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from ...protocol.errors import TokenbusError
from ...protocol.settings import Settings
from . import (
    aici,
    anthropic,
    chat_page,
    console,
    health,
    inputs,
    llama_cpp,
    lmtp,
    metrics,
    ollama,
    openai,
    openapi,
    rollouts,
    sglang,
)
from .connections.connection_shares import CountConnections
from .context import Gateway
from .errors import ApiError, as_api_error
from .stored import requests as responses
from .traffic import Traffic
from .users.keys import ApiKeys
from .users.security import OriginCheck, RequireKey

log = logging.getLogger(__name__)


def routes() -> list[BaseRoute]:
    """The routes of all interfaces."""
    completing = (openai, responses, anthropic, ollama, llama_cpp, aici, sglang)
    doors = (lmtp, *completing, inputs, rollouts, chat_page, console, health, metrics)
    described = [
        operation
        for door in (*completing, inputs, rollouts, health, metrics)
        for operation in door.operations()
    ]
    return [*openapi.routes(described), *(route for door in doors for route in door.routes())]


class Application(Starlette):
    """Starlette's application. ``Traffic`` wraps the error handlers too, so that it also counts
    their answers."""

    def build_middleware_stack(self) -> ASGIApp:
        """Wraps the application in ``Traffic``. Starlette calls this method once."""
        return Traffic(super().build_middleware_stack())


def build(settings: Settings, keys: ApiKeys | None) -> Starlette:
    """The application of one gateway process. ``keys``: the accepted API keys, or None if requests
    need no key."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.gateway = Gateway(settings)
        try:
            yield
        finally:
            await app.state.gateway.close()

    checks = [Middleware(OriginCheck, allowed=settings.cors, any_host=keys is not None)]
    if settings.cors:
        checks.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["*"],
            )
        )
    if keys is not None:
        checks.append(Middleware(RequireKey, keys=keys))
    checks.append(Middleware(CountConnections))
    return Application(
        routes=routes(),
        middleware=checks,
        exception_handlers={
            ApiError: _error,
            TokenbusError: _error,
            HTTPException: _http_error,
            ClientDisconnect: _disconnected,
            Exception: _internal_error,
        },
        lifespan=lifespan,
    )


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError | TokenbusError)
    return as_api_error(error).response(request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers a request that Starlette refuses, for example because its path is unknown or the path
    does not accept its method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    path = request.url.path
    if error.status_code == 404:
        message = f"unknown path {path!r}; GET /openapi.json lists the paths"
        return ApiError(404, message, code="unknown_path", headers=headers).response(path)
    if error.status_code == 405:
        message = (
            f"{path} does not accept {request.method}; use {headers.get('Allow', 'another method')}"
        )
        return ApiError(405, message, code="method_not_allowed", headers=headers).response(path)
    return ApiError(error.status_code, error.detail, headers=headers).response(path)


async def _disconnected(request: Request, error: Exception) -> Response:
    """Answers a request whose client has disconnected, with the status that nginx logs (499)."""
    return Response(status_code=499)


async def _internal_error(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(
        500, "an internal error of the gateway; its log has the details", code="internal"
    ).response(request.url.path)
