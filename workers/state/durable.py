"""Durable variables and tables of modules: each operation is written to a log before it is applied.

The log has the operations as they were received, so a worker that replays the log computes the same
answers. If the process is killed during an operation, the sender does not get an answer and repeats
the operation. The operation is then applied only once, even if the log already contains it.

A change of a table is synced before the operation is answered; changes of variables are synced
within ``SYNC_S``. After a failed sync, the kernel may have dropped any part of the log. So
operations are refused until a new log with the whole state is on the disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from errno import ENOENT
from pathlib import Path
from typing import NamedTuple

from msgspec import msgpack, structs

from ...protocol.decoders import msgpack_decoder
from ...protocol.tenants import Tenant
from ...protocol.worker_messages import (
    ModuleTable,
    ModuleTableAnswer,
    Variable,
    VariableAnswer,
)
from ..variables import MIB, SavedRequest, StorageLimits, VariableStorage
from .compaction import Compaction
from .contexts import Contexts, SavedContext
from .folder import Folder, FolderError
from .log import CONTEXT, END, OPERATION, REQUEST, TABLE, TENANT, Log, Reader, Record
from .module_tables import ModuleTables, SavedTable
from .shares import Shares

log = logging.getLogger(__name__)

COMPACT_FLOOR = 16 * MIB
"""The *floor* in bytes. A log that is not larger than the floor is rewritten only when the worker
starts, when the log was deleted, or after a failed write or sync."""
COMPACT_FACTOR = 2
"""A log above the floor is rewritten if it is more than this number of times as large as the
state."""
SYNC_S = 1.0
"""Seconds between two syncs of the log. A power failure can lose the operations of about this
number of seconds. A crash of the process does not lose operations."""

_UNBOUNDED = 1 << 62
_DELETED = FileNotFoundError(ENOENT, "the file was deleted")

_encode = msgpack.Encoder().encode
_operation = msgpack_decoder(Variable).decode
_request = msgpack_decoder(int).decode
_saved = msgpack_decoder(SavedRequest).decode
_table = msgpack_decoder(SavedTable).decode
_context = msgpack_decoder(SavedContext).decode
_tenant = msgpack_decoder(tuple[int, str]).decode


class Counts(NamedTuple):
    """The amounts of stored data, which metrics report."""

    requests: int
    variables: int
    bytes: int
    log_bytes: int


class DurableVariables:
    """A ``VariableStorage``, the ``ModuleTables``, the ``Contexts`` and their log, in one folder.

    One thread applies operations; another thread calls ``maintain``.
    """

    def __init__(
        self, path: Path, limits: StorageLimits | None = None, compact_floor: int = COMPACT_FLOOR
    ) -> None:
        """Replays the log if it exists; raises FolderError if the folder or the log cannot be
        used."""
        self._limits = limits or StorageLimits()
        self._compact_floor = compact_floor
        self._lock = threading.Lock()
        self._compaction: Compaction | None = None
        self._compact_above = compact_floor
        self._synced_at = time.monotonic()
        self.failures = 0
        """Number of writes and syncs of the log that have failed."""
        self._tables = ModuleTables(self._limits.table_bytes)
        self._contexts = Contexts(self._limits.table_bytes, self._tables)
        self._shares = Shares(self._limits.total_bytes)
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
        """The ids of the requests that have variables, inputs or answers and have not ended."""
        return self._storage.requests

    @property
    def counts(self) -> Counts:
        """The current amounts of stored data."""
        storage = self._storage
        return Counts(len(storage), storage.variables, storage.bytes, self._log.size)

    def size(self, request: int) -> int:
        """The bytes of a request, as ``StorageLimits`` counts them; 0 for an unknown request."""
        return self._storage.size(request)

    def apply(
        self, ops: Sequence[tuple[Variable, bytes]], tenants: Sequence[Tenant | None] | None = None
    ) -> list[VariableAnswer]:
        """Applies operations in order; returns their answers. ``ops``: the decoded operations, each
        with the body that was received.

        ``tenants`` has the tenant of each operation, or None for an operation whose tenant the
        broker has not named. All operations are logged with one write. If the write fails, or a
        sync of the log has failed, new operations are not applied. Their answers then have an
        ``error`` and the flag ``again``.
        """
        storage = self._storage
        refusals: list[str | None] = []
        crowded: list[bool] = []
        """For each operation, whether it is refused because too many inputs of its stream wait."""
        records: list[Record] = []
        saved: dict[tuple[str, str], SavedContext] = {}
        quotas: dict[str, int | None] = {}
        """The quota of bytes of each tenant that saves a context; None for a tenant without a
        quota."""
        ops = list(ops)
        with self._lock:
            keys = {op.request: self._shares.key(op.request) for op, _ in ops}
            for place, tenant in enumerate(tenants or [None] * len(ops)):
                op, body = ops[place]
                error = full = None
                if not storage.answered(op):
                    context = self._context(op, tenant, saved)
                    too_long = None
                    if context is not None and op.op == "save":
                        quota = tenant.quota_bytes if tenant is not None else None
                        quotas[context.tenant] = quota
                        too_long = storage.refusal(op) or self._contexts.refusal(context, quota)
                    if context is not None:
                        if op.op == "save":
                            op = structs.replace(op, value=b"")
                        else:
                            used = self._shares.size(op.request)
                            op = storage.opening(op, context.content, used)
                        body = _encode(op)
                        ops[place] = op, body
                    full = storage.no_room(op)
                    error = full or too_long or storage.refusal(op)
                    error = error or self._reserve(op, body, tenant, records)
                    if op.op == "save" and context is not None and error is None:
                        saved[context.tenant, context.name] = context
                refusals.append(error)
                crowded.append(full is not None)
            records += [Record(CONTEXT, 0, _encode(context)) for context in saved.values()]
            failed = self._append(records) if records else None
            for context in saved.values() if failed is None else ():
                self._contexts.put(context, quotas[context.tenant])
            answers = []
            for (op, _), error, full_now in zip(ops, refusals, crowded, strict=True):
                again = error is None and failed is not None and not storage.answered(op)
                error = failed if again else error
                again |= full_now
                if error is not None:
                    name = (op.request, op.lineage, op.count)
                    answers.append(VariableAnswer(*name, error=error, again=again))
                else:
                    answers.append(storage.apply(op))
            for request, key in keys.items():
                key = self._shares.key(request) if failed is None else key
                self._shares.put(request, key, storage.size(request))
        return answers

    def _context(
        self, op: Variable, tenant: Tenant | None, saved: dict[tuple[str, str], SavedContext]
    ) -> SavedContext | None:
        """The context that an operation saves or opens; None for any other operation. ``saved``:
        the contexts that earlier operations of the same call save.

        The content of a context to open is logged with the operation, so that a replay of the log
        gives the same answer. A context that does not exist is empty.
        """
        key = tenant.key if tenant is not None else self._shares.key(op.request)
        if op.op == "save":
            return SavedContext(key, op.name, op.value)
        if op.op != "open":
            return None
        new = saved.get((key, op.name))
        content = self._contexts.get(key, op.name) if new is None else new.content
        return SavedContext(key, op.name, content or b"")

    def _reserve(
        self, op: Variable, body: bytes, tenant: Tenant | None, records: list[Record]
    ) -> str | None:
        """Counts the cost of an operation towards its tenant's share, and adds the operation's
        records to ``records``. If the tenant's share does not have room for the cost, returns the
        error instead."""
        shares, request = self._shares, op.request
        known = shares.key(request)
        tenant = tenant or Tenant(known)
        cost = self._storage.cost(op)
        error = shares.refusal(tenant, request, cost)
        if error is not None:
            return error
        if tenant.key != known:
            records.append(Record(TENANT, request, _encode((request, tenant.key))))
        records.append(Record(OPERATION, request, body))
        shares.put(request, tenant.key, shares.size(request) + cost)
        return None

    def table(self, op: ModuleTable) -> ModuleTableAnswer:
        """Reads or replaces the table of a tenant. The new table is on the disk before the answer
        is sent.

        If the new table cannot be written or synced, the old table stays, and the answer has an
        ``error``.
        """
        with self._lock:
            table = self._tables.replacement(op)
            if table is None:
                fault = self._log.fault
                if op.content is None or fault is None:
                    return self._tables.read(op)
                return ModuleTableAnswer(op.id, error=_cannot_write(fault))
            error = self._tables.refusal(table) or self._store(table)
            if error is not None:
                return ModuleTableAnswer(op.id, error=error)
            self._tables.put(table)
            self._contexts.make_room(table.tenant)
            return self._tables.read(op)

    def end(self, requests: Iterable[int]) -> None:
        """Removes the variables, inputs and answers of ended requests; ignores unknown requests.

        If the log cannot be written, a restarted state worker has the variables again. It removes
        them when the broker reports that the requests are unknown.
        """
        with self._lock:
            ended = [request for request in requests if self._storage.end(request)]
            if not ended:
                return
            for request in ended:
                self._shares.put(request, "", 0)
            self._write([Record(END, request, _encode(request)) for request in ended])
            if self._compaction is not None:
                self._compaction.pending.difference_update(ended)

    def maintain(self) -> float:
        """Syncs the log if a sync is due. If the log is being rewritten, writes a part of the new
        log. Returns the seconds until the next call. Another thread may apply operations at the
        same time.
        """
        now = time.monotonic()
        if now - self._synced_at >= SYNC_S:
            self._synced_at = now
            if self._log.fault is None:
                self._sync()
            if self._folder.lost:
                self._write_anew()
            elif not self._log.in_place:
                self._log.fault = _DELETED
        if self._compaction is None:
            size = self._storage.bytes + self._tables.bytes + self._contexts.bytes
            is_long = self._log.size > max(self._compact_above, COMPACT_FACTOR * size)
            if not is_long and self._log.fault is None:
                return SYNC_S
            log.debug("rewriting the log of %d bytes", self._log.size)
        try:
            with self._lock:
                if self._compaction is None:
                    self._compaction = Compaction(
                        self._new_path, self._limits, self.requests, self._tables, self._contexts
                    )
                compaction = self._compaction
                compaction.save(self._storage, self._shares.key)
            if compaction.complete:
                self._finish(compaction)
                return SYNC_S
        except OSError as error:
            with self._lock:
                self._abandon(error)
            return SYNC_S
        # The caller pauses for as long as this call took, so that operations have half of the time.
        return time.monotonic() - now

    def close(self) -> None:
        """Syncs the log and closes the files."""
        with self._lock:
            if self._compaction is not None:
                self._compaction.abandon()
            self._sync()
            self._log.close()
            self._folder.close()

    def _write_anew(self) -> None:
        """Creates the deleted folder again, with a log of the whole state."""
        log.error("%s was deleted while it was in use; it is written again", self._path)
        with self._lock:
            if self._compaction is not None:
                self._compaction.abandon()
                self._compaction = None
            try:
                folder = Folder(self._folder.path)
                try:
                    new = self._new_log(self._storage, folder)
                except OSError:
                    folder.close()
                    raise
            except (OSError, FolderError) as error:
                # The next call of ``maintain`` tries again. Until then, operations are still
                # written to the deleted log.
                log.error("cannot write %s again: %s", self._path, error)
                return
            self._log.close()
            self._folder.close()
            self._folder, self._log = folder, new

    # --- reading --------------------------------------------------------------------------------

    def _read(self) -> tuple[VariableStorage, Log]:
        """The state that the log contains, and the log to continue with."""
        self._new_path.unlink(missing_ok=True)
        storage = VariableStorage(self._limits)
        if not self._path.exists():
            return storage, self._new_log(storage, self._folder)
        started = time.monotonic()
        reader = Reader(self._path)
        try:
            if reader.limits is None:
                aside = self._path.with_suffix(".damaged")
                log.error(
                    "%s is damaged from its first byte; it was renamed to %s", self._path, aside
                )
                self._path.rename(aside)
                return storage, self._new_log(storage, self._folder)
            # Logged operations are replayed under the limits that applied when they were logged.
            storage.limits = structs.replace(reader.limits, total_bytes=_UNBOUNDED)
            count = _replay(reader, storage, self._tables, self._contexts, self._shares)
            storage.limits = self._limits
        finally:
            reader.close()
        cut = reader.file_size - reader.size
        if cut:
            log.warning("the last %d bytes of %s are damaged and were cut off", cut, self._path)
        took = time.monotonic() - started
        log.info("%d records replayed, %d requests restored, in %.2f s", count, len(storage), took)
        try:
            # Parts of the old log may be only in the kernel's memory, so a new log is written and
            # synced.
            return storage, self._new_log(storage, self._folder)
        except OSError as error:
            self._note("write", error)
            old = Log.reopen(self._path, reader.size)
            old.fault = error
            return storage, old

    def _new_log(self, storage: VariableStorage, folder: Folder) -> Log:
        """A new log of the current state, which replaces any other log. Raises OSError if the new
        log cannot be written."""
        compaction = Compaction(
            self._new_path, self._limits, storage.requests, self._tables, self._contexts
        )
        try:
            while not compaction.complete:
                compaction.save(storage, self._shares.key)
            compaction.log.sync()
            compaction.log.replace(self._path, folder)
        except OSError:
            compaction.abandon()
            raise
        return compaction.log

    # --- writing --------------------------------------------------------------------------------

    def _append(self, records: list[Record]) -> str | None:
        """Writes records of operations to the log. Returns the error message if the log has a fault
        or the write fails."""
        fault = self._log.fault
        return self._write(records) if fault is None else _cannot_write(fault)

    def _write(self, records: list[Record]) -> str | None:
        """Writes records to the log; returns the error message if that fails."""
        try:
            self._log.append(records)
        except OSError as error:
            self._note("write", error)
            return _cannot_write(error)
        if self._compaction is not None:
            try:
                self._compaction.also(records)
            except OSError as error:
                self._abandon(error)
        return None

    def _store(self, table: SavedTable) -> str | None:
        """Writes a table to the disk; returns the error message if that fails."""
        size = self._log.size
        error = self._append([Record(TABLE, 0, _encode(table))])
        if error is not None:
            return error
        error = self._sync()
        if error is None and (self._folder.lost or not self._log.in_place):
            self._log.fault = _DELETED
            error = _cannot_write(_DELETED)
        if error is not None:
            self._log.cut(size)
            if self._compaction is not None:
                # The compaction's new log also has the refused table, so the new log is discarded.
                # Because the current log has a fault, another compaction begins.
                self._compaction.abandon()
                self._compaction = None
        return error

    def _sync(self) -> str | None:
        """Syncs the log; returns the error message if that fails."""
        try:
            self._log.sync()
        except OSError as error:
            self._note("sync", error)
            return _cannot_write(error)
        return None

    def _finish(self, compaction: Compaction) -> None:
        """Replaces the old log by the new log. Raises OSError if the old log is still in use."""
        # Most of the new log is synced without the lock, so that operations do not wait.
        compaction.log.sync()
        with self._lock:
            if compaction is not self._compaction:
                return
            compaction.log.sync()
            compaction.log.replace(self._path, self._folder)
            old, self._log = self._log, compaction.log
            self._compaction = None
            self._compact_above = self._compact_floor
        old.close()
        if self._log.fault is not None:
            self._note("sync the folder of", self._log.fault)
        log.info("the log was rewritten: it has %d bytes now and had %d", self._log.size, old.size)

    def _abandon(self, error: OSError) -> None:
        """Gives up a compaction and continues with the old log. If a sync of the old log has
        failed, the next call of ``maintain`` begins another compaction. If not, the next compaction
        begins when the log has doubled in size."""
        if self._compaction is not None:
            self._compaction.abandon()
            self._compaction = None
        self._compact_above = 2 * self._log.size
        self._note("rewrite", error)

    def _note(self, what: str, error: OSError) -> None:
        """Counts a failure, and logs the first, second, fourth, eighth failure and so on. ``what``:
        the operation that failed, such as ``sync``."""
        self.failures += 1
        if self.failures & (self.failures - 1) == 0:
            log.error("cannot %s the log %s: %s", what, self._path, error.strerror)


def _cannot_write(error: OSError) -> str:
    return f"the state worker cannot write its log: {error.strerror}; try again"


def _replay(
    reader: Reader,
    storage: VariableStorage,
    tables: ModuleTables,
    contexts: Contexts,
    shares: Shares,
) -> int:
    """Replays the records of a log; returns their number."""
    count = 0
    keys: dict[int, str] = {}
    for kind, body in reader:
        count += 1
        if kind == OPERATION:
            storage.apply(_operation(body))
        elif kind == END:
            storage.end(_request(body))
        elif kind == REQUEST:
            storage.restore(_saved(body))
        elif kind == TABLE:
            tables.put(table := _table(body))
            contexts.make_room(table.tenant)
        elif kind == CONTEXT:
            contexts.put(_context(body))
        elif kind == TENANT:
            keys.update([_tenant(body)])
    for request in storage.requests:
        shares.put(request, keys.get(request, ""), storage.size(request))
    return count
