"""SGLang's native interface: ``POST /generate``, for trainers that send and receive token ids."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from ..openapi import Operation
from .answers import Generated
from .bodies import GenerateRequest
from .generate import generate


def routes() -> list[BaseRoute]:
    """The routes of this interface."""
    return [Route("/generate", generate, methods=["POST"])]


def operations() -> list[Operation]:
    """The operations for the OpenAPI document."""
    answer = Generated | list[Generated]
    summary = "Continues token ids or texts"
    return [Operation("post", "/generate", summary, "SGLang", GenerateRequest, answer, True)]
