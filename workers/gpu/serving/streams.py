"""The streams that a GPU worker runs, and the messages that carry the streams' tokens.

After a step, the worker sends one multipart message with tokens to each broker. It has a body for
each session. The broker forwards the bodies unchanged.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import repeat
from struct import Struct
from typing import Literal, NamedTuple, TypeVar, cast

import numpy as np

from ....protocol.bodies import Encoding, encode_bodies, encode_body, error_body, pack_tokens
from ....protocol.columns import (
    PlainToken,
    TokenColumns,
    encodable_entry,
    pack_columns,
    plain_entry,
)
from ....protocol.errors import TokenbusError
from ....protocol.header import Flag, Header, encode_header, encode_token_header
from ....protocol.messages import Buffer, ForwardPath, Generate, Msg, Span, System, Token
from ....protocol.worker_messages import Journal
from ..engine.sequence import PromptUsage
from ..sampling.candidates import Candidate
from .model_metrics import ModelMetrics
from .packed_fields import pack, unpacked

T = TypeVar("T")

Frames = list[bytes]
Form = Literal["json", "msgpack", "columns"]
"""The form of a client's TOKEN messages: entries in one of two encodings, or columns in msgpack."""
ROW = Struct("<IdII")
"""The binary form of a *row*, which is a plain token (``engine.sequence.TokenColumns``) that was
sent. The fields are token, log-probability, position and sequence number."""
ROWS = np.dtype([("token", "<u4"), ("logprob", "<f8"), ("pos", "<u4"), ("seq", "<u4")])
"""The fields of ``ROW`` as a NumPy type."""

ENTRY_BYTES = 800
"""Bytes of memory that an entry takes without its long fields."""
LONG_ENTRY_BYTES = 2048
"""Bytes of memory that an entry with 256 ``top_logprobs`` takes in addition to its packed
fields."""


class Move(NamedTuple):
    """The move of a stream, or of its controller, to another worker."""

    left: str
    """The previous worker."""
    why: str
    since: float
    """The time at which the stream lost its previous worker, by ``time.monotonic``."""

    def notice(self, stream: Stream, worker: str) -> System:
        """The SYSTEM notice for the client. ``worker``: the stream's new worker."""
        return System(
            event="moved",
            message=self.why,
            stream_id=stream.stream_id,
            model=stream.named,
            left=self.left,
            worker=worker,
            pause_s=round(time.monotonic() - self.since, 6),
            moves=stream.moves,
        )


