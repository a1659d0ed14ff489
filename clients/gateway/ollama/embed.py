"""``POST /api/embed``: a vector for each text."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Raw, Struct
from starlette.requests import Request
from starlette.responses import Response

from ..bodies.reading import Body, ignored_of, read_body
from ..context import Gateway, gateway_of
from ..embeddings import in_turns, shortened, tokenized, vectors
from ..events import unless_disconnected
from ..json import encode, json_response
from .names import served_name


class EmbedRequest(Body, kw_only=True):
    """The body of ``POST /api/embed``."""

    model: str
    input: str | Annotated[list[str], Meta(min_length=1)]
    truncate: bool | None = None
    """Whether texts that are too long are cut. Default: true."""
    dimensions: Annotated[int, Meta(ge=1)] | None = None


class OllamaEmbeddings(Struct):
    """The answer of ``POST /api/embed``."""

    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


async def embed(request: Request) -> Response:
    """Answers with the vectors of all texts."""
    ignored = ignored_of(request)
    body = await read_body(request, EmbedRequest, ignored)
    answer = await unless_disconnected(request.receive, _answer(gateway_of(request), body))
    return json_response(answer, headers=ignored.headers)


async def _answer(gateway: Gateway, body: EmbedRequest) -> OllamaEmbeddings:
    model = await gateway.models.get(await served_name(gateway, body.model))
    given = [body.input] if isinstance(body.input, str) else body.input
    texts = await tokenized(model, "input", given, None if body.truncate is False else -1)
    found = await vectors(gateway, model, texts, None)
    found = await shortened(model, found, body.dimensions)
    # Encoding all vectors at once may block the event loop for seconds.
    data: list[Any] = await in_turns(found, lambda vector: Raw(encode(vector.tolist())))
    return OllamaEmbeddings(body.model, data, texts.num_tokens)
