"""The conversion of lines to frames and back, in programs that forward most bodies undecoded."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.protocol.errors import Code, RequestError
from tokenbus.protocol.lines import error_line, frames_binary, frames_line, line_frames


def test_a_body_passes_as_it_is() -> None:
    body = '{"stream_id": 1,  "prompt": "ü \\u00e4", "unknown": [1.50]}'
    assert line_frames(f"GENERATE {body}\r\n") == [b"GENERATE", body.encode()]
    assert frames_line([b"GENERATE", body.encode()]) == f"GENERATE {body}"


def test_a_message_without_a_body_is_a_word() -> None:
    assert line_frames("BYE") == [b"BYE", b""]


@pytest.mark.parametrize("line", ["", "  \n", "é {}", "GENERATE \ud800", "GENERATE ü"])
def test_a_line_that_is_no_message_is_refused(line: str) -> None:
    with pytest.raises(RequestError) as refused:
        line_frames(line)
    assert refused.value.code == Code.BAD_MESSAGE
    assert error_line(refused.value, line).startswith("ERROR {")


@given(st.text())
def test_any_text_becomes_frames_or_an_error(line: str) -> None:
    try:
        answer = frames_line(line_frames(line))
    except RequestError as error:
        answer = error_line(error, line)
    assert answer


def test_a_hello_chooses_json_whatever_it_prefers() -> None:
    _, body = line_frames('HELLO {"encodings": ["msgpack", "json"], "client": "x"}')
    assert json.loads(body) == {"client": "x", "encodings": ["json"]}
    with pytest.raises(RequestError) as refused:
        line_frames('HELLO {"encodings": ["msgpack"]}')
    assert (refused.value.code, refused.value.path) == (Code.UNSUPPORTED, "$.encodings")


def test_where_messages_may_be_binary_a_hello_with_columns_chooses_msgpack() -> None:
    hello = 'HELLO {"encodings": ["msgpack", "json"], "capabilities": ["columns"]}'
    _, body = line_frames(hello, binary=True)
    assert json.loads(body)["encodings"] == ["msgpack", "json"]
    _, body = line_frames(hello)
    assert json.loads(body)["encodings"] == ["json"]
    _, body = line_frames('HELLO {"encodings": ["msgpack", "json"]}', binary=True)
    assert json.loads(body)["encodings"] == ["json"]
    assert frames_binary([b"TOKEN", b"\x80", b"\x90"]) == b"TOKEN \x80\x90"


def test_a_module_becomes_an_attachment() -> None:
    data = base64.b64encode(b"\0asm" * 10).decode()
    frames = line_frames(f'UPLOAD {{"stream_id": 3, "tag": "t", "data": "{data}"}}')
    assert json.loads(frames[1]) == {"stream_id": 3, "tag": "t"}
    assert frames[2:] == [b"\0asm" * 10]


def test_an_upload_that_is_not_valid_is_left_to_the_broker() -> None:
    assert line_frames('UPLOAD {"data": 5}') == [b"UPLOAD", b'{"data": 5}']
