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
from .response_bodies import DeletedResponse, InputItemList, ResponseAnswer, ResponsesRequest
from .responses import responses
from .served_models import Model, ModelList, model, models
from .stored_responses import (
    EventNumber,
    Order,
    PageLimit,
    cancel_response,
    delete_response,
    input_items,
    response,
)
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
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/responses/{id}", response, methods=["GET"]),
        Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", input_items, methods=["GET"]),
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
        post("/v1/responses", "Answers a conversation", ResponsesRequest, ResponseAnswer, True),
        *_stored_operations(),
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


def _stored_operations() -> list[Operation]:
    """The operations on stored responses."""
    path = "/v1/responses/{id}"
    events = {"stream": bool, "starting_after": EventNumber}
    pages = {"after": str, "limit": PageLimit, "order": Order}
    return [
        Operation(
            "get", path, "A stored response", "OpenAI", None, ResponseAnswer, True, query=events
        ),
        Operation("delete", path, "Deletes a response", "OpenAI", None, DeletedResponse),
        Operation("post", f"{path}/cancel", "Cancels a response", "OpenAI", None, ResponseAnswer),
        Operation(
            "get",
            f"{path}/input_items",
            "The input of a response",
            "OpenAI",
            None,
            InputItemList,
            query=pages,
        ),
    ]
