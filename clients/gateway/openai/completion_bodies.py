"""``/v1/completions``: its request and its answer."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ....protocol.sampling import MAX_N, TokenId
from ... import GenerateOptions
from ..bodies.field_types import RestOfContext, TopLogprobs
from ..conversation.constraints import Constraint, Receipt
from ..errors import invalid_field
from ..generation.generations import Prompt
from .fields import SampledRequest
from .logprobs import CompletionLogprobs
from .prompt_logprobs import PromptLogprobs
from .token_fields import TokenFields
from .usage import Usage

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions."""
MAX_PROMPTS = 256
"""Maximum number of prompts in a request."""

PromptList = Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class CompletionRequest(SampledRequest, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: str | PromptList
    """A text, a list of token ids, a list of texts, or a list of lists of token ids."""
    max_tokens: RestOfContext | None = None
    """Maximum number of tokens of each choice. The default is 16; -1 stands for the rest of the
    context. 0 is valid only with ``echo``."""
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    """Number of choices that are generated for each prompt. The answer has the ``n`` choices with
    the highest sum of log-probabilities."""
    echo: bool | None = None
    """Whether the text of each choice begins with the prompt."""
    logprobs: TopLogprobs | None = None
    """Number of alternatives that are reported with each token's log-probability."""
    heal_prompt: bool | None = None
    """Whether the prompt may end in the middle of a word. If true, the prompt's last token is
    removed, and the answer must begin with the text of this token. Only Tokenbus has this field."""
    suffix: str | None = None
    """The text after the gap that the model fills. Requires a tokenizer that has tokens for marking
    a gap."""

    def check(self) -> None:
        """Raises ApiError 400 if fields contradict each other or are not supported."""
        if self.suffix and self.echo:
            raise invalid_field("suffix", "suffix cannot be combined with echo; leave one out")
        self.check_prompt()
        if self.max_tokens == 0 and not self.echo:
            raise invalid_field("max_tokens", "max_tokens is 0 without echo; it must be at least 1")
        if self.max_tokens == 0 and self.min_tokens:
            what = f"min_tokens is {self.min_tokens}; expected at most max_tokens, which is 0"
            raise invalid_field("min_tokens", what)
        if self.best_of is not None:
            if self.best_of < (self.n or 1):
                raise invalid_field(
                    "best_of", f"best_of is {self.best_of}; it must be at least n, {self.n}"
                )
            if self.stream and self.best_of > (self.n or 1):
                raise invalid_field(
                    "best_of", f"best_of is {self.best_of} in a stream; it must be n, {self.n or 1}"
                )

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts. Raises ApiError 400 if there are too many prompts, or if the list mixes
        texts, token ids and lists."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if all(isinstance(one, int) for one in given):
            return [[one for one in given if isinstance(one, int)]]
        prompts: list[Prompt] = [one for one in given if not isinstance(one, int)]
        if len(prompts) < len(given) or len({type(one) for one in prompts}) > 1:
            raise invalid_field(
                "prompt",
                "prompt is a list of different kinds; it must be a text, token ids, a list of "
                "texts, or a list of lists of token ids",
            )
        if len(prompts) > MAX_PROMPTS:
            raise invalid_field(
                "prompt", f"prompt has {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed"
            )
        return prompts

    @property
    def limit(self) -> int:
        """Maximum number of tokens of each choice."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return 0x7FFF_FFFF if limit < 0 else limit

    @property
    def num_alternatives(self) -> int | None:
        """Number of alternatives that are reported with each token."""
        return self.logprobs

    def options(self, constraint: Constraint | None) -> GenerateOptions:
        """Converts the fields of this body to options of ``generate``."""
        options = super().options(constraint)
        options["n"] = self.best_of or self.n or 1
        if self.heal_prompt:
            options["heal_prompt"] = True
        return options


class CompletionChoice(TokenFields):
    """A choice of a completion, or of a chunk of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    """``stop``, ``length`` or ``error``."""
    tokenbus: Receipt | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """The answer of ``POST /v1/completions``, and a chunk of a streamed answer."""

    id: str
    object: Literal["text_completion"]
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None
