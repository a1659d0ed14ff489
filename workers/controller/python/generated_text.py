"""The texts that ``gen`` returns to a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypedDict

from ....protocol.errors import Code, ControllerError
from .bias_values import BiasValues
from .token_set import TokenSet


class Generated(NamedTuple):
    """A text, and the log-probabilities of its tokens."""

    text: str
    tokens: list[int]
    logprobs: list[float | None]
    """The natural logarithm of each token's probability under the model's own distribution. None
    for a token that was not sampled. Such a token was appended by a constraint. Or it replaces a
    sampled token whose end was dropped after a stop text."""


class GeneratedBytes(NamedTuple):
    """A text as an answer in the transcript of a script. The script cannot change it."""

    text: bytes
    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]


class GenerationOptions(TypedDict, total=False):
    """The arguments of ``Context.gen``."""

    regex: str | None
    choice: Sequence[str] | None
    json_schema: dict[str, object] | str | None
    lark: str | None
    yacc: str | None
    substring: str | None
    substring_end: str | None
    allow: TokenSet | Iterable[int] | None
    stop_at: str | Sequence[str] | None
    max_tokens: int | None
    bias: BiasValues


def text_of_answer(answer: object) -> str | Generated:
    """The result of ``gen`` for the answer in the transcript. Raises ControllerError if the
    answer is the reason why the constraint was refused."""
    match answer:
        case bytes():
            return answer.decode("utf-8", "replace")
        case GeneratedBytes(text, tokens, logprobs):
            return Generated(text.decode("utf-8", "replace"), list(tokens), list(logprobs))
        case _:
            raise ControllerError(Code.CONTROLLER_FAILED, str(answer))
