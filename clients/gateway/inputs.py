"""``POST /v1/streams/{id}/input`` sends an input to a program: the controller of a running HTTP
request.

``id`` is the ``x-request-id`` of the running request. The client may choose this id. Only the user
who has sent the running request may send inputs to it. The input must reach the gateway process
that serves the running request.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .bodies.reading import Body, read_body
from .context import gateway_of
from .errors import ApiError
from .events import unless_disconnected
from .openapi import Operation

PATH = "/v1/streams/{id}/input"


class InputBody(Body):
    """The body of an input."""

    text: str
    number: Annotated[int, Meta(ge=1)] | None = None
    """The number of the input in its stream, from 1. If another request repeats the number, it is
    answered, but the program does not receive the input again."""


def routes() -> list[BaseRoute]:
    """The route of ``PATH``."""
    return [Route(PATH, give_input, methods=["POST"])]


def operations() -> list[Operation]:
    """The operation for the OpenAPI document."""
    return [Operation("post", PATH, "Sends an input to a running program", "programs", InputBody)]


async def give_input(request: Request) -> Response:
    """Answers 204 when the input is stored."""
    body = await read_body(request, InputBody)
    stream = gateway_of(request).programs.stream(request.path_params["id"])
    if body.number is not None and body.number > stream.num_inputs + 1:
        raise ApiError(
            409,
            f"input {body.number} arrived before input {stream.num_inputs + 1}; send the inputs of "
            "a stream in order",
            code="conflict",
        )
    if body.number is None or body.number == stream.num_inputs + 1:
        await unless_disconnected(request.receive, stream.send(body.text))
    return Response(status_code=204)
