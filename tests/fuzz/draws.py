"""Converts the bytes of an input to the values that a fuzz target needs: numbers, choices and
frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

LONG = 0xFFFF
"""A frame with this size takes all remaining bytes of the input."""


class Draws:
    """Reads an input from its beginning. After its end, numbers are 0 and texts are empty."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """The number of bytes that were not read yet."""
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes, or the remaining bytes if there are fewer."""
        taken = self._data[self._at : self._at + size]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        """All remaining bytes."""
        return self.take(self.left)

    def number(self, size: int = 1) -> int:
        """A number of ``size`` bytes, little-endian."""
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
        """A frame: its size in two bytes, and then its bytes."""
        size = self.number(2)
        return self.rest() if size == LONG else self.take(size)

    def frames(self, most: int = 8) -> list[bytes]:
        """The frames up to the end of the input, at least one and at most ``most``."""
        frames = [self.frame()]
        while self.left and len(frames) < most:
            frames.append(self.frame())
        return frames


def as_input(frames: Iterable[bytes]) -> bytes:
    """The input from which ``Draws.frames`` reads these frames, each shorter than 64 KiB."""
    return b"".join(len(frame).to_bytes(2, "little") + frame for frame in frames)
