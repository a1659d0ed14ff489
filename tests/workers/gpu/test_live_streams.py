"""The messages of a GPU worker's streams: tokens in columns and in entries, and outputs that cannot
be encoded."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from tokenbus.protocol.bodies import Encoding, decode_as, encode_body, unpack_tokens
from tokenbus.protocol.columns import TokenBody, TokenColumns, column_entries
from tokenbus.protocol.header import Flag, decode_header, decode_manifest
from tokenbus.protocol.messages import Token
from tokenbus.protocol.sampling import Sampling
from tokenbus.protocol.worker_messages import Journal
from tokenbus.workers.gpu.engine import sequence
from tokenbus.workers.gpu.engine.sequence import PromptUsage, Sequence, StepOutputs, TokenOutput
from tokenbus.workers.gpu.sampling.candidates import Candidate
from tokenbus.workers.gpu.serving import kept_streams, recipients, streams
from tokenbus.workers.gpu.serving.attaching import ANSWER_ENTRIES, Attaching
from tokenbus.workers.gpu.serving.kept_streams import KeptStreams
from tokenbus.workers.gpu.serving.live_streams import LiveStreams
from tokenbus.workers.gpu.serving.streams import ROW, Form, Frames, Stream


class Sent:
    """A table of streams, the frames that it has sent, and the requests that it has released."""

    def __init__(self, *requests: int, live: int = 1, form: Form = "json") -> None:
        self.frames: list[Frames] = []
        self.released: list[int] = []
        self.streams = LiveStreams(
            lambda frames, link: self.frames.append(frames),
            lambda stream: self.released.append(stream.request),
        )
        for request in requests:
            encoding: Encoding = "json" if form == "json" else "msgpack"
            stream = Stream(request, 100 + request, request, encoding, "m", live)
            stream.columns = stream.texts = form == "columns"
            stream.usage = PromptUsage(9, 4)
            self.streams.add(stream)

    def entries(self) -> dict[int, list[Token]]:
        """The entries that clients have received, by stream."""
        found: dict[int, list[Token]] = {}
        for frames in self.frames:
            if frames[0] == b"TOKEN":
                sessions = decode_manifest(frames[1]).sessions
                assert len(set(sessions)) == len(sessions)
                for body in frames[2:]:
                    for entry in entries_of(body):
                        found.setdefault(entry.stream_id, []).append(entry)
        return found

    def columns(self) -> list[TokenColumns]:
        """The bodies that have columns."""
        bodies = [b for frames in self.frames if frames[0] == b"TOKEN" for b in frames[2:]]
        decoded = [decode_as(TokenBody, body) for body in bodies]
        return [body for body in decoded if isinstance(body, TokenColumns)]


def entries_of(body: bytes) -> list[Token]:
    decoded: TokenBody = decode_as(TokenBody, body)
    return column_entries(decoded) if isinstance(decoded, TokenColumns) else decoded


class Batch:
    """Makes outputs of an engine. A test chooses the sequences of each step.

    Sequences of the requests ``with_text`` have text, which is empty in every third step. Those of
    the requests ``reporting`` have ``processed`` and ``kept``.
    """

    def __init__(
        self, with_text: Set[int] = frozenset(), reporting: Set[int] = frozenset()
    ) -> None:
        self._with_text = with_text
        self._reporting = reporting
        self._sequences: dict[tuple[int, int], Sequence] = {}
        self._last: list[Sequence] = []

    def step(self, *keys: tuple[int, int], token: int = 5) -> StepOutputs:
        """One more token for each of these sequences, (request, seq). The first tokens of a request
        are entries."""
        if not keys:
            return StepOutputs()
        columns = self.rows(*keys, token=token)
        firsts = zip(columns.sequences, columns.positions.tolist(), strict=True)
        columns_or_none, first = columns.without({s.request for s, p in firsts if p == 0})
        return StepOutputs(first, columns_or_none)

    def rows(self, *keys: tuple[int, int], token: int = 5) -> sequence.TokenColumns:
        """One more token for each of these sequences, in columns."""
        sequences = []
        for key in keys:
            reports = key[0] in self._reporting
            sampling = Sampling(processed_logprobs=reports, kept=reports)
            new = Sequence(*key, [1], 1, sampling, 9, with_text=key[0] in self._with_text)
            sequences.append(self._sequences.setdefault(key, new))
            sequences[-1].tokens.append(token)
        if sequences != self._last:
            self._last = sequences
        positions = np.array([s.num_generated - 1 for s in self._last])
        logprobs = np.array([-1 / (3 + p) for p in positions.tolist()])
        texts = [f"{p} é" * (p % 3) if s.with_text else None for s, p in self._at()]
        columns = sequence.TokenColumns(self._last, token + positions, logprobs, positions)
        if any(text is not None for text in texts):
            columns.texts = texts
        if any(s.reports_candidates for s in self._last):
            columns.candidates = [
                Candidate(-p / 7, p if p % 3 else packed(p)) if s.reports_candidates else None
                for s, p in self._at()
            ]
        return columns

    def _at(self) -> list[tuple[Sequence, int]]:
        return [(s, s.num_generated - 1) for s in self._last]


def packed(number: int) -> bytes:
    """The token ids below ``number``, in the form of a column."""
    return np.arange(number, dtype="<u4").tobytes()


def output(request: int, **more: object) -> TokenOutput:
    made = TokenOutput(token=5, stream_id=0, logprob=-1.0, finish_reason=None, request=request)
    return msgspec.structs.replace(made, **more)


def test_what_cannot_be_encoded_ends_its_own_stream_with_an_error() -> None:
    sent = Sent(1, 2, 3)
    sent.streams.send([output(1), output(2, storage=[msgspec.msgpack.Ext(1, b"")]), output(3)])
    words = [frames[0] for frames in sent.frames]
    assert words == [b"TOKEN", b"ERROR", b"TOKEN"]
    assert [decode_manifest(f[1]).sessions for f in sent.frames[::2]] == [(101,), (103,)]
    header, error = decode_header(sent.frames[1][1]), msgspec.json.decode(sent.frames[1][2])
    assert (header.request, error["stream_id"], error["code"]) == (2, 2, "internal")
    assert "sending its tokens" in error["message"]
    assert sent.released == [2]
    assert [stream.request for stream in sent.streams] == [1, 3]


def test_a_stream_that_cannot_be_released_is_answered_all_the_same() -> None:
    sent = Sent(1)

    def fails(stream: Stream) -> None:
        raise KeyError(stream.request)

    sent.streams._release = fails
    [stream] = sent.streams
    sent.streams.fail(stream, ValueError("\udcff"), "testing")
    [[word, _, body]] = sent.frames
    assert word == b"ERROR"
    assert "\\udcff" in msgspec.json.decode(body)["message"]
    assert sent.streams.inconsistent
    assert not len(sent.streams)


# --- columns and entries are the same -------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.sets(st.tuples(st.integers(1, 4), st.integers(0, 1))), st.integers(0, 30)),
    max_size=12,
)
"""For each step: its sequences, and a number from which ``play`` takes the request whose outputs
are entries."""
WITH_TEXT = st.sets(st.integers(1, 4))
"""The requests that have text."""
REPORTING = st.sets(st.integers(1, 4))
"""The requests that report the candidates of their tokens."""


@pytest.fixture
def stored_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores the rows of streams after every second step."""
    monkeypatch.setattr(recipients, "MAX_STEPS", 2)


