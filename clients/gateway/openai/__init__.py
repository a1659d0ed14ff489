"""The OpenAI-compatible interface: ``/v1/…``, ``/rerank``, ``/score``, ``/tokenize`` and
``/detokenize``.

Fields that vLLM adds to OpenAI's interface have vLLM's names.
"""

from __future__ import annotations

from typing import Any

from starlette.routing import BaseRoute, Route

from ..openapi import Operation
from .chat import chat_completions
from .chat_bodies import ChatCompletion, ChatRequest
from .completion_bodies import Completion, CompletionRequest
from .completions import completions
from .embeddings import EmbeddingList, EmbeddingsRequest, embeddings
from .rerank import Reranked, RerankRequest, ScoreList, ScoreRequest, rerank, score
from .served_models import Model, ModelList, model, models
from .tokenize import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    detokenize,
    tokenize,
)


def routes() -> list[BaseRoute]:
    """The routes of this interface."""
    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        *(Route(path, rerank, methods=["POST"]) for path in ("/v1/rerank", "/rerank")),
        *(Route(path, score, methods=["POST"]) for path in ("/score", "/v1/score")),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def operations() -> list[Operation]:
    """The operations for the OpenAPI document."""

    def post(path: str, summary: str, body: Any, answer: Any, stream: bool = False) -> Operation:
        return Operation("post", path, summary, "OpenAI", body, answer, stream)

    return [
        Operation("get", "/v1/models", "The loaded models", "OpenAI", None, ModelList),
        Operation("get", "/v1/models/{model}", "A loaded model", "OpenAI", None, Model),
        post("/v1/completions", "Continues prompts", CompletionRequest, Completion, True),
        post(
            "/v1/chat/completions",
            "The assistant's next message",
            ChatRequest,
            ChatCompletion,
            True,
        ),
        post("/v1/embeddings", "A vector for each text", EmbeddingsRequest, EmbeddingList),
        *(
            post(path, "Sorts documents by their similarity to a query", RerankRequest, Reranked)
            for path in ("/v1/rerank", "/rerank")
        ),
        *(
            post(path, "The similarity of pairs of texts", ScoreRequest, ScoreList)
            for path in ("/score", "/v1/score")
        ),
        post("/tokenize", "The token ids of a text or of messages", TokenizeRequest, Tokenized),
        post("/detokenize", "The text of token ids", DetokenizeRequest, Detokenized),
    ]
