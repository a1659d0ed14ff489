"""``/api/chat`` and ``/api/generate``: their requests and answers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ... import GenerateOptions
from ..bodies.field_types import (
    FunctionName,
    MaybeStop,
    MaybeStops,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopPOrZero,
    kept_tokens,
    sampling_of,
    stops_of,
)
from ..bodies.leniency import Ignored
from ..bodies.reading import Body
from ..conversation.constraints import Constraint, Schema, json_object, json_schema
from ..conversation.parts import AnswerRules, Conversation, Part, Result, Text, Thinking, Turn
from ..conversation.parts import Call as CallPart
from ..conversation.tools import Tool
from ..errors import invalid_field

TEMPERATURE = 0.8
"""Ollama's default temperature."""


class Options(Body, kw_only=True):
    """``options``: the sampling parameters. Ollama's other options have no effect."""

    temperature: Temperature | None = None
    """Default: 0.8."""
    top_k: TopK | None = None
    top_p: TopPOrZero | None = None
    min_p: TopPOrZero | None = None
    seed: Seed | None = None
    num_predict: int | None = None
    """Maximum number of tokens of the answer. Default, and any negative number: the rest of the
    context."""
    stop: MaybeStop | MaybeStops | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    def generate(self, model: str, constraint: Constraint | None) -> GenerateOptions:
        """The options of ``generate``. The option ``max_tokens`` is missing if the answer may take
        the rest of the context. Raises ApiError 400."""
        options: GenerateOptions = {
            "model": model,
            "text": True,
            "temperature": TEMPERATURE if self.temperature is None else self.temperature,
            **kept_tokens(self.top_p, self.top_k),
            **sampling_of(
                min_p=self.min_p,
                repetition_penalty=self.repeat_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                seed=self.seed,
            ),
        }
        if self.num_predict == 0:
            what = "options.num_predict is 0; use at least 1, or -1 for the rest of the context"
            raise invalid_field("options.num_predict", what)
        if self.num_predict is not None and self.num_predict > 0:
            options["max_tokens"] = min(self.num_predict, 0x7FFF_FFFF)
        if strings := stops_of(self.stop):
            options["stop"] = strings
        return options if constraint is None else {**options, **constraint.options}


