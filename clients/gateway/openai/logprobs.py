"""``logprobs``: the two forms in which OpenAI reports log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from msgspec import UNSET, Struct

from ....protocol.messages import Token
from ... import GeneratedSequence
from ..models import ServedModel

UNLIKELY = -9999.0
"""OpenAI's value for a token that has no log-probability because it was not sampled. As in vLLM,
answers also contain this value in place of any lower log-probability, because JSON cannot represent
minus infinity."""


@dataclass
class Sampled:
    """Tokens with their log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    """The log-probability of each token; None for a token that a controller appended, and for the
    first token of a prompt."""
    tops: list[dict[int, float]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, sequence: GeneratedSequence) -> Self:
        """All tokens of a sequence."""
        logprobs = reported(sequence.logprobs)
        return cls(sequence.tokens, logprobs, sequence.top_logprobs, sequence.texts)

    def __add__(self, other: Sampled) -> Sampled:
        """The tokens of ``self``, and then those of ``other``."""
        return Sampled(
            [*self.tokens, *other.tokens],
            [*self.logprobs, *other.logprobs],
            [*self.tops, *other.tops],
            [*self.texts, *other.texts],
        )

    @classmethod
    def of_entry(cls, entry: Token, text: str) -> Self:
        """The token of an entry; empty if the entry has no token."""
        if entry.token is None:
            return cls()
        logprob = None if entry.logprob is None else bounded(entry.logprob)
        tops = {} if entry.top_logprobs is UNSET else entry.top_logprobs
        return cls([entry.token], [logprob], [tops], [text])

    def likeliest(self, place: int, count: int) -> list[tuple[int, float]]:
        """The ``count`` most likely alternatives to the token with the index ``place``, with their
        log-probabilities. The likeliest is first."""
        found = sorted(self.tops[place].items(), key=lambda item: -item[1])[:count]
        return [(token, bounded(logprob)) for token, logprob in found]


class CompletionLogprobs(Struct):
    """``logprobs`` of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """The offset of each token in the text, in characters."""


def completion_logprobs(
    model: ServedModel, sampled: Sampled, count: int, offset: int = 0
) -> CompletionLogprobs:
    """The logprobs of a completion. ``count``: number of alternatives for each token. ``offset``:
    the text offset of the first token."""
    tops: list[dict[str, float] | None] = []
    offsets = []
    for place, (token, logprob) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True)):
        found = dict(sampled.likeliest(place, count))
        if logprob is not None:
            found.setdefault(token, logprob)
        # If several tokens have the same text, such as parts of characters, only the likeliest is
        # reported.
        tops.append({model.text_of(t): p for t, p in reversed(found.items())} or None)
        offsets.append(offset)
        offset += len(sampled.texts[place])
    texts = [model.text_of(token) for token in sampled.tokens]
    return CompletionLogprobs(texts, sampled.logprobs, tops, offsets)


class TopLogprob(Struct):
    """An alternative to a token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """A token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """``logprobs`` of a choice of a chat."""

    content: list[TokenLogprob]
    refusal: None = None

    @classmethod
    def of(cls, model: ServedModel, sampled: Sequence[Sampled], count: int) -> Self:
        """The logprobs of consecutive tokens, with ``count`` alternatives to each token."""
        return cls([each for tokens in sampled for each in token_logprobs(model, tokens, count)])


def token_logprobs(model: ServedModel, sampled: Sampled, count: int) -> list[TokenLogprob]:
    """The logprobs of a chat or a response, with the bytes of each token."""
    return [
        TokenLogprob(
            model.text_of(token),
            UNLIKELY if logprob is None else logprob,
            list(model.bytes_of(token)),
            [_top(model, *top) for top in sampled.likeliest(place, count)],
        )
        for place, (token, logprob) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True))
    ]


def _top(model: ServedModel, token: int, logprob: float) -> TopLogprob:
    return TopLogprob(model.text_of(token), logprob, list(model.bytes_of(token)))


def cumulative(sequence: GeneratedSequence) -> float:
    """The sum of the sampled tokens' log-probabilities, by which ``best_of`` chooses."""
    return sum(value for value in sequence.logprobs if not math.isnan(value))


def reported(values: Sequence[float]) -> list[float | None]:
    """The log-probabilities that an answer contains, with None in place of NaN, which JSON cannot
    represent."""
    return [None if math.isnan(value) else bounded(value) for value in values]


def bounded(logprob: float) -> float:
    """A log-probability of at least ``UNLIKELY``."""
    return max(logprob, UNLIKELY)
