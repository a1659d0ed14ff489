"""Attacks by a guest process that was taken over: ``takeover.c`` runs in its place.

A request takes over the guest process of its controller if its argument is ``taken over: NAME``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..workers.controller.wasm.hostile.guests import guest
from .attack import Attack, Expected, fails

SOURCE = Path(__file__).with_name("takeover.c")
SHORT = "TOKENBUS_TEST_SHORT"
"""The environment variable that gives the controller worker of ``worker.py`` lower limits."""
ARGUMENT = b"taken over: "
"""The beginning of the argument of a request that takes over its guest process."""
KILLED = fails("the process of the controller was ended", "controller_failed", "controller_timeout")


def library_path() -> Path:
    """The path of the compiled ``takeover.c``. The name depends on the source."""
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    return Path(__file__).parents[2] / "build/guests" / f"takeover-{name}.so"


def compile_library() -> None:
    """Compiles ``takeover.c``, unless the compiled file exists."""
    path = library_path()
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-O1", "-pthread"]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, "takeover.so")
        subprocess.run([*command, str(SOURCE), "-o", str(made)], check=True)
        os.replace(made, path)


def load_library() -> ctypes.CDLL:
    """Loads the compiled ``takeover.c``."""
    library = ctypes.CDLL(str(library_path()))
    numbers = [ctypes.c_int] * 3
    library.take_over.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        *numbers,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
    ]
    return library


def takeover(name: str, tries: str, expected: Expected = KILLED, **options: object) -> Attack:
    """An attack by a request that takes over its guest process. ``name``: the name of the attack in
    ``takeover.c``."""
    arg = ARGUMENT.decode() + name
    return Attack(f"taken-{name.replace('_', '-')}", tries, expected, guest, arg, options)


NOTHING_DONE = fails("^nothing$")
ENDS_ANYHOW = Expected(("", "controller_failed", "controller_timeout"))

ATTACKS = (
    takeover("header_size", "sends a part of 2^32-1 bytes"),
    takeover("header_over", "overwrites the header of the shared memory"),
    takeover("endless_parts", "sends parts of a message without end"),
    takeover("garbage", "sends bytes that are not a message"),
    takeover("nothing", "sends an empty message"),
    takeover("nested", "sends a million nested lists"),
    takeover("many_items", "answers for 60 million sequences"),
    takeover("many_tokens", "appends 60 million tokens"),
    takeover("long_error", "fails with a message of 60 MB", ENDS_ANYHOW),
    takeover("long_log", "logs 60 MB", ENDS_ANYHOW),
    takeover("wrong_answers", "answers with actions that do not exist", ENDS_ANYHOW),
    takeover("too_many_answers", "gives three answers to one call", ENDS_ANYHOW),
    takeover("no_answers", "gives no answer to a call", ENDS_ANYHOW),
    takeover("bias_shared", "has the worker read a bias beyond the shared memory", ENDS_ANYHOW),
    takeover("cpu_negative", "claims minus infinity seconds of CPU time"),
    takeover("ask_for_ever", "asks for a variable for ever"),
    takeover("write_for_ever", "writes to a variable for ever"),
    takeover("ask_of_others", "asks for variables in the name of other guests", fails("^asked$")),
    takeover("return_memory", "returns memory that it does not have", fails("^asked$")),
    takeover("ask_without_reading", "asks without reading the answers", ENDS_ANYHOW),
    takeover("race", "changes a message while the worker reads it", ENDS_ANYHOW),
    takeover("event_overflow", "makes the counters of events overflow", ENDS_ANYHOW),
    takeover("drain_events", "takes the worker's events", ENDS_ANYHOW),
    takeover("remove_memory", "removes the pages of the shared memory", fails("^removed$")),
    takeover("flood_control", "writes 80 kB to the log of the worker"),
    takeover("hang", "does not answer", fails("", "timeout"), timeout_s=1.0),
    takeover("spin", "computes and does not answer"),
    takeover("spin_on_threads", "computes on 17 threads"),
    takeover("block_signals", "blocks all signals and computes"),
    takeover("many_threads", "starts 20,000 threads"),
    takeover("take_memory", "takes the machine's memory", fails("^refused$")),
    takeover("take_descriptors", "takes 100,000 descriptors", fails("^refused$")),
    takeover("leave", "exits"),
    takeover("crash", "writes to a wrong address"),
    takeover("abort_it", "aborts"),
    takeover("overflow", "overflows the stack of its thread"),
    takeover("try_files", "opens files, mounts, runs a program", NOTHING_DONE),
    takeover("try_proc", "reads the worker's memory through /proc and ptrace", NOTHING_DONE),
    takeover("try_signals", "sends signals to the worker and the zygote", NOTHING_DONE),
    takeover("try_sockets", "opens sockets, queues, processes", NOTHING_DONE),
    takeover("spin_beside", "computes on a thread while its guest behaves", ENDS_ANYHOW),
    takeover("race_beside", "changes its messages while its guest behaves", ENDS_ANYHOW),
)
