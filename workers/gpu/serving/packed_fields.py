"""Packs the lists and maps of entries that have been sent.

A stream stores its entries, because clients that attach and brokers that claim the stream may
request them. 256 ``top_logprobs`` take 25 KiB as Python objects, and 3 KiB as a map in msgpack. If
the entry is sent again in msgpack, the packed bytes are copied without decoding them.
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw, msgpack, structs

from ....protocol.decoders import msgpack_decoder
from ....protocol.messages import Token
from ....protocol.sampling import Distribution, Scores

_KINDS: dict[str, Any] = {
    "top_logprobs": dict[int, float],
    "kept": list[int],
    "cut": list[int],
    "bias": dict[int, float],
    "distribution": Distribution,
    "scores": Scores,
    "prompt": list[int],
}
"""The fields of ``Token`` that are packed, and their types. Clients determine the sizes of these
fields."""


def pack(entry: Token) -> int:
    """Replaces long fields of a sent entry by their bytes in msgpack (``msgspec.Raw``). Returns the
    number of these bytes. Does not replace lists and maps that have at most one value.
    """
    size = 0
    for name in _KINDS:
        value = getattr(entry, name)
        if isinstance(value, Distribution) or (isinstance(value, dict | list) and len(value) > 1):
            packed = msgpack.encode(value)
            setattr(entry, name, Raw(packed))
            size += len(packed)
    return size


def unpacked(entry: Token) -> Token:
    """The entry as it was before ``pack``; floats have the same bits as before. Returns ``entry``
    itself if no field is packed."""
    found = {
        name: msgpack_decoder(kind).decode(value)
        for name, kind in _KINDS.items()
        if isinstance(value := getattr(entry, name), Raw)
    }
    return structs.replace(entry, **found) if found else entry
