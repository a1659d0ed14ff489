"""The streams of both clients: ``Stream`` blocks its thread, ``AsyncStream`` its task."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

from ..protocol.columns import plain_entry
from ..protocol.errors import Code, SlowClientError, TokenbusError
from ..protocol.messages import Msg, System, Token
from .calls import Call, Ended, Event
from .connection import Connection
from .request_options import OnSystem
from .results import GeneratedSequence, Sequences, check_text, describe


class _Reader:
    """The common base of both streams: it processes the events of a call, and ends it."""

    def __init__(
        self,
        client: object,
        connection: Connection,
        call: Call,
        on_system: OnSystem | None,
        collected: Sequences | None = None,
    ) -> None:
        self._client = client  # Streams keep their client alive.
        self._connection = connection
        self._call = call
        self._on_system = on_system
        self._unread = call.unread
        self._to_end = False
        """Whether the reader waits for the end, and is not woken for each token."""
        self._collected = collected or Sequences()
        self._add_row = self._collected.add_row
        self._collecting = threading.Lock()
        self.answer: Msg | None = None
        self._finished = False
        """Read to the end, or closed."""
        self._closed = False
        self._error: TokenbusError | None = None

    @property
    def sequences(self) -> list[GeneratedSequence]:
        """The sequences as far as they were read: up to the entry of the loop."""
        if self._to_end and not self._closed:
            self._collect()
        return self._collected.listed()

    def close(self) -> None:
        """Cancels the request, unless it was read to its end; nothing can be read afterwards."""
        if not self._finished:
            self._finished = self._closed = True
            self._connection.cancel(self._call)
            self._ended(None, complete=False)

    def __del__(self) -> None:
        if not getattr(self, "_finished", True):
            self._connection.cancel(self._call)
            self._ended(None, complete=False)

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"<{kind} {self._call.number}: {describe(self._finished, self.sequences)}>"

    def _next_entry(self) -> Token | None:
        """The next entry that has arrived; None before it arrives and after the last entry."""
        unread = self._unread
        while unread and not self._finished:
            event = unread.popleft()
            if isinstance(event, tuple):
                self._add_row(event)
                return plain_entry(*event)
            if isinstance(event, Token):
                self._collected.add(event)
                return event
            self._read(event)
        return None

    def read_arrived(self) -> None:
        """Reads all that has arrived, and makes no entries of rows."""
        while not self._finished and (event := self._collect(pop_other=True)) is not None:
            self._read(event)

    def _collect(self, pop_other: bool = False) -> Event | None:
        """Reads the tokens that have arrived up to the first event of another kind; with
        ``pop_other``, also removes and returns that event. Safe on several threads while the stream
        is read to its end."""
        unread, add_row = self._unread, self._add_row
        with self._collecting:
            while unread:
                event = unread.popleft()
                if isinstance(event, tuple):
                    add_row(event)
                elif isinstance(event, Token):
                    self._collected.add(event)
                elif pop_other:
                    return event
                else:
                    unread.appendleft(event)
                    break
        return None

    def _read(self, event: Event) -> None:
        """Reads an event that is not a token."""
        match event:
            case System() as notice:
                if self._on_system is not None:
                    self._on_system(notice)
            case Msg() as answer:
                self.answer = answer
            case Ended(error):
                self._finished = True
                self._error = error
                self._ended(error, complete=True)

    def _ended(self, error: TokenbusError | None, complete: bool) -> None:
        self._collected.ended(error, complete)
        if self._call.span is not None:
            self._call.span.end(self.sequences, error)

    def _raise_failure(self) -> None:
        """Called after the last entry: raises the stream's error, or that it was closed, if so."""
        if self._closed:
            raise RuntimeError(
                "this stream was closed before its end; stream.sequences has what was read of it"
            )
        error = self._error or self._collected.failure()
        if error is not None:
            raise error.with_traceback(None)