def play(
    sent: Sent,
    steps: list[tuple[set[tuple[int, int]], int]],
    with_text: Set[int] = frozenset(),
    reporting: Set[int] = frozenset(),
) -> None:
    """Sends steps. In each step, the outputs of the request ``number % 8`` and first tokens are
    entries; all other outputs are rows. If the number is below 8, this request ends."""
    batch = Batch(with_text, reporting)
    over: set[int] = set()
    for keys, number in steps:
        alone = number % 8
        alive = sorted(key for key in keys if key[0] not in over)
        step = batch.step(*(key for key in alive if key[0] != alone))
        others = [
            output(request, seq=seq, token=7, logprob=None, text="x")
            for request, seq in alive
            if request == alone
        ]
        if number < 8 and others:
            others[-1].finish_reason = "stop"
            over.add(alone)
        step.others += others
        sent.streams.send(step)


FORMS = st.sampled_from(["json", "msgpack", "columns"])


@given(STEPS, st.lists(FORMS, min_size=4, max_size=4), WITH_TEXT, REPORTING, st.booleans())
@pytest.mark.usefixtures("stored_early")
def test_every_form_gives_a_client_the_same_entries(
    steps: list[tuple[set[tuple[int, int]], int]],
    forms: list[Form],
    with_text: set[int],
    reporting: set[int],
    takes_texts: bool,
) -> None:
    plain, mixed = Sent(1, 2, 3, 4), Sent(1, 2, 3, 4)
    for stream, form in zip(mixed.streams, forms, strict=True):
        stream.session = 100  # Streams of the same form belong to one client.
        stream.encoding, stream.columns = ("json" if form == "json" else "msgpack"), False
        stream.columns = form == "columns"
        stream.texts = stream.columns and takes_texts
        stream.session += ["json", "msgpack", "columns"].index(form)
    play(plain, steps, with_text, reporting)
    play(mixed, steps, with_text, reporting)
    assert mixed.entries() == plain.entries()
    assert takes_texts or not any(body.texts for body in mixed.columns())
    assert mixed.released == plain.released
    for sent in (plain, mixed):
        sent.streams._dissolve()
    counts = [[s.num_tokens for s in sent.streams] for sent in (plain, mixed)]
    assert counts[0] == counts[1]
    for stream in mixed.streams:
        got = plain.entries().get(stream.request, [])
        assert stream.num_tokens == len(got)
        assert [e.prompt_tokens for e in got[:1]] == [9] * len(got[:1])


