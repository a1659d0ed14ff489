"""A safetensors file with weights. One GPU worker makes the file from its own weights, and another
worker receives it in parts."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from hashlib import file_digest
from io import FileIO
from pathlib import Path
from stat import S_ISREG
from typing import Any

import psutil
import torch

from .loader import LoadedModel
from .new_weights import WeightsError, own_tensors, place

COPIED_BYTES = 2**24
"""Number of bytes that are copied from shared memory at a time."""
SHARED = Path("/dev/shm")
"""The folder of the shared memory objects of POSIX on Linux."""
MAX_HEAD_BYTES = 64 * 2**20
"""Maximum number of bytes that a received file may have in addition to its tensors."""
_BY_TYPE = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"
}  # fmt: skip


class WeightsFile:
    """The weights of a loaded model as a safetensors file, of which any part can be read. The file
    itself is not stored.

    Equal weights of equal types give equal files. If several weights are tied, the file has only
    the first of them. Raises WeightsError if the weights of the model cannot be replaced, because
    then no worker could use the file.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.weights = loaded.weights
        """The hash of the weights (``weights_version``)."""
        places: set[Any] = set()
        head: dict[str, Any] = {}
        offset = 0
        self._tensors: list[torch.Tensor] = []
        self._offsets: list[int] = []
        # Larger elements come first, as in files of the safetensors library, so that each tensor
        # is aligned.
        own = sorted(own_tensors(loaded).items(), key=lambda one: (-one[1].element_size(), one[0]))
        for name, tensor in own:
            if place(tensor) in places:
                continue
            places.add(place(tensor))
            end = offset + tensor.numel() * tensor.element_size()
            head[name] = {
                "dtype": _BY_TYPE[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            self._tensors.append(tensor.detach())
            self._offsets.append(offset)
            offset = end
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self.size = len(self._head) + offset
        """Number of bytes of the file."""

    def read(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``offset`` on. No weights may be replaced at the same time."""
        end = min(self.size, offset + count)
        return b"".join(self._pieces(offset, end))

    def _pieces(self, offset: int, end: int) -> Iterator[bytes]:
        yield self._head[offset:end]
        start, end = max(0, offset - len(self._head)), end - len(self._head)
        first = max(0, bisect_right(self._offsets, start) - 1)
        for at, tensor in zip(self._offsets[first:], self._tensors[first:], strict=True):
            if at >= end:
                break
            width = tensor.element_size()
            begin = max(0, start - at)
            stop = min(end - at, tensor.numel() * width)
            if begin >= stop:
                continue
            part = tensor.reshape(-1)[begin // width : -(-stop // width)]
            raw = part.contiguous().cpu().view(torch.uint8).numpy().tobytes()
            skipped = begin % width
            yield raw[skipped : skipped + stop - begin]


class ReceivedFile:
    """A safetensors file that arrives in parts, in order, and is kept in memory.

    Raises WeightsError if ``size`` is above the largest possible size of a file with the weights of
    ``loaded``, or if the machine does not have enough memory.
    """

    def __init__(self, loaded: LoadedModel, size: int) -> None:
        elements = sum(tensor.numel() for tensor in own_tensors(loaded).values())
        most = elements * max(_BY_TYPE, key=lambda t: t.itemsize).itemsize + MAX_HEAD_BYTES
        if size > most:
            raise WeightsError(
                f"the weights of {loaded.name} have {size} bytes; at most {most} are possible"
            )
        available = psutil.virtual_memory().available
        if size > available:
            raise WeightsError(
                f"the weights have {size} bytes, but only {available} bytes of memory are "
                "available on the worker's machine"
            )
        self.size = size
        self.offset = 0
        """Number of bytes that have arrived."""
        self._file = FileIO(os.memfd_create("weights"), "w")

    @property
    def path(self) -> Path:
        """The path of the file for this process."""
        return Path(f"/proc/self/fd/{self._file.fileno()}")

    @property
    def complete(self) -> bool:
        """Whether all bytes have arrived."""
        return self.offset == self.size

    def add(self, part: bytes) -> None:
        """Adds the next bytes. Raises WeightsError if they exceed the size of the file."""
        if self.offset + len(part) > self.size:
            raise WeightsError(f"more than the {self.size} bytes of the weights have arrived")
        self._file.write(part)
        self.offset += len(part)

    @property
    def sha256(self) -> str:
        """SHA-256 of the file, hexadecimal."""
        with self.path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()


def copied_from_shared(loaded: LoadedModel, name: str, size: int) -> ReceivedFile:
    """A copy of the first ``size`` bytes of the shared memory ``name``, which another process may
    change later. Raises WeightsError."""
    received = ReceivedFile(loaded, size)
    path = SHARED / name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with FileIO(descriptor) as file:
            there = os.fstat(descriptor)
            if not S_ISREG(there.st_mode) or there.st_size < size:
                raise WeightsError(
                    f"the shared memory {name!r} has {there.st_size} bytes; expected {size}"
                )
            while not received.complete:
                part = file.read(min(COPIED_BYTES, size - received.offset))
                if not part:
                    raise WeightsError(f"the shared memory {name!r} became smaller")
                received.add(part)
    except OSError as error:
        raise WeightsError(
            f"cannot read the shared memory {name!r} on this worker's machine: {error}"
        ) from None
    return received
