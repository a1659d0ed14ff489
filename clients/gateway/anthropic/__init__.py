"""Anthropic's Messages API: ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from ..openapi import Operation
from .bodies import CountTokens, CreateMessage
from .messages import count_tokens, create


def routes() -> list[BaseRoute]:
    """The paths of this door."""
    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


def operations() -> list[Operation]:
    """These paths, as the OpenAPI document describes them."""
    return [
        Operation(
            "post",
            "/v1/messages",
            "The assistant's next message",
            "Anthropic",
            CreateMessage,
            stream=True,
            error=None,
        ),
        Operation(
            "post",
            "/v1/messages/count_tokens",
            "The tokens of a conversation",
            "Anthropic",
            CountTokens,
            error=None,
        ),
    ]
