"""The content of a safetensors file with new weights, for UPDATE_WEIGHTS."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..protocol.messages import WEIGHTS_PART_BYTES

Weights = bytes | bytearray | memoryview | str | Path
"""The content of a safetensors file, or the file's path."""
SHARED = Path("/dev/shm")
"""The folder of the shared memory objects of POSIX on Linux."""


class WeightsContent:
    """A safetensors file in memory."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self.size = len(content)
        """Number of bytes."""
        self.sha256 = hashlib.sha256(content).hexdigest()

    def parts(self) -> Iterator[tuple[int, bytes]]:
        """Yields the parts to send. The number is the part's offset in the file, in bytes."""
        for offset in range(0, self.size, WEIGHTS_PART_BYTES):
            yield offset, bytes(self._content[offset : offset + WEIGHTS_PART_BYTES])


@contextmanager
def opened(weights: Weights) -> Iterator[WeightsContent]:
    """Opens the content of a safetensors file. The file must not change while it is open. Raises
    OSError if the file cannot be read, and ValueError if it is empty."""
    if isinstance(weights, str | Path):
        with (
            Path(weights).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as content,
        ):
            yield WeightsContent(content)
        return
    with memoryview(weights) as view, view.cast("B") as content:
        if not content:
            raise ValueError("the weights are empty; expected the content of a safetensors file")
        yield WeightsContent(content)
