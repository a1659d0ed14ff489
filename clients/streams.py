"""The streams of the clients: ``Stream`` for threads, ``AsyncStream`` for asyncio."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from ..protocol.columns import plain_entry
from ..protocol.errors import Code, RequestError, SlowClientError, TokenbusError
from ..protocol.messages import MAX_INPUT_BYTES, Msg, System, Token
from .calls import Call, Ended, Event
from .connection import Connection
from .request_options import OnSystem
from .results import GeneratedSequence, Sequences, check_text, describe


def check_input(text: object) -> None:
    """Raises RequestError if an input is not text or has more than ``MAX_INPUT_BYTES``."""
    if not isinstance(text, str):
        what = f"an input is text; got {type(text).__name__}"
        raise RequestError(Code.INVALID_FIELD, what)
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_INPUT_BYTES:
        what = f"the input has {size} bytes; at most {MAX_INPUT_BYTES} are allowed"
        raise RequestError(Code.TOO_LARGE, what)


class _Reader:
    """The common base of ``Stream`` and ``AsyncStream``, which processes the events of a call."""

    def __init__(
        self,
        client: object,
        connection: Connection,
        call: Call,
        on_system: OnSystem | None,
        collected: Sequences | None = None,
    ) -> None:
        self._client = client  # The reference keeps the client alive.
        self._connection = connection
        self._call = call
        self._on_system = on_system
        self._unread = call.unread
        self._to_end = False
        """Whether the reader waits for the end of the stream. If so, a token does not wake the
        reader."""
        self._collected = collected or Sequences()
        self._add_row = self._collected.add_row
        self._collecting = threading.Lock()
        self.num_inputs = 0
        """Number of inputs that were sent to the program, not counting refused inputs."""
        self.answer: Msg | None = None
        self._finished = False
        """Whether the stream has been read to its end or was closed."""
        self._closed = False
        self._error: TokenbusError | None = None

    @property
    def sequences(self) -> list[GeneratedSequence]:
        """The sequences up to the last entry that was read."""
        if self._to_end and not self._closed:
            self._collect()
        return self._collected.listed()

    @property
    def waiting(self) -> bool:
        """Whether the program waits for an input (``ctx.receive``) that was not sent yet, according
        to the entries that have been read. Workers of earlier releases do not report that a program
        waits; the value is then False."""
        running = (one for one in self.sequences if one.finish_reason is None)
        return not self._finished and any(one.waiting > self.num_inputs for one in running)

    def close(self) -> None:
        """Cancels the request unless the stream has been read to its end. A closed stream cannot
        be read."""
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
        """The next entry that has arrived; None if no entry has arrived or the stream has ended."""
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
        """Reads all events that have arrived, without converting rows to entries."""
        while not self._finished and (event := self._collect(pop_other=True)) is not None:
            self._read(event)

    def _collect(self, pop_other: bool = False) -> Event | None:
        """Reads the rows and entries that have arrived, up to the first event of another kind. If
        ``pop_other`` is true, removes this event and returns it. Several threads may call this
        method at the same time."""
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
        """Reads an event that is neither a row nor an entry."""
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
        """Called after the last entry. If the stream failed, raises its error. If the stream was
        closed, raises RuntimeError."""
        if self._closed:
            raise RuntimeError(
                "this stream was closed before its end; stream.sequences has the entries that were "
                "read"
            )
        error = self._error or self._collected.failure()
        if error is not None:
            raise error.with_traceback(None)


class Stream(_Reader):
    """The tokens of one request, as they arrive.

    Iterate over the stream to read its ``Token`` entries. Each entry is read once: a second loop
    continues where the first loop stopped. ``text``, ``tokens`` and ``wait`` read the rest of the
    stream. ``sequences`` contains the entries that have been read.

    Before the end of the stream, three events cancel the request: the stream is closed, its
    ``with`` block ends, or the last reference to the stream is dropped. A failed stream raises
    TokenbusError at its end. Reading after ``close`` raises RuntimeError.
    """

    def __init__(
        self,
        client: object,
        connection: Connection,
        call: Call,
        on_system: OnSystem | None,
        collected: Sequences | None = None,
    ) -> None:
        """``collected`` receives every entry that is read."""
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

    def text(self) -> str:
        """Reads the stream to its end; returns the text of the first sequence.

        Raises ValueError if the request did not ask for text.
        """
        check_text(self._call)
        return next((s.text for s in self.wait()), "")

    def tokens(self) -> list[int]:
        """Reads the stream to its end; returns the tokens of the first sequence."""
        return next((s.tokens for s in self.wait()), [])

    def send(self, text: str) -> None:
        """Sends an input to the program of this stream, and returns when the input is stored. The
        program receives the input from ``ctx.receive()`` exactly once, even if processes die.

        Raises UnavailableError if too many inputs wait for the program. Raises RequestError if the
        input is too large, or if the stream has ended or does not have a program.
        """
        check_input(text)
        answer: queue.SimpleQueue[TokenbusError | None] = queue.SimpleQueue()
        self._connection.send_input(self._call, text, answer.put)
        self.num_inputs += 1
        error = answer.get()
        if error is not None:
            self.num_inputs -= 1
            raise error

    def wait(self) -> list[GeneratedSequence]:
        """Reads the stream to its end; returns all sequences. An interrupt, such as Ctrl-C, closes
        the stream."""
        self._to_end, self._unread.watched = True, False
        try:
            self.read_arrived()
            while not self._finished:
                self._wakes.get()
                self.read_arrived()
            self._wakes.put(None)  # Wakes a thread that waits for an entry.
            self._raise_failure()
        except BaseException:
            self.close()
            raise
        return self.sequences

    def close(self) -> None:
        """Cancels the request unless the stream has been read to its end. A closed stream cannot
        be read."""
        super().close()
        self._wakes.put(None)  # Wakes a thread that waits for an entry.

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        while (entry := self._next_entry()) is None:
            if self._finished:
                self._wakes.put(None)  # Wakes the next thread that waits for an entry.
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
    """The tokens of one request, as they arrive. Its methods are those of ``Stream``.

    A task that waits for an entry may be cancelled, for example by ``asyncio.timeout``: the stream
    continues. If a task is cancelled while it waits for the end (``wait``, ``text``, ``tokens``),
    the stream is closed.
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
        self.hold: Callable[[int], None] | None = None
        """Counts bytes that the stream stores until its end: the logs, messages and writes of a
        program. Raises TokenbusError if there is no room; the stream then ends with this error."""
        self._overflowed = False
        self._waiters: list[asyncio.Future[None]] = []
        """A future for each task that waits for an event."""
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
        """Stores arrived events, up to the maximum number of unread entries. Called on the event
        loop."""
        if self._fits(len(arrived)) and self._holds(arrived):
            self._unread.extend(arrived)
            if self._to_end and isinstance(arrived[-1], Token):
                self._collect()
            else:
                self._wake()

    def _row_arrived(self) -> None:
        """Handles a row that was added to the unread entries. Called on the event loop."""
        row = self._unread.pop()
        if self._fits(1):
            self._unread.append(row)
            if not self._to_end:
                self._wake()

    def _fits(self, count: int) -> bool:
        """Whether ``count`` further events fit into the maximum number of unread entries. The first
        event that does not fit ends the stream."""
        limit, unread = self._max_unread, self._unread
        if self._overflowed:
            return False
        if limit is None or len(unread) + count <= limit:
            return True
        if self._to_end:
            self._collect()
            if len(unread) + count <= limit:
                return True
        what = f"the stream was cancelled, because its reader left more than {limit} entries unread"
        self._overflow(SlowClientError(Code.SLOW_CLIENT, what))
        return False

    def _holds(self, arrived: Sequence[Event]) -> bool:
        """Whether ``hold`` has room for the outputs of a program in these events. The first output
        that does not fit ends the stream."""
        if self.hold is None:
            return True
        size = sum(one.written_bytes for one in arrived if isinstance(one, Token))
        try:
            if size:
                self.hold(size)
        except TokenbusError as error:
            self._overflow(error)
            return False
        return True

    def _overflow(self, error: TokenbusError) -> None:
        """Cancels the request, and ends the stream with an error."""
        self._overflowed = True
        self._connection.cancel(self._call)
        self._unread.append(Ended(error))
        self._wake()

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

    async def text(self) -> str:
        """Reads the stream to its end; returns the text of the first sequence.

        Raises ValueError if the request did not ask for text.
        """
        check_text(self._call)
        return next((s.text for s in await self.wait()), "")

    async def tokens(self) -> list[int]:
        """Reads the stream to its end; returns the tokens of the first sequence."""
        return next((s.tokens for s in await self.wait()), [])

    async def arrived(self) -> list[Token]:
        """Waits for at least one entry, and returns all entries that have arrived. After the last
        entry, returns ``[]``.

        A server uses this method to write several entries to its client at once.
        """
        while not (entries := list(iter(self._next_entry, None))):
            if self._finished:
                self._raise_failure()
                break
            await self._arrival()
        return entries

    async def send(self, text: str) -> None:
        """Sends an input to the program of this stream, as ``Stream.send`` does."""
        check_input(text)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[TokenbusError | None] = loop.create_future()

        def give(error: TokenbusError | None) -> None:
            if not answer.done():
                answer.set_result(error)

        def answered(error: TokenbusError | None) -> None:
            with suppress(RuntimeError):  # The loop may be closed.
                loop.call_soon_threadsafe(give, error)

        self._connection.send_input(self._call, text, answered)
        self.num_inputs += 1
        error = await answer
        if error is not None:
            self.num_inputs -= 1
            raise error

    async def wait(self) -> list[GeneratedSequence]:
        """Reads the stream to its end; returns all sequences. A cancellation closes the stream."""
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
        """Cancels the request unless the stream has been read to its end. A closed stream cannot
        be read."""
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
