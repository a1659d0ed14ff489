"""The parts of a conversation, and of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from .constraints import Constraint
from .tools import Tool

T = TypeVar("T")


@dataclass
class Text:
    """Text outside thinking, calls and results."""

    text: str


@dataclass
class Thinking:
    """The assistant's thinking before its text and calls."""

    text: str


@dataclass
class Call:
    """A call of a function."""

    id: str
    name: str
    arguments: str | dict[str, Any]
    """The arguments, as JSON text that is unchanged from the model's output, or as an object."""


@dataclass
class Result:
    """The result of a call."""

    call_id: str
    parts: Sequence[Text]
    name: str | None = None
    """The name of the called function. If it is None, the name in the call is used."""
    failed: bool = False
    """Whether the call failed. The text of a failed call begins with ``Error: `` in the prompt."""


Part = Text | Thinking | Call | Result
Role = Literal["system", "developer", "user", "assistant"]


@dataclass
class Turn:
    """A message of a conversation. The results of calls are parts of a user's turn."""

    role: Role
    parts: list[Part]
    name: str | None = None
    """The name of the author, for templates that show names."""


@dataclass
class Rendering:
    """How the prompt is rendered: the chat template and its variables, except the messages and
    tools."""

    chat_template: str | None = None
    """A Jinja template that replaces the model's template."""
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    """Whether the prompt ends at the beginning of an assistant's message."""
    continue_final_message: bool = False
    """Whether the prompt ends inside the last message, which the answer continues."""
    effort: str | None = None
    """The amount of thinking, for templates with the variable ``reasoning_effort``."""
    effort_field: str = "reasoning_effort"
    """The name of the request's field with the value of ``effort``. If the template ignores the
    value, the header ``x-tokenbus-ignored`` has this name."""
    special: bool = False
    """Whether the tokenizer adds special tokens. Most templates write special tokens themselves."""


@dataclass
class Fitting:
    """Whether and how the prompt is shortened."""

    reserve: int | None = None
    """Number of tokens for which the context must have room after the prompt; at most half of the
    context is reserved. If there is less room, the oldest turns are left out. If this field is
    None, all turns are rendered, and a prompt that does not fit is refused."""
    last_tokens: int | None = None
    """Number of tokens to keep at the end of the prompt, if ``reserve`` is None. The value -1 keeps
    as many as fit into the context, and None keeps all."""


@dataclass
class AnswerRules:
    """The requested form of an answer."""

    choice: str = "auto"
    """Whether the answer calls functions: ``none``, ``auto``, ``required``, or a colon and the name
    of the function to call."""
    parallel: bool = True
    """Whether an answer may have several calls."""
    constraint: Constraint | None = None
    """The constraint on the text outside thinking and calls."""
    max_thinking_tokens: int | None = None
    thinking_field: str = "max_thinking_tokens"
    """The name of the field that bounds thinking, for errors."""
    thinking_is_optional: bool = False
    """If the model's template does not support thinking: True ignores ``max_thinking_tokens``, and
    False refuses the request."""
    separate_reasoning: bool = True
    """Whether thinking becomes a separate part of the answer, not a part of its text."""


@dataclass
class Conversation:
    """The turns so far, the tools, and the requested form of the next answer."""

    turns: list[Turn]
    tools: list[Tool] = field(default_factory=list)
    rules: AnswerRules = field(default_factory=AnswerRules)
    rendering: Rendering = field(default_factory=Rendering)
    fitting: Fitting = field(default_factory=Fitting)

    @property
    def offered(self) -> list[Tool]:
        """The tools that the prompt describes."""
        return [] if self.rules.choice == "none" else self.tools


class HasText(Protocol):
    """A part of a content in a request."""

    @property
    def text(self) -> str:
        """The text of the part."""


def texts_of(content: str | Iterable[HasText] | None) -> list[Text]:
    """The texts of a content, which is a text or a list of parts."""
    if isinstance(content, str):
        return [Text(content)]
    return [Text(part.text) for part in content or ()]


def text_of(parts: Iterable[Part]) -> str:
    """The texts of the parts, joined by line breaks as in vLLM."""
    return "\n".join(part.text for part in parts if isinstance(part, Text))


def thinking_of(parts: Iterable[Part]) -> str | None:
    """The thinking in some parts, joined by line breaks; None if no part is thinking."""
    found = of_kind(parts, Thinking)
    return "\n".join(part.text for part in found) if found else None


def of_kind(parts: Iterable[Any], kind: type[T]) -> list[T]:
    """The parts of one kind."""
    return [part for part in parts if isinstance(part, kind)]
