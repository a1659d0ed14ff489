"""The fields of an answer for clients that train on its tokens: ids, distributions and spans."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ....protocol.messages import Span, Token
from ... import GeneratedSequence


class WeightSpan(Struct, omit_defaults=True):
    """Consecutive new tokens that were computed with the same weights and arithmetic."""

    first: int
    """The position of the span's first token among the new tokens. The span ends where the next
    span begins."""
    weights: str
    """The hash of the loaded weights (``Span.weights``)."""
    exact: str
    """The arithmetic, such as ``AVX512``, if the bits of the results do not depend on the batch;
    otherwise empty."""
    version: int = 0
    """The number of the last update of the weights; left out before the first update."""
    kept_cache: bool = False
    """Whether the sequence kept keys and values that were computed with earlier weights."""

    @classmethod
    def of(cls, first: int, span: Span) -> WeightSpan:
        """The span that begins with the token ``first``."""
        return cls(first, span.weights, span.exact, span.version, span.kept_cache)

    @property
    def label(self) -> str:
        """The value of ``weight_version`` in SGLang's answers."""
        return weights_label(self.version, self.weights)


def weights_label(version: int, weights: str) -> str:
    """The version of weights as a text: the number of the last update; before the first update, the
    hash of the loaded weights. For a LoRA adapter, ``+NAME@HASH`` follows, its name and hash."""
    _, plus, adapter = weights.partition("+")
    return f"{version}{plus}{adapter}" if version else weights


class TokenFields(Struct, kw_only=True):
    """Optional fields of a choice; unset if the request does not ask for them."""

    token_ids: list[int] | UnsetType = UNSET
    """With ``return_token_ids``: the ids of the new tokens. A chunk has only the ids of its
    tokens."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """With ``return_token_ids``: the token ids of the prompt. In a stream, only the first chunk of
    a choice has them."""
    processed_logprobs: list[float | None] | UnsetType = UNSET
    """The log-probability of each new token under the distribution that it was drawn from."""
    kept: list[int | list[int] | None] | UnsetType = UNSET
    """For each new token, the ids of the candidates that it was drawn from. If there are more than
    1,024 candidates, or if all tokens of the vocabulary are candidates, the value is the number of
    candidates."""
    spans: list[WeightSpan] | UnsetType = UNSET
    """With ``return_token_ids``: how the tokens were computed. A chunk has a span only if the
    chunk's token is the first token of the span."""
    removed_tokens: int | UnsetType = UNSET
    """In a chunk, with ``return_token_ids``: the number of tokens that the client must remove
    before it adds the chunk's tokens."""


class TokenReports:
    """Makes the ``TokenFields`` of choices, with the fields that ``body`` requests."""

    def __init__(self, body: Any) -> None:
        """``body``: a ``SampledRequest``."""
        self.ids = bool(body.return_token_ids)
        self._processed = bool(body.processed_logprobs)
        self._kept = bool(body.kept)

    def __bool__(self) -> bool:
        return self.ids or self._processed or self._kept

    def of_sequence(
        self, sequence: GeneratedSequence, prompt: list[int] | None = None
    ) -> TokenFields:
        """The fields of a whole choice. ``prompt``: the tokens of the prompt, if the choice has
        them."""
        fields = TokenFields()
        if self.ids:
            fields.token_ids = sequence.tokens
            fields.prompt_token_ids = UNSET if prompt is None else prompt
            fields.spans = spans_of(sequence)
        if self._processed:
            fields.processed_logprobs = sequence.processed_logprobs
        if self._kept:
            fields.kept = sequence.kept
        return fields

    def of_entry(self, entry: Token, prompt: list[int] | None = None) -> TokenFields:
        """The fields of a chunk. ``prompt``: the tokens of the prompt, for the first chunk."""
        fields = TokenFields()
        has_token = entry.token is not None
        if self.ids:
            fields.token_ids = [] if entry.token is None else [entry.token]
            fields.prompt_token_ids = UNSET if prompt is None else prompt
            if entry.span is not None:
                span = WeightSpan.of(entry.pos, entry.span)
                fields.spans = [span]
            if entry.backtrack:
                fields.removed_tokens = entry.backtrack
        if self._processed and has_token:
            fields.processed_logprobs = [None if entry.processed is UNSET else entry.processed]
        if self._kept and has_token:
            fields.kept = [None if entry.kept is UNSET else entry.kept]
        return fields


def set_fields(choice: Any, fields: TokenFields | None) -> None:
    """Copies the fields to a choice, which has all fields of ``TokenFields`` that may be set."""
    if fields is None:
        return
    for name in TokenFields.__struct_fields__:
        value = getattr(fields, name)
        if value is not UNSET:
            setattr(choice, name, value)


def ids_of(prompt: str | list[int]) -> list[int]:
    """The token ids of a prompt; empty for a text, whose ids were not requested."""
    return prompt if isinstance(prompt, list) else []


def spans_of(sequence: GeneratedSequence) -> list[WeightSpan]:
    """The spans of a sequence."""
    return [WeightSpan.of(first, span) for first, span in sequence.spans]
