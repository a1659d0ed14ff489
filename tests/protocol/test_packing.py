"""Messages between broker and workers are the same after packing and unpacking, and other frames
are refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenbus.protocol.errors import Code, RequestError
from tokenbus.protocol.packing import MAX_PACKED, MAX_PACKED_BYTES, pack, unpack

LARGE = bytes(MAX_PACKED_BYTES + 1)
FRAME = st.binary(max_size=20) | st.sampled_from([LARGE, bytes(MAX_PACKED_BYTES)])


@given(st.lists(FRAME, min_size=1, max_size=6))
@example([b"TOKEN", b"header", b"body"])
@example([b"TOKEN", LARGE, b"body"])
@example([b"TOKEN", b"header", LARGE])
@example([b"", b"", b""])
def test_a_message_comes_back(frames: list[bytes]) -> None:
    assert unpack(pack(frames)) == frames


def test_small_frames_are_one_and_large_ones_are_not_copied() -> None:
    assert len(pack([b"TOKEN", b"header", *[b"body"] * 100])) == 1
    packed = pack([b"UPLOAD", b"header", b"body", LARGE, b"more"])
    assert len(packed) == 3
    assert packed[1] is LARGE


def test_more_frames_than_a_count_can_say_follow_unpacked() -> None:
    frames = [b"x"] * (MAX_PACKED + 2)
    packed = pack(frames)
    assert len(packed) == 3
    assert unpack(packed) == frames


@given(st.binary(max_size=40), st.lists(st.binary(max_size=4), max_size=2))
@example(b"\x02", [])
@example(b"\x02\x00\x00\x00", [])
def test_any_frames_are_a_message_or_a_request_error(start: bytes, more: list[bytes]) -> None:
    for first in (start, b"\x02\x00" + start, b"\x02\x00\x03\x00" + start):
        with contextlib.suppress(RequestError):
            frames = unpack([first, *more])
            assert sum(map(len, frames)) <= sum(map(len, [first, *more]))


@pytest.mark.parametrize("count", [3, 4])
def test_sizes_beyond_the_end_are_a_bad_message(count: int) -> None:
    [packed] = pack([b"TOKEN", *[b"frame"] * (count - 1)])
    # The last frame may have any size. The start of the message has the sizes of the other frames.
    for end in range(len(packed) - 5):
        with pytest.raises(RequestError) as caught:
            unpack([packed[:end]])
        assert caught.value.code == (Code.BAD_MESSAGE if end else Code.UNSUPPORTED_VERSION)


@pytest.mark.parametrize(
    ("frames", "version"), [([b"REGISTER", b"header", b"body"], 1), ([b"\x03" + bytes(20)], 3)]
)
def test_another_version_is_named(frames: list[bytes], version: int) -> None:
    with pytest.raises(RequestError, match=f"in version {version} .* version 2 is required"):
        unpack(frames)
