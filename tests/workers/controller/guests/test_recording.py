"""Recorded calls are stored compactly, and count towards the memory of the tenant."""

from __future__ import annotations

from tokenbus.workers.controller.guest_memory import GuestMemory
from tokenbus.workers.controller.guests.messages import Advance, Item, Mid, Prompt
from tokenbus.workers.controller.guests.recording import (
    GRANT_BYTES,
    Begun,
    Recording,
    repetitions,
)
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log

from ..played import WORDS, vocabulary

TOTAL = 64 * GRANT_BYTES
HANDLE = 7
TOKENS = [400] * 30_000


def host(memory: GuestMemory, arg: bytes = b"") -> Host:
    limits = Limits()
    variables = None
    return Host(
        1,
        0,
        arg,
        vocabulary(WORDS),
        variables,  # type: ignore[arg-type]
        Log(limits.log_bytes),
        limits,
        memory=memory.of("mallory"),
    )


def repeated(recording: Recording) -> list[object]:
    """The requests that repeat the recorded calls."""
    calls = [event for event in recording.events if not isinstance(event, Begun)]
    return [request for call in calls for request, _ in repetitions(call, HANDLE, Limits(), 64)]


def test_each_recorded_call_is_repeated_in_its_order() -> None:
    recording = Recording(host(GuestMemory(TOTAL)))
    recording.add(Prompt(0, [1, 2]))
    for item in (Item(0, [5]), Item(0, [6]), Item(0), Item(0), Item(0, [8, 9], 1)):
        recording.add_round(item)
    recording.add(Mid(0, [0, 1]))
    assert repeated(recording) == [
        Prompt(HANDLE, [1, 2]),
        Advance([Item(HANDLE, [5]), Item(HANDLE, [6])]),
        Advance([Item(HANDLE)]),
        Advance([Item(HANDLE)]),
        Advance([Item(HANDLE, [8, 9], 1)]),
        Mid(HANDLE, [0, 1]),
    ]


def test_recorded_tokens_count_towards_the_memory_of_the_tenant() -> None:
    memory = GuestMemory(TOTAL)
    recording = Recording(host(memory))
    for dropped in range(TOTAL // len(TOKENS)):
        recording.add_round(Item(0, TOKENS, dropped))
        assert memory.used <= TOTAL // 2
    assert recording.failure is not None
    assert memory.used > TOTAL // 4
    recording.close()
    recording.close()
    assert memory.used == 0


def test_a_sequence_that_is_woken_again_and_again_takes_no_memory() -> None:
    memory = GuestMemory(TOTAL)
    recording = Recording(host(memory))
    for _ in range(10_000):
        recording.add_round(Item(0))
    assert memory.used <= GRANT_BYTES
    assert repeated(recording) == [Advance([Item(HANDLE)])] * 10_000


def test_forks_have_the_calls_of_their_parent_and_share_its_argument() -> None:
    memory = GuestMemory(TOTAL)
    first = host(memory, bytes(4 * GRANT_BYTES))
    parent = Recording(first)
    parent.add_round(Item(0))
    child = Recording(first, parent)
    child.add_round(Item(0))
    parent.add_round(Item(0, [3]))
    assert repeated(child) == [Advance([Item(HANDLE)])] * 2
    assert len(repeated(parent)) == 2
    assert memory.used == 6 * GRANT_BYTES
    child.close()
    assert memory.used == 5 * GRANT_BYTES
    grandchild = Recording(first, parent)
    parent.close()
    parent.close()
    assert memory.used == 5 * GRANT_BYTES, "the argument counts as long as a sequence has it"
    grandchild.close()
    assert memory.used == 0
