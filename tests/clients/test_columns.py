"""Tokens in columns lead to the same events at a client as tokens in entries."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.clients.calls import Call, Ended, Event
from tokenbus.clients.connection import Connection
from tokenbus.clients.request_options import generate_call
from tokenbus.clients.results import Sequences
from tokenbus.clients.streams import AsyncStream, Stream
from tokenbus.protocol.bodies import encode_body, pack_tokens
from tokenbus.protocol.columns import pack_columns, plain_entry
from tokenbus.protocol.errors import SlowClientError
from tokenbus.protocol.messages import Token

from ..worlds.token_columns import CALLS, KEYS, World

STEP = st.tuples(
    st.just("step"),
    st.sampled_from([KEYS, KEYS, KEYS[2:], KEYS[1::2]]),
    st.sampled_from([None, None, None, 0, 1]),
)
"""A TOKEN message: the sequences that get a token, and the call whose tokens have text, if any."""
OTHER = st.tuples(
    st.sampled_from(["end", "lost", "resume", "resume twice", "cancel", "time", "fail"]),
    st.integers(0, CALLS - 1),
    st.integers(0, 3),
)
STORY = st.lists(st.one_of(STEP, STEP, OTHER), min_size=5, max_size=25)


ALL = ("step", KEYS, None)
STORIES: list[list[tuple[str, Any, Any]]] = [
    [ALL, ALL, ("cancel", 0, 0), ALL, ("time", 0, 1), ALL],
    [ALL, ALL, ("resume", 0, 2), ALL, ALL],
    [ALL, ALL, ("resume twice", 0, 2), ALL, ALL],
    [ALL, ALL, ("lost", 0, 0), ("time", 0, 3), ALL, ALL, ALL],
    [ALL, ALL, ("fail", 1, 0), ALL, ("time", 0, 3), ALL, ALL, ALL, ("end", 1, 0)],
    [ALL, ALL, ("step", KEYS, 1), ALL, ("time", 0, 2), ("resume", 0, 0), ALL, ("end", 1, 0), ALL],
]
"""Sequences of events that have failed in the past, or that test special cases."""


def test_the_same_events_in_these_stories() -> None:
    for story in STORIES:
        compare(story)


@given(STORY)
def test_columns_and_entries_are_the_same_events(story: list[tuple[str, Any, Any]]) -> None:
    compare(story)


def compare(story: list[tuple[str, Any, Any]]) -> None:
    by_entries, by_columns = World(False), World(True)
    for event in story:
        by_entries.play(*event)
        by_columns.play(*event)
    assert by_columns.state() == by_entries.state()
    for mine, others in zip(by_columns.events, by_entries.events, strict=True):
        assert [_shown(e) for e in mine] == [_shown(e) for e in others]


def _shown(event: Event) -> Any:
    if isinstance(event, Ended):
        # Errors are compared by their text, because two errors are never equal.
        return str(event.error)
    return event


def test_columns_that_are_not_valid_are_dropped() -> None:
    world = World(True)
    body = pack_columns([plain_entry(world.calls[0].number, 5, -1.0, 0, 0)])
    body.tokens += b"\0"
    world.session.on_frames([b"TOKEN", encode_body(body, "msgpack")], 0.0)
    assert world.session.ready == []
    world.play("step", [(0, 0)], None)
    assert len(world.events[0]) == 1


# --- rows as entries of a stream ------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=30))
def test_sequences_are_the_same_from_rows_and_from_entries(keys: list[tuple[int, bool]]) -> None:
    of_rows, of_entries = Sequences(), Sequences()
    for pos, (seq, looked_at) in enumerate(keys):
        more: tuple[float | None, int | bytes | None] = (None, pos or None)
        if pos % 2:
            more = (-0.5, pack_tokens([7, 9]))
        row = (1, pos, -float(pos), pos, seq, str(pos) if pos % 3 else None, *more)
        of_entries.add(plain_entry(*row))
        of_rows.add_row(row)
        if looked_at:
            assert of_rows.listed() == of_entries.listed()
    assert of_rows.listed() == of_entries.listed()
    assert [s.texts for s in of_rows.listed()] == [s.texts for s in of_entries.listed()]


class Unconnected(Connection):
    """A connection whose events come from the test."""

    def __init__(self) -> None:
        self.cancelled: list[Call] = []

    def submit(self, call: Call) -> None:
        """Sends nothing."""

    def cancel(self, call: Call) -> None:
        self.cancelled.append(call)


def arrive(call: Call, first: int, last: int, end: bool = False) -> None:
    """Adds the rows of a message in columns to a call. If ``end`` is true, the call then ends."""
    for pos in range(first, last):
        call.unread.append((1, pos, -float(pos), pos, 0, None, None, None))
        if call.unread.watched:
            call.unread.wake()
    if end:
        call.take([Ended(None)])


def entries(first: int, last: int) -> list[Token]:
    return [plain_entry(1, pos, -float(pos), pos, 0) for pos in range(first, last)]


def test_a_blocking_stream_gives_rows_as_entries() -> None:
    call = generate_call([1], {})
    with Stream(None, Unconnected(), call, None) as stream:
        arrive(call, 0, 2)
        assert [next(stream), next(stream)] == entries(0, 2)
        later = threading.Timer(0.01, arrive, (call, 2, 5, True))
        later.start()
        assert list(stream) == entries(2, 5)
        later.join()
        [sequence] = stream.sequences
        assert sequence.tokens == [0, 1, 2, 3, 4]
        assert sequence.top_logprobs[3] == {3: -3.0}


def test_a_blocking_stream_that_is_read_to_its_end_shows_how_far_it_is() -> None:
    call = generate_call([1], {})
    stream = Stream(None, Unconnected(), call, None)
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(stream.wait()))
    reader.start()
    while not stream._to_end:  # Wait until the other thread is in ``stream.wait()``.
        pass
    arrive(call, 0, 3)
    assert stream.sequences[0].tokens == [0, 1, 2]
    arrive(call, 3, 4, end=True)
    reader.join(300)
    assert [s.tokens for s in found] == [[0, 1, 2, 3]]


@pytest.mark.anyio
async def test_an_async_stream_gives_rows_as_entries() -> None:
    call = generate_call([1], {})
    stream = AsyncStream(None, Unconnected(), call, None)
    loop = asyncio.get_running_loop()
    loop.call_soon(arrive, call, 0, 2)
    assert await stream.arrived() == entries(0, 2)
    loop.call_soon(arrive, call, 2, 3)
    assert await anext(stream) == entries(2, 3)[0]
    loop.call_soon(arrive, call, 3, 6, True)
    assert [entry async for entry in stream] == entries(3, 6)
    assert stream.sequences[0].tokens == list(range(6))


@pytest.mark.anyio
async def test_a_task_that_waits_for_an_entry_can_be_cancelled() -> None:
    call = generate_call([1], {})
    stream = AsyncStream(None, Unconnected(), call, None)
    waits = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    asyncio.get_running_loop().call_soon(arrive, call, 0, 1, True)
    assert [entry async for entry in stream] == entries(0, 1)


@pytest.mark.anyio
@pytest.mark.parametrize("to_end", [False, True])
async def test_a_stream_bounds_the_rows_that_nobody_reads(to_end: bool) -> None:
    call = generate_call([1], {})
    connection = Unconnected()
    stream = AsyncStream(None, connection, call, None, max_unread=3)
    if to_end:
        waits = asyncio.ensure_future(stream.wait())
        await asyncio.sleep(0)
        arrive(call, 0, 50, end=True)
        [sequence] = await waits
        assert sequence.tokens == list(range(50))
        assert connection.cancelled == []
        return
    arrive(call, 0, 50, end=True)
    assert connection.cancelled == [call]
    assert [await anext(stream) for _ in range(3)] == entries(0, 3)
    with pytest.raises(SlowClientError, match="more than 3 entries"):
        await anext(stream)
