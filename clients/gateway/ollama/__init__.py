"""Ollama's interface at ``/api``, for clients that were written for Ollama."""

from __future__ import annotations

from typing import Any, Literal

from starlette.routing import BaseRoute, Route

from ..errors import OllamaError
from ..openapi import Operation
from .bodies import ChatRequest, GenerateRequest, OllamaAnswer
from .chat import chat, generate
from .embed import EmbedRequest, OllamaEmbeddings, embed
from .listing import ModelListing, ShownModel, ShowRequest, Version, server_version, show, tags


def routes() -> list[BaseRoute]:
    """The routes of this interface."""
    return [
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/generate", generate, methods=["POST"]),
        Route("/api/embed", embed, methods=["POST"]),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/tags", tags, methods=["GET"]),
        Route("/api/ps", tags, methods=["GET"]),
        Route("/api/version", server_version, methods=["GET"]),
    ]


def operations() -> list[Operation]:
    """The operations for the OpenAPI document."""

    def one(
        method: Literal["get", "post"], path: str, summary: str, body: Any, answer: Any
    ) -> Operation:
        return Operation(method, path, summary, "Ollama", body, answer, error=OllamaError)

    return [
        one("post", "/api/chat", "The assistant's next message", ChatRequest, OllamaAnswer),
        one("post", "/api/generate", "Answers a prompt", GenerateRequest, OllamaAnswer),
        one("post", "/api/embed", "A vector for each text", EmbedRequest, OllamaEmbeddings),
        one("post", "/api/show", "The properties of a model", ShowRequest, ShownModel),
        one("get", "/api/tags", "The loaded models", None, ModelListing),
        one("get", "/api/ps", "The loaded models", None, ModelListing),
        one("get", "/api/version", "The version of this server", None, Version),
    ]
