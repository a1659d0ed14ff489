"""The store of uploaded controller modules, by tenant. All controller workers share it.

A folder on each machine has the modules' bytes, named by their SHA-256 (``modules/``), copies of
the tenants' tables (``tenants/``), and compiled forms (``compiled/``). A tenant's table has the
tenant's modules and tags.

The state worker has the original tables, and replaces them by compare-and-set. So a tag denotes the
same module on all machines. If the bytes of a module are missing on this machine, they are fetched
from another machine, and their SHA-256 is checked.

A module that several tenants have uploaded is stored once. But a tenant can only name modules that
it has uploaded itself.

Only one thread or process at a time writes files. The writer writes a file under another name and
then renames the file, so that readers never have to wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import wasmtime
from msgspec import structs

from ....protocol.errors import (
    Code,
    RequestError,
    ServiceError,
    TokenbusError,
    UnavailableError,
)
from ....protocol.messages import StoredModule, module_too_large
from ....protocol.pace import RETRY_AFTER_S
from ....protocol.worker_messages import ModuleTableAnswer
from ...whole_files import clear_left, write_whole
from ..limits import Limits
from .compiled_modules import CompiledModules, Loaded
from .module_table import (
    Entry,
    Table,
    check_quota,
    check_tag,
    check_tags,
    decode_table,
    encode_table,
)
from .table_copies import TableCopies

__all__ = ["Loaded", "ModuleStore", "Others"]

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""Maximum wait for an answer about a table, in seconds."""
SHORT_S = 2.0
"""Maximum seconds to wait for an answer about a table if the local copy may be used instead. The
copy may be used if the request names a module by its id. It may also be used for a tag after a
stream has waited for ``PATIENCE_S`` without an answer."""
MAX_TRIES = 100
"""Maximum number of tries to change a table. A try fails if another change of the table comes
first."""

T = TypeVar("T")
Stored = list[StoredModule]


class Others(Protocol):
    """Sends the store's requests to other workers."""

    def table(
        self, tenant: str, known: int, content: bytes | None = None, patience_s: float = PATIENCE_S
    ) -> ModuleTableAnswer:
        """Reads or replaces the table of a tenant with the message ``ModuleTable``. Raises
        UnavailableError if the message is refused, or is not answered within ``patience_s``
        seconds."""

    def fetch(self, module: str) -> bytes:
        """The bytes of a module, checked against its id. Raises UnavailableError if no other worker
        sends them."""


