"""The log file. Records are appended to it. A reader reads the records up to the first incomplete
record.

A record begins with a length and a CRC-32 (u32 each, little-endian). The length is the number of
bytes that follow: one byte for the kind, and the body. The first record is a header with the format
of the file.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import DecodeError, Struct, msgpack

from ...protocol.decoders import msgpack_decoder
from ..variables import StorageLimits
from .folder import Folder, FolderError

HEAD = b"H"
OPERATION = b"V"
END = b"E"
REQUEST = b"R"
TABLE = b"T"
TENANT = b"N"
CONTEXT = b"C"

FORMAT = 1

_FRAME = struct.Struct("<II")


class Head(Struct, array_like=True):
    """The body of the first record. It has the limits under which the file's operations were
    applied."""

    format: int
    limits: StorageLimits


class Record(NamedTuple):
    """One record. ``request`` is the request to which the record belongs; 0 if the record does not
    belong to a request."""

    kind: bytes
    """``HEAD``: a ``Head``. ``OPERATION``: the body of a ``VARIABLE`` message. ``END``: the request
    id, as msgpack. ``REQUEST``: a ``SavedRequest``. ``TABLE``: a ``SavedTable``. ``CONTEXT``: a
    ``SavedContext``. Tables and contexts do not belong to a request. ``TENANT``: a request and the
    key of its tenant, as msgpack. If the tenant of a request does not have a key, the log does not
    have a ``TENANT`` for the request."""
    request: int
    body: bytes


class Log:
    """A log that is open for writing. When ``append`` has returned, its records survive a crash of
    the process. When a later ``sync`` has returned, they also survive a power failure."""

    def __init__(self, path: Path, number: int, size: int) -> None:
        self.path = path
        self.size = size
        """Bytes of complete records."""
        self.fault: OSError | None = None
        """The reason why the log on the disk may lack records. Set if the file was deleted, or if a
        sync of the log or of its folder has failed. After a failed sync, Linux drops the pages that
        it could not write, and a later sync succeeds without these pages. Never cleared, because a
        new log has to replace this log."""
        self._number = number
        self._torn = False
        self._synced = 0
        self._syncing = threading.Lock()

    @classmethod
    def create(cls, path: Path, limits: StorageLimits) -> Log:
        """Creates a log, replacing any file of that name. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        log = cls(path, os.open(path, flags, 0o600), 0)
        try:
            log.append([Record(HEAD, 0, msgpack.encode(Head(FORMAT, limits)))])
        except OSError:
            log.close()
            raise
        return log

    @classmethod
    def reopen(cls, path: Path, size: int) -> Log:
        """Opens an existing log to append after its first ``size`` bytes. Raises OSError."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        number = os.open(path, flags)
        os.ftruncate(number, size)
        return cls(path, number, size)

    def append(self, records: Sequence[Record]) -> None:
        """Writes all records or none. Raises OSError if nothing was written."""
        parts: list[bytes] = []
        for kind, _, body in records:
            parts += (_FRAME.pack(len(body) + 1, zlib.crc32(body, zlib.crc32(kind))), kind, body)
        data = b"".join(parts)
        try:
            if self._torn:
                os.ftruncate(self._number, self.size)
            self._torn = True
            written = os.write(self._number, data)
            while written < len(data):
                written += os.write(self._number, memoryview(data)[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._number, self.size)
                self._torn = False
            raise
        self._torn = False
        self.size += len(data)

    def cut(self, size: int) -> None:
        """Removes all records after the first ``size`` bytes. If the file cannot be truncated now,
        the next ``append`` truncates it first."""
        with self._syncing:
            self.size = size
            self._synced = 0
            self._torn = True
            with contextlib.suppress(OSError):
                os.ftruncate(self._number, size)
                self._torn = False

    def sync(self) -> None:
        """Syncs the appended records to disk. Raises OSError if this sync fails or an earlier sync
        has failed.

        Several threads may call this method. Their syncs take turns, because the kernel reports an
        error only to one of two simultaneous syncs.
        """
        with self._syncing:
            if self.fault is not None:
                raise OSError(self.fault.errno, self.fault.strerror)
            size = self.size
            if size != self._synced:
                try:
                    os.fdatasync(self._number)
                except OSError as error:
                    self.fault = error
                    raise
                self._synced = size

    def replace(self, path: Path, folder: Folder) -> None:
        """Renames the log to ``path``, replacing any file there, and syncs ``folder``.

        Raises OSError if the log was not renamed. If only the sync fails, the log has its new name
        and a ``fault``.
        """
        self.path.rename(path)
        self.path = path
        try:
            folder.sync()
        except OSError as error:
            self.fault = error

    @property
    def in_place(self) -> bool:
        """Whether the log's path still refers to the open file."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._number))

    def close(self) -> None:
        """Closes the file."""
        os.close(self._number)


class Reader:
    """Reads a log file. Iteration yields the kind and the body of each complete record after the
    header, in order."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and FolderError if another version wrote the file."""
        self.limits: StorageLimits | None = None
        """The limits in the header; None if the file does not have a valid header."""
        self.size = 0
        """Bytes of the complete records that were read."""
        self._file = path.open("rb", buffering=1 << 20)
        self.file_size = os.fstat(self._file.fileno()).st_size
        first = self._next()
        if first is not None and first[0] == HEAD:
            self.limits = self._head(first[1])

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        while self.limits is not None and (record := self._next()) is not None:
            yield record

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _head(self, body: bytes) -> StorageLimits:
        with contextlib.suppress(DecodeError):
            head = msgpack_decoder(Head).decode(body)
            if head.format == FORMAT:
                return head.limits
        self.close()
        raise FolderError(
            f"{self._file.name} was written by another version of Tokenbus; remove the file if no "
            "running stream has variables"
        )

    def _next(self) -> tuple[bytes, bytes] | None:
        frame = self._file.read(_FRAME.size)
        if len(frame) < _FRAME.size:
            return None
        length, crc = _FRAME.unpack(frame)
        # A length of 0 is not valid, because a record has a byte for its kind. A file system may
        # leave zeros at the end of a file.
        if not 0 < length <= self.file_size - self.size - _FRAME.size:
            return None
        content = self._file.read(length)
        if len(content) < length or zlib.crc32(content) != crc:
            return None
        self.size += _FRAME.size + length
        return content[:1], content[1:]
