"""Each message is the same after encoding and decoding in every codec."""

from __future__ import annotations

import contextlib
import math
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenbus.protocol.bodies import (
    decode_as,
    encode_body,
    encoding_of,
    pack_tokens,
    unpack_tokens,
)
from tokenbus.protocol.buffers import buffer_bytes, buffer_part
from tokenbus.protocol.errors import Code, RequestError, TokenbusError, error_for
from tokenbus.protocol.frames import (
    Message,
    decode_frames,
    decode_worker_frames,
    encode_frames,
)
from tokenbus.protocol.header import (
    Header,
    Manifest,
    decode_header,
    decode_manifest,
    encode_header,
    encode_token_header,
)
from tokenbus.protocol.lines import decode_line, encode_line
from tokenbus.protocol.messages import CLIENT_MESSAGES, SERVER_MESSAGES, Buffer, Generate, Token
from tokenbus.protocol.sampling import MAX_STOP_CHARS
from tokenbus.protocol.worker_messages import TO_BROKER, TO_WORKER

from ..counts import examples

FINITE = st.floats(allow_nan=False, allow_infinity=False)
U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """A strategy for the values of a type. msgspec's description of the type has the
    constraints."""
    return _of(msgspec.inspect.type_info(kind))


def _of(info: Any) -> st.SearchStrategy[Any]:
    t = msgspec.inspect
    match info:
        case t.IntType():
            low = -(2**63) if info.ge is None else info.ge
            return st.integers(low, 2**64 - 1 if info.le is None else info.le)
        case t.FloatType():
            return st.floats(
                min_value=info.ge if info.ge is not None else info.gt,
                max_value=info.le,
                exclude_min=info.gt is not None,
                allow_nan=False,
                allow_infinity=False,
            )
        case t.StrType():
            return st.text(
                st.characters(exclude_categories=["Cs"]),
                min_size=info.min_length or 0,
                max_size=min(info.max_length or 20, 20),
            )
        case t.BoolType():
            return st.booleans()
        case t.NoneType():
            return st.none()
        case t.BytesType():
            return st.binary(max_size=20)
        case t.LiteralType():
            return st.sampled_from(info.values)
        case t.ListType():
            return st.lists(_of(info.item_type), min_size=info.min_length or 0, max_size=3)
        case t.VarTupleType():
            return st.lists(_of(info.item_type), max_size=3).map(tuple)
        case t.DictType():
            return st.dictionaries(_of(info.key_type), _of(info.value_type), max_size=3)
        case t.UnionType():
            return st.one_of([_of(part) for part in info.types if not _is_unset(part)])
        case t.AnyType():
            return st.one_of(st.none(), st.booleans(), TEXT, st.integers(-9, 9), FINITE)
        case t.EnumType():
            return st.sampled_from(list(info.cls))
        case t.StructType():
            return structs(info.cls)
    raise AssertionError(f"no values for {info}")


def _is_unset(info: Any) -> bool:
    return getattr(info, "cls", None) is msgspec.UnsetType


@st.composite
def structs(draw: st.DrawFn, kind: Any) -> Any:
    """A struct with all of its required fields and a random choice of its optional fields."""
    hints = get_type_hints(kind, include_extras=True)
    given_fields = {}
    for field in msgspec.structs.fields(kind):
        if field.required or draw(st.booleans()):
            given_fields[field.name] = draw(values(_without_unset(hints[field.name])))
    return kind(**given_fields)


def _without_unset(hint: Any) -> Any:
    """The type ``hint`` without the alternative UnsetType, which is never sent."""
    parts = get_args(hint)
    if msgspec.UnsetType not in parts or get_origin(hint) is None:
        return hint
    kept = [part for part in parts if part is not msgspec.UnsetType]
    result = kept[0]
    for part in kept[1:]:
        result = result | part
    return result


TABLES = {
    "client": CLIENT_MESSAGES,
    "server": SERVER_MESSAGES,
    "worker": TO_BROKER,
    "broker": TO_WORKER,
}
EVERY = [(side, message_type) for side, table in TABLES.items() for message_type in table]


