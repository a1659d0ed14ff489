"""The table of live streams, and everything that a GPU worker sends to their clients.

A stream ends with the TOKEN message that contains the end of its last sequence, or with an ERROR.
Each stream gets one of these messages, even if its tokens cannot be sent. Only dropped streams do
not. A *row* is a plain token of a step (``engine.sequence.TokenColumns``).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain

from ....protocol import logs
from ....protocol.errors import (
    Code,
    RequestError,
    ServiceError,
    TokenbusError,
    UnavailableError,
)
from ....protocol.header import FORM
from ....protocol.logs import about
from ....protocol.messages import ForwardPath, Msg, Token
from ....protocol.pace import RETRY_AFTER_S
from ..engine.sequence import Sequence, StepOutputs, TokenColumns, TokenOutput
from .attaching import Attaching, Claiming, rows_frames
from .kept_streams import KeptStreams
from .metrics import WorkerMetrics
from .packed_fields import unpacked
from .recipients import Recipients
from .spans import record_span
from .stored_bytes import StoredBytes, max_stored_bytes
from .streams import (
    Frames,
    Stream,
    TokenMessage,
    entries_frames,
    error_frames,
    journal_frames,
    message_frames,
    saved_buffer_frames,
)

log = logging.getLogger(__name__)


class LiveStreams:
    """The streams whose requests an engine runs, by request.

    ``post`` sends frames over a link. ``release`` frees the state of an ended stream in the engine
    and in steering. It is sometimes called for a stream whose state is already freed. ``name``: the
    name of the worker.
    """

    def __init__(
        self,
        post: Callable[[Frames, int], None],
        release: Callable[[Stream], None],
        metrics: WorkerMetrics | None = None,
        name: str = "",
        num_workers: int = 1,
    ) -> None:
        """``num_workers``: the number of GPU workers on this machine. They share the bound on the
        bytes of stored entries."""
        self.metrics = metrics or WorkerMetrics()
        self._post = post
        self._release = release
        self._name = name
        self._streams: dict[int, Stream] = {}
        self._kept = KeptStreams()
        self._stored = StoredBytes(max_stored_bytes(num_workers))
        self._recipients: dict[str, Recipients] = {}
        """For each model: the recipients of its current batch. They are discarded when a stream of
        the batch changes."""
        self.num_outputs = 0
        """Number of outputs that were sent for all streams."""
        self.inconsistent = False
        """Whether a stream could not be released. The tables of its engine are then
        inconsistent."""

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        """A snapshot of the streams; safe on another thread."""
        return iter(list(self._streams.values()))

    def add(self, stream: Stream) -> None:
        """Adds the stream of a request that was passed to an engine. Raises the error of
        ``store``."""
        self._streams[stream.request] = stream
        stream.metrics = self.metrics.of(stream.model)
        self.store(stream)

    def store(self, stream: Stream) -> None:
        """Counts the bytes of a request until its stream ends or ``forget`` is called. Raises
        UnavailableError if the client exceeds its share of the bound on stored bytes."""
        error = self._stored.count(stream)
        if error:
            raise UnavailableError(Code.CLIENT_LIMIT, error, retry_after_s=RETRY_AFTER_S)

    def forget(self, stream: Stream) -> None:
        """Stops counting the bytes of a request that has been answered or dropped before an engine
        received it."""
        self._stored.drop(stream)

    def get(self, request: int) -> Stream | None:
        """The live stream of a request; None if the request does not have one."""
        return self._streams.get(request)

    def kept(self, request: int) -> Stream | None:
        """The stream of a request that has just ended; None if the stream is not stored."""
        return self._kept.get(request)

    def reported(self) -> Iterator[Stream]:
        """The streams that are reported to a restarted broker: live and stored streams. Any thread
        may call this method."""
        return chain(self, self._kept)

    # --- tokens ---------------------------------------------------------------------------------

    def send(self, outputs: StepOutputs | list[TokenOutput]) -> None:
        """Sends outputs, and removes the streams that end with them."""
        if not isinstance(outputs, StepOutputs):
            outputs = StepOutputs(outputs)
        self.num_outputs += len(outputs)
        new: dict[Stream, list[Token]] = {}
        for output in outputs.others:
            self._add(output, new)
        columns, recipients = outputs.columns, None
        if columns is not None:
            recipients = self._known(columns.sequences)
            if recipients is None:
                columns = self._begin(columns, new)
        if columns is not None:
            recipients = recipients or self._recipients_of(columns.sequences)
        if new or recipients is not None:
            self.metrics.count(new, recipients)
            if columns is not None and recipients is not None:
                recipients.take(columns)
            self._deliver(new, recipients)

    def _add(self, output: TokenOutput, new: dict[Stream, list[Token]]) -> None:
        """Adds an output to the new entries of its stream."""
        stream = self._streams.get(output.request)
        if stream is None:
            return
        if output.finish_reason is not None:
            stream.live -= 1
            output.live = stream.live
            if output.error is not None:
                self.metrics.errors.add(output.code or Code.INTERNAL)
        stream.live += output.parent is not None
        self._announce(stream)
        # The first output of a stream is never a row, so it always passes through this method.
        if not stream.entries and stream.usage is not None:
            output.prompt_tokens = stream.usage.tokens
            output.cached_tokens = stream.usage.cached or 0
        output.stream_id, output.request, output.shortened = stream.stream_id, 0, False
        self._settle(stream)
        stream.begin(output)
        stream.add(output)
        new.setdefault(stream, []).append(output)

    def _begin(self, columns: TokenColumns, new: dict[Stream, list[Token]]) -> TokenColumns | None:
        """The first entry that a sequence gets from this worker has the stream's ``span``, so it
        cannot be a row. If a request has such an entry in this step, adds all its outputs to the
        new entries. Returns the rows of the other requests; None if there are none."""
        found = [(s, self._streams.get(s.request)) for s in columns.sequences]
        begun = {
            sequence.request
            for sequence, stream in found
            if stream is not None and stream.span is not None and sequence.seq not in stream.begun
        }
        if not begun:
            return columns
        rest, outputs = columns.without(begun)
        for output in outputs:
            self._add(output, new)
        return rest

    def _known(self, sequences: list[Sequence]) -> Recipients | None:
        """Returns the stored recipients, if the last step of a model had rows of the same
        sequences. If none had, returns None."""
        for known in self._recipients.values():
            if known.sequences == sequences:
                return known
        return None

    def _recipients_of(self, sequences: list[Sequence]) -> Recipients | None:
        """The recipients of the rows of these sequences; None if all their streams have ended."""
        found = Recipients(sequences, [self._streams.get(one.request) for one in sequences])
        if not found.streams:
            return None
        for stream in found.streams:
            self._announce(stream)
        before = self._recipients.pop(stream.model, None)
        if before is not None:
            before.settle()
        self._recipients[stream.model] = found
        return found

    def _announce(self, stream: Stream) -> None:
        """Notifies the client of a moved stream before its first new entry."""
        move, stream.move = stream.move, None
        if move is not None:
            notice = move.notice(stream, self._name)
            self._post(message_frames(stream, b"SYSTEM", notice), stream.link)

    def send_end(self, stream: Stream, ends: list[Token]) -> None:
        """Sends the last entries of a stream that has not been passed to an engine."""
        stream.live = 0
        for end in ends:
            stream.add(end)
        self._deliver({stream: ends})

    def finish(self, stream: Stream) -> None:
        """Reports the end of a moved stream. The previous worker has already sent the stream's last
        entry."""
        if stream.save:
            self._post(saved_buffer_frames(stream), stream.link)
        self._post(TokenMessage([stream.request]).frames(), stream.link)
        self.forget(stream)
        logs.end(stream.request)

    def _deliver(
        self, new: Mapping[Stream, list[Token]], recipients: Recipients | None = None
    ) -> None:
        try:
            messages = self._messages(new, recipients)
        except Exception as error:
            if recipients is None and len(new) == 1:
                self.fail(next(iter(new)), error, "sending its tokens")
                return
            # A stream has a value that cannot be encoded. Each stream is sent separately, so that
            # only this stream fails.
            rows = recipients.entries() if recipients is not None else {}
            for stream, entries in (rows | dict(new)).items():
                self._deliver({stream: entries})
            return
        for frames, link in messages:
            self._post(frames, link)
        for stream, entries in new.items():
            stream.pack(entries)
            if stream.live == 0:
                end = entries[-1]
                self._end(stream, end.finish_reason or "cancelled", end.error)
                if end.finish_reason != "cancelled":
                    self._kept.add(stream)
        self._bound(*new, *(recipients.reporting if recipients is not None else ()))

    def _bound(self, *streams: Stream) -> None:
        """Ends each live stream of ``streams`` whose client exceeds its share of the bound on
        stored bytes."""
        for stream in streams:
            if self._streams.get(stream.request) is stream:
                error = self._stored.count(stream)
                if error:
                    refusal = RequestError(Code.TOO_LARGE, error)
                    self.fail(stream, refusal, "storing its entries")

    def _messages(
        self, new: Mapping[Stream, list[Token]], recipients: Recipients | None
    ) -> list[tuple[Frames, int]]:
        """The messages to send, each with its link. The first messages are the saved buffers of
        streams that end. One message with tokens for each broker follows."""
        messages: list[tuple[Frames, int]] = []
        by_link: defaultdict[int, TokenMessage] = defaultdict(TokenMessage)
        for stream, entries in new.items():
            by_link[stream.link].add(stream.session, stream.form, entries)
            if stream.live == 0:
                by_link[stream.link].finished.append(stream.request)
                if stream.save:
                    messages.append((saved_buffer_frames(stream), stream.link))
        if recipients is not None:
            recipients.add_to(by_link)
        return messages + [(message.frames(), link) for link, message in by_link.items()]

    def sent(self, stream: Stream) -> list[Token]:
        """All entries of a live stream that were sent, in order."""
        self._settle(stream)
        return list(map(unpacked, stream.sent()))

    def _settle(self, stream: Stream) -> None:
        """Stores the rows that were already sent to a stream's client in the stream
        (``Recipients.settle``)."""
        for recipients in self._recipients.values():
            if stream in recipients.streams:
                recipients.settle()

    def _dissolve(self) -> None:
        """Discards the recipients of all batches. Called when a stream of a batch changes."""
        for recipients in self._recipients.values():
            recipients.settle()
        self._recipients.clear()

    def take_form(self, stream: Stream, flags: int) -> None:
        """Sets the form of a stream's tokens when a client attaches. ``flags``: the flags of the
        ATTACH's header. The form can differ between connections."""
        if stream.flags != flags & FORM:
            self._dissolve()
            stream.take_form(flags)

    def cost(self, waiting: Attaching | Claiming) -> int:
        """The number of entries that a message takes from the budget. The message is the answer to
        an ATTACH, or a JOURNAL."""
        self._settle(waiting.stream)
        return waiting.cost

    def attach(self, attaching: Iterable[Attaching]) -> None:
        """Answers ATTACHes with the entries that their clients have not received. There may be at
        most one ATTACH for each stream. For each session, one message has the rows of all its
        streams."""
        rows: defaultdict[tuple[int, int], dict[Stream, int]] = defaultdict(dict)
        for one in attaching:
            stream = one.stream
            try:
                last_rows = self._attach(stream, one.received)
            except Exception as error:
                self.fail(stream, error, "answering an ATTACH")
                continue
            if last_rows:
                rows[stream.link, stream.session][stream] = last_rows
        for (link, session), streams in rows.items():
            try:
                self._post(rows_frames(session, streams), link)
            except Exception as error:
                for stream in streams:
                    self.fail(stream, error, "answering an ATTACH")

    def _attach(self, stream: Stream, received: int) -> int:
        """Sends the answer to an ATTACH, and the missed entries. If the last entries can be sent as
        rows in columns, leaves them out and returns their number."""
        self._settle(stream)
        # This copy of the stream may have fewer entries than the client has received. It then
        # computes the missing entries again, and the client discards the repeated entries.
        received = min(received, stream.num_entries)
        missed, last_rows = stream.missed(received)
        answer = Msg(stream_id=stream.stream_id, attached=received, moves=stream.moves)
        messages = [message_frames(stream, b"MSG", answer)]
        if missed > last_rows:
            messages.append(entries_frames(stream, stream.encodable(received, last_rows)))
        for frames in messages:
            self._post(frames, stream.link)
        return last_rows

    def change_path(
        self,
        model: str,
        path_of: Callable[[str], ForwardPath],
        kept: Collection[int],
        held: Callable[[int], list[TokenOutput]] = lambda request: [],
    ) -> int:
        """Sets how the streams of a model are computed from now on. ``path_of``: the forward path
        by LoRA adapter (``Engine.path_of``). ``kept``: the requests that keep a part of their KV
        cache. ``held``: the outputs of a request that have been computed and will be sent later.
        Returns the number of the streams."""
        self._dissolve()
        streams = [stream for stream in self if stream.model == model]
        for stream in streams:
            computed, path = held(stream.request), path_of(stream.adapter)
            for output in computed:
                stream.begin(output)
            stream.compute_by(path, stream.request in kept)
            stream.begun.update(output.seq for output in computed)
            log.debug(
                "request %d continues after %d tokens at %s with version %d of the weights, %s",
                *(stream.request, stream.num_tokens, self._name, path.version, path.weights),
                extra=about(stream.request),
            )
        return len(streams)

    def send_journal(self, stream: Stream, claimed: int = 0) -> None:
        """Sends the request and all entries of a stream to the broker of the stream's link. This
        broker takes over the stream. ``claimed``: ``Journal.claimed``."""
        self._dissolve()
        self._post(journal_frames(stream, claimed), stream.link)
        if stream.save and not stream.live:
            self._post(saved_buffer_frames(stream), stream.link)

    # --- ends -----------------------------------------------------------------------------------

    def fail(self, stream: Stream, error: Exception, doing: str) -> None:
        """Ends a stream with an ERROR. If ``error`` is a TokenbusError, the client receives it. Any
        other exception becomes an ``internal`` error. ``doing``: the work in which the error was
        raised."""
        if not isinstance(error, TokenbusError):
            number = stream.request
            log.error("request %d: %s failed", number, doing, exc_info=error, extra=about(number))
            error = internal_error(error, doing)
        self.metrics.errors.add(error.code)
        self._end(stream, "error", error.message)
        self._post(error_frames(stream, error), stream.link)

    def drop(self, request: int) -> None:
        """Ends a live stream, or deletes a stored stream, without sending anything. Called when the
        broker does not need the stream any more."""
        kept, stream = self._kept.get(request), self._streams.get(request)
        if kept is not None:
            kept.dropped = True
            self._kept.drop(request)
        if stream is not None:
            stream.dropped = True
            self._end(stream, "cancelled", None)

    def _end(self, stream: Stream, reason: str, error: str | None) -> None:
        """Counts an ended stream and frees its state."""
        if any(stream in recipients.streams for recipients in self._recipients.values()):
            self._dissolve()
        self.metrics.ended(stream, reason)
        if stream.trace:
            record_span(stream, reason, error)
        self._streams.pop(stream.request, None)
        self._stored.drop(stream)
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
