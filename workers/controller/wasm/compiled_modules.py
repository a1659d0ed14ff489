"""Caches compiled modules: the most recently used ones in memory, and all of them on disk, for
later processes. The *compiled form* of a module is the machine code that Wasmtime has made from the
module.

A script is stored like a module. The interpreter that runs the script is also a module.

If another user replaced a compiled form, the worker would run the machine code of this user. So
each file has an HMAC. The HMAC's key is in a file that only the worker's user can read. The HMAC
also covers the module's id and the compilation target. A file with a wrong HMAC counts as missing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import platform
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import wasmtime

from ....protocol.decoders import json_decoder
from ....protocol.errors import Code, UnavailableError
from ...whole_files import clear_left, write_first, write_whole
from ..backends.compiling.kept import Kept
from ..backends.compiling.turns import Turns
from ..limits import Limits
from ..pool import tenant_of_thread, waiting
from ..scripts.engines import engine
from ..scripts.sources import Source, is_script, read_source
from .module_compiler import check_script, compile_interpreter, compile_module

log = logging.getLogger(__name__)

KEPT_BYTES = 256 * 1024**2
"""Maximum bytes of compiled forms in memory. Beyond this bound, the tenant with the most bytes
loses its least recently used form. So its modules do not evict those of others."""
MAX_KEPT = 4096
"""Maximum number of compiled forms in memory."""
AT_ONCE = 2
"""Maximum modules that are compiled at the same time, all but one of them for one tenant. Further
uploads are refused, and the client has to send them again."""
INTERPRETER = "interpreter-"
"""Beginning of the names of the interpreters' compiled forms. A client may upload the bytes of an
interpreter as a module, and delete this module. The name of the interpreter is therefore not the
hash of its bytes."""
TURN_S = 60.0
"""Maximum seconds that a stream waits because too many other modules are being compiled."""

_MAC_BYTES = 32
_KEY_BYTES = 32


Abi = Literal["native", "aici", "javascript", "python"]
"""The interface of a module, or the language of a script."""


class Loaded(NamedTuple):
    """A module that is ready to be instantiated, or a script with its interpreter."""

    abi: Abi
    module: wasmtime.Module
    """The compiled module, with exports for all of its state (``exported_state.py``)."""
    why_no_fork: str | None = None
    """The reason why a fork cannot copy an instance of the module; None if it can."""
    script: bytes | None = None
    """The text of a script; None for a module, and for a script in the request's argument."""


Head = tuple[Abi, str | None]
"""The header before the compiled code on disk: the ABI, and ``Loaded.why_no_fork``."""


