"""Reads the inputs of requests for responses, with stored items in place of references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ..bodies.leniency import Ignored, declared_fields
from ..context import Gateway
from ..new_ids import new_id
from ..openai.response_bodies import ResponsesRequest
from ..openai.response_input import InputItem, InputItems, read_items
from ..tokenization import num_items
from .database import Item, Stored
from .references import context_of, resolved


@dataclass
class ResponseInput:
    """The input of one request for a response."""

    given: list[dict[str, Any]]
    """The items of the request, with ids."""
    items: InputItems
    """All items, decoded: first the items of the earlier responses (``previous_response_id``), then
    the items of the request."""
    size: int = 0
    """The memory of the stored items in the input, in bytes."""

    @classmethod
    def of(
        cls, given: list[dict[str, Any]], context: list[dict[str, Any]], ignored: Ignored
    ) -> ResponseInput:
        """Decodes the items. Raises ApiError 400."""
        own = read_items(given, ignored)
        # Earlier answers have reported the fields of these items that have no effect.
        earlier = read_items(context, Ignored()).input if context else []
        items = InputItems([*earlier, *own.input])
        return cls([_identified(item) for item in given], items)

    def given_items(self) -> list[Item]:
        """The items of the request for the database."""
        return [Item(item["id"], msgspec.json.encode(item), True) for item in self.given]


async def _input(
    gateway: Gateway, given: list[dict[str, Any]], previous: str | None, ignored: Ignored
) -> ResponseInput:
    """The input with the items ``given``, which continues the response ``previous``. The items of
    earlier responses count towards the user's share of the memory. Raises ApiError and
    UnavailableError."""
    context: list[dict[str, Any]] = []
    size = 0
    if previous is not None:
        context, size = await context_of(gateway.stored, previous)
        gateway.shares.take_bytes(size)
    found = await gateway.models.tokenization.prepare(
        num_items(given, context), lambda: ResponseInput.of(given, context, ignored)
    )
    found.size = size
    return found


async def read_input(gateway: Gateway, body: ResponsesRequest, ignored: Ignored) -> ResponseInput:
    """The input of a request, with stored items in place of references. The stored items count
    towards the user's share of the memory. Raises ApiError and UnavailableError."""
    given, size = await resolved(gateway.stored, _listed(body.input))
    gateway.shares.take_bytes(size)
    found = await _input(gateway, given, body.previous_response_id, ignored)
    found.size += size
    return found


async def stored_input(gateway: Gateway, response: Stored, ignored: Ignored) -> ResponseInput:
    """The input of a stored response. Raises ApiError, for example if an earlier response is not
    stored any more."""
    found = await gateway.stored.call(lambda database, user: database.given(user, response.id))
    given = [msgspec.json.decode(data) for data in found]
    return await _input(gateway, given, response.previous, ignored)


def _listed(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An input as a list of items. A text becomes a message of the user."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


_PREFIXES = {
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "function_call_output": "fco_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
}


def _identified(item: dict[str, Any]) -> dict[str, Any]:
    """An item of the input in the form in which OpenAI lists it: with a type, an id and a list of
    parts. Fields that have no effect are left out."""
    kind = item.get("type", "message")
    id = item.get("id")
    fields = declared_fields({"type": kind, **item}, InputItem)
    found = {"type": kind, "status": item.get("status", "completed"), **fields}
    found["id"] = id if isinstance(id, str) and id else new_id(_PREFIXES.get(kind, "msg_"))
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        found["content"] = [{"type": part, "text": content}]
    return found