COLUMNS = Flag.MSGPACK | Flag.COLUMNS
FLAGS = st.sampled_from([Flag(0), Flag.MSGPACK, COLUMNS, COLUMNS | Flag.TEXTS])
"""The flags of an attaching client, which determine the form of its tokens."""


@given(STEPS, STEPS, st.integers(0, 9), WITH_TEXT, REPORTING, FLAGS, FORMS)
@pytest.mark.usefixtures("stored_early")
def test_a_client_that_attaches_gets_what_it_has_missed(
    steps: list[tuple[set[tuple[int, int]], int]],
    later: list[tuple[set[tuple[int, int]], int]],
    received: int,
    with_text: set[int],
    reporting: set[int],
    flags: Flag,
    form: Form,
) -> None:
    whole, sent = Sent(1, 2, 3, 4), Sent(1, 2, 3, 4, form=form)
    for stream in sent.streams:
        stream.session = 100
    play(whole, steps, with_text, reporting)
    play(sent, steps, with_text, reporting)
    live, before = list(sent.streams), whole.entries()
    sent.frames.clear()
    for stream in live:
        sent.streams.take_form(stream, flags)
        assert stream.flags == flags
    sent.streams.attach(Attaching(stream, 0, received) for stream in live)
    play(whole, later, with_text, reporting)
    play(sent, later, with_text, reporting)
    got = entries_after_answers(sent.frames)
    for stream in live:
        first = min(received, len(before.get(stream.stream_id, [])))
        assert got[stream.stream_id] == whole.entries().get(stream.stream_id, [])[first:]
    assert (flags & Flag.COLUMNS) or not sent.columns()
    assert (flags & Flag.TEXTS) or not any(body.texts for body in sent.columns())


def entries_after_answers(frames: list[Frames]) -> dict[int, list[Token]]:
    """The entries of each stream. Fails if an entry comes before the answer to the stream's
    ATTACH."""
    found: dict[int, list[Token]] = {}
    for kind, _, *bodies in frames:
        for body in bodies:
            if kind == b"MSG":
                assert found.setdefault(_decoded(body)["stream_id"], []) == []
            else:
                assert kind == b"TOKEN"
                for entry in entries_of(body):
                    found[entry.stream_id].append(entry)
    return found


def _decoded(body: bytes) -> dict[str, Any]:
    decode = msgspec.json.decode if body.startswith(b"{") else msgspec.msgpack.decode
    decoded: dict[str, Any] = decode(body)
    return decoded


def begun(*requests: int, rows: int, reporting: Set[int] = frozenset()) -> Sent:
    """Streams of one client. Each has an entry, followed by ``rows`` rows."""
    sent = Sent(*requests, form="columns")
    for stream in sent.streams:
        stream.session = 100
    batch = Batch(reporting=reporting)
    for _ in range(1 + rows):
        sent.streams.send(batch.step(*((request, 0) for request in requests)))
    sent.frames.clear()
    return sent


