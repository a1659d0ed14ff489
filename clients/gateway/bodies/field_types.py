"""Types of the request fields that several HTTP interfaces share, with their bounds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ....protocol.sampling import (
    MAX_N,
    MAX_STOP,
    MAX_STOP_CHARS,
    MAX_TOP_LOGPROBS,
    StopString,
    TokenId,
)
from ... import GenerateOptions
from ..errors import invalid_field

Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopPOrZero = Annotated[float, Meta(ge=0, le=1)]
"""``top_p``. The value 0 keeps only the most probable token, as ``top_k`` 1 does."""
TopK = Annotated[int, Meta(ge=-1, le=0xFFFF_FFFF)]
"""``top_k``. The values 0 and -1 keep all tokens."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Choices = Annotated[int, Meta(ge=1, le=MAX_N)]
MaxTokens = Annotated[int, Meta(ge=1, le=0x7FFF_FFFF)]
MinTokens = Annotated[int, Meta(ge=0, le=0x7FFF_FFFF)]
MaxThinkingTokens = Annotated[int, Meta(ge=0)]
RestOfContext = Annotated[int, Meta(ge=-1, le=0x7FFF_FFFF)]
"""Maximum number of tokens of an answer; -1 stands for the rest of the context."""
PromptTokens = Annotated[int, Meta(ge=-1, le=0x7FFF_FFFF)]
"""Number of tokens that are kept at the end of a prompt; -1 keeps as many as the context allows."""
Stops = Annotated[list[StopString], Meta(max_length=MAX_STOP)]
MaybeStop = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
"""A stop string; an empty string has no effect."""
MaybeStops = Annotated[list[MaybeStop], Meta(max_length=MAX_STOP)]
StopIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:-]{1,128}$")]


def kept_tokens(top_p: float | None, top_k: int | None) -> GenerateOptions:
    """The options that select the tokens from which the next token is sampled."""
    if top_p == 0:
        return {"top_k": 1}
    options: GenerateOptions = {}
    if top_p is not None:
        options["top_p"] = top_p
    if top_k is not None:
        options["top_k"] = max(0, top_k)
    return options


def sampling_of(
    *,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: dict[int, float] | None = None,
    seed: int | None = None,
    min_tokens: int | None = None,
) -> GenerateOptions:
    """Converts these fields of a body to sampling options. A field that is None or has no effect is
    left out."""
    options: GenerateOptions = {}
    if min_p:
        options["min_p"] = min_p
    if repetition_penalty is not None:
        options["repetition_penalty"] = repetition_penalty
    if presence_penalty:
        options["presence_penalty"] = presence_penalty
    if frequency_penalty:
        options["frequency_penalty"] = frequency_penalty
    if logit_bias:
        options["logit_bias"] = logit_bias
    if seed is not None:
        options["seed"] = seed_of(seed)
    if min_tokens:
        options["min_tokens"] = min_tokens
    return options


def check_max_tokens(name: str, value: int | None) -> None:
    """Raises ApiError 400 if the maximum number of tokens in the field ``name`` is 0."""
    if value == 0:
        raise invalid_field(
            name,
            f"{name}: expected a whole number of at least 1, or -1 for the rest of the context",
        )


def limit_of(value: int | None) -> int | None:
    """A maximum number of tokens (``RestOfContext``); None if only the context bounds them."""
    return value if value is not None and value > 0 else None


def stops_of(given: str | list[str] | None) -> list[str]:
    """The stop strings of a field, without empty strings."""
    strings = [given] if isinstance(given, str) else given or []
    return [string for string in strings if string]


def seed_of(seed: int) -> int:
    """A seed without its sign bit, because the bus accepts only non-negative seeds."""
    return seed & 0x7FFF_FFFF_FFFF_FFFF
