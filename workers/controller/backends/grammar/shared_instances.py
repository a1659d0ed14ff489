"""The grammar instances of this worker. Each pair of a grammar and a vocabulary has one instance (a
guest), which all sequences with this grammar and this vocabulary share.

An instance is idle if no sequence uses it. Idle instances stay loaded until their memory is needed.
If the masks of an instance take long to compute, a snapshot of the instance's memory is written to
disk when the instance becomes idle. A later instance of the same pair gets these masks from the
snapshot.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path
from weakref import WeakValueDictionary

import wasmtime

from .....grammars.yacc.compiled import MAGIC as grammar_magic
from .....protocol.errors import Code, UnavailableError
from .....protocol.shares import fits_share
from ....machine import machine_memory
from ...host import Vocabulary
from ...pool import tenant_of_thread
from .grammar_instance import GrammarInstance, GrammarModule
from .snapshots import SnapshotFiles

log = logging.getLogger(__name__)

KEPT_BYTES = 1024**3
"""If the guests of all instances together take more bytes than this, idle guests are evicted, the
least recently used first."""
USED_PART = 4
"""All guests in use together may take 1 / ``USED_PART`` of the machine's memory."""
SAVE_AGAIN_S = 60.0
"""Minimum time between two snapshots of a guest, in seconds."""


@lru_cache(maxsize=64)
def _digest(tables: bytes) -> bytes:
    return hashlib.sha256(tables).digest()


class Shared:
    """A grammar instance and the number of sequences that use it."""

    def __init__(
        self, owner: SharedInstances, key: str, guest: GrammarInstance, saved: int
    ) -> None:
        self.guest = guest
        self.key = key
        self.users = 0
        self.tenant = tenant_of_thread()
        """The tenant whose request created the guest. While sequences use the guest, its memory
        counts towards this tenant's share."""
        self.saved = saved
        """``GrammarInstance.found`` at the last snapshot."""
        self.saved_at = float("-inf")
        self.worth_saving = False
        """Whether masks take longer to compute than to read from disk, as those of yacc grammars
        do."""
        self._owner = owner

    def share(self) -> None:
        """Counts one more sequence that uses the instance."""
        self._owner._use(self)

    def release(self) -> None:
        """Counts one sequence fewer that uses the instance."""
        self._owner._release(self)


class SharedInstances:
    """Grammar instances by grammar and vocabulary. Thread-safe."""

    def __init__(self, engine: wasmtime.Engine, folder: Path | None) -> None:
        """``folder`` stores snapshots. If it is None, no snapshots are stored."""
        self._module = GrammarModule(engine)
        self._snapshots = SnapshotFiles(folder) if folder is not None else None
        self._module_digest = hashlib.sha256(self._module.wasm).digest()
        self._max_used_bytes = machine_memory() // USED_PART
        self._lock = threading.Lock()
        self._all: OrderedDict[str, Shared] = OrderedDict()
        self._making: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    def get(self, tables: bytes, vocabulary: Vocabulary) -> Shared:
        """The instance of a grammar. If the instance does not exist, it is created. The caller's
        sequence is counted as one of its users. Raises UnavailableError if the instances that all
        tenants use, or that the caller's tenant uses, take too much memory."""
        digest = hashlib.sha256(self._module_digest)
        digest.update(f"{vocabulary.fingerprint} {vocabulary.size} {vocabulary.eos} ".encode())
        digest.update(_digest(tables))
        key = digest.hexdigest()
        with self._lock:
            shared = self._reuse(key)
            if shared is not None:
                return shared
            making = self._making.get(key)
            if making is None:
                making = self._making[key] = threading.Lock()
        with making:
            with self._lock:
                shared = self._reuse(key)
            if shared is None:
                shared = self._make(key, tables, vocabulary)
                shared.worth_saving = tables.startswith(grammar_magic)
                evicted = self._add(shared)
                for old in evicted:
                    old.guest.close()
        return shared

    def close(self) -> None:
        """Called when the worker stops: writes snapshots of the instances that are
        ``worth_saving``."""
        with self._lock:
            every = list(self._all.values())
        for shared in every:
            shared.saved_at = float("-inf")
            self._save(shared)
        if self._snapshots is not None:
            self._snapshots.close()

    # --- inside ---------------------------------------------------------------------------------

    def _reuse(self, key: str) -> Shared | None:
        shared = self._all.get(key)
        if shared is None or shared.guest.dead:
            return None
        self._all.move_to_end(key)
        shared.users += 1
        return shared

    def _add(self, shared: Shared) -> list[Shared]:
        """Adds a new instance that one sequence uses; returns the instances that are evicted
        because their memory is needed. Raises UnavailableError if the new instance does not
        fit."""
        with self._lock:
            used = [other for other in self._all.values() if other.users]
            total = sum(other.guest.size for other in used)
            own = sum(other.guest.size for other in used if other.tenant == shared.tenant)
            size = shared.guest.size
            # Clients without keys are one tenant, whose share is not bounded.
            if fits_share(own if shared.tenant else 0, total, self._max_used_bytes, size):
                shared.users += 1
                self._all[shared.key] = shared
                return self._evicted()
        shared.guest.close()
        raise UnavailableError(
            Code.QUEUE_FULL,
            f"the grammars of this client's streams take {own} bytes of memory; the grammars of "
            f"all streams take {total} of {self._max_used_bytes} bytes; a client may not use more "
            "memory than remains free; try again when other streams have ended",
            retry_after_s=1.0,
        )

    def _make(self, key: str, tables: bytes, vocabulary: Vocabulary) -> Shared:
        if self._snapshots is not None:
            with self._snapshots.read(key) as memory:
                if memory is not None:
                    guest = GrammarInstance(self._module, vocabulary, tables, memory)
                    return Shared(self, key, guest, guest.found)
        return Shared(self, key, GrammarInstance(self._module, vocabulary, tables), 0)

    def _evicted(self) -> list[Shared]:
        """Removes the idle instances whose memory is needed; the caller closes them."""
        evicted: list[Shared] = []
        used = sum(shared.guest.size for shared in self._all.values())
        for key, shared in list(self._all.items()):
            if used <= KEPT_BYTES:
                break
            if shared.users == 0:
                evicted.append(self._all.pop(key))
                used -= shared.guest.size
        return evicted

    def _use(self, shared: Shared) -> None:
        with self._lock:
            shared.users += 1

    def _release(self, shared: Shared) -> None:
        with self._lock:
            shared.users -= 1
            idle = shared.users == 0
            replaced = self._all.get(shared.key) is not shared
            if idle and not replaced and shared.guest.dead:
                del self._all[shared.key]
        if not idle:
            return
        if replaced or shared.guest.dead:
            shared.guest.close()
        else:
            self._save(shared)

    def _save(self, shared: Shared) -> None:
        """If masks were computed since the last snapshot, schedules a snapshot of an instance.
        Another thread writes the snapshot."""
        now = time.monotonic()
        if (
            self._snapshots is None
            or not shared.worth_saving
            or now - shared.saved_at < SAVE_AGAIN_S
        ):
            return
        guest = shared.guest
        if guest.dead or guest.found == shared.saved:
            return
        shared.saved, shared.saved_at = guest.found, now
        self._snapshots.write(shared.key, guest.memory)
