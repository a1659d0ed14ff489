"""Walks over a table in parts, one part in each tick, so that a large table does not make a tick
long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

T = TypeVar("T")

ROUND_TICKS = 16


class Sweep(Generic[T]):
    """Walks over the values of a table again and again. Each part of a walk has at least
    ``at_once`` values.

    If the table has fewer values, each part is a whole walk. A walk also visits values that were
    removed from the table after the walk began.
    """

    def __init__(self, table: Mapping[Any, T], at_once: int, ticks: int = ROUND_TICKS) -> None:
        """``ticks``: the maximum number of parts of a walk. If the table is very large, each part
        therefore has more than ``at_once`` values."""
        self._table = table
        self._ticks = ticks
        self._at_once = at_once
        self._number = at_once
        self._left: Iterator[T] | None = None

    @property
    def begins(self) -> bool:
        """Whether the next part is the first one of a walk."""
        return self._left is None

    def part(self) -> list[T]:
        """The values of the next part."""
        if self._left is None:
            values = list(self._table.values())
            self._number = max(self._at_once, len(values) // self._ticks)
            self._left = iter(values)
        found = list(islice(self._left, self._number))
        if self._left.__length_hint__() == 0:  # type: ignore[attr-defined]
            self._left = None
        return found