class ModuleStore:
    """A store in a folder that only the worker's user can access. Thread-safe.

    Mistakes of a client raise RequestError.
    """

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        engine: wasmtime.Engine,
        others: Others | None = None,
    ) -> None:
        """``engine`` must be the engine that ``sandbox.make_engine`` made from ``limits``. If
        ``others`` is None, the store consists of the folder only."""
        self._folder = folder
        self._limits = limits
        self._others = others
        self._silent = False
        """Whether the state worker does not answer: a stream has waited for ``PATIENCE_S`` without
        an answer, and no answer has come since."""
        self._make_folders()
        self._copies = TableCopies(folder / "tenants")
        self._compiled = CompiledModules(folder / "compiled", limits, engine)
        for part in ("modules", "tenants"):
            clear_left(folder / part)

    def _make_folders(self) -> None:
        for part in ("modules", "tenants"):
            (self._folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)

    # --- requests of clients --------------------------------------------------------------------

    def put(
        self,
        tenant: str,
        wasm: bytes,
        tag: str | None = None,
        by: str = "",
        upload_bytes: int | None = None,
    ) -> StoredModule:
        """Stores a module for a tenant, unless it is already stored, and assigns ``tag`` to it.

        Raises RequestError if the module is too large, is not valid, or is not a controller of a
        supported ABI. Also raises RequestError if the tenant does not have room for the module.
        Raises UnavailableError if too many modules are being compiled, or if the tenant would
        exceed its quota ``upload_bytes``.
        """
        if tag is not None:
            check_tag(tag)
        if (too_large := module_too_large(len(wasm))) is not None:
            raise too_large
        module = hashlib.sha256(wasm).hexdigest()
        check_quota(self._read(tenant), module, len(wasm), upload_bytes)
        began = time.perf_counter()
        loaded, size = self._compiled.prepare(module, wasm)
        compile_ms = 1000 * (time.perf_counter() - began)
        entry = Entry(
            size=len(wasm),
            compiled=size,
            uploaded=time.time(),
            abi=loaded.abi,
            forks=loaded.why_no_fork is None,
            why_no_fork=loaded.why_no_fork or "",
            compile_ms=compile_ms,
        )
        tags = [tag] if tag is not None else []

        def add(table: Table) -> str:
            check_quota(table, module, entry.size + entry.compiled, upload_bytes)
            table.modules.setdefault(module, entry)
            table.assign(tags, module, by)
            check_tags(table)
            file = self._file(module)
            if not file.exists():
                write_whole(file, wasm, synced=True)
            return module

        try:
            return self._change(tenant, add, tags)[0].stored(module)
        except TokenbusError as error:
            # If the error is STORE_FAILED, the state worker may have changed the table, so the
            # module's files stay.
            if error.code != Code.STORE_FAILED:
                with self._locked():
                    self._drop_unused([module])
            raise

    def tag(self, tenant: str, name: str, tags: list[str], by: str = "") -> StoredModule:
        """Assigns ``tags`` to the module that ``name`` denotes, and removes them from all other
        modules.

        Raises ``conflict`` if another change has assigned one of the tags to a different module
        meanwhile.
        """
        for tag in tags:
            check_tag(tag)

        def assign(table: Table) -> str:
            module = table.named(name, "$.module")
            table.assign(tags, module, by)
            check_tags(table)
            return module

        table, module = self._change(tenant, assign, tags)
        return table.stored(module)

    def list(self, tenant: str) -> Stored:
        """The modules of a tenant, the latest first."""
        return sorted(self._read(tenant).all_stored(), key=lambda m: -m.uploaded)

    def delete(self, tenant: str, name: str) -> StoredModule:
        """Removes a tag, or a module with all its tags; the answer lists the removed tags."""

        def drop(table: Table) -> StoredModule:
            module = table.named(name, "$.module")
            if name in table.tags:
                dropped = table.stored(module, [name])
            else:
                dropped = table.stored(module)
                del table.modules[module]
            table.drop_tags(dropped.tags)
            return dropped

        return self._change(tenant, drop, [name])[1]

    # --- requests of the worker -----------------------------------------------------------------

    def resolve(self, tenant: str, name: str) -> str:
        """The id of the module that a tenant denotes by a tag, an id or the beginning of an id.

        Raises ``unknown_controller``, whose message lists the existing names. Raises
        UnavailableError if the state worker does not answer and the local copy does not have
        ``name`` as a tag or as a whole id.

        If the state worker does not answer, the name is looked up in the local copy. An id always
        denotes the same module, so a stream that names an id waits only for ``SHORT_S``. The first
        stream that names a tag waits for ``PATIENCE_S``, and later streams for ``SHORT_S``, until
        the state worker answers again.
        """
        copy = self._copy(tenant)
        short = name in copy.modules or (self._silent and name in copy.tags)
        try:
            return self._read(tenant, SHORT_S if short else PATIENCE_S).named(name, "$.controller")
        except UnavailableError as error:
            self._silent = self._silent or not short
            if name not in copy.modules and name not in copy.tags:
                raise
            log.warning("the name %s is looked up in this machine's copy: %s", name, error)
            return self._copy(tenant).named(name, "$.controller")

    def load(self, module: str) -> Loaded:
        """A compiled module; ``module`` is an id from ``resolve``."""
        return self._compiled.load(module, self.wasm)

    def interpreter(self, language: str) -> Loaded:
        """The interpreter of a language, for a script that is given as the request's argument."""
        return self._compiled.interpreter(language)

    def wasm(self, module: str) -> bytes:
        """The uploaded bytes of a module, from this machine or from another controller worker."""
        wasm = self.own(module)
        if wasm is not None:
            return wasm
        if self._others is None:
            raise RequestError(Code.UNKNOWN_CONTROLLER, f"the module {module} has been deleted")
        wasm = self._others.fetch(module)
        try:
            with self._locked():
                if self._copies.use(module):
                    write_whole(self._file(module), wasm, synced=False)
        except UnavailableError as error:
            log.warning("the module %s is not stored on this machine: %s", module, error)
        return wasm

    def has(self, module: str) -> bool:
        """Whether this machine has the file of a module. Does not read the file."""
        return self._file(module).exists()

    def own(self, module: str) -> bytes | None:
        """The bytes of a module on this machine; None if this machine does not have them. Raises
        ServiceError if the file was changed."""
        try:
            wasm = self._file(module).read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(wasm).hexdigest() != module:
            raise ServiceError(Code.INTERNAL, f"the stored file of module {module} was changed")
        return wasm

    # --- tables ---------------------------------------------------------------------------------

    def _copy(self, tenant: str) -> Table:
        try:
            return self._copies.read(tenant)
        except OSError as error:
            raise _failed(self._folder, "read", error) from None

    def _read(self, tenant: str, patience_s: float = PATIENCE_S) -> Table:
        """The table of a tenant, from the state worker. Updates the local copy."""
        copy = self._copy(tenant)
        table = self._current(copy, patience_s)
        if table is not copy:
            try:
                with self._locked():
                    if self._copies.read(tenant).version < table.version:
                        self._save(table)
            except UnavailableError as error:
                log.warning("the local copy of a table is not updated: %s", error)
        return table

    def _current(self, copy: Table, patience_s: float = PATIENCE_S) -> Table:
        """The state worker's table of the tenant of ``copy``, the local copy. Returns ``copy``
        itself if it is current, or if the store has no other workers.

        If the state worker does not have the table, this worker sends its local copy to the state
        worker.
        """
        if self._others is None:
            return copy
        for _ in range(MAX_TRIES):
            answer = self._others.table(copy.tenant, copy.version, patience_s=patience_s)
            self._silent = False
            if answer.content is not None:
                return structs.replace(decode_table(answer.content), version=answer.version)
            if answer.version:
                return copy
            if not copy.modules:
                return Table(copy.tenant)
            table = structs.replace(copy, version=0)
            if self._replace(table):
                return table
        raise _busy()

    def _replace(self, table: Table) -> bool:
        """Replaces a table at the state worker, and sets its new version; returns False if another
        change came first."""
        if self._others is None:
            return True
        content = encode_table(structs.replace(table, version=0))
        answer = self._others.table(table.tenant, table.version, content)
        if answer.written:
            table.version = answer.version
        return answer.written

    def _change(
        self, tenant: str, change: Callable[[Table], T], tags: Sequence[str]
    ) -> tuple[Table, T]:
        """Changes the table of a tenant; returns the new table, and the result of ``change``.

        If another change of the table comes first, ``change`` is applied again, to the new table.
        Raises ``conflict`` if that other change assigned one of ``tags`` to another module.
        """
        with self._locked():
            named: dict[str, str | None] | None = None
            for _ in range(MAX_TRIES):
                copy = self._copies.read(tenant)
                had = set(copy.modules)
                table = self._current(copy)
                now = {tag: table.tags.get(tag) for tag in tags}
                named = now if named is None else named
                done = change(table)
                for tag in tags:
                    if now[tag] not in (named[tag], table.tags.get(tag)):
                        raise _conflict(tag, now[tag])
                # The local copy is written first, without a version. If writing it fails, the state
                # worker's table is not changed.
                self._copies.save(structs.replace(table, version=0))
                if self._replace(table):
                    self._finish(table, had)
                    return table, done
                self._save(self._current(Table(tenant)))
        raise _busy()

    def _finish(self, table: Table, had: set[str]) -> None:
        """Saves ``table``, which the state worker has accepted, and removes unused modules.
        ``had``: the modules in the previous copy."""
        try:
            if table.version:
                self._copies.save(table)
        except OSError as error:
            log.warning("the local copy of a table is stored without its version: %s", error)
        self._drop_unused(had - table.modules.keys())

    # --- files ----------------------------------------------------------------------------------

    def _file(self, module: str) -> Path:
        return self._folder / "modules" / f"{module}.wasm"

    def _save(self, table: Table) -> None:
        """Writes a local copy of a table, and removes the files of modules that no tenant has any
        more. Called under the lock."""
        self._drop_unused(self._copies.save(table))

    def _drop_unused(self, modules: Iterable[str]) -> None:
        """Removes the files of the modules that no tenant has. Called under the lock."""
        unused = self._copies.unused(modules)
        for module in unused:
            self._file(module).unlink(missing_ok=True)
        self._compiled.drop(unused)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Admits one writer at a time, among all threads and processes of this machine.

        An error of the operating system, such as a full disk, becomes an UnavailableError.
        """
        try:
            self._make_folders()
            with (self._folder / "lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise _failed(self._folder, "written", error) from None


def _failed(folder: Path, what: str, error: OSError) -> UnavailableError:
    log.error("the module store %s cannot be %s: %s", folder, what, error)
    return UnavailableError(
        Code.STORE_FAILED,
        f"the module store of this worker cannot be {what} ({error.strerror}), so nothing was "
        "changed; free space on its disk, and try again",
    )


def _conflict(tag: str, module: str | None) -> RequestError:
    meanwhile = f"assigned to the module {module}" if module is not None else "deleted"
    return RequestError(
        Code.CONFLICT,
        f"the tag {tag!r} was {meanwhile} while this change was made, so nothing was changed; "
        "look at the tags, and assign the tag again if you still want to",
        path="$.tags",
    )


def _busy() -> UnavailableError:
    return UnavailableError(
        Code.STORE_FAILED,
        f"modules and tags were changed {MAX_TRIES} times while this change was made, so nothing "
        "was changed; try again",
        retry_after_s=RETRY_AFTER_S,
    )
