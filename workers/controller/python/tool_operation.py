"""The operation of ``ctx.call``, which calls a tool and waits for the tool's answer. The *record*
of a call is a variable of the request, which will contain the answer (``tool_calls.py``)."""

from __future__ import annotations

from typing import Any

import msgspec

from ....protocol.errors import Code, ControllerError
from ..host import Host
from ..interface import SUSPEND, Answer
from ..tool_calls import NO_TOOLS, answer_of
from .operations import Operation
from .transcript import Question


class CallTool(Operation):
    """Calls a tool, and waits until the call's record has the answer. The content of the record is
    then the answer of the operation."""

    def __init__(self, question: Question, host: Host, tool: str, arguments: bytes) -> None:
        """Raises ControllerError if the controller cannot call tools."""
        super().__init__(question)
        if host.tools is None:
            raise ControllerError(Code.CONTROLLER_FAILED, NO_TOOLS)
        self._tools = host.tools
        self._variables = host.variables
        self._tool = tool
        self._arguments = arguments
        self._record = ""
        """The name of the record; empty before the call."""

    def pre_process(self) -> Answer:
        """Makes the call, and suspends. After a wake-up, reads the call's record, and suspends
        again if the record has no answer."""
        if not self._record:
            self._record = self._tools.begin(self._tool, self._arguments)
            return SUSPEND
        stored = self._variables.get(self._record)
        if stored is not None and answer_of(stored.value) is not None:
            self._finish(stored.value)
        return SUSPEND

    def resume(self, other: Operation) -> None:
        """Copies the name of the call's record from ``other``."""
        assert isinstance(other, CallTool)
        self._record = other._record


def encoded_arguments(tool: object, arguments: dict[str, Any]) -> bytes:
    """The JSON of the arguments of a tool call. Raises ControllerError if the tool's name or an
    argument is not valid."""
    if not isinstance(tool, str) or not tool:
        raise ControllerError(
            Code.CONTROLLER_FAILED, f"call({tool!r}); expected the name of a tool"
        )
    try:
        return msgspec.json.encode(arguments)
    except (TypeError, ValueError, RecursionError) as error:
        raise ControllerError(
            Code.CONTROLLER_FAILED, f"call({tool!r}): its arguments are not values of JSON: {error}"
        ) from None
