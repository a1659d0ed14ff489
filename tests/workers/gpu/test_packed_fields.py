"""A GPU worker packs fields of entries that it has sent. Answers to an ATTACH, and JOURNALs, have
the same values as before packing, to the last bit. The budget of answers and the bound on ended
streams count the packed bytes."""

from __future__ import annotations

import time
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw, structs
from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.header import Flag
from tokenbus.protocol.messages import Token
from tokenbus.protocol.sampling import Distribution
from tokenbus.workers.gpu.engine.sequence import TokenOutput
from tokenbus.workers.gpu.serving import kept_streams
from tokenbus.workers.gpu.serving.attaching import ANSWER_ENTRIES, CANDIDATES_PER_ENTRY, Attaching
from tokenbus.workers.gpu.serving.packed_fields import pack
from tokenbus.workers.gpu.serving.resumption import resume
from tokenbus.workers.gpu.serving.streams import Form, Move, Stream

from .test_live_streams import Sent, entries_of, output

IDS = st.integers(0, 2**32 - 1)
LOGPROBS = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)
MAPS = st.dictionaries(IDS, LOGPROBS, max_size=5)
LISTS = st.lists(IDS, max_size=5)
DISTRIBUTIONS = st.builds(Distribution, logprob=LOGPROBS, rank=IDS, entropy=st.just(0.5), top=MAPS)
OUTPUTS = st.lists(
    st.builds(
        TokenOutput,
        token=IDS,
        stream_id=st.just(0),
        logprob=LOGPROBS,
        finish_reason=st.none(),
        request=st.just(1),
        top_logprobs=MAPS,
        kept=st.one_of(LISTS, IDS, st.just(UNSET)),
        cut=LISTS,
        bias=MAPS,
        distribution=st.none() | DISTRIBUTIONS,
    ),
    min_size=1,
    max_size=6,
)


@given(OUTPUTS, st.sampled_from(["json", "msgpack", "columns"]), st.integers(0, 3))
def test_packed_entries_are_sent_again_with_the_same_bits(
    outputs: list[TokenOutput], form: Form, received: int
) -> None:
    sent = Sent(1, form=form)
    [stream] = sent.streams
    for each in outputs:
        sent.streams.send([each])
    whole = sent.entries()[1]
    sent.frames.clear()
    sent.streams.attach([Attaching(stream, 0, received)])
    missed = whole[received:]
    bodies = [frames[2] for frames in sent.frames if frames[0] == b"TOKEN"]
    assert bodies == ([encode_body(missed, stream.encoding)] if missed else [])
    sent.frames.clear()
    sent.streams.send_journal(stream)
    assert encode_body(entries_of(sent.frames[0][3]), "json") == encode_body(whole, "json")
    # A restarted controller is replayed from these entries.
    assert encode_body(sent.streams.sent(stream), "json") == encode_body(whole, "json")


def many(request: int = 1, pairs: int = 256, **more: object) -> TokenOutput:
    """An output with ``pairs`` log-probabilities."""
    return output(request, top_logprobs={n: -n / 3 for n in range(pairs)}, **more)


def test_a_sent_entry_is_stored_without_an_object_for_each_pair() -> None:
    sent = Sent(1)
    sent.streams.send([many(cut=[1, 2], bias={1: 0.5, 2: 0.25}, kept=[3, 4])])
    [(_, entry)] = next(sent.streams.reported()).entries
    fields = entry.top_logprobs, entry.cut, entry.bias, entry.kept
    assert all(isinstance(field, Raw) for field in fields)


def test_an_answer_counts_for_the_pairs_that_it_sends() -> None:
    sent = Sent(1)
    [stream] = sent.streams
    for _ in range(10):
        sent.streams.send([many()])
    cost = sent.streams.cost(Attaching(stream, 0, 0)) - ANSWER_ENTRIES - 10
    # A pair has 10 to 14 packed bytes. ``Stream.num_candidates`` counts 4 packed bytes as one
    # candidate, so a pair counts as 2 to 4 candidates.
    assert 2 * 2560 <= cost * CANDIDATES_PER_ENTRY <= 4 * 2560
    assert sent.streams.cost(Attaching(stream, 0, 10)) == ANSWER_ENTRIES


@pytest.mark.parametrize("stored", [True, False])
def test_the_bound_of_ended_streams_counts_pairs(
    monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    # ``Stream.size`` of ten entries with 256 pairs each is about 1,350 tokens.
    monkeypatch.setattr(kept_streams, "MAX_TOKENS", 2000 if stored else 1000)
    sent = Sent(1)
    for _ in range(9):
        sent.streams.send([many()])
    sent.streams.send([many(finish_reason="length")])
    assert (sent.streams.kept(1) is not None) == stored
    sent.streams.drop(1)
    assert sent.streams._kept._tokens == 0


def test_the_entries_of_an_earlier_worker_are_packed_and_replayed() -> None:
    """The controller of a moved stream is replayed from the entries that came with the stream."""
    told = Distribution(logprob=-1.0, rank=1, entropy=0.5, top={1: -1.0, 2: -2.0})
    received: list[Token] = [
        structs.replace(many(), stream_id=1, distribution=told) for _ in range(3)
    ]
    before: list[Token] = deepcopy(received)
    stream = Stream(1, 101, 1, "json", "m", 1)
    stream.restore(received, Move("w", "it was lost", time.monotonic()), 1)
    assert received == before
    assert 3 * 2560 <= stream.packed_bytes < 3 * 4000
    sent = Sent()
    sent.streams.add(stream)
    sent.streams.take_form(stream, Flag(0))
    sent.streams.attach([Attaching(stream, 0, 0)])
    assert entries_of(sent.frames[-1][2]) == decode_as(list[Token], encode_body(before, "json"))
    [replay] = resume(sent.streams.sent(stream), steered=True).replay
    assert replay.distributions == {0: told, 1: told, 2: told}


def test_an_entry_is_packed_once() -> None:
    entry = many()
    assert pack(entry) > 2560
    assert pack(entry) == 0
