"""Keeps the items of recent responses in memory, for inputs that refer to them.

The items are those of one gateway process. They are dropped when their user or all users have too
many, the oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from .errors import invalid_field

MAX_BYTES = 64 * 1024 * 1024
"""Maximum bytes of the items of all users, as JSON."""
MAX_BYTES_OF_ONE = 8 * 1024 * 1024
"""Maximum bytes of the items of one user."""
MAX_ITEMS_OF_ONE = 4096
"""Maximum number of items of one user."""
MAX_RESOLVED_BYTES = MAX_BYTES_OF_ONE
"""Maximum bytes of the items that replace references in one input. An input may name the same item
many times."""
ITEM_BYTES = 512
"""Bytes that count for an item in addition to its JSON."""


class _User:
    """The items of one user by their ids, the oldest first."""

    def __init__(self) -> None:
        self.items: OrderedDict[str, bytes] = OrderedDict()
        self.size = 0

    def drop_oldest(self) -> int:
        """Drops an item; returns its size."""
        _, data = self.items.popitem(last=False)
        size = ITEM_BYTES + len(data)
        self.size -= size
        return size


class StoredItems:
    """The items of one gateway process."""

    def __init__(self) -> None:
        self._users: dict[str, _User] = {}
        """The users with items."""
        self._size = 0

    def store(self, user: str, items: Mapping[str, bytes]) -> None:
        """Stores the items of a finished response: the JSON of each by its id."""
        if not items:
            return
        own = self._users.setdefault(user, _User())
        for id, data in items.items():
            size = ITEM_BYTES + len(data)
            if id in own.items or size > MAX_BYTES_OF_ONE:
                continue
            own.items[id] = data
            own.size += size
            self._size += size
        if not own.items:
            del self._users[user]
        while own.size > MAX_BYTES_OF_ONE or len(own.items) > MAX_ITEMS_OF_ONE:
            self._size -= own.drop_oldest()
        while self._size > MAX_BYTES:
            self._drop_of_largest()

    def _drop_of_largest(self) -> None:
        name, largest = max(self._users.items(), key=lambda user: user[1].size)
        self._size -= largest.drop_oldest()
        if not largest.items:
            del self._users[name]

    def resolved(self, user: str, given: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """An input with items in place of references. Raises ApiError 400 for an unknown item, or
        if the items are too large together.

        Some clients send back only the id of a reasoning item. If the item is stored, its thinking
        is added.
        """
        if isinstance(given, str):
            return given
        own = self._users.get(user)
        return list(_resolved(own.items if own is not None else {}, given))


def _resolved(stored: Mapping[str, bytes], given: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    size = 0
    for place, item in enumerate(given):
        id = item.get("id")
        data = stored.get(id) if isinstance(id, str) else None
        if item.get("type") == "item_reference":
            if data is None:
                raise invalid_field(
                    f"input[{place}].id",
                    f"input[{place}]: the item {id!r} is not stored; this gateway keeps recent "
                    "items in memory; send the item itself, with 'store': false",
                )
        elif item.get("type") != "reasoning" or data is None or _has_text(item):
            yield item
            continue
        size += len(data)
        if size > MAX_RESOLVED_BYTES:
            raise invalid_field(
                f"input[{place}].id",
                f"input[{place}]: the stored items of this input have more than "
                f"{MAX_RESOLVED_BYTES} bytes together; refer to each item only once",
            )
        yield msgspec.json.decode(data)


def _has_text(item: dict[str, Any]) -> bool:
    """Whether a reasoning item has content or a summary."""
    return any(
        not isinstance(part, dict) or part.get("text")
        for name in ("content", "summary")
        if isinstance(parts := item.get(name), list)
        for part in parts
    )
