"""The table of live streams, and all that leaves a GPU worker for their clients.

A stream ends in one of two ways: with the TOKEN message that has the end of its last sequence, or
with an ERROR. Nothing that fails on the way leaves a stream without either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from msgspec import UNSET

from ...protocol import logs
from ...protocol.errors import Code, ServiceError, TokenbusError
from ...protocol.logs import about
from ...protocol.messages import Token
from .metrics import WorkerMetrics
from .sequence import TokenOutput
from .spans import record_span
from .streams import Frames, Stream, error_frames, saved_buffer_frames, token_frames

log = logging.getLogger(__name__)


class LiveStreams:
    """The streams whose requests an engine has, by request.

    ``post`` sends frames. ``release`` frees what the engine and the controllers keep of a stream
    that is over; it may be called for one of which nothing is left.
    """

    def __init__(
        self,
        post: Callable[[Frames], None],
        release: Callable[[Stream], None],
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self.metrics = metrics or WorkerMetrics()
        self._post = post
        self._release = release
        self._streams: dict[int, Stream] = {}
        self._unsent: list[TokenOutput] = []
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

    # --- tokens ---------------------------------------------------------------------------------

    def defer(self, outputs: list[TokenOutput]) -> None:
        """Keeps outputs for the next ``send``, which comes while the next forward runs."""
        self._unsent += outputs

    def send(self, outputs: list[TokenOutput]) -> None:
        """Sends outputs, after those that were deferred; streams that end with them are over."""
        outputs, self._unsent = [*self._unsent, *outputs], []
        new: dict[int, tuple[Stream, list[Token]]] = {}
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
            new.setdefault(output.request, (stream, []))[1].append(_entry(output, stream))
        self.num_outputs += len(outputs)
        for stream, entries in new.values():
            if not stream.entries and stream.usage is not None:
                entries[0].prompt_tokens = stream.usage.tokens
                entries[0].cached_tokens = stream.usage.cached or 0
            stream.entries += entries
        self.metrics.count(new.values())
        self._deliver(list(new.values()))

    def send_end(self, stream: Stream, end: Token) -> None:
        """Sends the only entry of a stream that no engine has."""
        stream.live = 0
        self._deliver([(stream, [end])])

    def _deliver(self, new: list[tuple[Stream, list[Token]]]) -> None:
        try:
            messages = _messages(new)
        except Exception as error:
            # A value of one stream cannot be encoded: the others are sent without it.
            if len(new) > 1:
                for one in new:
                    self._deliver([one])
            else:
                self.fail(new[0][0], error, "sending its tokens")
            return
        for frames in messages:
            self._post(frames)
        for stream, _ in new:
            if stream.live == 0:
                last = stream.entries[-1] if stream.entries else None
                reason = last.finish_reason if last is not None else None
                self._end(stream, reason or "cancelled", last.error if last is not None else None)

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
        self._post(error_frames(stream, error))

    def drop(self, request: int) -> None:
        """Ends a stream for which no client waits; nothing is sent."""
        stream = self._streams.get(request)
        if stream is not None:
            self._end(stream, "cancelled", None)

    def _end(self, stream: Stream, reason: str, error: str | None) -> None:
        """A stream is over: counts it, and frees what is kept of it."""
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


def _messages(new: list[tuple[Stream, list[Token]]]) -> list[Frames]:
    """The buffers of streams that end, then the tokens."""
    messages = [saved_buffer_frames(s) for s, _ in new if s.live == 0 and s.save]
    tokens = token_frames(new)
    return messages if tokens is None else [*messages, tokens]


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
    return entry
