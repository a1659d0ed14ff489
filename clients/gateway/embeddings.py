"""Vectors of texts for the doors: ``/v1/embeddings``, ``/v1/rerank`` and ``/score``."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul

from ...protocol.errors import TokenbusError
from ...protocol.messages import MAX_INPUTS, Embedded, Pooling
from ..request_options import EmbedOptions
from .context import Gateway
from .errors import ApiError, from_tokenbus, invalid_field
from .models import ServedModel

MAX_TEXTS = 2048
"""Maximum number of texts of a request, as at OpenAI."""
MAX_TOKENS = 300_000
"""Maximum number of tokens of a request's texts together, as at OpenAI."""
BATCH_TEXTS = 64
"""Number of texts of one request at the bus. A worker takes turns between requests."""
assert BATCH_TEXTS <= MAX_INPUTS

TURN_PAIRS = 16
"""Number of pairs that are compared before other requests have their turn."""

Vector = Sequence[float]


@dataclass(frozen=True)
class Texts:
    """The texts of a request as token ids. ``field``: the name of the field with the texts."""

    field: str
    ids: list[list[int]]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self.ids))


async def tokenized(
    model: ServedModel, field: str, texts: Sequence[str | list[int]], truncate: int | None = None
) -> Texts:
    """The token ids of some texts. ``truncate``: the number of first tokens of each text that are
    kept (-1: as many as the model takes). Raises ApiError."""
    if len(texts) > MAX_TEXTS:
        what = f"{field} has {len(texts)} texts; at most {MAX_TEXTS} are allowed"
        raise invalid_field(field, what)
    longest = model.info.context_length
    kept = longest if truncate == -1 else truncate
    ids = []
    for number, text in enumerate(texts):
        place = f"{field}[{number}]"
        own = await _ids(model, place, text)
        own = own if kept is None else own[:kept]
        if len(own) > longest:
            raise ApiError(
                400,
                f"{place} has {len(own)} tokens; {model.name} takes at most {longest}; shorten it, "
                "or set truncate_prompt_tokens to -1",
                code="context_length_exceeded",
                param=place,
            )
        if not own:
            raise invalid_field(place, f"{place} has no tokens; give a text that is not empty")
        ids.append(own)
    found = Texts(field, ids)
    if found.num_tokens > MAX_TOKENS:
        what = f"{field} has {found.num_tokens} tokens; at most {MAX_TOKENS} are allowed"
        raise invalid_field(field, what)
    return found


async def _ids(model: ServedModel, place: str, text: str | list[int]) -> list[int]:
    if not isinstance(text, str):
        return text
    try:
        return await model.tokenize(text)
    except TokenbusError as error:
        refused = from_tokenbus(error)
        refused.param = place
        raise refused from None


async def vectors(
    gateway: Gateway, model: ServedModel, texts: Texts, pooling: Pooling | None
) -> list[array[float]]:
    """The vectors of some texts, of length 1, in their order. Raises ApiError."""
    options: EmbedOptions = {"model": model.name}
    if pooling is not None:
        options["pooling"] = pooling
    parts = [texts.ids[at : at + BATCH_TEXTS] for at in range(0, len(texts.ids), BATCH_TEXTS)]
    found: list[array[float]] = []
    for number, part in enumerate(parts):
        try:
            answer = await gateway.client.embed(part, **options)
        except TokenbusError as error:
            raise _named(error, texts.field, number * BATCH_TEXTS) from None
        # Copying the vectors of 64 texts takes less than a millisecond.
        found += split(answer)
        await asyncio.sleep(0)
    return found


def split(answer: Embedded) -> list[array[float]]:
    """The vectors in an answer of a worker."""
    size = answer.dimensions * 4
    return [
        array("f", answer.vectors[at : at + size]) for at in range(0, len(answer.vectors), size)
    ]


def _named(error: TokenbusError, field: str, first: int) -> ApiError:
    """An error of the bus, with the place of the text in the request."""
    named = from_tokenbus(error)
    param = named.param or ""
    if param.startswith("inputs["):
        named.param = f"{field}[{first + int(param[len('inputs[') : param.index(']')])}]"
    return named


def shortened(vector: array[float], dimensions: int) -> array[float]:
    """The first components of a vector, scaled to the length 1 (Matryoshka embeddings)."""
    part = vector[:dimensions]
    length = math.sqrt(math.fsum(one * one for one in part)) or 1.0
    return array("f", (one / length for one in part))


async def similarities(pairs: Iterable[tuple[Vector, Vector]]) -> list[float]:
    """The cosine of each pair of vectors of length 1. Other requests are served in between."""
    found = []
    for number, (one, two) in enumerate(pairs):
        found.append(math.fsum(map(mul, one, two)))
        if number % TURN_PAIRS == TURN_PAIRS - 1:
            await asyncio.sleep(0)
    return found
