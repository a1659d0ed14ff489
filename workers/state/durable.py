"""Variables that outlive their process: each operation is in a log before it is done.

The log holds operations as they came; reading it again does them again, with the same answers. An
operation in which the process was killed was not answered, so that its sender repeats it, and it is
done once whether the log has it or not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import msgpack, structs

from ...protocol.worker_messages import Variable, VariableAnswer
from .compaction import Compaction
from .folder import Folder, FolderError
from .log import END, OPERATION, REQUEST, Log, Reader, Record
from .variables import MIB, SavedRequest, StorageLimits, VariableStorage

log = logging.getLogger(__name__)

COMPACT_FLOOR = 16 * MIB
"""Bytes of a log that is not worth rewriting."""
COMPACT_FACTOR = 2
"""The log is rewritten where it is longer than the floor and this many times what is held."""
SYNC_S = 1.0
"""How often what was written is brought to disk, in seconds: that much of the last answers may be
lost with the machine's power, and nothing with the process."""

_UNBOUNDED = 1 << 62

_encode = msgpack.Encoder().encode
_operation = msgpack.Decoder(Variable).decode
_request = msgpack.Decoder(int).decode
_saved = msgpack.Decoder(SavedRequest).decode


class Counts(NamedTuple):
    """What is held, for the operator."""

    requests: int
    variables: int
    bytes: int
    log_bytes: int


