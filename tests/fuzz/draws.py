"""The values that a fuzz target makes of the bytes of an input: numbers, choices and frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

LONG = 0xFFFF
"""The size of a frame that goes to the end of the input."""


class Draws:
    """Reads an input from its front. Where it has ended, numbers are 0 and texts are empty."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """The bytes that were not read yet."""
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        """The next this many bytes, or what is left of them."""
        taken = self._data[self._at : self._at + size]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(self.left)

    def number(self, size: int = 1) -> int:
        """A number of this many bytes, little-endian."""
        if size == 1:
            at = self._at
            if at >= len(self._data):
                return 0
            self._at = at + 1
            return self._data[at]
        return int.from_bytes(self.take(size), "little")

    def pick(self, choices: Sequence[T]) -> T:
        """One of at most 256 choices."""
        at = self._at
        if at >= len(self._data):
            return choices[0]
        self._at = at + 1
        return choices[self._data[at] % len(choices)]

    def frame(self) -> bytes:
        """A size of two bytes, and this many bytes."""
        size = self.number(2)
        return self.rest() if size == LONG else self.take(size)

    def frames(self, most: int = 8) -> list[bytes]:
        """The frames until the input ends, at least one."""
        frames = [self.frame()]
        while self.left and len(frames) < most:
            frames.append(self.frame())
        return frames


def as_input(frames: Iterable[bytes]) -> bytes:
    """The input from which ``Draws.frames`` reads these frames, each shorter than 64 KiB."""
    return b"".join(len(frame).to_bytes(2, "little") + frame for frame in frames)
