"""The gateway decompresses bodies of requests within bounds."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import httpx
import pytest
from starlette.requests import Request
from tokenbus.clients.gateway.bodies.content_encoding import PIECE_BYTES, Gzip
from tokenbus.clients.gateway.bodies.reading import decoded
from tokenbus.clients.gateway.errors import ApiError

from ...processes import Gateway
from .openai_requests import HELLO, MODEL


def test_a_body_is_decompressed_in_bounded_pieces() -> None:
    data = bytes(5 * PIECE_BYTES) + b"end"
    packed = gzip.compress(data)
    decoder = Gzip()
    found = [piece for at in range(0, len(packed), 7) for piece in decoder.pieces(packed[at:][:7])]
    decoder.end()
    assert b"".join(found) == data
    assert max(map(len, found)) <= PIECE_BYTES


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{}", "incorrect header check"),
        (gzip.compress(b"{}")[:-1], "incomplete"),
        (gzip.compress(b"{}") + b"x", "continues after its end"),
        (b"", "incomplete"),
    ],
    ids=["plain", "cut", "continued", "empty"],
)
def test_a_body_that_is_not_gzip_is_refused(body: bytes, words: str) -> None:
    def decode() -> None:
        decoder = Gzip()
        list(decoder.pieces(body))
        decoder.end()

    with pytest.raises(ApiError, match=words):
        decode()


def test_a_compressed_body_of_empty_blocks_is_bounded() -> None:
    empty_block = b"\x00\x00\x00\xff\xff"
    parts = [gzip.compress(b"")[:10], *[empty_block * 20] * 10]

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def read(limit: int) -> bytes:
        scope = {"type": "http", "headers": [(b"content-encoding", b"gzip")]}
        return b"".join([part async for part in decoded(Request(scope, receive), limit)])

    with pytest.raises(ApiError, match="at most 500 are allowed"):
        asyncio.run(read(500))
    assert len(parts) == 5


@pytest.mark.process
def test_a_compressed_request_is_answered_and_a_bomb_is_refused(gateway: Gateway) -> None:
    url = f"{gateway.url}/v1/chat/completions"
    headers = {"content-type": "application/json", "content-encoding": "gzip"}

    def post(body: bytes, encoding: str = "gzip") -> httpx.Response:
        own = {**headers, "content-encoding": encoding}
        return httpx.post(url, content=body, headers=own, timeout=300)

    asked = json.dumps({"model": MODEL, "messages": HELLO, "max_tokens": 1}).encode()
    assert post(gzip.compress(asked)).status_code == 200
    assert post(gzip.compress(bytes(2**26))).status_code == 413
    assert post(zlib.compress(asked)).status_code == 400
    refused = post(asked, "br")
    assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "gzip, identity")
    assert httpx.head(f"{gateway.url}/", follow_redirects=True, timeout=300).status_code == 200
