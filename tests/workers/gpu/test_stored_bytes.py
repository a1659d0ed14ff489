"""The memory of the requests and the entries that a GPU worker stores for live streams is bounded,
and clients share the bound."""

from __future__ import annotations

from typing import Any

import pytest
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.errors import Code, UnavailableError
from tokenbus.protocol.messages import Error
from tokenbus.workers.gpu.serving import kept_streams, stored_bytes
from tokenbus.workers.gpu.serving.stored_bytes import MEMORY_PART, max_stored_bytes
from tokenbus.workers.gpu.serving.streams import Move

from .test_live_streams import Batch, Sent, output

BOUND = 100_000
FORMS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"top_logprobs": {n: -n / 3 for n in range(256)}},
    "logs": {"logs": "x" * 3000},
    "messages": {"messages": ["x" * 1000] * 3},
    "writes": {"storage": [{"WriteVar": {"name": "a", "value": "00" * 1500}}]},
}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Two streams of different clients at a worker with the bound ``BOUND``."""
    monkeypatch.setattr(stored_bytes, "machine_memory", lambda: MEMORY_PART * BOUND)
    found = Sent(1, 2)
    for stream in found.streams:
        stream.client = stream.request
    return found


def ends(sent: Sent) -> list[tuple[int | None, str]]:
    """The stream and the code of each ERROR."""
    errors = [decode_as(Error, f[2], "json") for f in sent.frames if f[0] == b"ERROR"]
    return [(error.stream_id, str(error.code)) for error in errors]


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_ends_if_its_client_stores_more_than_its_share(sent: Sent, form: str) -> None:
    count = 0
    while not ends(sent):
        sent.streams.send([output(1, **FORMS[form])])
        count += 1
    # A single client gets half of the bound. An entry counts about 5,000 bytes.
    assert 7 <= count <= 13
    assert (ends(sent), sent.released) == ([(1, "too_large")], [1])
    sent.streams.send([output(2, **FORMS[form])])
    assert [stream.request for stream in sent.streams] == [2]


def test_the_requests_of_running_streams_count(sent: Sent) -> None:
    added = [next(iter(Sent(number).streams)) for number in range(3, 14)]
    for stream in added:
        stream.client, stream.frames = 1, [bytes(BOUND // 20)]
    # A single client gets half of the bound.
    for stream in added[:10]:
        sent.streams.add(stream)
    with pytest.raises(UnavailableError, match="your waiting and running streams take") as caught:
        sent.streams.add(added[10])
    assert caught.value.code == Code.CLIENT_LIMIT
    assert "gpu_workers" in caught.value.message


def test_the_candidates_of_rows_count(sent: Sent) -> None:
    batch = Batch(reporting={1})
    for _ in range(400):
        if not ends(sent):
            sent.streams.send(batch.step((1, 0)))
    assert ends(sent) == [(1, "too_large")]


def test_plain_tokens_do_not_count(sent: Sent) -> None:
    batch = Batch(with_text={1})
    for _ in range(5000):
        sent.streams.send(batch.step((1, 0)))
    assert ends(sent) == []


def test_appended_tokens_count(sent: Sent) -> None:
    """A program may append and drop millions of tokens."""
    count = 0
    while not ends(sent) and count < 200:
        sent.streams.send([output(1, logprob=None, top_logprobs={})])
        count += 1
    assert ends(sent) == [(1, "too_large")]
    assert 60 <= count <= 70


def test_the_entries_of_an_earlier_worker_do_not_count(sent: Sent) -> None:
    [stream, _] = sent.streams
    before = stream.long_bytes
    stream.restore([output(1, logprob=None, top_logprobs={})] * 200, Move("w", "", 0.0), 1)
    assert stream.long_bytes == before


def test_an_ended_stream_does_not_count(sent: Sent) -> None:
    for number in range(3, 40):
        [stream] = list(Sent(number).streams)
        sent.streams.add(stream)
        sent.streams.send([output(number, **FORMS["logs"]) for _ in range(4)])
        sent.streams.send([output(number, finish_reason="length")])
    assert ends(sent) == []


def test_the_bound_of_ended_streams_counts_the_logs_of_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_streams, "MAX_TOKENS", 1000)
    for number, kept in ((6, True), (7, False)):
        sent = Sent(1)
        sent.streams.send([output(1, logs="x" * 3000) for _ in range(number)])
        sent.streams.send([output(1, finish_reason="length")])
        assert (sent.streams.kept(1) is not None) == kept


def test_the_workers_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_bytes, "machine_memory", lambda: 800)
    assert (max_stored_bytes(1), max_stored_bytes(4)) == (100, 25)
