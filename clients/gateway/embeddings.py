"""Computes the vectors of texts, for OpenAI's and Ollama's embeddings, and for ``/rerank`` and
``/score``."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import TypeVar

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
"""Maximum number of texts in one request to the bus. Between two requests, a worker serves other
clients."""
assert BATCH_TEXTS <= MAX_INPUTS

ANSWER_BYTES = 6
"""Bytes of memory that an answer occupies for each byte of its vectors. The answer consists of the
vectors and their JSON text."""
TURN_VECTORS = 8
"""After this number of vectors has been scaled, compared or encoded, other requests have their
turn."""

S = TypeVar("S")
T = TypeVar("T")


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
    """The token ids of some texts. If ``truncate`` is not None, only the first ``truncate`` tokens
    of each text are kept; -1 keeps as many tokens as the model accepts. Raises ApiError."""
    if len(texts) > MAX_TEXTS:
        what = f"{field} has {len(texts)} texts; at most {MAX_TEXTS} are allowed"
        raise invalid_field(field, what)
    longest = model.info.context_length
    kept = longest if truncate == -1 else truncate
    found = Texts(field, [])
    num_tokens = 0
    for number, text in enumerate(texts):
        place = f"{field}[{number}]"
        own = await _ids(model, place, text)
        own = own if kept is None else own[:kept]
        if len(own) > longest:
            raise ApiError(
                400,
                f"{place} has {len(own)} tokens; {model.name} takes at most {longest}; shorten the "
                "text, or set truncate_prompt_tokens to -1 (Ollama: truncate to true)",
                code="context_length_exceeded",
                param=place,
            )
        if not own:
            raise invalid_field(place, f"{place} has no tokens; give a text that is not empty")
        found.ids.append(own)
        num_tokens += len(own)
        if num_tokens > MAX_TOKENS:
            what = f"{field} has at least {num_tokens} tokens; at most {MAX_TOKENS} are allowed"
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
    """A unit vector for each text, in the order of the texts. The vectors count towards the user's
    share of the memory until the end of the request. Raises ApiError and UnavailableError."""
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
        gateway.shares.take_bytes(ANSWER_BYTES * len(answer.vectors))
        # ``split`` copies the vectors of at most 64 texts. This blocks the event loop for less than
        # a millisecond.
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
    """Converts an error of the bus about a text to an ApiError. The ApiError names the place of the
    text in the HTTP request. ``first``: the index, in the HTTP request, of the first text of the
    request to the bus."""
    named = from_tokenbus(error)
    param = named.param or ""
    if param.startswith("inputs["):
        named.param = f"{field}[{first + int(param[len('inputs[') : param.index(']')])}]"
    return named


async def shortened(
    model: ServedModel, found: list[array[float]], dimensions: int | None
) -> list[array[float]]:
    """Shortens each vector to its first ``dimensions`` components, and scales it to the length 1
    (Matryoshka embeddings). If ``dimensions`` is None, the vectors are unchanged. Raises ApiError
    400 if the vectors have fewer components than ``dimensions``."""
    if dimensions is None:
        return found
    size = len(found[0])
    if dimensions > size:
        what = f"dimensions is {dimensions}; the vectors of {model.name} have {size}"
        raise invalid_field("dimensions", what)
    return await in_turns(found, lambda vector: _scaled(vector[:dimensions]))


def _scaled(part: array[float]) -> array[float]:
    length = math.sqrt(math.fsum(map(mul, part, part))) or 1.0
    return array("f", (one / length for one in part))


async def similarities(pairs: Iterable[tuple[array[float], array[float]]]) -> list[float]:
    """The cosine of the angle between the two unit vectors of each pair."""
    return await in_turns(pairs, lambda pair: math.fsum(map(mul, *pair)))


async def in_turns(given: Iterable[S], make: Callable[[S], T]) -> list[T]:
    """Calls ``make`` for each vector or pair; returns the results. After every ``TURN_VECTORS``
    calls, other requests run."""
    made = []
    for number, one in enumerate(given, 1):
        made.append(make(one))
        if number % TURN_VECTORS == 0:
            await asyncio.sleep(0)
    return made
