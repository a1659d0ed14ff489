"""Decodes compressed bodies of requests, in pieces of bounded size."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ..errors import ApiError

PIECE_BYTES = 256 * 1024
"""Maximum number of bytes in a decompressed piece. A small compressed body can become very long."""
_GZIP = 16 + zlib.MAX_WBITS


class Plain:
    """The decoder of a body that is not compressed."""

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """The part unchanged."""
        yield part

    def end(self) -> None:
        """Does nothing."""


class Gzip:
    """The decoder of a body with ``content-encoding: gzip``."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_GZIP)

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """The decompressed bytes of a part, in pieces of at most ``PIECE_BYTES``. Raises ApiError
        400 if the part is not valid."""
        while part or self._stream.unconsumed_tail:
            if self._stream.eof:
                raise _invalid("it continues after its end")
            try:
                piece = self._stream.decompress(part, PIECE_BYTES)
            except zlib.error as error:
                raise _invalid(str(error)) from None
            part = self._stream.unconsumed_tail or self._stream.unused_data
            if piece:
                yield piece
            elif not self._stream.unconsumed_tail and not self._stream.unused_data:
                return

    def end(self) -> None:
        """Raises ApiError 400 if the body has not ended."""
        if not self._stream.eof:
            raise _invalid("it is incomplete")


def decoder_of(encoding: str) -> Plain | Gzip:
    """The decoder for a ``content-encoding``; raises ApiError 415 for an unknown encoding."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return Plain()
    if name in ("gzip", "x-gzip"):
        return Gzip()
    raise ApiError(
        415,
        f"the content encoding of the body is {encoding!r}; it must be gzip or identity",
        code="unsupported_media_type",
        headers={"accept-encoding": "gzip, identity"},
    )


def _invalid(what: str) -> ApiError:
    return ApiError(400, f"the body is not valid gzip: {what}", code="invalid_body")
