"""Makes all decoders of typed values, because msgspec can crash if two threads make decoders at
the same time.

When the first decoder of a struct is made, msgspec computes how to decode the struct, and caches
this description. Another thread can find the description in the cache while it is incomplete. A
decoder that is made from an incomplete description reads a null pointer (msgspec 0.21). So only one
thread at a time makes decoders.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_making = threading.RLock()


@overload
def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of values of type ``kind`` in JSON."""
    return _json_decoder(kind)


@cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    with _making:
        return msgspec.json.Decoder(kind)


@overload
def msgpack_decoder(
    kind: type[T], dec_hook: Callable[[type, Any], Any] | None = None
) -> msgspec.msgpack.Decoder[T]: ...
@overload
def msgpack_decoder(
    kind: Any, dec_hook: Callable[[type, Any], Any] | None = None
) -> msgspec.msgpack.Decoder[Any]: ...
def msgpack_decoder(
    kind: Any, dec_hook: Callable[[type, Any], Any] | None = None
) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of values of type ``kind`` in msgpack. ``dec_hook``: converts values to types
    that msgspec does not support."""
    return _msgpack_decoder(kind, dec_hook)


@cache
def _msgpack_decoder(
    kind: Any, dec_hook: Callable[[type, Any], Any] | None
) -> msgspec.msgpack.Decoder[Any]:
    with _making:
        return msgspec.msgpack.Decoder(kind, dec_hook=dec_hook)


@overload
def convert(value: Any, kind: type[T], *, strict: bool = True, str_keys: bool = False) -> T: ...
@overload
def convert(value: Any, kind: Any, *, strict: bool = True, str_keys: bool = False) -> Any: ...
def convert(value: Any, kind: Any, *, strict: bool = True, str_keys: bool = False) -> Any:
    """Converts a value of built-in types to the type ``kind``, as ``msgspec.convert`` does."""
    msgpack_decoder(kind)
    return msgspec.convert(value, kind, strict=strict, str_keys=str_keys)
