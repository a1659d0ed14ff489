"""``/generate``: its request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

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
    RepetitionPenalty,
    Seed,
    StopIds,
    Temperature,
    TopK,
    TopLogprobs,
    TopPOrZero,
    kept_tokens,
    sampling_of,
    stops_of,
)
from ..bodies.reading import Body
from ..conversation.constraints import Constraint
from ..errors import invalid_field
from ..openai.constraints import StructuredOutputs, only_constraint

DEFAULT_MAX_TOKENS = 128
"""SGLang's default of ``max_new_tokens``."""
MAX_PROMPTS = 256
"""Maximum number of prompts in a request."""
Prompt = str | list[int]
Texts = Annotated[list[str], Meta(min_length=1)]
Ids = Annotated[list[TokenId | list[TokenId]], Meta(min_length=1)]
Start = Annotated[int, Meta(ge=-1)]
NewTokens = Annotated[int, Meta(ge=0, le=0x7FFF_FFFF)]
RequestName = Annotated[str, Meta(max_length=128)]
T = TypeVar("T")


class SamplingParams(Body):
    """``sampling_params`` of a prompt."""

    max_new_tokens: NewTokens | None = None
    """Maximum number of new tokens. Default: 128. If it is 0, only log-probabilities of the prompt
    are computed."""
    temperature: Temperature | None = None
    """Default: 1."""
    top_p: TopPOrZero | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    n: Choices | None = None
    stop: MaybeStop | MaybeStops | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    sampling_seed: Seed | None = None
    min_new_tokens: MinTokens | None = None
    """Minimum number of generated tokens. The text ends earlier only if its constraint ends it."""
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    """A grammar in llguidance's variant of the language of Lark."""

    # Fields that only Tokenbus has.
    controller: Name | None = None
    controller_arg: str | dict[str, Any] | list[Any] | None = None

    def check(self) -> None:
        """Raises ApiError 400 if fields contradict each other."""
        if (self.min_new_tokens or 0) > self.max_tokens:
            raise invalid_field(
                "sampling_params.min_new_tokens",
                f"min_new_tokens is {self.min_new_tokens}; expected at most max_new_tokens, which "
                f"is {self.max_tokens}",
            )

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a sequence."""
        return DEFAULT_MAX_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of the text. Raises ApiError 400 if there are several."""
        given = {"json": self.json_schema, "regex": self.regex, "grammar": self.ebnf}
        fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        structured = StructuredOutputs(**fields) if fields else None
        return only_constraint(structured, self.controller, self.controller_arg, None)

    def options(self) -> GenerateOptions:
        """Converts the fields of these parameters to options of ``generate``."""
        options: GenerateOptions = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "max_tokens": self.max_tokens,
            "n": self.n or 1,
            "stop": [*(self.stop_token_ids or ()), *stops_of(self.stop)],
            "ignore_eos": bool(self.ignore_eos),
            **kept_tokens(self.top_p, self.top_k),
            **sampling_of(
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias=self.logit_bias,
                seed=self.sampling_seed,
                min_tokens=self.min_new_tokens,
            ),
        }
        constraint = self.constraint
        return options if constraint is None else {**options, **constraint.options}


class GenerateRequest(Body):
    """The body of ``POST /generate``. If a field after ``text`` has a list, the list has one value
    for each prompt."""

    input_ids: Ids | None = None
    """The prompt as token ids, or a list of prompts."""
    text: str | Texts | None = None
    """The prompt as text, or a list of prompts. A request has exactly one of ``input_ids`` and
    ``text``."""
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    rid: RequestName | list[RequestName] | None = None
    """The id of the request in ``meta_info``."""
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Start | list[Start] | None = None
    """The position of the prompt's first token whose log-probability is reported. -1, the default:
    only log-probabilities of new tokens are reported."""
    top_logprobs_num: TopLogprobs | list[TopLogprobs] | None = None
    """Number of the most likely tokens that are reported at each position."""
    return_text_in_logprobs: bool | None = None
    """Whether log-probabilities have the text of their token."""
    stream: bool | None = None
    input_embeds: Any = None
    """Not supported, like ``image_data``: the request is refused unless both fields are null."""
    image_data: Any = None

    # Fields that only Tokenbus has.
    model: str = ""
    processed_logprobs: bool | None = None
    """Whether ``meta_info`` has the log-probabilities under the distribution that each token was
    drawn from."""
    kept: bool | None = None
    """Whether ``meta_info`` has the candidates that each token was drawn from."""

    def check(self) -> None:
        """Raises ApiError 400 if fields contradict each other or are not supported."""
        for name in ("input_embeds", "image_data"):
            if getattr(self, name) is not None:
                raise invalid_field(name, f"{name} is not supported; send text or input_ids")
        if (self.input_ids is None) == (self.text is None):
            both = "both are" if self.text is not None else "neither is"
            raise invalid_field("input_ids", f"give one of input_ids and text; {both} given")
        for params in self.of_each(self.sampling_params, SamplingParams(), "sampling_params"):
            params.check()

    @property
    def is_list(self) -> bool:
        """Whether the request has a list of prompts, so that the answer is a list."""
        if self.text is not None:
            return isinstance(self.text, list)
        return not isinstance((self.input_ids or [0])[0], int)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts. Raises ApiError 400 if there are too many, or if ``input_ids`` mixes ids and
        lists."""
        if self.text is not None:
            prompts: list[Prompt] = [*self.text] if isinstance(self.text, list) else [self.text]
        elif self.is_list:
            prompts = [one for one in self.input_ids or () if isinstance(one, list)]
            self._check_kinds(len(prompts))
        else:
            prompts = [[one for one in self.input_ids or () if isinstance(one, int)]]
            self._check_kinds(len(prompts[0]))
        if len(prompts) > MAX_PROMPTS:
            raise invalid_field(
                self.field,
                f"the body has {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed",
            )
        return prompts

    @property
    def field(self) -> str:
        """The name of the field that has the prompts."""
        return "input_ids" if self.text is None else "text"

    def of_each(self, given: T | list[T] | None, default: T, name: str) -> Sequence[T]:
        """The value of a field for each prompt. Raises ApiError 400 if their number is wrong."""
        count = len(self.prompts)
        if not isinstance(given, list):
            return [default if given is None else given] * count
        if len(given) != count:
            raise invalid_field(
                name, f"{name} has {len(given)} elements; expected {count}, one for each prompt"
            )
        return given

    def _check_kinds(self, count: int) -> None:
        if count != len(self.input_ids or ()):
            raise invalid_field(
                "input_ids",
                "input_ids is a list of different kinds; it must be token ids, or a list of lists "
                "of token ids",
            )
