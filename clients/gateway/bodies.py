"""Reads the bodies of requests, and checks their size, type and fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, TypeVar

import msgspec
from msgspec import UNSET, Struct
from starlette.requests import ClientDisconnect, Request

from ...protocol.messages import MAX_BODY_BYTES
from .context import gateway_of
from .errors import ApiError, field_name, invalid_field
from .idempotency import HEADER, LAST_EVENT, current_named

SMALL_BODY_BYTES = 256 * 1024
"""The values of a body that is smaller than this number of bytes are not counted."""
MAX_STRINGS = 65_536
"""Maximum number of strings in a body, including field names. The bound limits the time in which
the event loop creates their objects."""
MAX_VALUES = 1_048_576
"""Maximum number of values in a body, such as token ids."""
_STRUCTURE = b",[{"
"""The characters that may precede a value, in addition to the colon after a name."""
IGNORED_HEADER = "x-tokenbus-ignored"
"""The header that lists the request's fields that have no effect."""


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of all bodies. A field that is not declared is refused, with its path."""

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted but have no effect. They default to UNSET, and are reported if
    given."""

    def ignored(self) -> list[str]:
        """Names of given fields that have no effect, such as ``user`` or ``messages[].name``."""
        found = dict.fromkeys(self._ignored(""))
        return list(found)

    def _ignored(self, prefix: str) -> Iterator[str]:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name in self.IGNORED:
                if value is not UNSET:
                    yield prefix + name
            elif isinstance(value, Body):
                yield from value._ignored(f"{prefix}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                for one in value:
                    yield from one._ignored(f"{prefix}{name}[].")


B = TypeVar("B")


async def read_bytes(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """The body of a request. Raises ApiError 413 if the body is longer than ``limit`` bytes, and
    UnavailableError if the gateway's memory for bodies is used up."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    parts: list[bytes] = []
    size = 0
    gateway = gateway_of(request)
    shares = gateway.shares
    named = gateway.named.of(request.headers.get(HEADER), request.headers.get(LAST_EVENT))
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(size, limit)
            shares.take_bytes(len(part))
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "the connection was closed before the whole body arrived") from None
    body = b"".join(parts)
    if named is not None:
        named.read(request.url.path, body)
        current_named.set(named)
    return body


async def read_body(request: Request, kind: type[B], limit: int = MAX_BODY_BYTES) -> B:
    """The JSON body of a request as a ``kind``.

    Raises ApiError 415 if the content type is not JSON, 413 if the body is too large, and 400 if
    the body is not a valid ``kind``. The error 400 has the path of the faulty field.
    """
    check_json(request)
    return decode_body(await read_bytes(request, limit), kind)


def check_json(request: Request) -> None:
    """Raises ApiError 415 if the body of a request is not declared as JSON."""
    declared = request.headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            f"the content type of the body is {declared or 'not given'!r}; it must be "
            "application/json",
            code="unsupported_media_type",
        )


def decode_body(body: bytes, kind: type[B]) -> B:
    """Decodes ``body`` as a ``kind``. Raises ApiError 413 if the body has too many values, and 400
    with the path of a faulty field."""
    if len(body) > SMALL_BODY_BYTES:
        _check_values(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        what, path = split_validation(error)
        raise invalid_field(field_name(path), what) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def split_validation(error: msgspec.ValidationError) -> tuple[str, str]:
    """Splits msgspec's error into its message and the field's path, ``$.messages[0].role``."""
    what, _, path = str(error).partition(" - at ")
    path = path.removeprefix("`key` in ").strip("`") or "$"
    quoted = what.split("`")
    if what.startswith("Object contains unknown field"):
        path = f"{path}.{quoted[1]}"
        return f"unknown field {field_name(path)!r}; GET /openapi.json lists the fields", path
    if what.startswith("Object missing required field"):
        path = f"{path}.{quoted[1]}"
        return f"the field {field_name(path)!r} is missing", path
    where = field_name(path)
    shown = what.replace("`", "")
    return (f"{where}: {shown}" if where else shown), path


def check_inner(texts: Sequence[str]) -> None:
    """Raises ApiError 413 if JSON texts inside a body have more values than the event loop can
    decode in time."""
    if sum(map(len, texts)) <= SMALL_BODY_BYTES:
        return
    counts = [_counts(text.encode(errors="surrogatepass")) for text in texts]
    num_strings, num_values = (sum(counted) for counted in zip(*counts, strict=True))
    if num_strings + num_values > MAX_STRINGS:
        raise _too_many(num_strings + num_values, "values in texts that are JSON", MAX_STRINGS)


def ignored_header(names: list[str]) -> dict[str, str]:
    """The header that lists ``names``, the fields that have no effect; empty without names."""
    return {IGNORED_HEADER: ", ".join(names)} if names else {}


def _check_values(body: bytes) -> None:
    """Raises ApiError 413 if a body has more values than the event loop can decode in time.

    The values are counted in the raw bytes, because decoding them would already take too long.
    """
    num_strings, num_values = _counts(body)
    if num_strings > MAX_STRINGS:
        raise _too_many(num_strings, "strings (with field names)", MAX_STRINGS)
    if num_values > MAX_VALUES:
        raise _too_many(num_values, "values", MAX_VALUES)


def _counts(body: bytes) -> tuple[int, int]:
    """The numbers of strings and of values in a JSON text. Beyond MAX_STRINGS strings the values
    are not counted."""
    # If no quote is escaped, every string is the text between two quotes.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    num_strings = plain.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        return num_strings, 0
    structure = b"".join(plain.split(b'"')[::2])
    return num_strings, len(structure) - len(structure.translate(None, _STRUCTURE))


def _too_many(count: int, what: str, limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has at least {count} {what}; at most {limit} are allowed",
        code="too_large",
    )


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has at least {size} bytes; at most {limit} are allowed",
        code="too_large",
    )