class CompiledModules:
    """The compiled forms in a folder, for one engine. Several threads and processes may use the
    folder at the same time."""

    def __init__(self, folder: Path, limits: Limits, engine: wasmtime.Engine) -> None:
        """``engine`` must be the engine that ``sandbox.make_engine`` made from ``limits``."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        clear_left(folder)
        self._folder = folder
        self._limits = limits
        self._engine = engine
        self._made_for = (
            f"wasmtime {version('wasmtime')}, {platform.machine()}, sandbox, exported tables"
        )
        self._suffix = hashlib.sha256(self._made_for.encode()).hexdigest()[:8]
        self._key = _key(folder / "key")
        self._lock = threading.Lock()
        self._kept: Kept[str, Loaded] = Kept(MAX_KEPT, KEPT_BYTES)
        self._turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._compiling = Turns(AT_ONCE)
        self._interpreters: dict[str, Loaded] = {}
        """The loaded interpreters by language. They are not in ``_kept``, because the modules of
        clients would evict them."""

    def prepare(self, module: str, wasm: bytes) -> tuple[Loaded, int]:
        """Examines and compiles a module, unless its compiled form is stored. Returns the loaded
        module, and the size of its compiled form in bytes.

        Raises RequestError if the module is not a valid controller, and UnavailableError if too
        many modules are being compiled.
        """
        with self._turn(module):
            ready = self._read(module) or self._compile(module, wasm)
            self._kept.add(tenant_of_thread(), module, *ready)
            return ready

    def load(self, module: str, wasm: Callable[[str], bytes]) -> Loaded:
        """Loads a module by its id. If no compiled form is stored, ``wasm`` is called with the id,
        and returns the module's bytes.

        If too many modules are being compiled, the call waits up to ``TURN_S`` until one is done.
        """
        kept = self._kept.get(module)
        if kept is not None:
            return kept
        with self._turn(module):
            ready = self._read(module)
            if ready is None:
                ready = self._compile(module, wasm(module), TURN_S)
            self._kept.add(tenant_of_thread(), module, *ready)
            return ready[0]

    def interpreter(self, language: str) -> Loaded:
        """The interpreter of a language, which is compiled when it is first used. Raises
        RequestError if the interpreter is not installed."""
        loaded = self._interpreters.get(language)
        if loaded is not None:
            return loaded
        found = engine(language)
        name = INTERPRETER + found.id
        # ``_turn`` frees the slots of the threads that wait. If these threads kept their slots, the
        # thread that compiles could not get a slot again.
        with self._turn(name):
            loaded = self._interpreters.get(language)
            if loaded is None:
                ready, _ = self._read(name) or self._compile(name, found.wasm, boots=True)
                loaded = ready._replace(abi=language)  # type: ignore[arg-type]
                self._interpreters[language] = loaded
            return loaded

    def drop(self, modules: Collection[str]) -> None:
        """Removes modules from memory and disk."""
        for module in modules:
            kept = self._kept.get(module)
            if kept is not None:
                self._kept.drop(module, kept)
        for file in self._folder.glob("*-*") if modules else ():
            if file.name.partition("-")[0] in modules:
                file.unlink(missing_ok=True)

    # --- inside ---------------------------------------------------------------------------------

    @contextmanager
    def _turn(self, module: str) -> Iterator[None]:
        """Admits one thread at a time for each module, so that a module is not compiled twice."""
        with self._lock:
            turn = self._turns.get(module)
            if turn is None:
                turn = self._turns[module] = threading.Lock()
        if not turn.acquire(blocking=False):
            with waiting():
                turn.acquire()
        try:
            yield
        finally:
            turn.release()

    def _file(self, module: str) -> Path:
        return self._folder / f"{module}-{self._suffix}"

    def _compile(
        self, module: str, wasm: bytes, wait_s: float = 0.0, boots: bool = False
    ) -> tuple[Loaded, int]:
        """Compiles a module, or checks a script. Waits up to ``wait_s`` seconds if too many modules
        are being compiled. ``boots``: whether the module is an interpreter of scripts, which is
        compiled immediately."""
        source = read_source(wasm) if is_script(wasm) else None
        interpreter = self.interpreter(source.language) if source is not None else None
        with nullcontext() if boots else self._place_to_compile(wait_s), waiting():
            if source is not None and interpreter is not None:
                loaded, code = self._checked(source, interpreter), source.text
            else:
                compile_ = compile_interpreter if boots else compile_module
                found, code = compile_(wasm, self._limits)
                compiled = wasmtime.Module.deserialize(self._engine, code)
                loaded = Loaded(found.abi, compiled, found.why_no_fork)
        content = msgspec.json.encode((loaded.abi, loaded.why_no_fork)) + b"\n" + code
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._file(module), self._mac(module, content) + content, synced=False)
        except OSError as error:
            log.warning("the compiled form of %s is not stored on disk: %s", module, error)
        return loaded, len(code)

    def _checked(self, source: Source, interpreter: Loaded) -> Loaded:
        """Checks the syntax of a script, and returns the script with its interpreter. Raises
        RequestError with the position of a syntax error."""
        check_script(source, bytes(interpreter.module.serialize()), self._limits)
        return interpreter._replace(script=source.text)

    @contextmanager
    def _place_to_compile(self, wait_s: float) -> Iterator[None]:
        """Takes one of ``AT_ONCE`` places for the tenant of this thread's job. Raises
        UnavailableError if the tenant does not get a place within ``wait_s`` seconds."""
        tenant = tenant_of_thread()
        taken = self._compiling.acquire(tenant, 0.0)
        if not taken and wait_s:
            with waiting():
                taken = self._compiling.acquire(tenant, wait_s)
        if not taken:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"at most {AT_ONCE} modules are compiled at the same time, and at most "
                f"{AT_ONCE - 1} of one client; try again",
                retry_after_s=1.0,
            )
        try:
            yield
        finally:
            self._compiling.release(tenant)

    def _read(self, module: str) -> tuple[Loaded, int] | None:
        """The module in the file on disk, and the size of its compiled form; None if the file is
        missing, or if its HMAC or its target is wrong."""
        try:
            stored = self._file(module).read_bytes()
        except FileNotFoundError:
            return None
        mac, content = stored[:_MAC_BYTES], stored[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(module, content)):
            return None
        head, _, code = content.partition(b"\n")
        abi, why_no_fork = json_decoder(Head).decode(head)
        if abi not in ("native", "aici"):
            return self.interpreter(abi)._replace(script=code), len(code)
        with suppress(wasmtime.WasmtimeError):  # The code is for another target.
            compiled = wasmtime.Module.deserialize(self._engine, code)
            return Loaded(abi, compiled, why_no_fork), len(code)
        return None

    def _mac(self, module: str, content: bytes) -> bytes:
        mac = hmac.new(self._key, f"{self._made_for}\n{module}\n".encode(), hashlib.sha256)
        mac.update(content)
        return mac.digest()


def _key(file: Path) -> bytes:
    """The key in ``file``. The first process that needs the key creates the file."""
    if not file.exists():
        write_first(file, secrets.token_bytes(_KEY_BYTES))
    key = file.read_bytes()
    if len(key) != _KEY_BYTES:
        raise ValueError(
            f"the key file {file} has {len(key)} bytes; expected {_KEY_BYTES}; remove the file"
        )
    return key
