"""The calls of the bus's tools that the gateway has made, as an answer reports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType

from ....protocol.decoders import json_decoder


class MadeCall(Struct, kw_only=True, omit_defaults=True):
    """A call of a tool, with its result or its error."""

    id: str
    name: str
    arguments: str
    """The arguments as JSON text."""
    result: Raw | UnsetType = UNSET
    """The value that the tool has returned."""
    error: str = ""
    """The message of the error if the call has failed."""
    code: str = ""
    """The code of the error if the call has failed."""

    @property
    def text(self) -> str:
        """The text for the model: the result as JSON, or the error. A result that is a string is
        given without its quotes."""
        if isinstance(self.result, UnsetType):
            return self.error
        data = bytes(self.result)
        return json_decoder(str).decode(data) if data[:1] == b'"' else data.decode()


def as_messages(calls: Sequence[MadeCall]) -> list[dict[str, Any]]:
    """Calls and results as messages of a chat in OpenAI's form."""
    if not calls:
        return []
    called = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
    return [
        {"role": "assistant", "content": None, "tool_calls": called},
        *(
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": call.text if call.result is not UNSET else f"Error: {call.error}",
            }
            for call in calls
        ),
    ]
