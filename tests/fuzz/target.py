"""The definition of a fuzz target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class Target(NamedTuple):
    """Code that reads data from other processes, and the inputs with which fuzzing begins."""

    run: Callable[[bytes], None]
    """Tries an input. Raises an exception if the code fails, or if its result is not as documented.
    Documented errors are not failures."""
    corpus: Callable[[], Iterable[bytes]]
    """Makes the inputs of the corpus, most of which are valid. Each run has the same inputs."""
    words: tuple[bytes, ...] = ()
    """Texts that mutations insert, such as keywords of the format."""
    max_bytes: int = 4096
    """Maximum size of an input in bytes. If the inputs are sequences of events, a larger input
    would have more events than the target plays."""