def test_one_message_has_the_missed_rows_of_all_streams_of_a_client() -> None:
    sent = begun(1, 2, 3, rows=4)
    got = [sent.streams.sent(stream)[2:] for stream in sent.streams]
    sent.streams.attach(Attaching(stream, 0, 2) for stream in list(sent.streams))
    assert [frames[0] for frames in sent.frames] == [b"MSG"] * 3 + [b"TOKEN"]
    [body] = sent.columns()
    assert not body.entries
    assert column_entries(body) == [entry for entries in got for entry in entries]


def test_the_missed_rows_in_columns_have_the_reports_of_their_tokens() -> None:
    sent = begun(1, 2, rows=4, reporting={2})
    got = [sent.streams.sent(stream)[3:] for stream in sent.streams]
    sent.streams.attach(Attaching(stream, 0, 3) for stream in list(sent.streams))
    [body] = sent.columns()
    assert body.kept == [None, None, packed(3), 4]
    assert column_entries(body) == [entry for entries in got for entry in entries]


def test_entries_that_are_not_rows_come_before_the_rows() -> None:
    """A backtrack and the first entry of a stream are entries, not rows."""
    sent = begun(1, 2, rows=2)
    sent.streams.send([output(1, token=9, backtrack=1)])
    batch = Batch()
    for _ in range(3):
        sent.streams.send(batch.step((1, 0), (2, 0)))
    streams = list(sent.streams)
    whole = [entries_of(encode_body(sent.streams.sent(stream), "json")) for stream in streams]
    sent.frames.clear()
    sent.streams.attach([Attaching(streams[0], 0, 1), Attaching(streams[1], 0, 0)])
    [body] = sent.columns()
    assert column_entries(body) == [*whole[0][-2:], *whole[1][-2:]]
    assert entries_after_answers(sent.frames) == {1: whole[0][1:], 2: whole[1]}


def test_an_answer_counts_for_what_the_client_misses() -> None:
    sent = begun(1, rows=80)
    [stream] = sent.streams

    def cost(received: int) -> int:
        return sent.streams.cost(Attaching(stream, 0, received)) - ANSWER_ENTRIES

    assert [cost(81), cost(100), cost(41), cost(1), cost(0)] == [0, 0, 10, 20, 21]
    sent.streams.take_form(stream, Flag.MSGPACK)
    assert [cost(81), cost(41), cost(0)] == [0, 40, 81]
    stream.row_candidates = [Candidate(None, packed(10))] * 80
    assert [cost(81), cost(41)] == [0, 40 + 40]


def test_a_client_that_attaches_in_the_same_form_leaves_the_batch_as_it_is() -> None:
    sent = begun(1, 2, rows=4)
    [known] = sent.streams._recipients.values()
    for stream in sent.streams:
        sent.streams.take_form(stream, stream.flags)
    assert list(sent.streams._recipients.values()) == [known]
    sent.streams.take_form(stream, Flag.MSGPACK)
    assert not sent.streams._recipients


def test_rows_that_cannot_be_encoded_end_the_streams_of_their_client() -> None:
    sent = begun(1, 2, 3, rows=2)
    for stream in sent.streams:
        stream.row_texts = ["a", "b"]
    stream.session = 200
    sent.streams.get(1).row_texts = ["a", "\udcff"]  # type: ignore[union-attr]
    sent.streams.attach(Attaching(stream, 0, 1) for stream in list(sent.streams))
    kinds = [frames[0] for frames in sent.frames]
    assert kinds == [b"MSG"] * 3 + [b"ERROR"] * 2 + [b"TOKEN"]
    assert [stream.request for stream in sent.streams] == [3]


@given(steps=STEPS, with_text=WITH_TEXT, reporting=REPORTING)
@pytest.mark.usefixtures("stored_early")
def test_a_journal_has_all_that_was_sent_of_a_stream_and_of_one_that_has_just_ended(
    steps: list[tuple[set[tuple[int, int]], int]], with_text: set[int], reporting: set[int]
) -> None:
    sent = Sent(1, 2, 3, 4, form="columns")
    play(sent, steps, with_text, reporting)
    got, live = sent.entries(), {stream.request for stream in sent.streams}
    reported = {stream.request: stream for stream in sent.streams.reported()}
    assert reported.keys() == {1, 2, 3, 4}
    for request, stream in reported.items():
        sent.frames.clear()
        sent.streams.send_journal(stream)
        [[word, head, body, entries, *request_frames]] = sent.frames
        journal = msgspec.msgpack.decode(body, type=Journal)
        assert (word, decode_header(head)[:2]) == (b"JOURNAL", (request, 100 + request))
        assert journal.ended == (request not in live)
        assert entries_of(entries) == got.get(request, [])
        assert len(request_frames) == (0 if request in live else 1)


