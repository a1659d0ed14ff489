"""``POST /v1/rerank`` and ``POST /score``: how similar texts are, by the cosine of their vectors.

Requests and answers have vLLM's forms, which follow Cohere and Jina.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from ..bodies.reading import Body, ignored_of, read_body
from ..context import Gateway, gateway_of
from ..embeddings import similarities, tokenized, vectors
from ..errors import invalid_field
from ..events import unless_disconnected
from ..json import json_response
from ..new_ids import new_id
from .embeddings import EmbeddingUsage, Truncation, usage_of

TextList = Annotated[list[str], Meta(min_length=1)]


class RerankRequest(Body, kw_only=True):
    """The body of ``POST /v1/rerank``."""

    query: str
    documents: TextList
    model: str = ""
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Number of the most similar documents that the answer has. By default, and for 0, the answer
    has all documents."""
    return_documents: bool | None = None
    """Whether results have the texts of the documents. Default: true, as in vLLM."""
    truncate_prompt_tokens: Truncation | None = None


class RankedDocument(Struct):
    """The text of a document."""

    text: str


class RerankResult(Struct, omit_defaults=True):
    """A document and its similarity to the query."""

    index: int
    """The place of the document in the request."""
    relevance_score: float
    """The cosine of the vectors, from -1 to 1."""
    document: RankedDocument | None = None


class Reranked(Struct):
    """The answer of ``POST /v1/rerank``. The most similar document is first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class ScoreRequest(Body, kw_only=True):
    """The body of ``POST /score``."""

    text_1: str | TextList
    """A single text is compared with each text of ``text_2``. If there are several texts,
    ``text_2`` must have the same number, and texts at the same index are compared."""
    text_2: str | TextList
    model: str = ""
    truncate_prompt_tokens: Truncation | None = None


class PairScore(Struct):
    """The similarity of a pair of texts."""

    index: int
    score: float
    """The cosine of the vectors, from -1 to 1."""
    object: Literal["score"] = "score"


class ScoreList(Struct):
    """The answer of ``POST /score``."""

    id: str
    model: str
    data: list[PairScore]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


async def rerank(request: Request) -> Response:
    """Answers with the documents, sorted by their similarity to the query."""
    ignored = ignored_of(request)
    body = await read_body(request, RerankRequest, ignored)
    answer = await unless_disconnected(request.receive, _reranked(gateway_of(request), body))
    return json_response(answer, headers=ignored.headers)


async def _reranked(gateway: Gateway, body: RerankRequest) -> Reranked:
    model = await gateway.models.get(body.model)
    query = await tokenized(model, "query", [body.query], body.truncate_prompt_tokens)
    texts = await tokenized(model, "documents", body.documents, body.truncate_prompt_tokens)
    [wanted] = await vectors(gateway, model, query, None)
    found = await vectors(gateway, model, texts, None)
    scores = await similarities((wanted, one) for one in found)
    best = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n or None]
    shown = body.return_documents is not False
    results = [
        RerankResult(place, scores[place], RankedDocument(body.documents[place]) if shown else None)
        for place in best
    ]
    return Reranked(new_id("rerank-"), model.name_for(body.model), usage_of(query, texts), results)


async def score(request: Request) -> Response:
    """Answers with the similarity of each pair of texts."""
    ignored = ignored_of(request)
    body = await read_body(request, ScoreRequest, ignored)
    answer = await unless_disconnected(request.receive, _scores(gateway_of(request), body))
    return json_response(answer, headers=ignored.headers)


async def _scores(gateway: Gateway, body: ScoreRequest) -> ScoreList:
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) not in (1, len(second)):
        raise invalid_field(
            "text_1",
            f"text_1 has {len(first)} texts and text_2 has {len(second)}; give one text_1, or as "
            "many as text_2 has",
        )
    model = await gateway.models.get(body.model)
    one = await tokenized(model, "text_1", first, body.truncate_prompt_tokens)
    two = await tokenized(model, "text_2", second, body.truncate_prompt_tokens)
    left = await vectors(gateway, model, one, None)
    right = await vectors(gateway, model, two, None)
    left = left * len(right) if len(left) == 1 else left
    scores = await similarities(zip(left, right, strict=True))
    data = [PairScore(number, score) for number, score in enumerate(scores)]
    return ScoreList(new_id("score-"), model.name_for(body.model), data, usage_of(one, two))
