"""Large frames are sent without a copy: ZeroMQ reads the memory of the broker's own object."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import pytest
import zmq
from tokenbus.broker.outbox import Sent
from tokenbus.broker.sockets import MAX_COPIED_BYTES, packing_sender, sender
from tokenbus.protocol.packing import unpack

PEER = b"peer"
LARGE = 4 * MAX_COPIED_BYTES


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A ROUTER, and a DEALER that is connected to it within the process. Between such sockets,
    ZeroMQ passes the memory of a message on."""
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.setsockopt(zmq.ROUTING_ID, PEER)
        dealer.setsockopt(zmq.RCVTIMEO, 60_000)
        router.bind("inproc://large")
        dealer.connect("inproc://large")
        dealer.send(b"here")
        router.recv_multipart()
        yield router, dealer


def address(content: bytes) -> int | None:
    return ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value


def received(dealer: zmq.Socket[bytes]) -> list[tuple[int, bytes]]:
    """The frames of the next message, each with the address of its memory."""
    frames = dealer.recv_multipart(copy=False)
    found = [ctypes.addressof(ctypes.c_char.from_buffer(frame.buffer)) for frame in frames]
    return list(zip(found, [frame.bytes for frame in frames], strict=True))


def test_only_small_frames_are_copied(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    router, dealer = sockets
    small, large, last = b"s" * MAX_COPIED_BYTES, b"x" * LARGE, b"y" * LARGE
    assert sender(router)(PEER, [small, large, last]) is Sent.OK
    (first, _), (second, _), (third, _) = received(dealer)
    assert first != address(small)
    assert (second, third) == (address(large), address(last))


def test_a_large_frame_of_a_message_to_a_worker_is_not_copied(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    router, dealer = sockets
    buffer = b"x" * LARGE
    assert packing_sender(router)(PEER, [b"GENERATE", b"head", b"{}", buffer]) is Sent.OK
    found = received(dealer)
    assert unpack([frame for _, frame in found]) == [b"GENERATE", b"head", b"{}", buffer]
    assert found[-1][0] == address(buffer)


def test_a_frame_that_the_broker_has_dropped_arrives_unchanged(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    router, dealer = sockets
    send = sender(router)
    for number in range(8):
        assert send(PEER, [bytes([number]) * LARGE]) is Sent.OK
    gc.collect()
    _others = [b"z" * LARGE for _ in range(16)]
    for number in range(8):
        [(_, content)] = received(dealer)
        assert content == bytes([number]) * LARGE
