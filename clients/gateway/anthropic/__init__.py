"""Anthropic's Messages API: ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from .messages import count_tokens, create


def routes() -> list[BaseRoute]:
    """The paths of this door."""
    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