class Function(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None


class OllamaTool(Body):
    """A tool. Only functions are supported."""

    function: Function
    type: Literal["function"] = "function"


class CalledFunction(Body):
    """The function of a call."""

    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(Body):
    """A call in a message."""

    function: CalledFunction
    id: str | None = None


class Message(Body, kw_only=True):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    """In a message with the role ``tool``: the function whose result the message has."""
    tool_call_id: str | None = None
    images: list[str] | None = None
    """Left out, because the models have no vision."""


class OllamaRequest(Body, kw_only=True):
    """The fields that ``/api/chat`` and ``/api/generate`` share."""

    model: str
    stream: bool | None = None
    """Default: true."""
    format: Literal["json", ""] | Schema | None = None
    """The form of the answer's text: ``json`` for any JSON object, or a JSON schema."""
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    """Passed to the chat template: true and false as ``enable_thinking``, a text as
    ``reasoning_effort``."""
    keep_alive: str | float | None = None
    """Has no effect: the operator decides which models are loaded."""

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of ``format``."""
        if not self.format:
            return None
        if isinstance(self.format, str):
            return json_object("format")
        return json_schema(self.format, "format", None)

    def conversation(self, turns: list[Turn], tools: list[Tool]) -> Conversation:
        """A conversation with ``format`` and ``think`` of this request."""
        found = Conversation(turns, tools, AnswerRules(constraint=self.constraint))
        if isinstance(self.think, bool):
            found.rendering.variables["enable_thinking"] = self.think
        elif self.think is not None:
            found.rendering.effort, found.rendering.effort_field = self.think, "think"
        return found


class ChatRequest(OllamaRequest, kw_only=True):
    """The body of ``POST /api/chat``."""

    messages: list[Message] = []
    tools: list[OllamaTool] | None = None

    def to_conversation(self, ignored: Ignored) -> Conversation:
        """The conversation to continue. Raises ApiError 400 if it has no messages."""
        if not self.messages:
            raise invalid_field("messages", "messages is empty; give at least one message")
        functions = [tool.function for tool in self.tools or ()]
        tools = [Tool(f.name, f.description, f.parameters) for f in functions]
        return self.conversation(to_turns(self.messages, ignored), tools)


class GenerateRequest(OllamaRequest, kw_only=True):
    """The body of ``POST /api/generate``."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    """Whether the prompt is sent without the chat template."""
    images: list[str] | None = None
    """Left out, because the models have no vision."""

    def to_conversation(self, ignored: Ignored) -> Conversation:
        """The conversation of a prompt that is not ``raw``."""
        if self.images:
            _leave_out_images(ignored, "images")
        turns = [Turn("system", [Text(self.system)])] if self.system else []
        return self.conversation([*turns, Turn("user", [Text(self.prompt)])], [])


def to_turns(messages: list[Message], ignored: Ignored) -> list[Turn]:
    """The turns of a conversation. A result without ``tool_call_id`` belongs to the first call that
    does not have a result yet. If the result has a ``tool_name``, only calls of the function with
    this name count."""
    turns = []
    open_calls = _OpenCalls()
    for number, message in enumerate(messages):
        if message.images:
            _leave_out_images(ignored, f"messages[{number}].images")
        parts: list[Part] = [Text(message.content)] if message.content else []
        if message.role == "tool":
            call = open_calls.answered(message)
            result = Result(call, [Text(message.content)], message.tool_name)
            turns.append(Turn("user", [result]))
            continue
        if message.thinking:
            parts.append(Thinking(message.thinking))
        for place, one in enumerate(message.tool_calls or ()):
            call_id = one.id or f"call_{number}_{place}"
            call_part = CallPart(call_id, one.function.name, one.function.arguments)
            parts.append(call_part)
            open_calls.add(call_part)
        turns.append(Turn(message.role, parts))
    return turns


class _OpenCalls:
    """The calls without a result, in their order. Finding a call takes constant time."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, str] = OrderedDict()
        """The name of each call's function, by the id of the call."""
        self._of_name: dict[str, OrderedDict[str, None]] = {}
        """The ids of the calls of each function, by the name of the function."""

    def add(self, call: CallPart) -> None:
        """Adds a call after all earlier calls."""
        self._ids[call.id] = call.name
        self._of_name.setdefault(call.name, OrderedDict())[call.id] = None

    def answered(self, message: Message) -> str:
        """The id of the call whose result a message has, or ``call_unknown``. Removes the call."""
        id, name = message.tool_call_id, message.tool_name
        if id is None:
            id = next(iter(self._ids if name is None else self._of_name.get(name, ())), None)
        if id is None:
            return "call_unknown"
        if id in self._ids:
            del self._of_name[self._ids.pop(id)][id]
        return id


def _leave_out_images(ignored: Ignored, name: str) -> None:
    ignored.leave_out(name, f"{name}: images are not supported; leave {name} out")


class AnsweredFunction(Struct):
    """The function of a call in an answer."""

    name: str
    arguments: dict[str, Any]


class AnsweredCall(Struct):
    """A call in an answer."""

    function: AnsweredFunction


class AnsweredMessage(Struct):
    """The message of an answer, or a piece of it."""

    content: str
    role: Literal["assistant"] = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class OllamaAnswer(Struct, kw_only=True):
    """An answer, or a line of a streamed answer. Durations are in nanoseconds."""

    model: str
    created_at: str
    message: AnsweredMessage | UnsetType = UNSET
    """Only in answers of ``/api/chat``."""
    response: str | UnsetType = UNSET
    """The text of the answer. Only in answers of ``/api/generate``."""
    thinking: str | UnsetType = UNSET
    """Only in answers of ``/api/generate``."""
    done: bool
    done_reason: str | UnsetType = UNSET
    """``stop`` or ``length``. Only the last line has this field and the fields after it."""
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
