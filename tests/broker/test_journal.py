"""The journal of a session against a plain list of entries for each request."""

from __future__ import annotations

import random

import pytest
from tokenbus.broker.journal import Journal
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.columns import pack_columns, plain_entry
from tokenbus.protocol.messages import Token


def drawn_body(rng: random.Random, journal: Journal, entries: list[Token]) -> bytes:
    if journal.json and rng.random() < 0.5:
        return encode_body(entries, "json")
    return encode_body(pack_columns(entries) if rng.random() < 0.5 else entries, "msgpack")


@pytest.mark.parametrize("seed", range(20))
def test_a_journal_has_of_each_live_request_what_was_routed_for_it(seed: int) -> None:
    rng = random.Random(seed)
    journal = Journal()
    journal.json = rng.random() < 0.5
    wanted: dict[int, list[Token]] = {}
    live: dict[int, int] = {}
    """The request of each live stream."""
    for request in range(200):
        what = rng.random()
        stream = rng.randrange(7)
        if what < 0.15 and stream not in live:
            live[stream] = request
            wanted[request] = []
            journal.begin(request, stream, 10)
        elif what < 0.25 and stream in live:
            journal.end(live.pop(stream))
        elif what < 0.35:
            journal.pack()
        elif what < 0.4 and stream in live:
            received = rng.randrange(len(wanted[live[stream]]) + 1)
            journal.repeats(live[stream], received)
            del wanted[live[stream]][received:]
        else:
            count = rng.choice([1, 2, 40])
            entries = [
                plain_entry(rng.randrange(7), rng.randrange(999), -1.0, 0, 0) for _ in range(count)
            ]
            journal.tail.append(drawn_body(rng, journal, entries))
            for entry in entries:
                if entry.stream_id in live:
                    wanted[live[entry.stream_id]].append(entry)
    assert journal.entries(live.values()) == {number: wanted[number] for number in live.values()}
    for number in list(live.values()):
        journal.end(number)
    journal.pack()
    assert (journal.size, len(journal.tail)) == (0, 0)
