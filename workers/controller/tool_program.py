"""The built-in program ``call_tool``: makes one call of a tool and sends the answer to the
request's client.

The arguments and the result stay JSON text. A script would decode them, and round large numbers.
The *record* of a call is a variable of the request, which will contain the answer
(``tool_calls.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ...protocol.decoders import json_decoder
from ...protocol.errors import Code, ControllerError, RequestError
from ...protocol.messages import MAX_INPUT_BYTES
from ...protocol.worker_messages import ToolCall
from .host import Host
from .interface import STOP, SUSPEND, Answer
from .tool_calls import NO_TOOLS, answer_of
from .variable_calls import ROUND_BYTES

_decode = json_decoder(ToolCall).decode


class ToolProgram:
    """The factory of ``ToolCaller``."""

    def start(self, host: Host) -> ToolCaller:
        """Creates the controller. Raises RequestError if the request's argument is not valid."""
        try:
            call = _decode(host.arg)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RequestError(
                Code.INVALID_FIELD,
                f"the argument of call_tool is not valid: {error}; expected "
                '{"tool": NAME, "arguments": {…}}',
                path="$.controller_arg",
            ) from None
        return ToolCaller(host, call)


class ToolCaller:
    """Calls a tool, suspends until the answer is in the record of the call, and sends the
    answer."""

    def __init__(self, host: Host, call: ToolCall) -> None:
        self._host = host
        self._call = call
        self._record = ""
        """The name of the record; empty before the call."""

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Does nothing, because the program does not read the prompt."""

    def pre_process(self) -> Answer:
        """Makes the call, or reads its record; suspends if the record has no answer."""
        if self._host.tools is None:
            raise ControllerError(Code.CONTROLLER_FAILED, NO_TOOLS)
        if not self._record:
            arguments = bytes(self._call.arguments)
            self._record = self._host.tools.begin(self._call.tool, arguments)
        stored = self._host.variables.get(self._record)
        if stored is None or answer_of(stored.value) is None:
            return SUSPEND
        for piece in _pieces(stored.value):
            self._host.variables.send(piece)
        return STOP

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """Not called, because pre_process does not continue."""
        return STOP

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Not called, because no token is sampled."""
        return STOP

    def fork(self, host: Host) -> ToolCaller:
        """A copy that reads the same record, or makes a call if no call has been made yet."""
        copy = ToolCaller(host, self._call)
        copy._record = self._record
        return copy

    def close(self) -> None:
        """Does nothing, because there is nothing to free."""


def _pieces(answer: bytes) -> Iterator[bytes]:
    """Splits an answer into parts that fit into messages. A part does not end inside a
    character."""
    if len(answer) > ROUND_BYTES:
        text = f"the answer of the tool has {len(answer)} bytes; at most {ROUND_BYTES} can be sent"
        answer = msgspec.json.encode({"error": text, "code": Code.TOOL_FAILED})
    begin = 0
    while begin < len(answer):
        end = min(len(answer), begin + MAX_INPUT_BYTES)
        while end < len(answer) and answer[end] & 0xC0 == 0x80:
            end -= 1
        yield answer[begin:end]
        begin = end
