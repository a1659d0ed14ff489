"""Bounds the time of checks by a number of steps, so that their outcome does not depend on the
load of the machine."""

from __future__ import annotations

BYTES_OF_STEP = 32
"""Number of bytes or items of a value that count as one step."""


class Budget:
    """The number of steps that a group of checks, for example all checks for one mask, may still
    take."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self.verdicts: dict[tuple[int, bytes], bool] = {}
        """The verdicts of these checks, by the id of a part of the schema and the text of a value.
        So equal checks are made once."""

    def take(self, steps: int) -> None:
        """Counts steps. Raises ``Exhausted`` if none are left."""
        self._left -= steps
        if self._left < 0:
            raise Exhausted


class Exhausted(Exception):
    """The checks have taken all steps of their budget."""
