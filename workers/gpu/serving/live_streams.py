"""The table of live streams, and all that leaves a GPU worker for their clients.

A stream ends in one of two ways: with the TOKEN message that has the end of its last sequence, or
with an ERROR. Nothing that fails on the way leaves a stream without either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from msgspec import UNSET

from ....protocol import logs
from ....protocol.errors import Code, ServiceError, TokenbusError
from ....protocol.logs import about
from ....protocol.messages import Token
from ..engine.sequence import StepOutputs, TokenColumns, TokenOutput
from .history import History
from .kept_streams import KeptStreams
from .metrics import WorkerMetrics
from .recipients import Columns, Recipients
from .spans import record_span
from .streams import (
    BySession,
    Frames,
    Move,
    Stream,
    attached_frames,
    error_frames,
    journal_frames,
    message_frames,
    saved_buffer_frames,
    token_frames,
)

log = logging.getLogger(__name__)


class LiveStreams:
    """The streams whose requests an engine has, by request.

    ``post`` sends frames over a link. ``release`` frees what the engine and the controllers keep of
    a stream that is over; it may be called for one of which nothing is left. ``name``: the
    worker's.
    """

    def __init__(
        self,
        post: Callable[[Frames, int], None],
        release: Callable[[Stream], None],
        metrics: WorkerMetrics | None = None,
        name: str = "",
    ) -> None:
        self.metrics = metrics or WorkerMetrics()
        self._post = post
        self._release = release
        self._name = name
        self._streams: dict[int, Stream] = {}
        self._kept = KeptStreams()
        self._history = History(lambda request: self._streams.get(request) or self.kept(request))
        self._recipients: dict[str, Recipients] = {}
        """The recipients of the batch of each model, while its streams stay as they are."""
        self.num_outputs = 0
        """Outputs that were sent, all streams together."""
        self.inconsistent = False
        """Whether a stream could not be released: its engine's tables can no longer be trusted."""

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        """The streams as they are now; safe on another thread."""
        return iter(list(self._streams.values()))

    def add(self, stream: Stream) -> None:
        """A request was given to its engine."""
        self._streams[stream.request] = stream
        stream.metrics = self.metrics.of(stream.model)

    def get(self, request: int) -> Stream | None:
        """The live stream of a request."""
        return self._streams.get(request)

    def kept(self, request: int) -> Stream | None:
        """The stream of a request that ended a moment ago."""
        return self._kept.get(request)

    def reported(self) -> Iterator[Stream]:
        """The streams that a broker which was restarted is notified of; safe on another thread."""
        return chain(self, self._kept)

    # --- tokens ---------------------------------------------------------------------------------

    def send(self, outputs: StepOutputs | list[TokenOutput]) -> None:
        """Sends outputs; streams that end with them are over."""
        if not isinstance(outputs, StepOutputs):
            outputs = StepOutputs(outputs)
        new: dict[int, tuple[Stream, list[Token]]] = {}
        self._add(outputs.others, new)
        columns = None
        if outputs.columns is not None:
            recipients = self._recipients_of(outputs.columns, new)
            columns = recipients.columns(outputs.columns) if recipients is not None else None
        self.num_outputs += len(outputs)
        if not new and columns is None:
            return
        entries = list(new.values())
        self._history.add(entries, columns)
        self.metrics.count(entries, columns.recipients if columns is not None else None)
        self._deliver(entries, columns)

    def _add(
        self, outputs: Iterable[TokenOutput], new: dict[int, tuple[Stream, list[Token]]]
    ) -> None:
        """Adds outputs to the new entries of their streams."""
        for output in outputs:
            stream = self._streams.get(output.request)
            if stream is None:
                continue
            if output.finish_reason is not None:
                stream.live -= 1
                if output.error is not None:
                    self.metrics.errors.add(output.code or Code.INTERNAL)
            if output.parent is not None:
                stream.live += 1
            if stream.move is not None:
                self._announce(stream, stream.move)
            stream.num_tokens += output.token is not None
            entry = _entry(output, stream)
            if not stream.started:
                stream.started = True
                if stream.usage is not None:
                    entry.prompt_tokens = stream.usage.tokens
                    entry.cached_tokens = stream.usage.cached or 0
            new.setdefault(output.request, (stream, []))[1].append(entry)

    def _recipients_of(
        self, columns: TokenColumns, new: dict[int, tuple[Stream, list[Token]]]
    ) -> Recipients | None:
        """Who gets these rows; None where none of their streams is live. A stream that begins with
        this step gets an entry, which says what its prompt was: its rows go to ``new``."""
        for known in self._recipients.values():
            if known.sequences == columns.sequences:
                return known
        streams = [self._streams.get(sequence.request) for sequence in columns.sequences]
        first = next((stream for stream in streams if stream is not None), None)
        if first is None:
            return None
        before = self._recipients.pop(first.model, None)
        if before is not None:
            before.settle()
        for stream in streams:
            if stream is not None and stream.move is not None:
                self._announce(stream, stream.move)
        begins = {stream for stream in streams if stream is not None and not stream.started}
        if not begins:
            found = Recipients(columns.sequences, streams)
            self._recipients[first.model] = found
            return found
        self._add((o for o, s in zip(columns, streams, strict=True) if s in begins), new)
        rest = [None if stream in begins else stream for stream in streams]
        if not any(rest):
            return None
        found = Recipients(columns.sequences, rest)
        # In the next step the streams that begin have rows too.
        found.sequences = None
        self._recipients[first.model] = found
        return found

    def _announce(self, stream: Stream, move: Move) -> None:
        """Notifies the client of a stream that has moved, before its first new entry."""
        stream.move = None
        notice = move.notice(stream, self._name)
        self._post(message_frames(stream, b"SYSTEM", notice), stream.link)

    def send_end(self, stream: Stream, ends: list[Token]) -> None:
        """Sends the last entries of a stream that no engine has."""
        stream.live = 0
        self._deliver([(stream, ends)])

    def finish(self, stream: Stream) -> None:
        """Reports the end of a stream that has moved, and whose last entry was sent before."""
        if stream.save:
            self._post(saved_buffer_frames(stream, self._history.of(stream)), stream.link)
        self._post(token_frames({}, [stream.request]), stream.link)
        logs.end(stream.request)

    def _deliver(
        self, new: list[tuple[Stream, list[Token]]], columns: Columns | None = None
    ) -> None:
        try:
            messages = self._messages(new, columns)
        except Exception as error:
            if not new:
                if columns is None or columns.texts is None:
                    raise
                # A text cannot be encoded: each row is sent alone, as an entry.
                for row in self._rows_as_entries(columns):
                    self._deliver([row])
                return
            if len(new) == 1 and columns is None:
                self.fail(new[0][0], error, "sending its tokens")
                return
            # A value of one stream cannot be encoded: the others are sent without it.
            if columns is not None:
                self._deliver([], columns)
            for one in new:
                self._deliver([one])
            return
        for frames, link in messages:
            self._post(frames, link)
        for stream, entries in new:
            if stream.live == 0:
                end = entries[-1]
                self._end(stream, end.finish_reason or "cancelled", end.error)
                if end.finish_reason != "cancelled":
                    self._kept.add(stream)

    def _rows_as_entries(self, columns: Columns) -> Iterator[tuple[Stream, list[Token]]]:
        requests = columns.recipients.requests.tolist()
        entries = columns.recipients.entries(columns, 0, len(requests))
        for request, entry in zip(requests, entries, strict=True):
            stream = self._streams.get(request)
            if stream is not None:
                yield stream, [entry]

    def _messages(
        self, new: list[tuple[Stream, list[Token]]], columns: Columns | None
    ) -> list[tuple[Frames, int]]:
        """The buffers of streams that end, then the tokens: a message for each broker that has any
        of these streams."""
        messages = []
        by_link: dict[int, tuple[BySession, list[int]]] = {}
        for stream, entries in new:
            by_session, finished = by_link.setdefault(stream.link, ({}, []))
            by_session.setdefault((stream.session, stream.form), []).extend(entries)
            if stream.live == 0:
                finished.append(stream.request)
                if stream.save:
                    saved = saved_buffer_frames(stream, self._history.of(stream))
                    messages.append((saved, stream.link))
        if columns is not None:
            for link in columns.recipients.links:
                by_session, finished = by_link.pop(link, ({}, []))
                frames = columns.recipients.frames(columns, by_session, finished, link)
                messages.append((frames, link))
        for link, (by_session, finished) in by_link.items():
            messages.append((token_frames(by_session, finished), link))
        return messages

    def sent(self, stream: Stream) -> list[Token]:
        """All entries of a live stream that were sent, in their order."""
        return self._history.of(stream)

    def take_form(self, stream: Stream, flags: int) -> None:
        """A client attaches. ``flags``: those of its header, as another connection may take another
        form."""
        self._dissolve()
        stream.take_form(flags)

    def attach(self, stream: Stream, received: int) -> int:
        """Sends again what a client that attaches has not received; returns the number of entries
        that the stream has."""
        entries = self._history.of(stream)
        for frames in attached_frames(stream, entries[received:], received):
            self._post(frames, stream.link)
        return len(entries)

    def send_journal(self, stream: Stream) -> None:
        """Sends all of a stream to the broker of its link, as it is to go on there."""
        self._dissolve()
        entries = self._history.of(stream)
        self._post(journal_frames(stream, entries), stream.link)
        if stream.save and not stream.live:
            self._post(saved_buffer_frames(stream, entries), stream.link)

    def _dissolve(self) -> None:
        """The streams of the batches change: the recipients are worked out again."""
        for recipients in self._recipients.values():
            recipients.settle()
        self._recipients.clear()

    # --- ends -----------------------------------------------------------------------------------

    def fail(self, stream: Stream, error: Exception, doing: str) -> None:
        """Ends a stream with an ERROR: ``error`` where that is written for clients, else one that
        says that the worker failed while ``doing`` something."""
        if not isinstance(error, TokenbusError):
            number = stream.request
            log.error("request %d: %s failed", number, doing, exc_info=error, extra=about(number))
            error = internal_error(error, doing)
        self.metrics.errors.add(error.code)
        self._end(stream, "error", error.message)
        self._post(error_frames(stream, error), stream.link)

    def drop(self, request: int) -> None:
        """Ends a stream for which no client waits; nothing is sent."""
        self._kept.drop(request)
        stream = self._streams.get(request)
        if stream is not None:
            self._end(stream, "cancelled", None)
        self._history.sort()

    def _end(self, stream: Stream, reason: str, error: str | None) -> None:
        """A stream is over: counts it, and frees what is kept of it."""
        if any(stream in recipients.streams for recipients in self._recipients.values()):
            self._dissolve()
        self.metrics.ended(stream, reason)
        if stream.trace:
            record_span(stream, reason, error)
        self._streams.pop(stream.request, None)
        try:
            self._release(stream)
        except Exception:
            text = "what the engine keeps of request %d was not freed"
            log.exception(text, stream.request, extra=about(stream.request))
            self.inconsistent = True
        logs.end(stream.request)