class DurableVariables:
    """A ``VariableStorage`` and its log, in a folder of its own.

    One thread does operations; ``maintain`` runs on another one.
    """

    def __init__(
        self, path: Path, limits: StorageLimits | None = None, compact_floor: int = COMPACT_FLOOR
    ) -> None:
        """Reads the log that is there; raises FolderError where it cannot be used."""
        self._limits = limits or StorageLimits()
        self._compact_floor = compact_floor
        self._lock = threading.Lock()
        self._compaction: Compaction | None = None
        self._compact_above = compact_floor
        self._synced_at = time.monotonic()
        self._folder = Folder(path)
        self._path = path / "log"
        self._new_path = path / "log.new"
        try:
            self._storage, self._log = self._read()
        except (OSError, FolderError) as error:
            self._folder.close()
            if isinstance(error, OSError):
                message = f"cannot use the log {self._path}: {error.strerror}"
                raise FolderError(message) from None
            raise

    @property
    def requests(self) -> list[int]:
        """Requests that have not ended."""
        return self._storage.requests

    @property
    def counts(self) -> Counts:
        """What is held."""
        storage = self._storage
        return Counts(len(storage), storage.variables, storage.bytes, self._log.size)

    def apply(self, ops: Sequence[tuple[Variable, bytes]]) -> list[VariableAnswer]:
        """Does operations, each given decoded and as it came, in order; their answers.

        One write takes all of them into the log. Where that fails, those that are new are not done,
        and say so in their answer's ``error``.
        """
        storage = self._storage
        refusals: list[str | None] = []
        records = []
        ahead = 0
        with self._lock:
            for op, body in ops:
                error = None
                if not storage.answered(op):
                    error = storage.refusal(op, ahead)
                    if error is None:
                        records.append(Record(OPERATION, op.request, body))
                        ahead += storage.cost(op)
                refusals.append(error)
            failed = self._append(records) if records else None
            answers = []
            for (op, _), error in zip(ops, refusals, strict=True):
                if error is None and failed is not None and not storage.answered(op):
                    error = failed
                if error is not None:
                    answers.append(VariableAnswer(op.request, op.seq, op.count, error=error))
                else:
                    answers.append(storage.apply(op))
        return answers

    def end(self, requests: Iterable[int]) -> None:
        """Drops requests; those that are not held are passed over.

        Where the log cannot be written they are held again after a restart, until the broker says
        that it does not know them.
        """
        with self._lock:
            ended = [request for request in requests if self._storage.end(request)]
            if not ended:
                return
            failed = self._append([Record(END, request, _encode(request)) for request in ended])
            if failed is not None:
                log.error("%s", failed)
            if self._compaction is not None:
                self._compaction.pending.difference_update(ended)

    def maintain(self) -> float:
        """Has what was written on disk, and rewrites a part of the log, where it is time to.

        Returns after how many seconds it should be called again. It may run on another thread than
        the operations do.
        """
        now = time.monotonic()
        if now - self._synced_at >= SYNC_S:
            self._sync()
            self._synced_at = now
        if self._compaction is None:
            if self._log.size <= max(self._compact_above, COMPACT_FACTOR * self._storage.bytes):
                return SYNC_S
            log.debug("rewriting the log of %d bytes", self._log.size)
        try:
            with self._lock:
                if self._compaction is None:
                    self._compaction = Compaction(self._new_path, self._limits, self.requests)
                compaction = self._compaction
                compaction.save(self._storage)
            if not compaction.pending:
                self._finish(compaction)
                return SYNC_S
        except OSError as error:
            with self._lock:
                self._abandon(error)
            return SYNC_S
        # As long again for the operations as they had to wait.
        return time.monotonic() - now

    def close(self) -> None:
        """Has everything on disk and closes the files."""
        with self._lock:
            if self._compaction is not None:
                self._compaction.abandon()
            self._sync()
            self._log.close()
            self._folder.close()

    # --- reading --------------------------------------------------------------------------------

    def _read(self) -> tuple[VariableStorage, Log]:
        """What the log holds, and the log to go on with."""
        self._new_path.unlink(missing_ok=True)
        storage = VariableStorage(self._limits)
        if not self._path.exists():
            return storage, self._new_log(storage)
        started = time.monotonic()
        reader = Reader(self._path)
        try:
            if reader.limits is None:
                aside = self._path.with_suffix(".damaged")
                log.error("%s is damaged from its first byte; it is %s now", self._path, aside)
                self._path.rename(aside)
                return storage, self._new_log(storage)
            # What was done then is done again, whatever the limits are now.
            storage.limits = structs.replace(reader.limits, total_bytes=_UNBOUNDED)
            count = _do_again(reader, storage)
            storage.limits = self._limits
        finally:
            reader.close()
        cut = reader.file_size - reader.size
        if cut:
            log.warning("the last %d bytes of %s are damaged and were cut off", cut, self._path)
        took = time.monotonic() - started
        log.info("%d records read, %d requests held, in %.2f s", count, len(storage), took)
        if reader.limits == self._limits:
            return storage, Log.go_on(self._path, reader.size)
        return storage, self._new_log(storage)

    def _new_log(self, storage: VariableStorage) -> Log:
        """A log of what is held, in the place of any other."""
        compaction = Compaction(self._new_path, self._limits, storage.requests)
        while compaction.pending:
            compaction.save(storage)
        compaction.log.sync()
        compaction.log.rename(self._path)
        self._folder.sync()
        return compaction.log

    # --- writing --------------------------------------------------------------------------------

    def _append(self, records: list[Record]) -> str | None:
        """Writes records to the log; what to say where that is not possible."""
        try:
            self._log.append(records)
        except OSError as error:
            return f"the state worker cannot write its log: {error.strerror}; try again"
        if self._compaction is not None:
            try:
                self._compaction.also(records)
            except OSError as error:
                self._abandon(error)
        return None

    def _sync(self) -> None:
        try:
            self._log.sync()
        except OSError as error:
            log.error("cannot have the log %s on disk: %s", self._path, error.strerror)

    def _finish(self, compaction: Compaction) -> None:
        """The new log takes the old one's place. Raises OSError."""
        compaction.log.sync()
        with self._lock:
            if compaction is not self._compaction:
                return
            compaction.log.rename(self._path)
            old, self._log = self._log, compaction.log
            self._compaction = None
            self._compact_above = self._compact_floor
        old.close()
        self._folder.sync()
        log.info("the log was rewritten: %d bytes of %d", self._log.size, old.size)

    def _abandon(self, error: OSError) -> None:
        """Goes on with the old log, and does not try again before it has doubled."""
        if self._compaction is not None:
            self._compaction.abandon()
            self._compaction = None
        self._compact_above = 2 * self._log.size
        log.error("cannot rewrite the log %s: %s", self._path, error.strerror)


def _do_again(reader: Reader, storage: VariableStorage) -> int:
    """Does what a log holds; how many records that were."""
    count = 0
    for kind, body in reader:
        count += 1
        if kind == OPERATION:
            storage.apply(_operation(body))
        elif kind == END:
            storage.end(_request(body))
        elif kind == REQUEST:
            storage.restore(_saved(body))
    return count