def test_the_journal_of_a_request_that_timed_out_while_it_waited_has_its_end() -> None:
    sent = Sent()
    stream = Stream(1, 101, 1, "msgpack", "m", 1)
    end = Token(token=None, stream_id=1, logprob=None, finish_reason="timeout")
    sent.streams.send_end(stream, [end])
    assert sent.entries() == {1: [end]}
    assert list(sent.streams.reported()) == [stream]
    sent.frames.clear()
    sent.streams.send_journal(stream)
    [[_, _, body, entries, *_]] = sent.frames
    assert msgspec.msgpack.decode(body, type=Journal).ended
    assert entries_of(entries) == [end]


def test_streams_that_have_ended_are_kept_for_a_while_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    kept = KeptStreams(clock=lambda: now)

    def end(request: int, tokens: int = 1) -> None:
        stream = Stream(request, 9, request, "msgpack", "m", 0, rows=bytearray(tokens * ROW.size))
        stream.frames = [b"a long prompt"]
        kept.add(stream)

    for request in (1, 2, 3):
        end(request)
    assert [stream.request for stream in kept] == [1, 2, 3]
    assert all(stream.frames != [b"a long prompt"] for stream in kept)
    now = kept_streams.KEEP_S + 1
    end(4)
    assert [stream.request for stream in kept] == [4]
    end(5, tokens=kept_streams.MAX_TOKENS)
    assert [stream.request for stream in kept] == [5]
    monkeypatch.setattr(kept_streams, "MAX_STREAMS", 2)
    for request in (6, 7, 8):
        end(request)
    assert [stream.request for stream in kept] == [7, 8]
    kept.drop(7)
    assert kept.get(7) is None


def test_the_ended_streams_of_a_client_do_not_drop_those_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_streams, "MAX_STREAMS", 8)
    kept = KeptStreams()

    def end(request: int, client: int, tokens: int = 1) -> None:
        rows = bytearray(tokens * ROW.size)
        kept.add(Stream(request, 9, request, "msgpack", "m", 0, client=client, rows=rows))

    end(1, client=1)
    end(2, client=2, tokens=kept_streams.MAX_TOKENS)
    assert [stream.request for stream in kept] == [1]
    end(3, client=2, tokens=kept_streams.MAX_TOKENS + 1)
    for request in range(4, 24):
        end(request, client=2)
    assert [stream.request for stream in kept] == [1, *range(17, 24)]


