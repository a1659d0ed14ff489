"""Reads the gateway's calls of tools from the stored events of a response."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, Raw, Struct, UnsetType

from ....protocol.decoders import json_decoder
from ..conversation.made_calls import MadeCall
from ..json import encode
from ..openai.response_bodies import OutputBusCall, OutputItem

_ENDED_EARLY = "the gateway ended during the call, which may or may not have been made"


class _CallEvent(Struct):
    """The part of an event that ``recorded_calls`` reads."""

    type: str
    item: OutputItem | UnsetType = UNSET
    item_id: str = ""
    arguments: str = ""


def recorded_calls(events: Iterable[bytes]) -> dict[str, MadeCall]:
    """The gateway's calls in the stored events of a response, by their ids. A call without a result
    has an error."""
    found: dict[str, MadeCall] = {}
    for data in events:
        if b"mcp_call" not in data:
            continue
        one = json_decoder(_CallEvent).decode(data.partition(b"data: ")[2])
        item = one.item
        if one.type == "response.mcp_call_arguments.done":
            call = MadeCall(id=one.item_id, name="", arguments=one.arguments)
            call.error, call.code = _ENDED_EARLY, "worker_lost"
            found[call.id] = call
        elif one.type == "response.output_item.done" and isinstance(item, OutputBusCall):
            call = MadeCall(id=item.id, name=item.name, arguments=item.arguments)
            if item.output is None:
                call.error = item.error or _ENDED_EARLY
            else:
                call.result = Raw(encode(item.output))
            found[item.id] = call
    return found
