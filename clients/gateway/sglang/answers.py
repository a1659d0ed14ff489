"""``/generate``: its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, Struct, UnsetType

from ... import GeneratedSequence
from ..conversation.constraints import Receipt
from ..models import ServedModel
from ..openai.logprobs import bounded, reported
from ..openai.token_fields import WeightSpan

Logprob = tuple[float | None, int, str | None]
"""A token: its log-probability, its id, and its text if the request asks for texts. The first token
of a prompt, and a token that a controller appended, do not have a log-probability."""


class Finish(Struct, omit_defaults=True):
    """Why a sequence ended."""

    type: str
    """``stop``, ``length`` or ``abort``."""
    matched: str | int | UnsetType = UNSET
    """If ``type`` is ``stop``: the stop string or the id of the token that ended the sequence."""
    length: int | UnsetType = UNSET
    """If ``type`` is ``length``: the number of new tokens."""
    message: str | UnsetType = UNSET
    """If ``type`` is ``abort``: the message of the error."""
    err_type: str | UnsetType = UNSET


class MetaInfo(Struct, kw_only=True):
    """``meta_info``: the properties of an answer."""

    id: str
    finish_reason: Finish | None
    """None while the sequence runs."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    """The weights that computed the last token: the number of the last update; before the first
    update, the hash of the loaded weights. For a LoRA adapter, ``+NAME@HASH`` follows, its name and
    hash. Empty if there are no spans."""
    spans: list[WeightSpan]
    e2e_latency: float
    """Seconds since the request arrived."""
    input_token_logprobs: list[Logprob] | UnsetType = UNSET
    output_token_logprobs: list[Logprob] | UnsetType = UNSET
    input_top_logprobs: list[list[Logprob] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Logprob] | None] | UnsetType = UNSET
    output_processed_logprobs: list[float | None] | UnsetType = UNSET
    """The log-probability of each new token under the distribution that it was drawn from."""
    output_kept: list[int | list[int] | None] | UnsetType = UNSET
    """For each new token, the ids of the candidates that it was drawn from. If there are more than
    1,024 candidates, or if all tokens of the vocabulary are candidates, the value is the number of
    candidates."""
    tokenbus: Receipt | UnsetType = UNSET
    """The receipt of an ended sequence."""


class Generated(Struct):
    """An answer: the new text and the new token ids so far."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
    """The number of the answer, in a stream of several answers."""


@dataclass
class PromptLogprobs:
    """Tokens of a prompt or of a sequence, with their log-probabilities."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    tops: Sequence[dict[int, float]] = ()


@dataclass
class Reports:
    """Adds the requested data about tokens to the answers of one prompt."""

    model: ServedModel
    logprobs: bool
    tops: int
    """Number of the most likely tokens that are reported at each position."""
    texts: bool
    processed: bool
    kept: bool
    prompt: PromptLogprobs | None = None
    """The reported part of the prompt. None if only new tokens are reported."""
    _prompt: tuple[list[Logprob], list[list[Logprob] | None]] | None = field(default=None)
    """The tokens of ``prompt`` as the answer reports them, and the most likely tokens at each
    position. None until the first call of ``add_to``, or if ``logprobs`` is false."""

    def add_to(self, info: MetaInfo, sequence: GeneratedSequence) -> None:
        """Adds the requested data about the tokens of a sequence to ``info``."""
        if self.logprobs:
            logprobs = reported(sequence.logprobs)
            output = PromptLogprobs(sequence.tokens, logprobs, sequence.top_logprobs)
            info.output_token_logprobs = self._tokens(output)
            if self.tops:
                info.output_top_logprobs = self._tops(output)
            if self._prompt is None:
                prompt = self.prompt or PromptLogprobs()
                self._prompt = self._tokens(prompt), self._tops(prompt) if self.tops else []
            info.input_token_logprobs = self._prompt[0]
            if self.tops:
                info.input_top_logprobs = self._prompt[1]
        if self.processed:
            info.output_processed_logprobs = sequence.processed_logprobs
        if self.kept:
            info.output_kept = sequence.kept

    def _tokens(self, tokens: PromptLogprobs) -> list[Logprob]:
        pairs = zip(tokens.logprobs, tokens.tokens, strict=True)
        return [self._one(logprob, token) for logprob, token in pairs]

    def _tops(self, tokens: PromptLogprobs) -> list[list[Logprob] | None]:
        """The most likely tokens at each position, the likeliest first."""
        found: list[list[Logprob] | None] = []
        for top in tokens.tops:
            ordered = sorted(top.items(), key=lambda item: -item[1])[: self.tops]
            found.append([self._one(logprob, token) for token, logprob in ordered] or None)
        return found

    def _one(self, logprob: float | None, token: int) -> Logprob:
        if logprob is not None:
            logprob = bounded(logprob)
        return logprob, token, self.model.text_of(token) if self.texts else None


def finish_of(sequence: GeneratedSequence) -> Finish | None:
    """Why a sequence ended; None while it runs."""
    match sequence.finish_reason:
        case None:
            return None
        case "length":
            return Finish("length", length=len(sequence.tokens))
        case "stop" | "controller":
            eos = sequence.tokens[-1:] if sequence.finish_reason == "stop" else []
            matched = sequence.stop if sequence.stop is not None else next(iter(eos), UNSET)
            return Finish("stop", matched)
        case other:
            message = sequence.error or f"the sequence has ended: {other}"
            return Finish("abort", message=message, err_type=sequence.code or other)
