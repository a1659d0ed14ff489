"""The entries of each stream in a TOKEN are the same after conversion to columns and back."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from tokenbus.protocol.bodies import decode_as, encode_body, pack_tokens
from tokenbus.protocol.columns import (
    TokenBody,
    TokenColumns,
    column_entries,
    encodable_entry,
    is_plain,
    pack_columns,
    plain_entry,
    unpack_columns,
)
from tokenbus.protocol.errors import Code, RequestError
from tokenbus.protocol.messages import Token

U32 = st.integers(0, 2**32 - 1)
FLOATS = st.floats(allow_nan=False)
OTHER_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "token": st.none(),
    "logprob": st.none(),
    "finish_reason": st.sampled_from(["stop", "length"]),
    "top_logprobs": st.just(UNSET) | st.dictionaries(U32, FLOATS, max_size=2),
    "parent": st.integers(0, 3),
    "text": st.text(max_size=3),
    "backtrack": st.integers(1, 3),
    "logs": st.text(min_size=1, max_size=3),
    "live": st.integers(1, 3),
    "prompt_tokens": st.integers(1, 9),
    "allowed": st.integers(0, 9),
}
PLAIN = st.builds(
    *(plain_entry, st.integers(0, 5), U32, FLOATS, U32, st.integers(0, 2)),
    text=st.none() | st.text(max_size=3),
    processed=st.none() | FLOATS,
    kept=st.none() | st.integers(0, 9) | st.lists(U32, max_size=3).map(pack_tokens),
)


ENTRY_OF_NO_TEXT = plain_entry(3, 7, -2.0, 4, 1, "")
"""An entry without text. The text of its token is held back, because it may begin a stop string."""


@st.composite
def some_entries(draw: st.DrawFn) -> list[Token]:
    """Entries of a few streams. Rows with text can represent most of them (``is_plain``)."""
    entries = draw(st.lists(PLAIN, max_size=12))
    for entry in entries:
        if draw(st.integers(0, 4)) == 0:
            name = draw(st.sampled_from(sorted(OTHER_FIELDS)))
            setattr(entry, name, draw(OTHER_FIELDS[name]))
    return entries


def test_a_body_of_one_row_is_small() -> None:
    body = encode_body(pack_columns([plain_entry(2**63 - 1, 2**31, -0.1, 2**31, 0)]), "msgpack")
    assert len(body) <= 48


@given(PLAIN)
def test_an_encodable_entry_is_the_plain_entry_of_the_same_row(entry: Token) -> None:
    assert entry.token is not None
    assert entry.logprob is not None
    row = (entry.stream_id, entry.token, entry.logprob, entry.pos, entry.seq)
    encodable = encodable_entry(*row, "é", -0.5, b"1234")
    plain = plain_entry(*row, "é", -0.5, b"1234")
    assert encode_body(encodable, "json") == encode_body(plain, "json")


@given(some_entries(), st.booleans())
def test_entries_come_back_in_the_order_of_their_streams(entries: list[Token], texts: bool) -> None:
    body = decode_as(TokenBody, encode_body(pack_columns(entries, texts), "msgpack"))
    assert isinstance(body, TokenColumns)
    back = column_entries(body)
    assert len(back) == len(entries)
    for stream in {entry.stream_id for entry in entries}:
        of_it = [entry for entry in entries if entry.stream_id == stream]
        assert [entry for entry in back if entry.stream_id == stream] == of_it
        in_rows = stream in unpack_columns(body).streams
        assert in_rows == all(is_plain(entry, texts) for entry in of_it)
    assert texts or not body.texts


@given(some_entries())
def test_a_list_of_entries_is_the_other_form_of_the_same_message(entries: list[Token]) -> None:
    assert decode_as(TokenBody, encode_body(entries, "msgpack")) == entries


def test_columns_of_different_lengths_are_refused() -> None:
    body = pack_columns([plain_entry(1, 5, -0.5, 0, 2)])
    for name in ("tokens", "logprobs", "positions", "seqs"):
        wrong = msgspec.structs.replace(body, **{name: getattr(body, name) + b"\0"})
        with pytest.raises(RequestError, match="columns") as caught:
            unpack_columns(wrong)
        assert caught.value.code == Code.BAD_MESSAGE
    with pytest.raises(RequestError, match="columns"):
        unpack_columns(TokenColumns(streams=b"\0" * 9))
    with pytest.raises(RequestError, match="columns"):
        unpack_columns(msgspec.structs.replace(body, processed=bytes(9)))
    with pytest.raises(RequestError, match="2 kept; expected 1, one for each row, or none"):
        unpack_columns(msgspec.structs.replace(body, kept=[1, None]))
    with pytest.raises(RequestError, match="kept of a row has 3 bytes; expected a multiple of 4"):
        column_entries(msgspec.structs.replace(body, kept=[b"abc"]))
    with pytest.raises(RequestError, match="2 texts; expected 1, one for each row, or none"):
        unpack_columns(msgspec.structs.replace(body, texts=["a", None]))


def test_a_row_of_no_stream_is_refused() -> None:
    """The stream id 2**63 is above ``MAX_STREAM_ID``, so no entry can have this stream id."""
    body = pack_columns([plain_entry(1, 5, -0.5, 0, 0), plain_entry(2**63, 5, -0.5, 0, 0)])
    with pytest.raises(RequestError, match=f"has the stream id {2**63}; stream ids are at most"):
        unpack_columns(body)


def test_rows_with_text_and_without_stand_beside_each_other() -> None:
    given = [plain_entry(1, 5, -0.5, 0, 0, "a"), plain_entry(2, 6, -1.0, 0, 0), ENTRY_OF_NO_TEXT]
    body = pack_columns(given, texts=True)
    assert body.texts == ["a", None, ""]
    assert column_entries(body) == given
    assert pack_columns(given).texts == []
    assert pack_columns(given[1:2], texts=True).texts == []


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_any_bytes_are_columns_or_a_request_error(first: bytes, second: bytes) -> None:
    with contextlib.suppress(RequestError):
        column_entries(TokenColumns(streams=first, tokens=second, logprobs=first, positions=second))
    with contextlib.suppress(RequestError):
        decode_as(TokenBody, first)


def test_a_row_takes_24_bytes() -> None:
    """Two bodies are compared, so that the names of the columns do not count."""
    bodies = [pack_columns([plain_entry(s, 5, -0.5, 7, 0) for s in range(n)]) for n in (64, 128)]
    small, large = (len(encode_body(body, "msgpack")) for body in bodies)
    assert 24 * 64 <= large - small <= 24 * 64 + 8
