"""Anthropic's Messages API: ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from ..errors import AnthropicError
from ..openapi import Operation
from .answers import MessageAnswer
from .bodies import CountTokens, CreateMessage, TokenCount
from .messages import count_tokens, create


def routes() -> list[BaseRoute]:
    """The routes of this interface."""
    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


def operations() -> list[Operation]:
    """The operations for the OpenAPI document."""
    return [
        Operation(
            "post",
            "/v1/messages",
            "The assistant's next message",
            "Anthropic",
            CreateMessage,
            MessageAnswer,
            stream=True,
            error=AnthropicError,
        ),
        Operation(
            "post",
            "/v1/messages/count_tokens",
            "The tokens of a conversation",
            "Anthropic",
            CountTokens,
            TokenCount,
            error=AnthropicError,
        ),
    ]
