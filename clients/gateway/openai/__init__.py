"""The OpenAI-compatible door: ``/v1/…``, ``/tokenize`` and ``/detokenize``.

What vLLM adds to OpenAI's interface has vLLM's names here too.
"""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from .chat import chat_completions
from .completions import completions
from .responses import responses
from .served_models import model, models
from .tokenize import detokenize, tokenize


def routes() -> list[BaseRoute]:
    """The paths of this door."""
    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
