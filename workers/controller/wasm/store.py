"""The store of controller modules: by tenant, shared by all controller workers of a machine.

A folder holds the uploaded bytes by their SHA-256 (``modules/``), what each tenant has and what its
tags name (``tenants/``), and compiled forms (``compiled/``). Contents that several tenants uploaded
are kept once; a tenant can name only what it uploaded itself. Files are written under another name
and renamed, one writer at a time; readers never wait.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import msgspec
import wasmtime
from msgspec import Struct

from ....protocol.errors import (
    Code,
    RequestError,
    ServiceError,
    TokenbusError,
    UnavailableError,
)
from ....protocol.messages import StoredModule, Tagged, module_too_large
from ....protocol.pace import RETRY_AFTER_S
from ..limits import Limits
from .abis import examine
from .compiled_modules import CompiledModules, Loaded
from .whole_files import clear_left, write_whole

__all__ = ["Loaded", "ModuleStore"]

log = logging.getLogger(__name__)

MOST_MODULES = 1_000
"""Modules of a tenant."""
MOST_BYTES = 1024**3
"""Bytes of a tenant's modules, the compiled forms included."""
MOST_TAGS = 10_000
MOST_READ = 256
"""Tenants whose files are kept as they were last read."""
SHOWN = 20
SHOWN_CHARACTERS = 400
"""Names that an error lists at most, and their length together."""
COMPARED = 200
COMPARED_CHARACTERS = 40
"""Tags that are compared with a wrong name at most, and how long they may be: it takes time."""

_ID = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{8,63}")
"""The beginning of an id, which may stand for it."""
_PYTHON = re.compile(r"[\w.]+:\w+")
"""The name of a Python controller."""

BUILT_IN = (
    "choice",
    "combination",
    "json_schema",
    "lark",
    "regex",
    "structural",
    "substring",
    "yacc",
)
"""The constraints that need no code: names that no tag can have."""


class Entry(Struct, omit_defaults=True):
    """A module of a tenant."""

    size: int
    compiled: int
    """Bytes of its compiled form."""
    uploaded: float
    abi: str
    forks: bool = True
    compile_ms: float = 0.0


class Index(Struct, omit_defaults=True):
    """What a tenant has."""

    tenant: str
    modules: dict[str, Entry] = {}
    tags: dict[str, str] = {}
    tagged: dict[str, Tagged] = {}
    """How each tag was assigned."""

    def stored(self, module: str, tags: list[str] | None = None) -> StoredModule:
        """A module as clients see it, with all its tags or with these."""
        entry = self.modules[module]
        if tags is None:
            tags = [tag for tag, named in self.tags.items() if named == module]
        # A tag of an earlier version, which did not keep this, was assigned after the upload.
        earlier = Tagged(at=entry.uploaded, by=self.tenant)
        return StoredModule(
            module=module,
            tags=sorted(tags),
            size=entry.size,
            uploaded=entry.uploaded,
            abi=entry.abi,
            forks=entry.forks,
            compiled_size=entry.compiled,
            compile_ms=entry.compile_ms,
            tagged={tag: self.tagged.get(tag, earlier) for tag in sorted(tags)},
        )

    def assign(self, tags: Iterable[str], module: str, by: str) -> None:
        """Lets ``tags`` name a module, at the request of ``by``."""
        tagged = Tagged(at=time.time(), by=by or self.tenant)
        for tag in tags:
            self.tags[tag] = module
            self.tagged[tag] = tagged

    def drop_tags(self, tags: Iterable[str]) -> None:
        """Removes ``tags``."""
        for tag in tags:
            del self.tags[tag]
            self.tagged.pop(tag, None)


_decoder = msgspec.json.Decoder(Index)

Stored = list[StoredModule]


