"""Types of fields that bodies of several interfaces have, with their bounds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ...protocol.sampling import MAX_N, MAX_STOP, MAX_TOP_LOGPROBS, StopString, TokenId

Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=0xFFFF_FFFF)]
"""0 and -1 keep all tokens."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Choices = Annotated[int, Meta(ge=1, le=MAX_N)]
MaxTokens = Annotated[int, Meta(ge=1, le=0x7FFF_FFFF)]
Stops = Annotated[list[StopString], Meta(max_length=MAX_STOP)]
StopIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:-]{1,128}$")]


def seed_of(seed: int) -> int:
    """A seed for the bus, which is not negative."""
    return seed & 0x7FFF_FFFF_FFFF_FFFF
