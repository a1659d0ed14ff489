"""Compares the logs of sessions with a plain list of entries for each request."""

from __future__ import annotations

import pytest
from tokenbus.broker.recent import SEGMENT_BYTES, Recent
from tokenbus.broker.stream_log import StreamLog
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.columns import pack_columns, plain_entry
from tokenbus.protocol.header import encode_token_header
from tokenbus.protocol.packing import pack

from ..worlds.stream_logs import World


def test_a_session_that_is_made_again_keeps_its_log_when_streams_of_before_end() -> None:
    recent = Recent(1 << 27, 1 << 30)
    before, again = StreamLog(recent, 7), StreamLog(recent, 7)
    before.begin(1, 0, 10)
    recent.distribute()
    again.begin(2, 1, 10)
    recent.distribute()
    before.remove(1)
    entry = plain_entry(1, 5, -1.0, 0, 0)
    recent.keep([7], [encode_body([entry], "msgpack")])
    assert again.entries([2]) == {2: [entry]}
    again.remove(2)
    assert recent.logs == {}


@pytest.mark.parametrize("seed", range(40))
def test_a_log_has_of_each_live_request_what_was_routed_for_it(seed: int) -> None:
    world = World(seed)
    for request in range(300):
        world.turn(request)
    world.check()
    world.end()


def test_a_request_begins_between_messages_of_equal_layout() -> None:
    recent = Recent(1 << 27, 1 << 30)
    log = StreamLog(recent, 7)
    log.begin(1, 1, 10)
    recent.distribute()

    def step(token: int) -> None:
        entries = [plain_entry(stream, token, -1.0, 0, 0) for stream in (1, 2)]
        body = encode_body(pack_columns(entries), "msgpack")
        recent.pending += pack([b"TOKEN", encode_token_header([7]), body])
        recent.settle()

    for token in (5, 6):
        step(token)
    log.begin(2, 2, 10)
    for token in (7, 8):
        step(token)
    found = log.entries([1, 2])
    assert [entry.token for entry in found[1]] == [5, 6, 7, 8]
    assert [entry.token for entry in found[2]] == [7, 8]


def test_more_than_there_is_memory_for_goes_through_it() -> None:
    """When the buffer is full, its oldest messages are distributed to the logs, and their
    segments are reused. No entry of a live request is lost."""
    world = World(1, sessions=2)
    kept, other = world.logs
    kept.begin(1, 1, 10)
    world.live[0, 1] = 1
    world.wanted[1] = []
    sizes = set()
    for request in range(10, 40):
        other.begin(request, 2, 10)
        large = b"\x90" + bytes(59_999)
        for _ in range(2 * SEGMENT_BYTES // len(large)):
            head = encode_token_header([other.session])
            [packed] = pack([b"TOKEN", head, large])
            world.recent.pending.append(packed)
            world.recent.settle()
            sizes.add(world.recent.size // SEGMENT_BYTES)
        world.message([0], size=2)
        other.remove(request)
    assert max(sizes) >= 10
    world.check()
    world.end()


def test_what_no_live_request_needs_is_dropped_without_being_read() -> None:
    world = World(2, sessions=1)
    [log] = world.logs
    for request in range(100):
        log.begin(request, 1, 10)
        world.message([0], size=1)
        if request:
            log.remove(request - 1)
    assert log.size == 10
    assert world.recent.size <= SEGMENT_BYTES
    log.remove(99)
    assert (world.recent.size, world.recent.total) == (0, 0)


@pytest.mark.parametrize("seed", range(10))
def test_the_bounds_of_a_log_and_of_all_hold_at_any_time(seed: int) -> None:
    """The bounds hold if the requests that began first are given up when the log exceeds a
    bound."""
    most, in_all = 6_000, 10_000
    world = World(seed, sessions=4)
    recent = world.recent = Recent(most, in_all)
    world.logs = logs = [StreamLog(recent, 100 + n) for n in range(4)]

    def keep_bounds() -> None:
        while recent.beyond:
            log = recent.beyond.pop()
            while log.size > recent.most and log.oldest is not None:
                world.live = {at: one for at, one in world.live.items() if one != log.oldest}
                log.remove(log.oldest)
        while recent.total > recent.max_total:
            log = max(logs, key=lambda one: one.size)
            assert log.oldest is not None
            world.live = {at: one for at, one in world.live.items() if one != log.oldest}
            log.remove(log.oldest)

    for request in range(600):
        world.turn(request)
        recent.settle()
        keep_bounds()
        assert recent.total + recent.size <= in_all
        assert max(log.size for log in logs) + recent.size <= most
    world.check()
    world.end()