class Stream(_Reader):
    """The tokens of one request, as they arrive.

    Iterate it for the ``Token`` entries. Each is read once: a second loop continues after the first
    one. ``text``, ``tokens`` and ``wait`` read the rest of the stream. ``sequences`` has the
    entries that were read so far.

    Closing the stream before its end, leaving its ``with`` block or dropping the last reference to
    it cancels the request. Reading a failed stream to the end raises TokenbusError; reading after
    ``close`` raises RuntimeError.
    """

    def __init__(
        self,
        client: object,
        connection: Connection,
        call: Call,
        on_system: OnSystem | None,
        collected: Sequences | None = None,
    ) -> None:
        """``collected`` receives the entries that are read."""
        super().__init__(client, connection, call, on_system, collected)
        unread = call.unread
        wakes = self._wakes = queue.SimpleQueue[None]()

        def wake() -> None:
            wakes.put(None)

        def take(arrived: Sequence[Event]) -> None:
            unread.extend(arrived)
            wake()

        unread.watched, unread.wake = True, wake
        call.take = take
        connection.submit(call)

    @property
    def text(self) -> str:
        """The text of the first sequence, read to its end.

        Raises ValueError if the request did not ask for text.
        """
        check_text(self._call)
        return next((s.text for s in self.wait()), "")

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first sequence, read to its end."""
        return next((s.tokens for s in self.wait()), [])

    def wait(self) -> list[GeneratedSequence]:
        """Reads to the end; returns all sequences. If it is interrupted, for example by Ctrl-C, it
        closes the stream."""
        self._to_end, self._unread.watched = True, False
        try:
            self.read_arrived()
            while not self._finished:
                self._wakes.get()
                self.read_arrived()
            self._wakes.put(None)  # Wakes another thread that waits for an entry.
            self._raise_failure()
        except BaseException:
            self.close()
            raise
        return self.sequences

    def close(self) -> None:
        """Cancels the request, unless it was read to its end; nothing can be read afterwards."""
        super().close()
        self._wakes.put(None)  # Wakes a thread that waits for an entry.

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        while (entry := self._next_entry()) is None:
            if self._finished:
                self._wakes.put(None)  # For another thread that waits for an entry.
                self._raise_failure()
                raise StopIteration
            self._wakes.get()
        return entry

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


class AsyncStream(_Reader):
    """The tokens of one request, as they arrive; otherwise like ``Stream``.

    A task that is cancelled while it waits for an entry, for example by ``asyncio.timeout``, does
    not affect the stream. A task that waits for the end (``wait``, ``text``, ``tokens``) closes it.
    """

    def __init__(
        self,
        client: object,
        connection: Connection,
        call: Call,
        on_system: OnSystem | None,
        max_unread: int | None = None,
        collected: Sequences | None = None,
    ) -> None:
        super().__init__(client, connection, call, on_system, collected)
        self._max_unread = max_unread
        self._overflowed = False
        self._waiters: list[asyncio.Future[None]] = []
        """The tasks that wait for an event."""
        this = weakref.ref(self)

        def take(arrived: Sequence[Event]) -> None:
            stream = this()
            if stream is not None:
                stream._take(arrived)

        def wake() -> None:
            stream = this()
            if stream is not None:
                stream._row_arrived()

        call.unread.wake = wake
        call.unread.watched = max_unread is not None
        call.take = take
        connection.submit(call)

    def _take(self, arrived: Sequence[Event]) -> None:
        """Called on the event loop: stores events that have arrived, up to a number of unread
        entries."""
        if self._fits(len(arrived)):
            self._unread.extend(arrived)
            if self._to_end and isinstance(arrived[-1], Token):
                self._collect()
            else:
                self._wake()

    def _row_arrived(self) -> None:
        """Called on the event loop: a row was added to the unread entries."""
        row = self._unread.pop()
        if self._fits(1):
            self._unread.append(row)
            if not self._to_end:
                self._wake()

    def _fits(self, count: int) -> bool:
        """Whether this number of further events may wait to be read. If not, the first that exceeds
        the bound ends the stream."""
        most, unread = self._max_unread, self._unread
        if self._overflowed:
            return False
        if most is None or len(unread) + count <= most:
            return True
        if self._to_end:
            self._collect()
            if len(unread) + count <= most:
                return True
        self._overflowed = True
        self._connection.cancel(self._call)
        what = f"more than {most} entries of the stream were not read; it was cancelled"
        unread.append(Ended(SlowClientError(Code.SLOW_CLIENT, what)))
        self._wake()
        return False

    def _wake(self) -> None:
        """Wakes the tasks that wait for an event."""
        self._unread.watched = self._max_unread is not None
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _arrival(self) -> None:
        """Waits until an event arrives, or the stream is closed."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        if not self._to_end:
            self._unread.watched = True
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    @property
    def text(self) -> Coroutine[Any, Any, str]:
        """``await stream.text``: the text of the first sequence, read to its end.

        Raises ValueError if the request did not ask for text.
        """
        check_text(self._call)
        return self._text()

    @property
    def tokens(self) -> Coroutine[Any, Any, list[int]]:
        """``await stream.tokens``: the tokens of the first sequence, read to its end."""
        return self._tokens()

    async def arrived(self) -> list[Token]:
        """The next entries: all that have arrived, and at least one; ``[]`` after the last one.

        It is for programs that pass several entries on with one write.
        """
        while not (entries := list(iter(self._next_entry, None))):
            if self._finished:
                self._raise_failure()
                break
            await self._arrival()
        return entries

    async def wait(self) -> list[GeneratedSequence]:
        """Reads to the end; returns all sequences. If it is cancelled, it closes the stream."""
        self._to_end = True
        self._unread.watched = self._max_unread is not None
        try:
            self.read_arrived()
            while not self._finished:
                await self._arrival()
                self.read_arrived()
            self._raise_failure()
        except BaseException:
            self.close()
            raise
        return self.sequences

    def close(self) -> None:
        """Cancels the request, unless it was read to its end; nothing can be read afterwards."""
        super().close()
        self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        while (entry := self._next_entry()) is None:
            if self._finished:
                self._raise_failure()
                raise StopAsyncIteration
            await self._arrival()
        return entry

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    async def _text(self) -> str:
        return next((s.text for s in await self.wait()), "")

    async def _tokens(self) -> list[int]:
        return next((s.tokens for s in await self.wait()), [])
