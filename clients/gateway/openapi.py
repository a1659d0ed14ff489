"""``GET /openapi.json`` describes the gateway's paths. The schemas of bodies and answers are made
from the structs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .errors import ErrorAnswer
from .json import encode

REFUSALS = {
    400: "The request is not valid, or the model cannot serve it.",
    401: "A valid API key is missing.",
    404: "The model or the controller does not exist.",
    413: "The body is too large.",
    415: "The content type of the body is wrong.",
    429: "The user has too many open requests; Retry-After has the seconds to wait.",
    503: "No worker is available, or the queue is full; Retry-After has the seconds to wait.",
    504: "The request took too long.",
}
"""The error statuses that the document lists for each operation. 500 is not listed, because it
means that the gateway has a defect."""


@dataclass(frozen=True)
class Operation:
    """An operation of the document: a path and a method."""

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    tag: str
    """The interface to which the operation belongs."""
    body: Any = None
    """The type of the JSON body. ``bytes`` stands for raw data, and None for no body."""
    answer: Any = None
    """The type of the JSON answer. ``str`` stands for plain text, and None for any JSON."""
    stream: bool = False
    """Whether the operation can also answer with server-sent events."""
    error: Any = ErrorAnswer
    """The type of the errors. None means that the errors do not have a JSON body."""
    statuses: dict[int, str] = field(default_factory=dict)
    """Further error statuses of this operation, with their meanings."""
    query: dict[str, Any] = field(default_factory=dict)
    """The types of the optional query parameters."""


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The OpenAPI document of these operations."""
    types: list[Any] = []
    for one in operations:
        types += [kind for kind in (one.body, one.answer, one.error) if _has_schema(kind)]
        types += one.query.values()
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    found = iter(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        body, answer, error = (
            next(found) if _has_schema(kind) else _raw(kind)
            for kind in (one.body, one.answer, one.error)
        )
        query = {name: next(found) for name in one.query}
        paths.setdefault(one.path, {})[one.method] = _operation(one, body, answer, error, query)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tokenbus",
            "version": version("tokenbus"),
            "description": "The HTTP interface of a Tokenbus gateway; docs/http.md describes it.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def routes(operations: Sequence[Operation]) -> list[BaseRoute]:
    """The route of the document. The document is created at the first request."""
    made: list[bytes] = []

    async def openapi(request: Request) -> Response:
        if not made:
            made.append(encode(document(operations)))
        return Response(made[0], media_type="application/json")

    return [Route("/openapi.json", openapi, methods=["GET"])]


def _has_schema(kind: Any) -> bool:
    return kind is not None and kind is not bytes


def _raw(kind: Any) -> dict[str, Any] | None:
    return {"type": "string", "format": "binary"} if kind is bytes else None


def _operation(
    one: Operation,
    body: dict[str, Any] | None,
    answer: dict[str, Any] | None,
    error: dict[str, Any] | None,
    query: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    kind = "text/plain" if one.answer is str else "application/json"
    good: dict[str, Any] = {kind: {"schema": answer or {}}}
    if one.stream:
        good["text/event-stream"] = {"schema": {"type": "string"}}
    refusals = {**REFUSALS, **one.statuses}
    bad = {"content": {"application/json": {"schema": error}}} if error is not None else {}
    made: dict[str, Any] = {
        "summary": one.summary,
        "tags": [one.tag],
        "operationId": re.sub(r"\W+", "_", f"{one.method}{one.path}").strip("_"),
        "responses": {
            "200": {"description": "The answer.", "content": good},
            **{str(status): {"description": what, **bad} for status, what in refusals.items()},
        },
    }
    names = re.findall(r"{(\w+)}", one.path)
    made["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ] + [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
    if body is not None:
        media = "application/octet-stream" if one.body is bytes else "application/json"
        made["requestBody"] = {"required": True, "content": {media: {"schema": body}}}
    return made
