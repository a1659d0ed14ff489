"""The messages of a GPU worker's streams, where one of them cannot be encoded."""

from __future__ import annotations

import msgspec
from tokenbus.protocol.header import decode_header, decode_manifest
from tokenbus.workers.gpu.live_streams import LiveStreams
from tokenbus.workers.gpu.sequence import TokenOutput
from tokenbus.workers.gpu.streams import Frames, Stream


class Sent:
    """A table of streams, the frames that it has sent and the requests that it has released."""

    def __init__(self, *requests: int, live: int = 1) -> None:
        self.frames: list[Frames] = []
        self.released: list[int] = []
        self.streams = LiveStreams(
            self.frames.append, lambda stream: self.released.append(stream.request)
        )
        for request in requests:
            self.streams.add(Stream(request, 100 + request, request, "json", "m", live))


def output(request: int, **more: object) -> TokenOutput:
    return TokenOutput(request, 0, 5, -1.0, 0)._replace(**more)  # type: ignore[arg-type]


def test_what_cannot_be_encoded_ends_its_own_stream_with_an_error() -> None:
    sent = Sent(1, 2, 3)
    sent.streams.send([output(1), output(2, storage=[msgspec.msgpack.Ext(1, b"")]), output(3)])
    words = [frames[0] for frames in sent.frames]
    assert words == [b"TOKEN", b"ERROR", b"TOKEN"]
    assert [decode_manifest(f[1]).sessions for f in sent.frames[::2]] == [(101,), (103,)]
    header, error = decode_header(sent.frames[1][1]), msgspec.json.decode(sent.frames[1][2])
    assert (header.request, error["stream_id"], error["code"]) == (2, 2, "internal")
    assert "sending its tokens" in error["message"]
    assert sent.released == [2]
    assert [stream.request for stream in sent.streams] == [1, 3]


def test_a_stream_that_cannot_be_released_is_answered_all_the_same() -> None:
    sent = Sent(1)

    def fails(stream: Stream) -> None:
        raise KeyError(stream.request)

    sent.streams._release = fails
    [stream] = sent.streams
    sent.streams.fail(stream, ValueError("\udcff"), "testing")
    [[word, _, body]] = sent.frames
    assert word == b"ERROR"
    assert "\\udcff" in msgspec.json.decode(body)["message"]
    assert sent.streams.inconsistent
    assert not len(sent.streams)