@pytest.mark.parametrize(
    ("side", "message_type"), EVERY, ids=lambda v: v if isinstance(v, str) else ""
)
@settings(max_examples=examples(8), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_message_comes_back_from_every_codec_as_it_was(
    side: str, message_type: bytes, data: st.DataObject
) -> None:
    table = TABLES[side]
    body = data.draw(values(table[message_type]))
    attachments = tuple(data.draw(st.lists(st.binary(max_size=9), max_size=2)))
    message = Message(message_type, body, attachments)
    for encoding in ("json", "msgpack"):
        assert decode_frames(encode_frames(message, encoding), table) == message
        header = Header(7, 2**63, 1)
        framed = encode_frames(message, encoding, header)
        assert decode_worker_frames(framed, table) == (header, message)
    plain = Message(message_type, body)
    assert decode_line(encode_line(plain), table) == plain


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_travel_as_four_bytes_each(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert len(packed) == 4 * len(tokens)
    assert unpack_tokens(packed) == tokens


@given(U64, U64, st.integers(0, 2**32 - 1))
def test_a_header_comes_back(request_id: int, address: int, flags: int) -> None:
    header = Header(request_id, address, flags)
    assert decode_header(encode_header(*header)) == header


def test_a_manifest_comes_back() -> None:
    encoded = encode_token_header((1, 2, 2**63), (4,), (5, 6))
    assert decode_manifest(encoded) == Manifest((1, 2, 2**63), (4,), (5, 6))
    with pytest.raises(RequestError, match="manifest"):
        decode_manifest(encoded[:-1])
    with pytest.raises(RequestError, match="manifest"):
        decode_manifest(encoded[:21])
    with pytest.raises(RequestError, match="20 bytes"):
        decode_header(b"short")


@given(st.binary(max_size=64))
def test_any_bytes_are_a_value_or_a_request_error(body: bytes) -> None:
    for table in TABLES.values():
        for kind in table.values():
            with contextlib.suppress(RequestError):
                decode_as(kind, body)


@given(TEXT)
def test_any_line_is_a_message_or_a_request_error(line: str) -> None:
    with contextlib.suppress(RequestError):
        decode_line(line, CLIENT_MESSAGES)


def test_lmtp_s_own_trace_is_understood() -> None:
    line = 'GENERATE {"model": "gpt2-medium", "prompt": [15496, 612, 220], "stream_id": 1}'
    message = decode_line(line, CLIENT_MESSAGES)
    assert message.body.prompt == [15496, 612, 220]
    assert message.body.temperature == 0


def test_a_score_may_have_the_fields_of_a_generation() -> None:
    line = (
        'SCORE {"temperature": 1.2, "max_tokens": 64, "logit_bias": {"1": 100}, '
        '"model": "gpt2-medium", "prompt": [15496, 220], "scored": [7], "stream_id": 1}'
    )
    message = decode_line(line, CLIENT_MESSAGES)
    assert (message.body.prompt, message.body.scored) == ([15496, 220], [7])


def test_a_token_entry_has_the_fields_that_lmtp_s_client_reads() -> None:
    entry = Token(
        token=1256,
        stream_id=1,
        logprob=-0.5,
        finish_reason=None,
        top_logprobs={1256: -0.5},
    )
    assert msgspec.json.decode(encode_body([entry], "json")) == [
        {
            "token": 1256,
            "stream_id": 1,
            "logprob": -0.5,
            "finish_reason": None,
            "top_logprobs": {"1256": -0.5},
        }
    ]


def test_unknown_fields_are_ignored() -> None:
    message = decode_line('PING {"n": 3, "colour": "red"}', CLIENT_MESSAGES)
    assert message.body.n == 3


@pytest.mark.parametrize(
    ("line", "code", "path", "says"),
    [
        ("FLY {}", Code.UNKNOWN_TYPE, None, "'FLY'"),
        ("GENERATE {", Code.BAD_MESSAGE, None, "not valid json"),
        ("", Code.BAD_MESSAGE, None, "empty"),
        ('GENERATE {"stream_id": "a"}', Code.INVALID_FIELD, "$.stream_id", "a whole number"),
        (
            'GENERATE {"stream_id": 1, "prompt": [1, "x"]}',
            Code.INVALID_FIELD,
            "$.prompt[1]",
            "a whole number, not a text",
        ),
        (
            'GENERATE {"stream_id": 1, "temperature": -1}',
            Code.INVALID_FIELD,
            "$.temperature",
            "a number of at least 0.0, not -1",
        ),
        (
            'GENERATE {"stream_id": 1, "n": 1000}',
            Code.INVALID_FIELD,
            "$.n",
            "at most 128, not 1000",
        ),
        ('PING {"x": ' + "[" * 100_000, Code.BAD_MESSAGE, None, "deep"),
        # The body is malformed too, but the error names the wrong number, which comes first.
        ('PING {"n": -1,', Code.INVALID_FIELD, "$.n", "a whole number of at least 0"),
        ('PING {"n": -1, "x": ' + "[" * 50_000, Code.INVALID_FIELD, "$.n", "of at least 0"),
    ],
)
def test_a_wrong_line_says_what_is_wrong_and_where(
    line: str, code: Code, path: str | None, says: str
) -> None:
    with pytest.raises(RequestError) as caught:
        decode_line(line, CLIENT_MESSAGES)
    assert caught.value.code == code
    assert caught.value.path == path
    assert says in caught.value.message


def test_an_error_shows_only_the_beginning_of_a_wrong_text() -> None:
    for text in ("x" * 60_000, f" - at `$.{'a.' * 30_000}a`"):
        with pytest.raises(RequestError) as caught:
            decode_line(f'PAUSE {{"stream_id": 1, "mode": "{text}"}}', CLIENT_MESSAGES)
        assert caught.value.path == "$.mode"
        assert caught.value.message.startswith(
            f"expected 'abort' or 'keep' or 'wait', not '{text[:100]}"
        )
        assert len(caught.value.message) < 400


def test_json_and_msgpack_bodies_are_distinguished_by_their_first_byte() -> None:
    for body in ({"a": 1}, [1, 2], {}, [], list(range(70_000))):
        assert encoding_of(encode_body(body, "json")) == "json"
        assert encoding_of(encode_body(body, "msgpack")) == "msgpack"


def test_a_buffer_is_given_by_one_thing() -> None:
    assert buffer_part(buffer_bytes(Buffer(name="b", text="é"), ()) or b"") == "é"
    assert buffer_part(buffer_bytes(Buffer(name="b", tokens=[1, 2]), ()) or b"") == [1, 2]
    assert buffer_part(buffer_bytes(Buffer(name="b"), (pack_tokens([3]),)) or b"") == [3]
    assert buffer_bytes(Buffer(name="b"), ()) is None
    with pytest.raises(RequestError, match="give only one"):
        buffer_bytes(Buffer(name="b", text="a", tokens=[1]), ())


def test_every_code_makes_an_error_that_keeps_what_it_knows() -> None:
    for code in Code:
        error = error_for(code, "why", path="$.x", retry_after_s=2.0)
        assert isinstance(error, TokenbusError)
        assert (error.code, error.path, error.retry_after_s) == (code, "$.x", 2.0)
        assert str(error) == f"why (at $.x) [{code}]"


def test_nan_is_no_log_probability_in_json() -> None:
    entry = Token(token=1, stream_id=1, logprob=math.nan, finish_reason=None)
    assert b"null" in encode_body([entry], "json")


def test_a_stop_string_has_a_bound() -> None:
    longest = "x" * MAX_STOP_CHARS
    assert decode_as(Generate, encode_body({"stream_id": 1, "stop": [longest]}, "json"))
    with pytest.raises(RequestError, match=str(MAX_STOP_CHARS)):
        decode_as(Generate, encode_body({"stream_id": 1, "stop": [longest + "x"]}, "json"))
