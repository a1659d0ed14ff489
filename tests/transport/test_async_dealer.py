"""A DEALER on an event loop, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq
from tokenbus.transport.async_dealer import PIPE, AsyncDealer
from tokenbus.transport.dealer import AddressError

from ..processes import free_port

WAIT_S = 300.0


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    """The broker's end of the connection. Its socket stores only few messages."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.RCVHWM, 10)
    socket.setsockopt(zmq.RCVBUF, 4096)
    socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
    socket.bind(f"tcp://127.0.0.1:{free_port()}")
    yield socket
    context.destroy(linger=0)


def address(router: zmq.Socket[bytes]) -> str:
    return router.getsockopt_string(zmq.LAST_ENDPOINT)


@pytest.mark.anyio
async def test_messages_go_both_ways_in_order(router: zmq.Socket[bytes]) -> None:
    dealer = AsyncDealer(router.context, address(router))
    try:
        for number in range(5):
            await dealer.send([b"M", b"%d" % number])
        peer = b""
        for number in range(5):
            peer, *frames = await asyncio.to_thread(router.recv_multipart)
            assert frames == [b"M", b"%d" % number]
        for number in range(500):
            router.send_multipart([peer, b"A", b"%d" % number])
        received: list[list[bytes]] = []
        async with asyncio.timeout(WAIT_S):
            while len(received) < 500:
                received += await dealer.receive()
                await dealer.send([b"M", b"a send between receives swallows no wake-up"])
        assert received == [[b"A", b"%d" % number] for number in range(500)]
    finally:
        dealer.close()


@pytest.mark.anyio
async def test_other_tasks_have_their_turns_while_messages_wait(
    router: zmq.Socket[bytes],
) -> None:
    dealer = AsyncDealer(router.context, address(router))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(others())
    try:
        await dealer.send([b"M", b""])
        peer, *_ = await asyncio.to_thread(router.recv_multipart)
        for number in range(900):
            router.send_multipart([peer, b"A", b"%d" % number])
        received = 0
        async with asyncio.timeout(WAIT_S):
            while received < 900:
                before = turns
                received += len(await dealer.receive())
                received += len(await dealer.receive()) if received < 900 else 0
                received += len(await dealer.receive()) if received < 900 else 0
                assert received >= 900 or turns > before
    finally:
        turning.cancel()
        dealer.close()


@pytest.mark.anyio
async def test_a_sender_waits_while_the_broker_does_not_read(router: zmq.Socket[bytes]) -> None:
    dealer = AsyncDealer(router.context, address(router))
    body = b"x" * 200_000
    sent = 0

    async def send() -> None:
        nonlocal sent
        while True:
            await dealer.send([b"M", body])
            sent += 1

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(WAIT_S):
            before = -1
            while before != sent or not sent:
                before = sent
                await asyncio.sleep(0.3)
        assert sent < 20 * PIPE
        stopped_at = sent
        async with asyncio.timeout(WAIT_S):
            while sent <= stopped_at + PIPE:
                await asyncio.to_thread(router.recv_multipart)
    finally:
        sending.cancel()
        dealer.close()


@pytest.mark.anyio
async def test_what_was_sent_before_the_close_arrives(router: zmq.Socket[bytes]) -> None:
    dealer = AsyncDealer(router.context, address(router))
    await dealer.send([b"BYE", b"{}"])
    dealer.close(linger_ms=int(WAIT_S * 1000))
    assert (await asyncio.to_thread(router.recv_multipart))[1:] == [b"BYE", b"{}"]


@pytest.mark.anyio
async def test_an_address_that_is_not_valid_is_refused() -> None:
    with pytest.raises(AddressError, match="'nowhere' is not a valid address"):
        AsyncDealer(zmq.Context.instance(), "nowhere")
