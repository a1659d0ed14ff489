"""The grammars that this worker has at work: one guest for each, shared, bounded, kept on disk.

A guest that no sequence uses stays until others need its room. What it has found out is written to
a file when it falls idle, so that the next process, or the same one later, begins where it was.
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
from ...host import Vocabulary
from .grammar_instance import GrammarInstance, GrammarModule
from .snapshots import SnapshotFiles

log = logging.getLogger(__name__)

KEPT_BYTES = 1024**3
"""Memory of all guests together beyond which idle ones go, the one used least recently first."""
SAVE_AGAIN_S = 60.0
"""A guest's memory is written to disk at most so often, in seconds."""


@lru_cache(maxsize=64)
def _digest(tables: bytes) -> bytes:
    return hashlib.sha256(tables).digest()


class Shared:
    """A guest and how many sequences use it."""

    def __init__(
        self, guests: SharedInstances, key: str, guest: GrammarInstance, saved: int
    ) -> None:
        self.guest = guest
        self.key = key
        self.users = 0
        self.saved = saved
        """Masks that it had found when its memory was written."""
        self.saved_at = float("-inf")
        self.worth_saving = False
        """Whether its masks take longer to find than to read: those of a grammar do."""
        self._guests = guests

    def share(self) -> None:
        """One more sequence uses it."""
        self._guests._use(self)

    def release(self) -> None:
        """One fewer does."""
        self._guests._leave(self)


class SharedInstances:
    """Guests by grammar and vocabulary. Safe from any thread."""

    def __init__(self, engine: wasmtime.Engine, folder: Path | None) -> None:
        """``folder`` is where their memories are kept; None: nowhere."""
        self._module = GrammarModule(engine)
        self._memories = SnapshotFiles(folder) if folder is not None else None
        self._made_for = hashlib.sha256(self._module.wasm).digest()
        self._lock = threading.Lock()
        self._all: OrderedDict[str, Shared] = OrderedDict()
        self._making: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    def get(self, tables: bytes, vocabulary: Vocabulary) -> Shared:
        """The guest of a grammar, with one more user; made where there is none."""
        digest = hashlib.sha256(self._made_for)
        digest.update(f"{vocabulary.fingerprint} {vocabulary.size} {vocabulary.eos} ".encode())
        digest.update(_digest(tables))
        key = digest.hexdigest()
        with self._lock:
            shared = self._ready(key)
            if shared is not None:
                return shared
            making = self._making.get(key)
            if making is None:
                making = self._making[key] = threading.Lock()
        with making:
            with self._lock:
                shared = self._ready(key)
            if shared is None:
                shared = self._make(key, tables, vocabulary)
                shared.worth_saving = tables.startswith(grammar_magic)
                with self._lock:
                    shared.users += 1
                    self._all[key] = shared
                    gone = self._too_many()
                for old in gone:
                    old.guest.close()
        return shared

    def close(self) -> None:
        """Writes what is worth it to disk: the worker ends."""
        with self._lock:
            every = list(self._all.values())
        for shared in every:
            shared.saved_at = float("-inf")
            self._save(shared)
        if self._memories is not None:
            self._memories.close()

    # --- inside ---------------------------------------------------------------------------------

    def _ready(self, key: str) -> Shared | None:
        shared = self._all.get(key)
        if shared is None or shared.guest.dead:
            return None
        self._all.move_to_end(key)
        shared.users += 1
        return shared

    def _make(self, key: str, tables: bytes, vocabulary: Vocabulary) -> Shared:
        if self._memories is not None:
            with self._memories.read(key) as memory:
                if memory is not None:
                    guest = GrammarInstance(self._module, vocabulary, tables, memory)
                    return Shared(self, key, guest, guest.found)
        return Shared(self, key, GrammarInstance(self._module, vocabulary, tables), 0)

    def _too_many(self) -> list[Shared]:
        """Idle guests whose room is needed, taken out."""
        gone: list[Shared] = []
        used = sum(shared.guest.size for shared in self._all.values())
        for key, shared in list(self._all.items()):
            if used <= KEPT_BYTES:
                break
            if shared.users == 0:
                gone.append(self._all.pop(key))
                used -= shared.guest.size
        return gone

    def _use(self, shared: Shared) -> None:
        with self._lock:
            shared.users += 1

    def _leave(self, shared: Shared) -> None:
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
        """Writes a guest's memory, on a thread of its own, where it has found something new."""
        now = time.monotonic()
        if (
            self._memories is None
            or not shared.worth_saving
            or now - shared.saved_at < SAVE_AGAIN_S
        ):
            return
        guest = shared.guest
        if guest.dead or guest.found == shared.saved:
            return
        shared.saved, shared.saved_at = guest.found, now
        self._memories.write(shared.key, guest.memory)