class ModuleStore:
    """The store in a folder, which is made for this user alone. Safe from any thread.

    Whatever a client can be wrong about is a RequestError.
    """

    def __init__(self, folder: Path, limits: Limits, engine: wasmtime.Engine) -> None:
        """``engine`` was made of these ``limits`` by ``sandbox.make_engine``."""
        self._folder = folder
        self._limits = limits
        self._lock = threading.Lock()
        self._last_read: OrderedDict[str, bytes] = OrderedDict()
        """By tenant: its file."""
        self._make_folders()
        self._compiled = CompiledModules(folder / "compiled", limits, engine)
        for part in ("modules", "tenants"):
            clear_left(folder / part)

    def _make_folders(self) -> None:
        for part in ("modules", "tenants"):
            (self._folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)

    # --- what clients ask for -------------------------------------------------------------------

    def put(
        self,
        tenant: str,
        wasm: bytes,
        tag: str | None = None,
        by: str = "",
        upload_bytes: int | None = None,
    ) -> StoredModule:
        """Stores a module for a tenant, and lets ``tag`` name it; one that is there stays.

        Refuses one that is too large, not valid, no controller of an ABI that this worker speaks,
        or for which the store has no room. UnavailableError where others are being compiled, or
        beyond the tenant's quota of ``upload_bytes``.
        """
        if tag is not None:
            _check_tag(tag)
        if (too_large := module_too_large(len(wasm))) is not None:
            raise too_large
        module = hashlib.sha256(wasm).hexdigest()
        found = examine(wasm, self._limits)
        _check_quota(self._read(tenant), module, len(wasm), upload_bytes)
        began = time.perf_counter()
        size = self._compiled.prepare(module, wasm, found)
        compile_ms = 1000 * (time.perf_counter() - began)
        forks = found.why_no_fork is None
        entry = Entry(len(wasm), size, time.time(), found.abi, forks, compile_ms)
        with self._locked():
            index = self._read(tenant)
            try:
                _check_quota(index, module, entry.size + entry.compiled, upload_bytes)
                index.modules.setdefault(module, entry)
                if tag is not None:
                    index.assign([tag], module, by)
                _check_tags(index)
            except TokenbusError:
                self._drop_unused(module)
                raise
            file = self._file(module)
            if not file.exists():
                write_whole(file, wasm, synced=True)
            self._save(index)
        return index.stored(module)

    def tag(self, tenant: str, name: str, tags: list[str], by: str = "") -> StoredModule:
        """Lets ``tags`` name the module that ``name`` does; they name no other one any more."""
        for tag in tags:
            _check_tag(tag)
        with self._locked():
            index = self._read(tenant)
            module = _named(index, name, "$.module")
            index.assign(tags, module, by)
            _check_tags(index)
            self._save(index)
        return index.stored(module)

    def list(self, tenant: str) -> Stored:
        """The modules of a tenant, the latest first."""
        index = self._read(tenant)
        modules = [index.stored(module) for module in index.modules]
        return sorted(modules, key=lambda m: -m.uploaded)

    def delete(self, tenant: str, name: str) -> StoredModule:
        """Drops a tag, or a module with all its tags; the answer has the tags that are dropped."""
        with self._locked():
            index = self._read(tenant)
            module = _named(index, name, "$.module")
            if name in index.tags:
                dropped = index.stored(module, [name])
            else:
                dropped = index.stored(module)
                del index.modules[module]
            index.drop_tags(dropped.tags)
            self._save(index)
            self._drop_unused(module)
        return dropped

    # --- what the worker asks for ---------------------------------------------------------------

    def resolve(self, tenant: str, name: str) -> str:
        """The id of the module that a tenant means by a tag, an id or the beginning of one.

        Raises ``unknown_controller``, which says what there is.
        """
        return _named(self._read(tenant), name, "$.controller")

    def load(self, module: str) -> Loaded:
        """A module, compiled; ``module`` is an id of ``resolve``."""
        return self._compiled.load(module, self.wasm)

    def wasm(self, module: str) -> bytes:
        """The bytes that were uploaded."""
        try:
            wasm = self._file(module).read_bytes()
        except FileNotFoundError:
            raise RequestError(
                Code.UNKNOWN_CONTROLLER, f"the module {module} has been deleted"
            ) from None
        if hashlib.sha256(wasm).hexdigest() != module:
            raise ServiceError(Code.INTERNAL, f"the stored file of module {module} was changed")
        return wasm

    # --- files ----------------------------------------------------------------------------------

    def _file(self, module: str) -> Path:
        return self._folder / "modules" / f"{module}.wasm"

    def _tenant_file(self, tenant: str) -> Path:
        name = hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()
        return self._folder / "tenants" / f"{name}.json"

    def _read(self, tenant: str) -> Index:
        """What a tenant has; as it was last read, where the system has no descriptor left."""
        try:
            content = self._tenant_file(tenant).read_bytes()
        except FileNotFoundError:
            return Index(tenant)
        except OSError as error:
            last = self._last_read.get(tenant)
            if last is None:
                raise _failed(self._folder, "read", error) from None
            content = last
        with self._lock:
            self._last_read[tenant] = content
            self._last_read.move_to_end(tenant)
            if len(self._last_read) > MOST_READ:
                self._last_read.popitem(last=False)
        return _decoder.decode(content)

    def _save(self, index: Index) -> None:
        file = self._tenant_file(index.tenant)
        if index.modules:
            write_whole(file, msgspec.json.encode(index), synced=True)
        else:
            file.unlink(missing_ok=True)

    def _drop_unused(self, module: str) -> None:
        """Removes the files of a module, unless a tenant has it."""
        for file in (self._folder / "tenants").glob("*.json"):
            if module in _decoder.decode(file.read_bytes()).modules:
                return
        self._file(module).unlink(missing_ok=True)
        self._compiled.drop(module)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time, of all threads and processes.

        What the system refuses, as a full disk does, is an UnavailableError: nothing was changed.
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
        f"the module store of this worker cannot be {what} ({error.strerror}), so that nothing was "
        "changed; make room on its disk, and try again",
    )


