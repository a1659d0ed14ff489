"""Requests the descriptions of the bus's tools, which tool workers serve, and makes the calls that
a model's answer contains.

The gateway makes a call by sending a request with the built-in program ``call_tool``. The rules for
calls by programs therefore apply: allow-lists, shares, time-outs, and the rule that a call is made
at most once. A separate message type would need a second implementation of these rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from ....protocol.decoders import json_decoder
from ....protocol.errors import Code, RequestError, TokenbusError, error_for
from ....protocol.messages import MAX_DESCRIBED_TOOLS, Status
from ....protocol.worker_messages import CALL_TOOL, MAX_ARGUMENT_BYTES, ToolAnswer, ToolCall
from ... import AsyncStream
from ...request_options import ASK_S, status_call
from ..context import Gateway
from ..errors import ApiError, from_tokenbus, invalid_field
from ..users.idempotency import HEADER, current_named
from .made_calls import MadeCall
from .parts import Call
from .planning import Prepared
from .tools import Tool

MAX_CALLS = 16
"""Maximum number of calls that the gateway makes for one turn. They run at the same time."""


async def described(
    gateway: Gateway, names: Sequence[str], *, recorded: bool = False
) -> dict[str, Tool]:
    """The tools of the bus with these names. Raises ApiError: 400 if there are too many names, or
    if the request has an idempotency key and ``recorded`` is False; 403 if a tool is forbidden to
    the user's programs; 503 if a tool has no worker. ``recorded``: whether the calls are stored, so
    that a repeated request does not make them again."""
    if current_named.get() is not None and not recorded:
        raise ApiError(
            400,
            f"{HEADER} cannot be combined with tools of the type 'bus', because a repeated request "
            f"would call the tools again; leave out {HEADER}",
            code="invalid_header",
        )
    if len(names) > MAX_DESCRIBED_TOOLS:
        raise invalid_field(
            "tools",
            f"tools has {len(names)} tools of the type 'bus'; at most {MAX_DESCRIBED_TOOLS} are "
            "allowed",
        )
    try:
        answer = await gateway.client.ask(status_call(ASK_S, tools=names))
    except TokenbusError as error:
        named = from_tokenbus(error)
        named.param = "tools"
        raise named from None
    assert isinstance(answer.status, Status)
    found = answer.status.tools
    if len(found) != len(names):
        raise ApiError(
            503,
            "the broker is of an earlier release, which cannot describe tools; start a new broker",
            code="unsupported",
            param="tools",
        )
    return {tool.name: Tool(tool.name, tool.description, tool.parameters or None) for tool in found}


class _Running:
    """One call that runs on the bus."""

    def __init__(self, gateway: Gateway, prepared: Prepared, call: Call) -> None:
        """Begins the call. If the call cannot begin, the error becomes the result of the call."""
        self._gateway = gateway
        self._made = MadeCall(id=call.id, name=call.name, arguments=str(call.arguments))
        self._stream: AsyncStream | None = None
        try:
            self._stream = self._begun(prepared)
        except TokenbusError as error:
            self._fail(error)

    async def made(self) -> MadeCall:
        """The call with its result, or with the error of the tool or of the bus."""
        if self._stream is not None:
            try:
                [sequence] = await self._stream.wait()
                answer = json_decoder(ToolAnswer).decode("".join(sequence.messages))
                if answer.error is not None:
                    raise error_for(answer.code, answer.error)
                self._made.result = answer.value
            except TokenbusError as error:
                self._fail(error)
        return self._made

    def close(self) -> None:
        """Cancels the call if it still runs, and stops counting it towards the user's share."""
        if self._stream is not None:
            self._stream.close()
            self._gateway.shares.give_back_stream()

    def _begun(self, prepared: Prepared) -> AsyncStream:
        call = ToolCall(self._made.name, _checked(self._made))
        return self._gateway.client.generate(
            prepared.ids[:1],
            model=prepared.model.name,
            controller=CALL_TOOL,
            controller_arg=msgspec.json.encode(call).decode(),
            max_tokens=1,
            # The client must not repeat this request after a failure, because a repetition would
            # call the tool again.
            retry_s=0.0,
        )

    def _fail(self, error: TokenbusError) -> None:
        self._made.error, self._made.code = error.message, str(error.code)


async def make_calls(gateway: Gateway, prepared: Prepared, calls: Sequence[Call]) -> list[MadeCall]:
    """Makes the first ``MAX_CALLS`` calls of a turn at the same time, and waits for their results;
    reports the other calls as not made. ``prepared``: the conversation that the turn answers."""
    running = [_Running(gateway, prepared, call) for call in calls[:MAX_CALLS]]
    try:
        made = [await call.made() for call in running]
    finally:
        for call in running:
            call.close()
    why = f"not called: the message has {len(calls)} calls, and at most {MAX_CALLS} are made"
    return made + not_made(calls[MAX_CALLS:], why)


def not_made(calls: Sequence[Call], why: str) -> list[MadeCall]:
    """Converts calls that the gateway does not make to failed calls with the error ``why``."""
    return [
        MadeCall(
            id=call.id, name=call.name, arguments=str(call.arguments), error=why, code="not_called"
        )
        for call in calls
    ]


def _checked(made: MadeCall) -> Raw:
    """The arguments of a call as JSON. Raises RequestError if they are not JSON or too long."""
    data = made.arguments.encode("utf-8", "replace")
    if len(data) > MAX_ARGUMENT_BYTES:
        what = f"they have {len(data)} bytes; at most {MAX_ARGUMENT_BYTES} are allowed"
        raise RequestError(Code.INVALID_FIELD, f"the arguments of {made.name!r}: {what}")
    try:
        return json_decoder(Raw).decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        what = f"the arguments of {made.name!r} are not JSON: {error}"
        raise RequestError(Code.INVALID_FIELD, what) from None
