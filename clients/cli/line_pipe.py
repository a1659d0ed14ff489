"""Connects standard input and output to the broker: converts lines to frames and back."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import zmq
from msgspec import Struct

from ...protocol.bodies import decode_as, encode_body
from ...protocol.errors import Code, ConnectionLostError, RequestError
from ...protocol.frames import Frames
from ...protocol.keys import OwnKey
from ...protocol.lines import error_line, frames_line, line_frames
from ...protocol.messages import MAX_BODY_BYTES, Error, InputAnswer, Ping, StreamId
from ...transport.async_dealer import AsyncDealer
from ..session import no_broker

MAX_LINE_BYTES = 2 * MAX_BODY_BYTES
"""Maximum size of an input line. A line with the largest controller module in base64 fits."""
READ_BYTES = 65_536
PING_S = 1.0
"""Interval between PINGs to the broker, in seconds."""
OWN_PING, LAST_PING = 2**62, 2**62 + 1
"""This program also sends PINGs of its own. The first number is that of the PINGs during the run,
the second that of the PING after the last input line. Their PONGs are not printed."""


class _Named(Struct):
    """The field of a message's body that names a stream."""

    stream_id: StreamId | None = None


class _Entry(Struct):
    """The fields of a TOKEN entry that show whether the entry is the last of its stream."""

    stream_id: int
    finish_reason: str | None = None
    live: int = 0


class _Answer(Struct):
    stream_id: int
    attached: int | None = None
    input: InputAnswer | None = None


class _Pong(Struct):
    n: int = 0


class LinePipe:
    """Sends the lines of standard input to the broker at the address ``front``, and prints the
    broker's messages.

    ``timeout_s``: if the broker does not answer for this number of seconds, it counts as lost.
    ``key``: the key for the connection, or None. Raises AddressError if ``front`` is not a valid
    address.
    """

    def __init__(self, front: str, timeout_s: float, key: OwnKey | None = None) -> None:
        self._front = front
        self._timeout_s = timeout_s
        self._key = key
        self._live: set[int] = set()
        """The ids of the streams and requests that have not ended."""
        self._sent_all = False
        """Whether the broker has received the whole input."""

    async def serve(self) -> None:
        """Runs until the input and every stream have ended. Raises ConnectionLostError if the
        broker does not answer."""
        self._dealer = AsyncDealer(zmq.Context.instance(), self._front, self._key)
        sending = [asyncio.create_task(self._ping()), asyncio.create_task(self._send_all())]
        try:
            while self._live or not self._sent_all:
                async with asyncio.timeout(self._timeout_s):
                    messages = await self._dealer.receive()
                for task in sending:
                    if task.done():
                        task.result()
                for frames in messages:
                    if self._is_for_the_user(frames):
                        await _print(frames_line(frames))
            await self._dealer.send([b"BYE", b"{}"])
        except TimeoutError:
            error = ConnectionLostError(Code.CONNECTION_LOST, no_broker(self._front))
            await _print(error_line(error, ""))
            raise error from None
        finally:
            for task in sending:
                task.cancel()
            self._dealer.close(linger_ms=int(1000 * PING_S))

    async def _ping(self) -> None:
        while True:
            await self._dealer.send([b"PING", encode_body(Ping(n=OWN_PING), "json")])
            await asyncio.sleep(PING_S)

    async def _send_all(self) -> None:
        lines = _InputLines()
        while (line := await lines.next()) is not None:
            try:
                if line.size > MAX_LINE_BYTES:
                    what = f"the line has {line.size} bytes; at most {MAX_LINE_BYTES} are allowed"
                    raise RequestError(Code.TOO_LARGE, what)
                await self._send(line.data.decode())
            except UnicodeDecodeError as fault:
                what = f"the line is not valid UTF-8: {fault}"
                await _print(error_line(RequestError(Code.BAD_MESSAGE, what), ""))
            except RequestError as error:
                await _print(error_line(error, line.data[:40].decode("ascii", "replace")))
        await self._dealer.send([b"PING", encode_body(Ping(n=LAST_PING), "json")])

    async def _send(self, line: str) -> None:
        if not line.strip():
            return
        frames = line_frames(line)
        if frames[0] not in (b"CANCEL", b"INPUT"):
            try:
                named: _Named = decode_as(_Named, frames[1], "json")
            except RequestError:
                named = _Named()
            if named.stream_id is not None:
                self._live.add(named.stream_id)
        await self._dealer.send(frames)

    def _is_for_the_user(self, frames: Frames) -> bool:
        """Returns whether a message is printed. If the message ends a stream, removes the stream
        from ``_live``."""
        match frames[0]:
            case b"TOKEN":
                for entry in decode_as(list[_Entry], frames[1], "json"):
                    if entry.finish_reason is not None and not entry.live:
                        self._live.discard(entry.stream_id)
            case b"MSG":
                answer: _Answer = decode_as(_Answer, frames[1], "json")
                if answer.attached is None and answer.input is None:
                    self._live.discard(answer.stream_id)
            case b"ERROR":
                error: Error = decode_as(Error, frames[1], "json")
                ends = error.code != Code.DUPLICATE_STREAM and error.type != "INPUT"
                if error.stream_id is not None and ends:
                    self._live.discard(error.stream_id)
            case b"PONG":
                number = decode_as(_Pong, frames[1], "json").n
                self._sent_all = self._sent_all or number == LAST_PING
                return number not in (OWN_PING, LAST_PING)
        return True


class Line(NamedTuple):
    """A line of input without its line break."""

    data: bytes
    """The bytes of the line. If the line is too long, only its first bytes are kept."""
    size: int
    """Number of bytes of the whole line."""


class _InputLines:
    """Reads the lines of standard input on a thread. Standard input may be a file, and an event
    loop cannot watch a file.

    The thread reads the file descriptor. If the thread waited in ``sys.stdin``, the process could
    not exit.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Line | None] = asyncio.Queue(maxsize=1)
        threading.Thread(target=self._read, name="input", daemon=True).start()

    async def next(self) -> Line | None:
        """The next line; None at the end of the input. At most ``MAX_LINE_BYTES`` of a line are
        kept."""
        return await self._queue.get()

    def _read(self) -> None:
        descriptor = sys.stdin.fileno()
        for line in split_lines(lambda: os.read(descriptor, READ_BYTES), MAX_LINE_BYTES):
            self._put(line)
        self._put(None)

    def _put(self, line: Line | None) -> None:
        asyncio.run_coroutine_threadsafe(self._queue.put(line), self._loop).result()


def split_lines(read: Callable[[], bytes], max_bytes: int) -> Iterator[Line]:
    """Splits the bytes from ``read`` into lines, until ``read`` returns no bytes. At most the first
    ``max_bytes`` bytes of a line are kept."""
    parts: list[bytes] = []
    size = 0
    while data := read():
        *ended, rest = data.split(b"\n")
        for piece in ended:
            yield Line(b"".join([*parts, piece])[:max_bytes], size + len(piece))
            parts, size = [], 0
        if size <= max_bytes:
            parts.append(rest)
        size += len(rest)
    if size:
        yield Line(b"".join(parts)[:max_bytes], size)


async def _print(line: str) -> None:
    """Prints and flushes a line on a thread, because the reader of the output may be slow."""
    await asyncio.to_thread(_write, line.encode() + b"\n")


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
