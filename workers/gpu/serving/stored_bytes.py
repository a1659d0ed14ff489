"""Bounds the memory of the requests at a GPU worker and of the entries that live streams store.

A request counts from its arrival, also while its model is loaded or its texts are tokenized. Until
its end, a stream stores its request and its entries. Clients that attach and brokers that claim the
stream receive them. A row (``streams.ROW``) takes 20 bytes, and is not counted. Any other entry
takes 800 bytes, and a program may append and drop millions of tokens, each of which is an entry.
256 ``top_logprobs`` take 3 KiB, and a request may have 128 sequences that wait for an input. So
clients share a bound. A request that exceeds its client's share is refused, and a stream that
exceeds the share ends.
"""

from __future__ import annotations

from collections import Counter
from sys import getsizeof
from typing import Any

from msgspec import json

from ....protocol.messages import Embed, Generate, Score
from ....protocol.shares import fits_share
from ...machine import machine_memory
from .streams import Stream

MEMORY_PART = 8
"""The requests and entries at all GPU workers of a machine take at most this part of the machine's
memory."""
ID_BYTES = 40
"""The memory of a decoded token id, in bytes: an element of a list, and an int."""
USUAL_BYTES = 16 * 1024**3
"""The bound of a machine whose memory is unknown, in bytes."""


def max_stored_bytes(num_workers: int) -> int:
    """The bound of a GPU worker on a machine with ``num_workers`` GPU workers, in bytes."""
    try:
        whole = machine_memory() // MEMORY_PART
    except OSError:
        whole = USUAL_BYTES
    return whole // max(1, num_workers)


def decoded_bytes(request: Generate | Score | Embed, num_bytes: int) -> int:
    """The memory of a request's decoded texts and token ids, in bytes. ``num_bytes``: size of the
    body."""
    if isinstance(request, Embed):
        return sum(map(_memory, request.inputs))
    if isinstance(request, Score):
        return _memory(request.prompt) + _memory(request.scored)
    arg = request.controller_arg
    if isinstance(arg, dict | list):
        return _memory(request.prompt) + ID_BYTES * _json_bytes(arg, num_bytes)
    return _memory(request.prompt) + _memory(arg)


def _json_bytes(arg: dict[str, Any] | list[Any], num_bytes: int) -> int:
    """The size of a controller's argument as JSON, in bytes. Its decoded values take up to
    ``ID_BYTES`` for each of these bytes. An argument with values that only msgpack has counts like
    the body."""
    try:
        return len(json.encode(arg))
    except (TypeError, ValueError):
        return num_bytes


def _memory(part: str | list[int] | None) -> int:
    return ID_BYTES * len(part) if isinstance(part, list) else getsizeof(part)


class StoredBytes:
    """The bytes of the requests and the live streams of a worker, by client. ``most``: the bound on
    all bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0
        self._clients: Counter[int] = Counter()
        self._streams: Counter[Stream] = Counter()

    def count(self, stream: Stream) -> str:
        """Counts the new bytes of a stream. If the stream's client now exceeds its share, returns
        the message of the error with which the stream must end. If not, returns an empty
        string."""
        size = stream.long_bytes - self._streams[stream]
        if not size:
            return ""
        own = self._clients[stream.client]
        fits = fits_share(own, self._total, self._most, size)
        self._clients[stream.client] += size
        self._streams[stream] += size
        self._total += size
        if fits:
            return ""
        return (
            "the requests, log-probabilities, candidates, appended tokens, logs and writes of your "
            f"waiting and running streams take {own + size} bytes at this worker; all clients "
            f"together take {self._total} of {self._most} bytes (1/{MEMORY_PART} of the machine's "
            "memory, divided by the setting gpu_workers); ask for fewer top_logprobs, append fewer "
            "tokens, or run fewer sequences at a time"
        )

    def drop(self, stream: Stream) -> None:
        """Stops counting a stream that has ended."""
        size = self._streams.pop(stream, 0)
        self._total -= size
        self._clients[stream.client] -= size
        if not self._clients[stream.client]:
            del self._clients[stream.client]
