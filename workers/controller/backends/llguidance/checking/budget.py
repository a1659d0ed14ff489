"""Bounds the time of checks by a number of steps, so that the outcome of the checks does not depend
on the load of the machine."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MAX_KNOWN = 2_000
"""Maximum number of results in one ``Known``."""
MAX_KNOWN_LENGTH = 128
"""Maximum length of a text whose result is kept in ``Known``."""
BYTES_OF_STEP = 32
"""Number of bytes or items of a value that count as one step."""

_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result")


class Budget:
    """The number of steps that a group of checks, for example all checks for one mask, may still
    take."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        """Number of steps that are left; negative after ``Exhausted``."""
        self.verdicts: dict[tuple[int, bytes], bool] = {}
        """The verdicts of these checks, by the id of a part of the schema and the text of a value.
        So equal checks are made once."""

    def take(self, steps: int) -> None:
        """Counts steps. Raises ``Exhausted`` if none are left."""
        self.left -= steps
        if self.left < 0:
            raise Exhausted


class Known(Generic[_Key, _Result]):
    """Results of the last checks, and the number of steps that each check took. If a result is
    reused, its steps are taken from the budget again. So the outcome of checks does not depend on
    which results are stored."""

    def __init__(self) -> None:
        self._known: dict[_Key, tuple[_Result, int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: _Key, length: int, budget: Budget, check: Callable[[], _Result]) -> _Result:
        """The stored result for ``key``. If no result is stored, calls ``check`` and returns its
        result. ``length``: the length of the checked text, in bytes or characters. Raises
        ``Exhausted``."""
        known = self._known.get(key)
        if known is not None:
            budget.take(known[1])
            return known[0]
        before = budget.left
        result = check()
        if length <= MAX_KNOWN_LENGTH:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = result, before - budget.left
        return result


class Exhausted(Exception):
    """The checks have taken all steps of their budget."""
