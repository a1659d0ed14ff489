"""Requests for an answer, as their interfaces have decoded them, and the first step to an answer:
the conversation is prepared, and the tools of the bus are described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from ... import GenerateOptions
from ..bodies.leniency import Ignored
from ..context import Gateway
from ..generation.counter import Counter
from ..generation.generations import Generations, chat_generations
from ..generation.shown_text import ShownText
from .bus_tools import described
from .constraints import Constraint
from .made_calls import MadeCall
from .parts import Conversation
from .planning import Prepared, prepare
from .tools import Tool


class ConversationRequest(Protocol):
    """A request with a conversation. Each interface translates its fields to these."""

    @property
    def model(self) -> str:
        """The name of the model."""

    @property
    def num_items(self) -> int:
        """The number of items to translate, as ``tokenization.num_items`` counts them."""

    @property
    def bus_tools(self) -> Sequence[str]:
        """The names of the tools of the bus that the model may call."""

    @property
    def max_tool_calls(self) -> int | None:
        """Maximum number of calls that the gateway makes; None if the number is not bounded.
        Further calls get an error as their result."""

    def to_conversation(self, served: Mapping[str, Tool]) -> Conversation:
        """The conversation to continue. ``served``: the tools of the bus by name, as their tool
        workers describe them. Raises ApiError 400."""


class AnswerRequest(ConversationRequest, Protocol):
    """A request for the next message of a conversation."""

    bus_fields: ClassVar[Mapping[str, str]]
    """The names that fields of the bus have in the request's body, for errors."""
    call_prefix: ClassVar[str]
    """The beginning of the ids of calls."""

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of all turns; None if only the context bounds them."""

    @property
    def max_tool_turns(self) -> int | None:
        """Maximum number of turns; None stands for ``DEFAULT_TOOL_TURNS``."""

    def options(self, constraint: Constraint | None) -> GenerateOptions:
        """The options of ``generate``, except the model. The option ``max_tokens`` is missing if
        ``limit`` is None."""


@dataclass
class Plan:
    """A request whose answer can begin."""

    gateway: Gateway
    request: AnswerRequest
    conversation: Conversation
    prepared: Prepared
    """The conversation in its prepared form, for the first turn."""
    recorded: Mapping[str, MadeCall] = field(default_factory=dict)
    """The calls that an earlier gateway made for this answer, by their ids. They are not made
    again."""
    counter: Counter = field(default_factory=Counter)
    shown: ShownText | None = None
    """Text to add to the answer."""

    def begin(self) -> Generations:
        """Begins the stream of the first turn."""
        return self._begin(self.prepared, self.request.options(self.prepared.constraint))

    def continued(self, prepared: Prepared, max_tokens: int | None) -> Generations:
        """Begins the stream of a later turn. ``max_tokens``: the maximum number of its tokens; None
        if only the context bounds them."""
        options = self.request.options(prepared.constraint)
        options.pop("min_tokens", None)
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        return self._begin(prepared, options)

    def _begin(self, prepared: Prepared, options: GenerateOptions) -> Generations:
        fields = self.request.bus_fields
        begun = chat_generations(self.gateway, prepared, options, self.counter, fields)
        begun.shown = self.shown
        return begun


async def plan(
    gateway: Gateway,
    request: AnswerRequest,
    ignored: Ignored,
    recorded: Mapping[str, MadeCall] | None = None,
) -> Plan:
    """Prepares the first turn of an answer. ``recorded``: the calls that an earlier gateway made
    for the answer, by id; None if calls are not recorded. Raises ApiError or TokenbusError."""
    conversation, prepared = await prepared_of(
        gateway, request, ignored, recorded=recorded is not None
    )
    return Plan(gateway, request, conversation, prepared, recorded or {})


async def prepared_of(
    gateway: Gateway, request: ConversationRequest, ignored: Ignored, *, recorded: bool = False
) -> tuple[Conversation, Prepared]:
    """The conversation of a request, with the tools of the bus, and its prepared form.
    ``recorded``: as in ``bus_tools.described``. Raises ApiError or TokenbusError."""
    served: Mapping[str, Tool] = {}
    if request.bus_tools:
        served = await described(gateway, request.bus_tools, recorded=recorded)
    elif request.max_tool_calls is not None:
        ignored.add("max_tool_calls")
    conversation = await gateway.models.tokenization.prepare(
        request.num_items, lambda: request.to_conversation(served)
    )
    return conversation, await prepare(gateway, request.model, conversation, ignored)
