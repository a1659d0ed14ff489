"""``POST /v1/embeddings``: a vector for each text."""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.messages import Pooling
from ....protocol.sampling import TokenId
from ..bodies.reading import Body, ignored_of, read_body
from ..context import Gateway, gateway_of
from ..embeddings import Texts, in_turns, shortened, tokenized, vectors
from ..errors import invalid_field
from ..events import unless_disconnected
from ..json import encode, json_response

Truncation = Annotated[int, Meta(ge=-1)]


class EmbeddingsRequest(Body, kw_only=True):
    """The body of ``POST /v1/embeddings``."""

    input: str | list[str | list[TokenId] | TokenId]
    """A text, a list of token ids, or a list whose elements are texts or lists of token ids."""
    model: str = ""
    encoding_format: Literal["float", "base64"] | None = None
    """The form of the vectors. ``base64``: little-endian float32 as text. Default: ``float``."""
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Number of components to keep, from the first. The result is scaled to the length 1."""
    user: str | None = None

    # Fields that vLLM adds.
    truncate_prompt_tokens: Truncation | None = None
    """Number of tokens to keep at the beginning of each text; -1 stands for as many tokens as the
    model takes."""

    # Fields that only Tokenbus has.
    pooling: Pooling | None = None
    """How the vector of a text is computed from its tokens. Default: the pooling of the model."""

    def texts(self) -> list[str | list[int]]:
        """The texts. Raises ApiError 400 if ``input`` mixes ids and texts, or is empty."""
        if isinstance(self.input, str):
            return [self.input]
        ids = [one for one in self.input if isinstance(one, int)]
        if ids and len(ids) == len(self.input):
            return [ids]
        texts = [one for one in self.input if not isinstance(one, int)]
        if ids or not texts:
            raise invalid_field(
                "input", "input must be a text, a list of texts, or lists of token ids"
            )
        return texts


class Embedding(Struct):
    """The vector of a text."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct):
    """The number of tokens of the texts of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """The answer of ``POST /v1/embeddings``."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


async def embeddings(request: Request) -> Response:
    """Answers with the vectors of all texts."""
    ignored = ignored_of(request)
    body = await read_body(request, EmbeddingsRequest, ignored)
    work = _answer(gateway_of(request), body)
    return json_response(await unless_disconnected(request.receive, work), headers=ignored.headers)


async def _answer(gateway: Gateway, body: EmbeddingsRequest) -> EmbeddingList:
    model = await gateway.models.get(body.model)
    texts = await tokenized(model, "input", body.texts(), body.truncate_prompt_tokens)
    found = await vectors(gateway, model, texts, body.pooling)
    found = await shortened(model, found, body.dimensions)
    as_base64 = body.encoding_format == "base64"

    def item(numbered: tuple[int, array[float]]) -> Any:
        number, vector = numbered
        return Raw(encode(Embedding(number, _encoded(vector, as_base64))))

    # Encoding all vectors at once may block the event loop for seconds.
    data = await in_turns(enumerate(found), item)
    return EmbeddingList(data, model.name_for(body.model), usage_of(texts))


def usage_of(*texts: Texts) -> EmbeddingUsage:
    """The number of tokens of all texts."""
    count = sum(one.num_tokens for one in texts)
    return EmbeddingUsage(count, count)


def _encoded(vector: array[float], as_base64: bool) -> list[float] | str:
    if not as_base64:
        return vector.tolist()
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
