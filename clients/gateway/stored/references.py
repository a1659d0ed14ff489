"""Replaces references in inputs by the stored items, and loads the items of earlier responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..bodies.value_counts import ValueCounts
from ..errors import ApiError, invalid_field
from .database import (
    MAX_CONTEXT_BYTES,
    ContextTooLargeError,
    Database,
    NotStoredError,
    UnfinishedError,
)
from .responses import StoredResponses


async def resolved(
    stored: StoredResponses, given: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], int]:
    """An input with the current user's stored items in place of references, and the memory of these
    items in bytes. Raises ApiError 400 if an item is not stored, or if the items are too large
    together.

    Some clients send back a reasoning item without its text. If this item is stored, the stored
    item replaces it. Otherwise it is not changed.
    """
    ids = [id for item in given if isinstance(id := item.get("id"), str) and _refers(item)]
    if not ids:
        return list(replaced({}, given)), 0

    def read(database: Database, user: str) -> tuple[dict[str, bytes], int]:
        found = database.items(user, ids)
        return found, _memory_of([found[id] for id in ids if id in found])

    try:
        found, size = await stored.call(read)
    except ContextTooLargeError:
        raise _too_large("input") from None
    return list(replaced(found, given)), size


def replaced(
    stored: Mapping[str, bytes], given: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The items of an input, in which items of ``stored`` replace the references to them."""
    size = 0
    for place, item in enumerate(given):
        id = item.get("id")
        data = stored.get(id) if isinstance(id, str) else None
        if not _refers(item):
            yield item
            continue
        if data is None:
            if item.get("type") == "reasoning":
                yield item
                continue
            raise invalid_field(
                f"input[{place}].id",
                f"input[{place}]: the item {id!r} is not stored; send the item itself",
            )
        size += len(data)
        if size > MAX_CONTEXT_BYTES:
            raise _too_large(f"input[{place}].id")
        yield msgspec.json.decode(data)


async def context_of(stored: StoredResponses, previous: str) -> tuple[list[dict[str, Any]], int]:
    """The items of the response ``previous`` and of the responses that it continues, and the memory
    of these items in bytes. Raises ApiError 400."""

    def read(database: Database, user: str) -> tuple[list[dict[str, Any]], int]:
        # The items are decoded on the thread of the database, because there may be thousands.
        items = database.context(user, previous)
        return list(map(msgspec.json.decode, items)), _memory_of(items)

    try:
        return await stored.call(read)
    except UnfinishedError as error:
        raise invalid_field(
            "previous_response_id",
            f"the response {error.id!r} is {error.status}; continue a response that is completed "
            "or incomplete",
        ) from None
    except NotStoredError as error:
        raise ApiError(
            400,
            f"the response {error.id!r} is not stored: it was deleted, or dropped to make room, or "
            "belongs to another API key; send the whole conversation as 'input'",
            code="previous_response_not_found",
            param="previous_response_id",
        ) from None
    except ContextTooLargeError:
        raise _too_large("previous_response_id") from None


def _memory_of(items: Sequence[bytes]) -> int:
    """The memory of stored items and of their decoded values, in bytes, as for a request's body."""
    return sum(map(len, items)) + ValueCounts.of(items).memory


def _too_large(param: str) -> ApiError:
    return invalid_field(
        param,
        f"{param}: the stored items of this input have more than {MAX_CONTEXT_BYTES} bytes or too "
        "many values together; begin a new conversation, and refer to each item only once",
    )


def _refers(item: dict[str, Any]) -> bool:
    """Whether an item of an input is a reference, or a reasoning item without its text."""
    kind = item.get("type")
    return kind == "item_reference" or (kind == "reasoning" and not _has_text(item))


def _has_text(item: dict[str, Any]) -> bool:
    """Whether a reasoning item has content or a summary."""
    return any(
        not isinstance(part, dict) or part.get("text")
        for name in ("content", "summary")
        if isinstance(parts := item.get(name), list)
        for part in parts
    )