def test_no_message_with_a_whole_stream_makes_a_token_object_for_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For 128,000 rows, this would take 1.5 s, during which all streams of the worker wait."""
    sent = begun(1, rows=4)
    [stream] = sent.streams
    stream.columns, stream.encoding, stream.save = False, "json", "b"
    whole = entries_of(encode_body(sent.streams.sent(stream), "json"))
    monkeypatch.setattr(streams, "plain_entry", lambda *_: pytest.fail("a token object is made"))
    sent.streams.attach([Attaching(stream, 0, 0)])
    assert sent.entries() == {1: whole}
    sent.streams.send_journal(stream)
    assert entries_of(sent.frames[-1][3]) == whole
    sent.streams.send([output(1, finish_reason="length")])
    buffer = next(frames for frames in sent.frames if frames[0] == b"BUFFER")
    assert len(unpack_tokens(buffer[3][1:])) == len(whole) + 1


def test_a_saved_buffer_has_the_tokens_of_rows_and_entries() -> None:
    sent = Sent(1, form="columns")
    [stream] = sent.streams
    stream.save, stream.prompt = "b", [1, 2]
    batch = Batch()
    for token in (10, 20, 30):
        sent.streams.send(batch.step((1, 0), (1, 1), token=token))
    end = output(1, token=99, backtrack=2, finish_reason="stop")
    stream.live = 1
    sent.streams.send([end])
    buffer = next(frames for frames in sent.frames if frames[0] == b"BUFFER")
    assert unpack_tokens(buffer[3][1:]) == [1, 2, 10, 99]


def test_rows_of_a_stream_that_is_over_reach_nobody() -> None:
    """The step began before the stream was cancelled."""
    sent = Sent(1, 2, form="columns")
    batch = Batch()
    for _ in range(2):
        sent.streams.send(batch.step((1, 0), (2, 0)))
    sent.streams.send([output(1, token=None, logprob=None, finish_reason="cancelled")])
    sent.streams.send(batch.step((1, 0), (2, 0)))
    got = sent.entries()
    assert [len(got[1]), len(got[2])] == [3, 3]
    assert [entry.finish_reason for entry in got[1]] == [None, None, "cancelled"]
    sent.streams.drop(2)
    sent.frames.clear()
    sent.streams.send(batch.step((1, 0), (2, 0)))
    assert sent.frames == []


def test_a_stream_that_comes_back_has_nothing_of_what_the_dropped_one_had() -> None:
    """The stream moves back to a worker that had dropped it."""
    sent = Sent(1, form="columns")
    batch = Batch()
    # The first rows of a new batch are stored as entries.
    for _ in range(4):
        sent.streams.send(batch.step((1, 0)))
    sent.streams.drop(1)
    again = Stream(1, 101, 1, "msgpack", "m", 1)
    sent.streams.add(again)
    sent.frames.clear()
    sent.streams.take_form(again, Flag.MSGPACK)
    sent.streams.attach([Attaching(again, 0, 0)])
    [answer] = sent.frames
    assert answer[0] == b"MSG"


def test_an_entry_that_cannot_be_encoded_leaves_the_rows_beside_it() -> None:
    sent = Sent(1, 2, form="columns")
    batch = Batch()
    sent.streams.send(batch.step((1, 0), (2, 0)))
    sent.frames.clear()
    bad = output(1, storage=[1j])
    sent.streams.send(StepOutputs([bad], batch.rows((2, 0))))
    assert [frames[0] for frames in sent.frames] == [b"TOKEN", b"ERROR"]
    assert len(sent.entries()[2]) == 1
    assert sent.released == [1]


def test_intervals_between_tokens_are_counted_for_each_row() -> None:
    sent = Sent(1, 2, form="columns")
    batch = Batch()
    for _ in range(5):
        sent.streams.send(batch.step((1, 0), (2, 0)))
    sent.streams.send([output(1, finish_reason="length")])
    sent.streams.send([output(2, finish_reason="length")])
    metrics = sent.streams.metrics.of("m")
    assert sum(metrics.first_token_s.counts) == 2
    assert sum(metrics.between_tokens_s.counts) == 2 * 5
    assert metrics._generation_sizes.total == 2 * 6


def test_a_text_that_cannot_be_encoded_ends_its_own_stream_only() -> None:
    """A tokenizer that is written in Python may return half of a surrogate pair."""
    sent = Sent(1, 2, 3, 4, form="columns")
    batch = Batch(with_text={1, 2})
    keys = ((1, 0), (2, 0), (2, 1), (3, 0))
    for _ in range(2):
        sent.streams.send(batch.step(*keys))
    sent.frames.clear()
    rows = batch.rows(*keys)
    rows.texts = ["a", "b", "\ud800", None]
    sent.streams.send(StepOutputs([output(4, finish_reason="length")], rows))
    assert [frames[0] for frames in sent.frames].count(b"ERROR") == 1
    got = sent.entries()
    assert [(e.token, e.text) for e in got[3]] == [(7, UNSET)]
    assert [e.text for e in got[1]] == ["a"]
    assert [e.finish_reason for e in got[4]] == ["length"]
    assert sorted(sent.released) == [2, 4]
    assert [stream.request for stream in sent.streams] == [1, 3]


def test_text_goes_in_rows_to_clients_that_take_it_there() -> None:
    sent = Sent(1, 2, form="columns")
    for stream in sent.streams:
        stream.session = 100
    batch = Batch(with_text={1})
    for _ in range(3):
        sent.streams.send(batch.step((1, 0), (2, 0)))
    *_, last = sent.columns()
    assert (last.texts, last.entries) == (["2 é2 é", None], [])
    for stream in sent.streams:
        stream.texts = False
    sent.streams._dissolve()
    sent.frames.clear()
    sent.streams.send(batch.step((1, 0), (2, 0)))
    [body] = sent.columns()
    assert (body.texts, len(body.streams)) == ([], 8)
    [entry] = body.entries
    assert (entry.stream_id, entry.text) == (1, "")
