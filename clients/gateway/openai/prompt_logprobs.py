"""``prompt_logprobs``: the log-probabilities of a prompt's tokens, in vLLM's form."""

from __future__ import annotations

import math

from msgspec import Struct

from ....protocol.errors import TokenbusError
from ..context import Gateway
from ..errors import from_tokenbus
from ..generation.counter import compose
from ..models import ServedModel
from .logprobs import UNLIKELY, bounded


class PromptLogprob(Struct):
    """A token of the prompt, or an alternative to this token."""

    logprob: float
    rank: int | None
    """1 plus the number of more likely tokens; null if the token is not among the requested number
    of most likely tokens."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""A list with one element for each token of the prompt. An element maps the ids of this token and
of the most likely tokens at its position to their log-probabilities. The first element is null."""


async def prompt_logprobs(
    gateway: Gateway, model: ServedModel, ids: list[int], count: int
) -> PromptLogprobs:
    """The log-probabilities of a prompt, with ``count`` alternatives for each token. The caller
    bounds the number of alternatives. Raises ApiError."""
    if len(ids) < 2:
        return [None] * len(ids)
    try:
        scores = await gateway.client.score(ids[:1], ids[1:], model=model.name, top_logprobs=count)
    except TokenbusError as error:
        error.path = "$.prompt" if error.path == "$.scored" else error.path
        raise from_tokenbus(error) from None
    places = list(zip(scores.tokens, scores.logprobs, scores.top_logprobs, strict=True))
    alternatives = len(ids) * (1 + count)
    found = await compose(
        gateway.large_answers,
        alternatives,
        lambda: [_place(model, count, *one) for one in places],
    )
    return [None, *found]


def _place(
    model: ServedModel, count: int, token: int, logprob: float, tops: dict[int, float]
) -> dict[str, PromptLogprob]:
    likeliest = sorted(tops.items(), key=lambda one: -one[1])[:count]
    found = {
        str(one): PromptLogprob(bounded(value), rank, model.text_of(one))
        for rank, (one, value) in enumerate(likeliest, 1)
    }
    if str(token) not in found:
        value = UNLIKELY if math.isnan(logprob) else bounded(logprob)
        found[str(token)] = PromptLogprob(value, None, model.text_of(token))
    return found
