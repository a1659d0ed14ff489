"""Before the broker decodes a body, it refuses the body if decoding would take long."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.body_bounds import MAX_PLAIN_BODY_BYTES, MAX_STRUCTURE_BYTES
from tokenbus.protocol.messages import MAX_BODY_BYTES

from ..worlds.broker import Bench, peer_of

IDS = [1] * (MAX_STRUCTURE_BYTES // 2)
"""A list with more token ids than a body may have."""
TEXT = "a" * (MAX_BODY_BYTES - 4096)


def error(bench: Bench, kind: str, body: dict[str, Any]) -> dict[str, Any]:
    [(answer, content)] = bench.client("c", kind, body)
    assert answer == "ERROR"
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("HELLO", {"capabilities": ["a"] * (MAX_PLAIN_BODY_BYTES // 4)}),
        ("HELLO", {"versions": [1] * (MAX_PLAIN_BODY_BYTES // 2)}),
        ("PING", {"other": [1] * (MAX_PLAIN_BODY_BYTES // 2)}),
        ("TAG", {"stream_id": 1, "module": "m", "tags": ["a"] * (MAX_PLAIN_BODY_BYTES // 4)}),
        ("NOTHING", {"other": "a" * MAX_PLAIN_BODY_BYTES}),
    ],
    ids=["names", "numbers", "unknown field", "tags", "unknown type"],
)
def test_a_message_without_text_has_a_small_body(kind: str, body: dict[str, Any]) -> None:
    bench = Bench()
    refused = error(bench, kind, body)
    assert refused["code"] == "too_large"
    assert f"{MAX_PLAIN_BODY_BYTES} are allowed in a message of type '{kind}'" in refused["message"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("GENERATE", {"stream_id": 7, "prompt": IDS}),
        ("GENERATE", {"stream_id": 7, "prompt": [1], "buffers": ["a"] * len(IDS)}),
        ("GENERATE", {"stream_id": 7, "prompt": "a", "controller_arg": {"a": [{}] * len(IDS)}}),
        ("SCORE", {"stream_id": 7, "prompt": "a", "scored": IDS}),
        ("BUFFER", {"stream_id": 7, "name": "a", "tokens": IDS}),
    ],
    ids=["prompt", "buffers", "controller_arg", "scored", "tokens"],
)
@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])
def test_all_but_texts_in_a_body_has_a_bound(kind: str, body: dict[str, Any], encode: Any) -> None:
    bench = Bench()
    frames = [kind.encode(), encode(body | {"other": [1] * (MAX_STRUCTURE_BYTES // 2)})]
    [sent] = bench.broker.on_client(peer_of("c"), frames, bench.now, "")
    refused: dict[str, Any] = decode_as(dict[str, Any], sent.frames[1])
    assert (refused["code"], refused["stream_id"]) == ("too_large", 7)
    assert "send token ids as an attachment" in refused["message"]


@pytest.mark.parametrize(
    ("kind", "field"), [("GENERATE", "data"), ("SCORE", "text"), ("BUFFER", "prompt")]
)
def test_a_large_text_in_a_field_of_another_type_is_refused(kind: str, field: str) -> None:
    """A worker would store the field with the request as long as the request runs."""
    body = {"stream_id": 7, "name": "a", "prompt": [1], "scored": [1], field: TEXT}
    refused = error(Bench(), kind, body)
    assert refused["code"] == "too_large"
    assert f"{MAX_STRUCTURE_BYTES} are allowed" in refused["message"]


@pytest.mark.parametrize(
    ("kind", "body", "path", "most"),
    [
        ("HELLO", {"client": "a" * 257}, "$.client", 256),
        ("HELLO", {"session": "a" * 257}, "$.session", 256),
        ("HELLO", {"encodings": ["a" * 65]}, "$.encodings[0]", 64),
        ("GENERATE", {"stream_id": 7, "prompt": "a", "model": "a" * 1025}, "$.model", 1024),
        ("GENERATE", {"stream_id": 7, "controller": "a" * 257}, "$.controller", 256),
    ],
)
def test_names_that_status_repeats_have_a_bound(
    kind: str, body: dict[str, Any], path: str, most: int
) -> None:
    refused = error(Bench(), kind, body)
    assert (refused["code"], refused["path"]) == ("invalid_field", path)
    assert f"a text with a length of at most {most}" in refused["message"]


@pytest.mark.parametrize("field", ["versions", "encodings", "capabilities"])
def test_the_lists_of_a_hello_have_a_bound(field: str) -> None:
    items: list[Any] = list(range(65)) if field == "versions" else ["a"] * 65
    refused = error(Bench(), "HELLO", {field: items})
    assert (refused["code"], refused["path"]) == ("invalid_field", f"$.{field}")
    assert "a list with a length of at most 64" in refused["message"]


def test_a_message_has_at_most_one_attachment() -> None:
    bench = Bench()
    body = msgspec.json.encode({"stream_id": 7})
    frames = [b"GENERATE", body, b"\1\0\0\0", b"\2\0\0\0"]
    [sent] = bench.broker.on_client(peer_of("c"), frames, bench.now, "")
    assert sent.frames[0] == b"ERROR"
    assert b"at most one attachment" in sent.frames[1]


def test_a_text_may_fill_a_body() -> None:
    bench = Bench()
    bench.worker("w")
    bench.client("c", "HELLO", {})
    assert bench.client("c", "GENERATE", {"stream_id": 7, "prompt": TEXT}) == []
    assert bench.client("c", "BUFFER", {"name": "a", "text": TEXT}) == []
    arg = {"stream_id": 8, "prompt": [1], "controller": "regex", "controller_arg": TEXT}
    assert error(bench, "GENERATE", arg)["code"] == "no_worker"


def test_a_text_that_is_named_twice_hides_nothing() -> None:
    """The last value of a repeated field counts, but the bound covers the earlier value too."""
    bench = Bench()
    ids = b",".join([b"1"] * len(IDS))
    body = b'{"stream_id":7,"prompt":[' + ids + b',1,1],"prompt":"a"}'
    [sent] = bench.broker.on_client(peer_of("c"), [b"GENERATE", body], bench.now, "")
    assert msgspec.json.decode(sent.frames[1])["code"] == "too_large"
