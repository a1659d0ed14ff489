"""The common fields of requests for text, and their conversion to options of the bus."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from ....protocol.messages import Name
from ....protocol.sampling import Probability, TokenId
from ... import GenerateOptions
from ..bodies.field_types import (
    Bias,
    Choices,
    MaybeStop,
    MaybeStops,
    MinTokens,
    Penalty,
    Priority,
    PromptTokens,
    RepetitionPenalty,
    Seed,
    StopIds,
    Temperature,
    TopK,
    TopLogprobs,
    TopPOrZero,
    check_max_tokens,
    kept_tokens,
    sampling_of,
    stops_of,
)
from ..bodies.reading import Body
from ..conversation.constraints import Constraint, Schema
from ..conversation.parts import AnswerRules
from ..errors import invalid_field
from ..generation.shown_text import ShownText
from ..models import ServedModel
from .constraints import ResponseFormat, StructuredOutputs, format_constraint, only_constraint

OPENAI_TEMPERATURE = 1.0
"""OpenAI's default temperature. The bus's default is 0."""


class StreamOptions(Body):
    """The field ``stream_options``."""

    include_usage: bool | None = None
    """Whether the last chunk has the usage of the request. All other chunks then have
    ``usage: null``."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the usage so far. Requires ``include_usage``. The name is vLLM's."""


class TextRequest(Body):
    """Fields of completions, chat and responses."""

    model: str = ""
    """The name of the model. If the name is empty, the workers' default model is used or, if their
    defaults differ, the embedded model."""
    stream: bool | None = None
    temperature: Temperature | None = None
    """Default: 1."""
    top_p: TopPOrZero | None = None

    # Fields that vLLM adds.
    top_k: TopK | None = None
    """Number of most likely tokens that may be sampled; 0 and -1 allow all tokens."""
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    """Lower values are served first, as in vLLM. On the bus, higher values are served first."""
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    """The fields ``guided_…`` are vLLM's older names of the fields of ``structured_outputs``."""
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None

    # Fields that only Tokenbus has.
    controller: Name | None = None
    """The program that controls the answer: a module id, a tag, or the name of a built-in
    controller."""
    controller_arg: str | dict[str, Any] | list[Any] | None = None

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of the answer; None if only the context bounds them."""
        raise NotImplementedError

    @property
    def num_alternatives(self) -> int | None:
        """Number of alternatives that are reported with each token."""
        raise NotImplementedError

    @property
    def format_constraint(self) -> Constraint | None:
        """The constraint of the requested text format; None if any text is allowed."""
        raise NotImplementedError

    @property
    def structured(self) -> StructuredOutputs | None:
        """``structured_outputs``, or the fields ``guided_…`` in the same form."""
        if self.structured_outputs is not None:
            return self.structured_outputs
        older = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        return None if older == StructuredOutputs() else older

    @property
    def own_constraint(self) -> Constraint | None:
        """The constraint of the answer's text outside thinking and calls. Raises ApiError 400 if
        the request has several constraints."""
        return only_constraint(
            self.structured, self.controller, self.controller_arg, self.format_constraint
        )

    def answer_rules(self, choice: str | None, parallel: bool | None, calls: bool) -> AnswerRules:
        """The requested form of the answer. ``choice``: ``AnswerRules.choice``, or None for
        ``auto``. ``calls``: whether the request has tools. Raises ApiError 400."""
        given = {"structured_outputs": self.structured, "controller": self.controller}
        for name, value in given.items():
            if calls and choice != "none" and value is not None:
                raise invalid_field(
                    name, f"{name} cannot be combined with tools, unless tool_choice is 'none'"
                )
        return AnswerRules(choice or "auto", parallel is not False, self.own_constraint)

    def options(self, constraint: Constraint | None) -> GenerateOptions:
        """Converts the fields of this body to options of ``generate``, except the model. The option
        ``max_tokens`` is missing if ``limit`` is None."""
        options: GenerateOptions = {
            "text": True,
            "temperature": OPENAI_TEMPERATURE if self.temperature is None else self.temperature,
            **kept_tokens(self.top_p, self.top_k),
            **sampling_of(min_p=self.min_p, repetition_penalty=self.repetition_penalty),
        }
        if self.limit is not None:
            options["max_tokens"] = self.limit
        if self.num_alternatives:
            options["top_logprobs"] = self.num_alternatives
        if self.ignore_eos:
            options["ignore_eos"] = True
        if self.priority:
            options["priority"] = -self.priority
        if self.stop_token_ids:
            options["stop"] = self.stop_token_ids
        return options if constraint is None else {**options, **constraint.options}


class SampledRequest(TextRequest):
    """Fields of completions and chat."""

    n: Choices | None = None
    stop: MaybeStop | MaybeStops | None = None
    seed: Seed | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Whether choices have the ids of their tokens and of the prompt's tokens, as in vLLM."""
    processed_logprobs: bool | None = None
    """Whether choices have the log-probability of each token under the distribution that it was
    drawn from. Only Tokenbus has this field and ``kept``."""
    kept: bool | None = None
    """Whether choices have the candidates that each token was drawn from."""
    response_format: ResponseFormat | None = None

    # Fields that vLLM adds.
    min_tokens: MinTokens | None = None
    """Minimum number of generated tokens. The text ends earlier only if its constraint ends it."""
    truncate_prompt_tokens: PromptTokens | None = None
    """Number of tokens at the end of the prompt to keep; -1 stands for as many as fit into the
    context."""
    prompt_logprobs: TopLogprobs | None = None
    """Number of alternatives that are reported with each token of the prompt. Not available in a
    stream."""
    include_stop_str_in_output: bool | None = None
    """Whether the text has the stop string that ended it. Default: false."""
    skip_special_tokens: bool | None = None
    """Whether the text leaves out special tokens. Default: true."""

    @property
    def format_constraint(self) -> Constraint | None:
        """The constraint of ``response_format``."""
        return format_constraint(self.response_format, "response_format")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        given = self.stream_options
        return self.include_usage and given is not None and bool(given.continuous_usage_stats)

    def check_prompt(self) -> None:
        """Raises ApiError 400 if the fields about the prompt are not valid."""
        check_max_tokens("truncate_prompt_tokens", self.truncate_prompt_tokens)
        if self.prompt_logprobs is not None and self.stream:
            raise invalid_field(
                "prompt_logprobs",
                "prompt_logprobs is not available in a stream; leave out prompt_logprobs or stream",
            )

    def shown_text(self, model: ServedModel, special: bool) -> ShownText | None:
        """The text to add to the answers; None if nothing is added. ``special``: whether the names
        of special tokens can be added."""
        names = model.special_names if special and self.skip_special_tokens is False else {}
        with_stop = bool(self.include_stop_str_in_output)
        return ShownText(with_stop, names) if with_stop or names else None

    def options(self, constraint: Constraint | None) -> GenerateOptions:
        """Converts the fields of this body to options of ``generate``."""
        options = super().options(constraint)
        options["n"] = self.n or 1
        if strings := stops_of(self.stop):
            options["stop"] = [*options.get("stop", ()), *strings]
        options |= sampling_of(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            min_tokens=self.min_tokens,
        )
        if self.processed_logprobs:
            options["processed_logprobs"] = True
        if self.kept:
            options["kept"] = True
        return options