@dataclass(slots=True, eq=False)
class Stream:
    """A client's request on the worker that runs it."""

    request: int
    session: int
    stream_id: int
    encoding: Encoding
    model: str
    """The model that computes the stream."""
    live: int
    """Number of sequences that have not ended."""
    columns: bool = False
    """Whether the client accepts tokens in columns."""
    texts: bool = False
    """Whether the client accepts columns with texts."""
    link: int = 0
    """The link to the client's broker."""
    client: int = 0
    """The number of the client (``arrivals.client_of``)."""
    adapter: str = ""
    """The LoRA adapter of the model; empty if the stream uses the model itself."""
    type: bytes = b"GENERATE"
    frames: list[bytes] = field(default_factory=list)
    """The request's body and attachments, which a restarted broker needs."""
    save: str | None = None
    """The name of the buffer that will contain prompt and tokens; None if no buffer is stored."""
    prompt: list[int] = field(default_factory=list)
    healed: int | None = None
    """The token that ``heal_prompt`` removed from the end of the prompt; None without such a
    token."""
    message: Generate | None = None
    """The request of a generation; None until it is passed to the engine."""
    usage: PromptUsage | None = None
    """The usage of the prompt; None until the request is passed to the engine."""
    rows: bytearray = field(default_factory=bytearray)
    """The plain tokens that were sent, as ``ROW``: 20 bytes each, and no Python objects."""
    row_texts: list[str | None] = field(default_factory=list)
    """The text of each row; empty if the request does not ask for text."""
    row_candidates: list[Candidate] = field(default_factory=list)
    """The distribution of each row; empty if the request does not ask for distributions."""
    entries: list[tuple[int, Token]] = field(default_factory=list)
    """All other entries that were sent, each with the number of rows before it. When the message of
    an entry has been encoded, the entry's fields are packed (``packed_fields``)."""
    decoded_bytes: int = 0
    """The memory of the request's decoded texts and token ids, and of an EMBED's vectors, in
    bytes."""
    packed_bytes: int = 0
    """Number of bytes of all packed fields."""
    written_bytes: int = 0
    """Number of bytes of the logs, the messages and the writes of a program in all entries."""
    id_bytes: int = 0
    """Number of bytes of the candidates' ids in all rows."""
    num_added: int = 0
    """Number of entries in ``entries`` that this worker has sent. The entries that an earlier
    worker has sent do not count towards the client's share, because a move must not end a
    stream."""
    num_long: int = 0
    """Number of entries with packed fields or with logs, messages or writes of a program."""
    claimed_by: int | None = None
    """The link over which a CLAIM of this stream arrived, until its JOURNAL is sent.
    ``ReportQueue`` sets and clears this field."""
    dropped: bool = False
    """Whether the broker does not need the stream any more. ``LiveStreams.drop`` sets the flag."""
    trace: str = ""
    operation: str = "text_completion"
    """``gen_ai.operation.name`` of the request's span, if it has a trace."""
    received: float = field(default_factory=time.monotonic)
    """The time at which this worker received the request, by ``time.monotonic``."""
    arrived: float = field(default_factory=time.monotonic)
    """The time at which the broker received the request, by this process's ``time.monotonic``."""
    first_at: float = 0.0
    """The time at which the first token was sent; 0 before that."""
    sent_at: float = 0.0
    """The time at which the last token was sent."""
    metrics: ModelMetrics | None = None
    """The metrics of the model, while an engine runs the request."""
    move: Move | None = None
    """The move of a moved stream. None if the stream has not moved, or if the client has been
    notified of the move."""
    moves: int = 0
    """Number of moves of the stream so far, including the move to this worker."""
    span: Span | None = None
    """How this worker computes the stream; None until the request is passed to the engine."""
    begun: set[int] = field(default_factory=set)
    """The sequences that have an entry from this worker. The first such entry has the span."""
    arithmetics: set[str] = field(default_factory=set)
    """``Span.exact`` of all workers that have computed the stream. An empty string stands for a
    worker that was not exact."""

    @classmethod
    def of(cls, header: Header, stream_id: int, model: str, live: int = 1, link: int = 0) -> Stream:
        """A new stream for the request with this header."""
        stream = cls(header.request, header.address, stream_id, "json", model, live, link=link)
        stream.take_form(header.flags)
        stream.arrived = stream.received - header.waited_s
        return stream

    @property
    def named(self) -> str:
        """The name of the adapter, or of the model if the stream has no adapter. SYSTEM messages
        and traces contain this name."""
        return self.adapter or self.model

    @property
    def form(self) -> Form:
        """The form of the client's TOKEN messages."""
        return "columns" if self.columns else self.encoding

    @property
    def takes_rows(self) -> bool:
        """Whether the answer to the client's ATTACH may have the rows of this stream in columns."""
        return self.columns and (self.texts or not self.row_texts)

    @property
    def flags(self) -> int:
        """The capabilities of the client, as flags of a header."""
        msgpack = Flag.MSGPACK if self.encoding == "msgpack" else 0
        return msgpack | (Flag.COLUMNS if self.columns else 0) | (Flag.TEXTS if self.texts else 0)

    @property
    def exact(self) -> bool:
        """Whether all steps of the stream were exact and used the same arithmetic (``Span.exact``),
        including the steps at earlier workers."""
        return len(self.arithmetics) == 1 and "" not in self.arithmetics

    def compute_by(self, path: ForwardPath, kept_cache: bool = False) -> None:
        """Sets how this worker computes the stream from now on. ``kept_cache``: whether the stream
        keeps keys and values of an earlier version of the weights."""
        exact = "" if kept_cache else path.arithmetic
        self.span = Span(
            weights=path.weights, exact=exact, version=path.version, kept_cache=kept_cache
        )
        self.arithmetics.add(exact)
        self.begun.clear()

    def begin(self, entry: Token) -> None:
        """Prepares an entry. Adds the span to the first entry that a sequence gets from this
        worker. Adds ``exact`` to the last entry of a sequence."""
        if self.span is None:
            return
        if entry.seq not in self.begun:
            self.begun.add(entry.seq)
            entry.span = self.span
        if entry.finish_reason is not None:
            entry.exact = self.exact

    @property
    def num_entries(self) -> int:
        """Number of entries that were sent."""
        return len(self.rows) // ROW.size + len(self.entries)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were sent."""
        others = sum(entry.token is not None for _, entry in self.entries)
        return len(self.rows) // ROW.size + others

    @property
    def size(self) -> int:
        """The memory of the stream's entries, measured in tokens. An entry without a token counts
        as a token. The ids of five candidates count as a token, and so do 20 bytes of packed fields
        and 20 bytes of a program's logs, messages and writes."""
        return self.num_entries + self.num_candidates // 5 + self.written_bytes // 20

    @property
    def long_bytes(self) -> int:
        """The memory of the stream's request, of its entries that are not rows, and of the ids of
        candidates in its rows, in bytes."""
        fields = self.packed_bytes + self.written_bytes + self.id_bytes
        entries = ENTRY_BYTES * self.num_added + LONG_ENTRY_BYTES * self.num_long
        return self.decoded_bytes + sum(map(len, self.frames)) + fields + entries

    @property
    def num_candidates(self) -> int:
        """Number of candidates that the stream's rows report by their ids. Four bytes of packed
        fields also count as a candidate, so a pair of ``top_logprobs`` (about 12 bytes) counts as
        three."""
        ids = sum(len(c.kept) // 4 for c in self.row_candidates if isinstance(c.kept, bytes))
        return ids + self.packed_bytes // 4

    def add(self, entry: Token) -> None:
        """Stores an entry that is sent."""
        self.entries.append((len(self.rows) // ROW.size, entry))
        self.num_added += 1

    def pack(self, entries: Iterable[Token]) -> None:
        """Packs the fields of stored entries that have been sent."""
        for entry in entries:
            packed = pack(entry)
            self.packed_bytes += packed
            written = entry.written_bytes
            self.written_bytes += written
            self.num_long += packed + written > 0

    def sent(self) -> list[Token]:
        """The entries that were sent, in order. Fields may be packed."""
        return self._entries(plain_entry)

    def encodable(self, received: int = 0, last_rows: int = 0) -> list[Token | PlainToken]:
        """The entries that were sent, in order, for a message that is only encoded. Leaves out the
        first ``received`` entries and the last ``last_rows`` rows. Fields may be packed.

        A stream of 128,000 rows takes 0.15 s in JSON. With a ``Token`` for each row it would take
        1.5 s, during which all streams of the worker wait.
        """
        return self._entries(encodable_entry, received, last_rows)

    def _entries(
        self, entry_of: Callable[..., T], received: int = 0, last_rows: int = 0
    ) -> list[Token | T]:
        """The entries that were sent. ``entry_of`` makes the entry of a row."""
        others, first = self._without(received)
        end = len(self.rows) - last_rows * ROW.size
        rows = zip(
            ROW.iter_unpack(self.rows[first * ROW.size : end]),
            self.row_texts[first:] if self.row_texts else repeat(None),
            self.row_candidates[first:] if self.row_candidates else repeat(Candidate()),
            strict=False,
        )
        plain = [
            entry_of(self.stream_id, token, logprob, pos, seq, text, *candidate)
            for (token, logprob, pos, seq), text, candidate in rows
        ]
        found: list[Token | T] = []
        taken = 0
        for end, entry in self.entries[others:]:
            found += plain[taken : end - first]
            found.append(entry)
            taken = end - first
        return found + plain[taken:]

    def tokens(self, seq: int) -> list[int]:
        """The tokens of a sequence, without those that were dropped again."""
        rows = np.frombuffer(bytes(self.rows), ROWS)
        found: list[int] = []
        taken = 0
        for end, entry in self.entries:
            if end > taken:
                found += _tokens_of(rows[taken:end], seq)
                taken = end
            if entry.seq == seq:
                if entry.backtrack:
                    del found[-entry.backtrack :]
                if entry.token is not None:
                    found.append(entry.token)
        return found + _tokens_of(rows[taken:], seq)

    def missed(self, received: int) -> tuple[int, int]:
        """Returns two numbers: the number of entries after the first ``received`` entries, and the
        number of the last entries that can be sent as rows in columns."""
        num_rows = len(self.rows) // ROW.size
        missed = max(0, num_rows + len(self.entries) - received)
        if not self.takes_rows:
            return missed, 0
        last_entry, _ = self.entries[-1] if self.entries else (0, None)
        return missed, min(missed, num_rows - last_entry)

    def _without(self, received: int) -> tuple[int, int]:
        """Divides the first ``received`` entries. Returns the number of entries that are not rows,
        and the number of rows."""
        entries = self.entries
        others = bisect_left(range(len(entries)), received, key=lambda i: entries[i][0] + i)
        return others, received - others

    def restore(self, sent: list[Token], move: Move, moves: int) -> None:
        """Restores a stream that began at another worker. ``sent``: the entries that its client has
        received. ``moves``: number of moves of the stream so far."""
        self.moves = moves
        self.entries = [(0, copy(entry)) for entry in sent]
        self.pack(entry for _, entry in self.entries)
        # A worker of an earlier release does not report spans, and may not be exact.
        begun: set[int] = set()
        for entry in sent:
            if entry.span is not None or entry.seq not in begun:
                self.arithmetics.add(entry.span.exact if entry.span is not None else "")
            begun.add(entry.seq)
        self.move = move
        if self.num_tokens:
            # The time to first token must not be counted again. The pause of the move counts as an
            # interval between tokens.
            self.first_at = self.sent_at = move.since

    def take_form(self, flags: int) -> None:
        """Sets the form of tokens from the flags of a header."""
        self.encoding = "msgpack" if flags & Flag.MSGPACK else "json"
        self.columns = bool(flags & Flag.COLUMNS)
        self.texts = bool(flags & Flag.TEXTS)


@dataclass(slots=True)
class TokenMessage:
    """A ``TOKEN`` for one broker. It has the tokens of a step, in one body for each session."""

    finished: list[int] = field(default_factory=list)
    """The requests that end with this message."""
    columns: dict[int, TokenColumns] = field(default_factory=dict)
    """The rows of each session that receives columns."""
    _entries: dict[tuple[int, Form], list[Token]] = field(default_factory=dict)

    def add(self, session: int, form: Form, entries: Sequence[Token]) -> None:
        """Adds entries of a session."""
        self._entries.setdefault((session, form), []).extend(entries)

    def frames(self) -> Frames:
        """The frames of the message. Raises an exception if an entry cannot be encoded."""
        for session, body in self.columns.items():
            if self._entries or body.entries:
                body.entries = self._entries.pop((session, "columns"), [])
        bodies = encode_bodies(self.columns.values(), "msgpack")
        for (_, form), entries in self._entries.items():
            bodies.append(encode_body(entries, "json" if form == "json" else "msgpack"))
        sessions = [*self.columns, *(session for session, _ in self._entries)]
        return [b"TOKEN", encode_token_header(sessions, self.finished), *bodies]


def _tokens_of(rows: np.ndarray, seq: int) -> list[int]:
    found: list[int] = rows["token"][rows["seq"] == seq].tolist()
    return found


def entries_frames(stream: Stream, entries: Sequence[Token | PlainToken]) -> Frames:
    """A ``TOKEN`` with entries of one stream."""
    if stream.encoding == "json" and stream.packed_bytes:
        entries = [unpacked(entry) if isinstance(entry, Token) else entry for entry in entries]
    body = encode_body(entries, stream.encoding)
    return [b"TOKEN", encode_token_header([stream.session]), body]


def message_frames(stream: Stream, kind: bytes, body: Msg | System, final: bool = False) -> Frames:
    """An answer or a notice to a stream's client."""
    flags = Flag.FINAL if final else 0
    head = encode_header(stream.request, stream.session, flags)
    return [kind, head, encode_body(body, stream.encoding)]


def error_frames(stream: Stream, error: TokenbusError) -> Frames:
    """The ERROR that ends a stream."""
    body = error_body(error, stream.stream_id)
    head = encode_header(stream.request, stream.session, Flag.FINAL)
    return [b"ERROR", head, encode_body(body, stream.encoding)]


def journal_frames(stream: Stream, claimed: int = 0) -> Frames:
    """A stream's request and all sent entries, for the broker at which the stream continues.
    ``claimed``: ``Journal.claimed``."""
    body = Journal(
        type="SCORE" if stream.type == b"SCORE" else "GENERATE",
        age_s=time.monotonic() - stream.arrived,
        ended=stream.live == 0,
        moves=stream.moves,
        claimed=claimed,
    )
    head = encode_header(stream.request, stream.session, stream.flags)
    body.entries = stream.num_entries
    if stream.entries:
        # An entry is not a row, so the columns could not contain any entry of the stream.
        sent = TokenColumns(entries=cast("list[Token]", stream.encodable()))
    else:
        sent = pack_columns(stream.sent(), texts=True)
    return [
        *(b"JOURNAL", head, encode_body(body, "msgpack")),
        *(encode_body(sent, "msgpack"), *stream.frames),
    ]


def gone_frames(request: int) -> Frames:
    """The answer to a broker that requests a stream which has ended. This worker does not store the
    stream's entries."""
    body = Journal(type="GENERATE", gone=True)
    return [b"JOURNAL", encode_header(request), encode_body(body, "msgpack")]


def saved_buffer_frames(stream: Stream) -> Frames:
    """The buffer of a stream with ``save``. It has the prompt and the tokens of the stream's first
    sequence."""
    tokens = stream.prompt + stream.tokens(0)
    body = encode_body(Buffer(name=stream.save or ""), "msgpack")
    head = encode_header(stream.request, stream.session)
    return [b"BUFFER", head, body, b"t" + pack_tokens(tokens)]