def internal_error(error: Exception, doing: str) -> ServiceError:
    """The error that clients receive where the worker itself failed."""
    text = f"the GPU worker failed while {doing}: {type(error).__name__}: {error}"
    # Names of files may hold what is not valid Unicode, and such text cannot be sent.
    return ServiceError(Code.INTERNAL, text.encode(errors="backslashreplace").decode())


def _entry(output: TokenOutput, stream: Stream) -> Token:
    # A call with more than 15 names builds a dict for them, which takes longer than all the rest.
    entry = Token(
        token=output.token,
        stream_id=stream.stream_id,
        logprob=output.logprob,
        finish_reason=output.finish_reason,
        top_logprobs=UNSET if output.top_logprobs is None else dict(output.top_logprobs),
        pos=output.pos,
        seq=output.seq,
        text=UNSET if output.text is None else output.text,
        backtrack=output.backtrack,
        parent=output.parent,
        error=output.error,
        code=output.code,
        logs=output.logs,
        storage=list(output.storage),
    )
    if output.finish_reason is not None:
        entry.live, entry.stop, entry.constraint = stream.live, output.stop, output.constraint
    inspected = output.inspected
    if inspected is not None:
        entry.allowed = UNSET if inspected.allowed is None else inspected.allowed
        entry.cut, entry.round_us = list(inspected.cut), inspected.round_us
        entry.bias = dict(inspected.bias)
    if output.distribution is not None:
        entry.distribution = output.distribution
    entry.wakes = output.wakes
    return entry
