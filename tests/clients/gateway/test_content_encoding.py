"""Compressed bodies of requests."""

from __future__ import annotations

import gzip
import json
import zlib

import httpx
import pytest
from tokenbus.clients.gateway.content_encoding import PIECE_BYTES, Gzip
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
