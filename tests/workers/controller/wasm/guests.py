"""Compiles C files or C text to guests for tests, with ziglang and the SDK."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .... import starts

ROOT = Path(__file__).parents[4]
SDK = ROOT / "workers/controller/sdk"
TARGET = ("-target", "wasm32-freestanding", "-O2", "-g0", "-nostdlib")
FLAGS = (*TARGET, "-Wl,--no-entry", "-Wl,-z,stack-size=65536")
"""The flags that docs/controllers.md and the examples name."""
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
CACHE = ROOT / "build/guests"


def compile_guest(source: str | Path, *flags: str) -> bytes:
    """Compiles a C file (a path) or C text, which may include the SDK's headers; returns the
    module.

    ``flags`` follow the usual flags. Modules are stored in ``build/guests`` by a hash of their
    sources and flags. Raises AssertionError with the compiler's messages if the compiler fails.
    """
    starts.check("a compiler")
    text = source.read_bytes() if isinstance(source, Path) else source.encode()
    made_of = hashlib.sha256(text)
    for header in sorted(SDK.rglob("*.h")):
        made_of.update(header.read_bytes())
    made_of.update("\0".join((*FLAGS, *WARNINGS, *flags)).encode())
    wasm = CACHE / f"{made_of.hexdigest()}.wasm"
    if wasm.exists():
        return wasm.read_bytes()
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        path = Path(folder, "guest.c")
        path.write_bytes(text)
        made = Path(folder, "guest.wasm")
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, *WARNINGS, "-I", str(SDK)]
        command += [str(path), *flags, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        os.replace(made, wasm)
    return wasm.read_bytes()
