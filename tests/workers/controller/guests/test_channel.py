"""A channel carries messages of any size, and the worker's side handles any content."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from tokenbus.workers.controller.guests.channel import (
    AREA_BYTES,
    HEAD_BYTES,
    MAX_ANSWER_BYTES,
    Channel,
    ChannelClosed,
    ChannelFiles,
)


def both_sides() -> tuple[Channel, Channel]:
    files = ChannelFiles.make()
    copied = ChannelFiles(*map(os.dup, files))
    return Channel(files, guest=False), Channel(copied, guest=True)


@pytest.mark.parametrize(
    "size", [0, 1, AREA_BYTES - 1, AREA_BYTES, AREA_BYTES + 1, 3 * AREA_BYTES, 10_000_000]
)
def test_a_message_arrives_and_is_answered(size: int) -> None:
    worker, guest = both_sides()
    thread = threading.Thread(target=lambda: guest.send(guest.receive()[::-1]))
    thread.start()
    message = os.urandom(size)
    worker.send(message)
    assert worker.receive() == message[::-1]
    thread.join()


def test_memory_is_free_after_a_large_message() -> None:
    files = ChannelFiles.make()
    memory = os.dup(files.memory)
    copied = ChannelFiles(*map(os.dup, files))
    worker, guest = Channel(files, guest=False), Channel(copied, guest=True)
    worker.send(bytes(100))
    assert guest.receive() == bytes(100)
    worker.shrink(masks=False)
    small = os.fstat(memory).st_blocks
    assert small > 0
    worker.send(b"x" * AREA_BYTES)
    assert guest.receive() == b"x" * AREA_BYTES
    guest.masks[:] = b"x" * len(guest.masks)
    before = os.fstat(memory).st_blocks
    worker.shrink(masks=False)
    assert os.fstat(memory).st_blocks <= before - AREA_BYTES // 512
    worker.shrink(masks=True)
    assert os.fstat(memory).st_blocks <= small
    guest.send(b"after")
    assert worker.receive() == b"after"


def test_masks_are_shared() -> None:
    worker, guest = both_sides()
    guest.masks[100:104] = b"mask"
    guest.current = 7
    assert bytes(worker.masks[100:104]) == b"mask"
    assert worker.current == 7


def test_a_size_beyond_the_area_closes_the_channel() -> None:
    worker, guest = both_sides()
    guest.send(b"x")
    guest._head[:] = b"\xff" * HEAD_BYTES
    with pytest.raises(ChannelClosed, match="4294967295 bytes"):
        worker.receive()


def test_the_other_side_cannot_shrink_the_memory_or_block_the_worker() -> None:
    files = ChannelFiles.make()
    with pytest.raises(PermissionError):
        os.ftruncate(files.memory, 0)
    worker = Channel(files, guest=False)
    # The counter of the eventfd is full.
    os.write(files.to_guest, (2**64 - 2).to_bytes(8, "little"))
    worker.send(b"x")


def test_a_reader_ends_when_the_channel_is_closed() -> None:
    worker, _ = both_sides()
    ended: list[str] = []

    def read() -> None:
        try:
            worker.receive()
        except ChannelClosed as error:
            ended.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    worker.close()
    thread.join()
    assert ended == ["the process has ended"]


def test_a_reader_ends_although_the_other_side_has_consumed_the_notice() -> None:
    files = ChannelFiles.make()
    copied = os.dup(files.to_worker)
    worker = Channel(files, guest=False)
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(ChannelClosed):
            worker.receive()
        ended.set()

    worker.close()
    os.read(copied, 8)
    threading.Thread(target=read, daemon=True).start()
    assert ended.wait(60)


def test_the_answers_of_a_process_have_a_bound_of_their_own() -> None:
    worker, guest = both_sides()
    thread = threading.Thread(target=lambda: guest.send(bytes(MAX_ANSWER_BYTES + 1)), daemon=True)
    thread.start()
    with pytest.raises(ChannelClosed, match=f"all parts {MAX_ANSWER_BYTES + 1}"):
        worker.receive()
    guest.close()
    thread.join()


@pytest.mark.process
@pytest.mark.parametrize("free", [1, 2])
def test_a_channel_that_cannot_be_made_leaves_no_descriptor(free: int) -> None:
    """The test runs in a separate process, because the limit of descriptors applies to a whole
    process."""
    code = f"""
import os, resource
from tokenbus.workers.controller.guests.channel import ChannelFiles
before = os.listdir("/proc/self/fd")
lowest = os.dup(0)
os.close(lowest)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + {free}, hard))
try:
    ChannelFiles.make()
except OSError:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.listdir("/proc/self/fd") == before
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
