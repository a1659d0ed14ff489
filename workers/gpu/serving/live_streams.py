"""The table of live streams, and everything that a GPU worker sends to their clients.

A stream ends either with the TOKEN message that contains the end of its last sequence, or with an
ERROR. Every stream gets one of these messages, even if sending fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

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
    """The streams whose requests an engine runs, by request.

    ``post`` sends frames over a link. ``release`` frees the state of an ended stream in the engine
    and in steering; it may be called when the state is already freed. ``name``: the name of the
    worker.
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
        """By model: the recipients of the current batch, as long as its streams do not change."""
        self.num_outputs = 0
        """Number of outputs that were sent for all streams."""
        self.inconsistent = False
        """Set if a stream could not be released: the tables of its engine are then inconsistent."""

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        """A snapshot of the streams; safe on another thread."""
        return iter(list(self._streams.values()))

    def add(self, stream: Stream) -> None:
        """Adds the stream of a request that was passed to an engine."""
        self._streams[stream.request] = stream
        stream.metrics = self.metrics.of(stream.model)

    def get(self, request: int) -> Stream | None:
        """The live stream of a request; None if the request does not have one."""
        return self._streams.get(request)

    def kept(self, request: int) -> Stream | None:
        """The stream of a request that has just ended; None if the stream is not stored."""
        return self._kept.get(request)

    def reported(self) -> Iterator[Stream]:
        """The streams that are reported to a restarted broker; safe on another thread."""
        return chain(self, self._kept)

    # --- tokens ---------------------------------------------------------------------------------

    def send(self, outputs: StepOutputs | list[TokenOutput]) -> None:
        """Sends outputs, and removes the streams that end with them."""
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
                output.live = stream.live
                if output.error is not None:
                    self.metrics.errors.add(output.code or Code.INTERNAL)
            if output.parent is not None:
                stream.live += 1
            if stream.move is not None:
                self._announce(stream, stream.move)
            stream.num_tokens += output.token is not None
            if not stream.started:
                stream.started = True
                if stream.usage is not None:
                    output.prompt_tokens = stream.usage.tokens
                    output.cached_tokens = stream.usage.cached or 0
            new.setdefault(output.request, (stream, []))[1].append(output)
            output.stream_id, output.request, output.shortened = stream.stream_id, 0, False

    def _recipients_of(
        self, columns: TokenColumns, new: dict[int, tuple[Stream, list[Token]]]
    ) -> Recipients | None:
        """The recipients of the rows of ``columns``; None if all their streams have ended. If a
        stream's first token is in this step, the token is added to ``new`` as an entry, which also
        reports the usage of the prompt."""
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
        # From the next step on, the streams that begin in this step get rows too.
        found.sequences = None
        self._recipients[first.model] = found
        return found

    def _announce(self, stream: Stream, move: Move) -> None:
        """Notifies the client of a moved stream before its first new entry."""
        stream.move = None
        notice = move.notice(stream, self._name)
        self._post(message_frames(stream, b"SYSTEM", notice), stream.link)

    def send_end(self, stream: Stream, ends: list[Token]) -> None:
        """Sends the last entries of a stream that has not been passed to an engine."""
        stream.live = 0
        self._deliver([(stream, ends)])

    def finish(self, stream: Stream) -> None:
        """Reports the end of a moved stream whose last entry was sent by the previous worker."""
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
                # A text cannot be encoded: each row is sent separately, as an entry.
                for row in self._rows_as_entries(columns):
                    self._deliver([row])
                return
            if len(new) == 1 and columns is None:
                self.fail(new[0][0], error, "sending its tokens")
                return
            # A value of one stream cannot be encoded: the other streams are sent without it.
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
        """The saved buffers of streams that end, then the tokens: one message for each broker."""
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
        """All entries of a live stream that were sent, in order."""
        return self._history.of(stream)

    def take_form(self, stream: Stream, flags: int) -> None:
        """Sets the form of a stream's tokens when a client attaches. ``flags``: the flags of its
        header. The form can differ between connections."""
        self._dissolve()
        stream.take_form(flags)

    def attach(self, stream: Stream, received: int) -> int:
        """Sends the entries that an attaching client has not received. Returns the number of
        entries of the stream."""
        entries = self._history.of(stream)
        for frames in attached_frames(stream, entries[received:], received):
            self._post(frames, stream.link)
        return len(entries)

    def send_journal(self, stream: Stream) -> None:
        """Sends the request and all entries of a stream to the broker of the stream's link, which
        takes the stream over."""
        self._dissolve()
        entries = self._history.of(stream)
        self._post(journal_frames(stream, entries), stream.link)
        if stream.save and not stream.live:
            self._post(saved_buffer_frames(stream, entries), stream.link)

    def _dissolve(self) -> None:
        """Discards the recipients of all batches, because their streams change."""
        for recipients in self._recipients.values():
            recipients.settle()
        self._recipients.clear()

    # --- ends -----------------------------------------------------------------------------------

    def fail(self, stream: Stream, error: Exception, doing: str) -> None:
        """Ends a stream with an ERROR. ``error`` is sent if it is meant for clients. Otherwise the
        client receives an error that says that the worker failed while ``doing`` something."""
        if not isinstance(error, TokenbusError):
            number = stream.request
            log.error("request %d: %s failed", number, doing, exc_info=error, extra=about(number))
            error = internal_error(error, doing)
        self.metrics.errors.add(error.code)
        self._end(stream, "error", error.message)
        self._post(error_frames(stream, error), stream.link)

    def drop(self, request: int) -> None:
        """Ends a stream without sending anything, because no client waits for it."""
        self._kept.drop(request)
        stream = self._streams.get(request)
        if stream is not None:
            self._end(stream, "cancelled", None)
        self._history.sort()

    def _end(self, stream: Stream, reason: str, error: str | None) -> None:
        """Counts an ended stream and frees its state."""
        if any(stream in recipients.streams for recipients in self._recipients.values()):
            self._dissolve()
        self.metrics.ended(stream, reason)
        if stream.trace:
            record_span(stream, reason, error)
        self._streams.pop(stream.request, None)
        try:
            self._release(stream)
        except Exception:
            text = "the engine's state of request %d was not freed"
            log.exception(text, stream.request, extra=about(stream.request))
            self.inconsistent = True
        logs.end(stream.request)


def internal_error(error: Exception, doing: str) -> ServiceError:
    """The error that clients receive if the worker itself failed."""
    text = f"the GPU worker failed while {doing}: {type(error).__name__}: {error}"
    # File names may contain invalid Unicode, which cannot be sent.
    return ServiceError(Code.INTERNAL, text.encode(errors="backslashreplace").decode())
