"""A safetensors file that one GPU worker makes of its weights and another worker receives in
parts."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import psutil
import torch

from .loader import LoadedModel
from .new_weights import WeightsError, own_tensors, place

PART_BYTES = 2**20
"""Maximum number of bytes of a part. Copying a part takes about 0.1 ms, and sending it takes about
1 ms on a network of 10 Gbit/s. The tokens of a step wait for at most one part."""
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
    no worker could use the file then.
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

    Raises WeightsError if the file is larger than a file with the weights of ``loaded`` can be, or
    if the machine does not have the memory.
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
