"""The codecs of the protocol as fuzz targets: a decoded value is the same after encoding and
decoding again."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from random import Random
from typing import Any

from msgspec import structs
from tokenbus.protocol.bodies import decode_as, encode_body, pack_tokens, unpack_tokens
from tokenbus.protocol.columns import (
    TokenBody,
    TokenColumns,
    column_entries,
    pack_columns,
    unpack_columns,
)
from tokenbus.protocol.errors import TokenbusError
from tokenbus.protocol.frames import decode_frames, decode_worker_frames, encode_frames
from tokenbus.protocol.header import (
    HEADER_SIZE,
    decode_header,
    decode_manifest,
    encode_header,
    encode_token_header,
)
from tokenbus.protocol.lines import decode_line, encode_line, error_line, frames_line, line_frames
from tokenbus.protocol.messages import CLIENT_MESSAGES, SERVER_MESSAGES, Token
from tokenbus.protocol.packing import PACKING_VERSION, pack, unpack
from tokenbus.protocol.transcript import decode_transcript, encode_transcript
from tokenbus.protocol.worker_messages import TO_BROKER, TO_WORKER

from .draws import Draws, as_input
from .samples import sample, samples
from .target import Target

FRONT: dict[bytes, Any] = {**CLIENT_MESSAGES, **SERVER_MESSAGES, b"TOKEN": TokenBody}
BACK: dict[bytes, Any] = {**TO_WORKER, **TO_BROKER}


def _fields(table: dict[bytes, Any]) -> tuple[bytes, ...]:
    """The message types of ``table``, and the field names of their bodies."""
    kinds = [k for k in table.values() if hasattr(k, "__struct_encode_fields__")]
    names = {f.encode() for kind in [*kinds, Token] for f in kind.__struct_encode_fields__}
    return (*table, *sorted(names))


# --- frames ---------------------------------------------------------------------------------------


def run_frames(data: bytes) -> None:
    """Decodes a message between a client and the broker."""
    try:
        message = decode_frames(Draws(data).frames(), FRONT)
    except TokenbusError:
        return
    for encoding in ("msgpack", "json"):
        frames = encode_frames(message, encoding)
        again = decode_frames(frames, FRONT)
        assert encode_frames(again, encoding) == frames


def run_worker_frames(data: bytes) -> None:
    """Decodes a message between the broker and a worker."""
    try:
        header, message = decode_worker_frames(Draws(data).frames(), BACK)
    except TokenbusError:
        return
    frames = encode_frames(message, "msgpack", header)
    assert encode_frames(decode_worker_frames(frames, BACK)[1], "msgpack", header) == frames


def _front_frames() -> Iterator[bytes]:
    for encoding in ("json", "msgpack"):
        for frames in samples(FRONT, encoding):
            yield as_input([*frames, b"\1\0\0\0"])


def _back_frames() -> Iterator[bytes]:
    for message_type, body in samples(BACK, "msgpack"):
        yield as_input([message_type, encode_header(7, 8, 1), body, b"attached"])


# --- headers --------------------------------------------------------------------------------------


def run_header(data: bytes) -> None:
    """Decodes a header, and a header with a manifest."""
    try:
        header = decode_header(data)
        assert encode_header(*header) == data[:HEADER_SIZE]
        manifest = decode_manifest(data)
    except TokenbusError:
        return
    encoded = encode_token_header(*manifest)
    assert decode_manifest(encoded) == manifest
    assert encoded[HEADER_SIZE:] == data[HEADER_SIZE:]


def _headers() -> Iterator[bytes]:
    yield encode_header(1, 2, 3)
    yield encode_header(2**64 - 1, 2**64 - 1, 2**32 - 1)
    for counts in ((0, 0, 0), (1, 0, 0), (2, 1, 0), (9, 3, 2)):
        yield encode_token_header(*(range(7, 7 + n) for n in counts))


# --- packing --------------------------------------------------------------------------------------


def run_packing(data: bytes) -> None:
    """Unpacks a packed message, and packs arbitrary frames."""
    frames = Draws(data).frames()
    try:
        unpacked = unpack(frames)
        assert unpack(pack(unpacked)) == unpacked
    except TokenbusError:
        pass
    assert unpack(pack(frames)) == frames


def _packed() -> Iterator[bytes]:
    for frames in ([b"T"], [b"TOKEN", bytes(20), b"body"], [b"A", b"", b"", b"", b"x"]):
        yield as_input(pack(frames))
    yield as_input([*pack([b"A", b"b", b"c"]), bytes(100)])
    yield as_input([struct.pack("<BBHI", PACKING_VERSION, 0, 2, 2**32 - 1)])


# --- lines ----------------------------------------------------------------------------------------


def run_lines(data: bytes) -> None:
    """Decodes a line from a client or from the broker."""
    line = data.decode("utf-8", "surrogateescape")
    try:
        frames = line_frames(line)
        assert len(frames) in (2, 3)
        frames_line(frames)
    except TokenbusError as error:
        decode_line(error_line(error, line), FRONT)
    try:
        message = decode_line(line, FRONT)
    except TokenbusError:
        return
    encoded = encode_line(message)
    assert "\n" not in encoded
    assert encode_line(decode_line(encoded, FRONT)) == encoded


def _lines() -> Iterator[bytes]:
    for frames in samples(FRONT, "json"):
        yield b" ".join(frames)
    yield b'UPLOAD {"stream_id":1,"data":"AGFzbQEAAAA="}'
    yield b'HELLO {"encodings":["json"]}'


# --- columns and transcripts ----------------------------------------------------------------------


def run_columns(data: bytes) -> None:
    """Decodes the body of a TOKEN in columns, and converts it to entries and back."""
    try:
        body = decode_as(TokenColumns, data, "msgpack")
        rows = unpack_columns(body)
        entries = column_entries(body)
    except TokenbusError:
        return
    assert len(entries) == len(rows.streams) + len(body.entries)
    assert unpack_columns(body, rows) == rows or any(map(math.isnan, rows.logprobs))
    for texts in (False, True):
        packed = encode_body(pack_columns(entries, texts), "msgpack")
        again = decode_as(TokenColumns, packed, "msgpack")
        assert _in_streams(column_entries(again)) == _in_streams(entries)


def run_transcript(data: bytes) -> None:
    """Decodes the transcript of a stream that moves."""
    try:
        transcript = decode_transcript(data)
        entries = transcript.entries
    except TokenbusError:
        return
    encoded = encode_transcript(entries, transcript.left, transcript.why, transcript.pause_s)
    assert _in_streams(decode_transcript(encoded).entries) == _in_streams(entries)


def _in_streams(entries: list[Token]) -> dict[int, list[bytes]]:
    """The encoded entries of each stream. They are compared in this form, because NaN is not equal
    to itself."""
    streams: dict[int, list[bytes]] = {}
    for entry in entries:
        streams.setdefault(entry.stream_id, []).append(encode_body(entry, "msgpack"))
    return streams


def _entries() -> Iterator[list[Token]]:
    plain = [
        Token(token=t, stream_id=t % 3, logprob=-1.0, finish_reason=None, top_logprobs={t: -1.0})
        for t in range(5)
    ]
    yield []
    yield plain
    yield [structs.replace(entry, text=text) for entry, text in zip(plain, "aé€", strict=False)]
    draw = Random(1)
    for count in (1, 2, 4):
        yield [*plain, *(sample(Token, draw) for _ in range(count))]


def _columns() -> Iterator[bytes]:
    for entries in _entries():
        yield encode_body(pack_columns(entries), "msgpack")
        yield encode_body(pack_columns(entries, texts=True), "msgpack")


def _transcripts() -> Iterator[bytes]:
    for entries in _entries():
        yield encode_transcript(entries, "gpu-1", "its connection closed", 0.5)
        yield encode_body({"sent": entries}, "msgpack")


# --- token ids ------------------------------------------------------------------------------------


def run_tokens(data: bytes) -> None:
    """Decodes token ids in an attachment."""
    try:
        tokens = unpack_tokens(data)
    except TokenbusError:
        return
    assert pack_tokens(tokens) == data


_COLUMN_FIELDS = tuple(f.encode() for f in TokenColumns.__struct_encode_fields__)

CODECS = {
    "frames": Target(run_frames, _front_frames, _fields(FRONT)),
    "worker_frames": Target(run_worker_frames, _back_frames, _fields(BACK)),
    "header": Target(run_header, _headers),
    "packing": Target(run_packing, _packed),
    "lines": Target(run_lines, _lines, _fields(FRONT)),
    "columns": Target(run_columns, _columns, _COLUMN_FIELDS),
    "transcript": Target(run_transcript, _transcripts, (*_COLUMN_FIELDS, b"sent", b"pause_s")),
    "tokens": Target(run_tokens, lambda: [b"", b"\1\0\0\0", b"\xff" * 8]),
}
