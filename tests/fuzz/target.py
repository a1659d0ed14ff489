"""The definition of a fuzz target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class Target(NamedTuple):
    """Code that reads what others send, and the inputs that fuzzing begins with."""

    run: Callable[[bytes], None]
    """Raises where the code fails, or where what it promises of its result does not hold. The
    errors that it documents are not failures."""
    corpus: Callable[[], Iterable[bytes]]
    """Inputs, most of them valid; the same ones in each run."""
    words: tuple[bytes, ...] = ()
    """Texts that mutations insert: keywords of the format."""
    max_bytes: int = 4096
    """The size of an input at most: of one that is a sequence of events, as many as are played."""