def _named(index: Index, name: str, path: str) -> str:
    """The id of a module that a tenant names by a tag, its id, or 8 characters of it or more."""
    module = index.tags.get(name, name)
    if module in index.modules:
        return module
    found = [m for m in index.modules if m.startswith(name)] if _PREFIX.fullmatch(name) else []
    if len(found) == 1:
        return found[0]
    if found:
        raise RequestError(
            Code.INVALID_FIELD,
            f"the ids of {len(found)} modules begin with {name}: {', '.join(sorted(found))}",
            path=path,
        )
    raise RequestError(Code.UNKNOWN_CONTROLLER, _why_unknown(index, name, path), path=path)


def _why_unknown(index: Index, name: str, path: str) -> str:
    """What is wrong with a name, and which ones there are, those like it first."""
    runs = path == "$.controller"
    parts = [f"there is no {'controller' if runs else 'module'} {name!r}"]
    if runs and _PYTHON.fullmatch(name):
        parts[0] += (
            ": Python controllers are served by `tokenbus controller serve`, and none of that "
            "name is"
        )
    if runs:
        parts.append(f"built in: {', '.join(BUILT_IN)}")
    if index.tags:
        parts.append(f"tags: {_some(index.tags, name)}")
    if untagged := len(index.modules.keys() - set(index.tags.values())):
        parts.append(f"modules without tags: {untagged}")
    if not index.modules:
        parts.append("no module has been uploaded")
    return "; ".join(parts)


def _some(tags: Iterable[str], name: str) -> str:
    """As many tags as a message has room for, those like ``name`` first."""
    every = sorted(tags)
    short = (tag for tag in every if len(tag) <= COMPARED_CHARACTERS)
    near = difflib.get_close_matches(name[:COMPARED_CHARACTERS], islice(short, COMPARED))
    shown: list[str] = []
    for tag in [*near, *(tag for tag in every if tag not in near)][:SHOWN]:
        if shown and len(", ".join([*shown, tag])) > SHOWN_CHARACTERS:
            break
        shown.append(tag)
    more = len(every) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _check_tag(tag: str) -> None:
    if tag in BUILT_IN:
        raise RequestError(
            Code.INVALID_FIELD, f"{tag!r} is the name of a built-in controller", path="$.tag"
        )
    if not tag or not tag.isprintable() or _ID.fullmatch(tag):
        raise RequestError(
            Code.INVALID_FIELD,
            f"{tag!r} is not a valid tag; a tag has printable characters and is not a module id",
            path="$.tag",
        )


def _check_tags(index: Index) -> None:
    if len(index.tags) > MOST_TAGS:
        raise RequestError(
            Code.TOO_LARGE,
            f"{len(index.tags)} tags; at most {MOST_TAGS} are allowed",
            path="$.tags",
        )


def _check_quota(index: Index, module: str, more: int, upload_bytes: int | None) -> None:
    """Refuses a module for which a tenant has no room; ``more``: its bytes."""
    if module in index.modules:
        return
    if len(index.modules) >= MOST_MODULES:
        raise RequestError(
            Code.TOO_LARGE,
            f"{len(index.modules)} modules are stored, and no more are allowed; delete some first",
        )
    used = sum(entry.size + entry.compiled for entry in index.modules.values())
    if upload_bytes is not None and used + more > upload_bytes:
        raise UnavailableError(
            Code.CLIENT_LIMIT,
            f"the quota upload_bytes of this key is used up: the stored modules have {used} bytes "
            f"with their compiled forms, this one {more}, and it is {upload_bytes}; try again when "
            "some are deleted",
            retry_after_s=RETRY_AFTER_S,
        )
    if used + more > MOST_BYTES:
        raise RequestError(
            Code.TOO_LARGE,
            f"the stored modules have {used} bytes with their compiled forms, this one {more}; "
            f"at most {MOST_BYTES} are allowed; delete some first",
        )
