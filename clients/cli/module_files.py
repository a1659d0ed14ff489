"""Reads Wasm files and scripts, and compiles C files with the SDK of this installation."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from ...protocol.python_command import python_command
from ...protocol.scripts import LANGUAGES, language_of, marked_script
from . import type_eraser
from .type_eraser import TypeScriptFault, erase_types

SCRIPT_SUFFIXES = tuple(suffix for group in LANGUAGES.values() for suffix in group)
SUFFIXES = (".wasm", ".c", *SCRIPT_SUFFIXES, *type_eraser.SUFFIXES)
"""A name is a file name if it has one of these suffixes or contains a "/"."""
C_FLAGS = "-target wasm32-freestanding -O2 -g0 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536"
WARNINGS = "-Wall -Wmissing-prototypes"
CALLS = ("tb_init_prompt", "tb_pre_process", "tb_mid_process", "tb_post_process")
"""The functions ``tb_…`` that a controller in C defines. The SDK defines all other functions
``tb_…``."""

_DIAGNOSTIC = re.compile(r"^.*:\d+:\d+: (warning|error|fatal error|note|remark): ")
_UNDECLARED = re.compile(r"no previous prototype for function '(\w+)' \[-Wmissing-prototypes\]")
_COUNT = re.compile(r"^\d+ warnings? generated\.$")


class FileFault(Exception):
    """A file or an argument of the command cannot be used, or a package is missing."""


def check_writable(path: str) -> None:
    """Raises FileFault if ``path`` is a folder, or if its folder does not exist or is not writable.
    A command calls this function before its work begins. Without this check, the work could be
    lost."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileFault(f"cannot write {path}: the folder {folder} does not exist")
    if Path(path).is_dir():
        raise FileFault(f"cannot write {path}, because it is a folder; name a file")
    if not os.access(folder, os.W_OK):
        raise FileFault(f"cannot write {path}: the folder {folder} is not writable")


def text_or_file(name: str, given: str) -> str:
    """The value of the flag or parameter ``name``. The value is the given text or, if this is
    ``@FILE``, the text of the file. Raises FileFault if the file cannot be read."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise FileFault(f"{name} {given}: cannot read {given[1:]}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FileFault(
            f"{name} {given}: {given[1:]} is not valid UTF-8 at byte {error.start}"
        ) from None


def is_file(name: str) -> bool:
    """Whether a name has the form of a file name, and not of a tag, a module id or a constraint."""
    return "/" in name or Path(name).suffix in SUFFIXES


def read_module(file: Path) -> bytes:
    """Reads a Wasm file or a script, or compiles a C file; raises FileFault. A script in TypeScript
    is returned without its types.

    Prints the compiler's warnings on stderr.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise FileFault(f"cannot read {file}: {error.strerror}") from None
    language = language_of(file.suffix)
    if language is not None:
        return marked_script(content, language)
    if file.suffix in type_eraser.SUFFIXES:
        return marked_script(_without_types(file, content), "javascript")
    return _compiled(file) if file.suffix == ".c" else content


def _without_types(file: Path, content: bytes) -> bytes:
    """Converts a script in TypeScript to JavaScript: erases its types."""
    try:
        return erase_types(content)
    except TypeScriptFault as error:
        raise FileFault(f"{file}: {error}") from None
    except ModuleNotFoundError:
        raise FileFault(
            f"{file} is in TypeScript, and no parser is installed; use "
            "pip install 'tokenbus[typescript]'"
        ) from None


def _compiled(source: Path) -> bytes:
    """Compiles one C file to a module."""
    if importlib.util.find_spec("ziglang") is None:
        raise FileFault(
            f"{source} is a C file, and no compiler is installed; pip install ziglang, or compile "
            "the file to Wasm yourself"
        )
    workers = importlib.util.find_spec("tokenbus.workers")
    places = workers.submodule_search_locations if workers is not None else None
    # With -isystem, the headers of the SDK do not cause warnings.
    include = [f"-isystem{place}/controller/sdk" for place in places or []]
    with tempfile.TemporaryDirectory(prefix="tokenbus-c-") as folder:
        out = Path(folder) / "out.wasm"
        flags = [*C_FLAGS.split(), *WARNINGS.split(), *include]
        command = python_command("ziglang", "cc", *flags, str(source), "-o", str(out))
        # The compiler does not repeat the warnings of a cached result, so each compilation has a
        # new cache.
        fresh = os.environ | {"ZIG_LOCAL_CACHE_DIR": f"{folder}/cache"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=fresh)
        if done.returncode:
            raise FileFault(f"{source} does not compile:\n{done.stderr.rstrip()}")
        print(_checked(source, done.stderr), end="", file=sys.stderr, flush=True)
        return out.read_bytes()


def _checked(source: Path, diagnostics: str) -> str:
    """Returns the compiler's warnings; raises FileFault if the file defines a function ``tb_…``
    that the SDK does not declare.

    The SDK declares the four functions in ``CALLS``. If a controller defines another function
    ``tb_…``, its name is probably misspelt, and clang warns that the function is not declared.
    clang's warnings about functions with other names are left out.
    """
    shown, kept = "", True
    for line in diagnostics.splitlines(keepends=True):
        kind = _DIAGNOSTIC.match(line)
        found = _UNDECLARED.search(line) if kind else None
        if found and found[1].startswith("tb_"):
            near = difflib.get_close_matches(found[1], CALLS, 1)
            calls = f"did you mean {near[0]}?" if near else f"the calls are {', '.join(CALLS)}"
            raise FileFault(f"{source}: unknown call {found[1]}; {calls}")
        if kind and kind[1] != "note":
            kept = found is None
        if kept and not _COUNT.match(line):
            shown += line
    return shown
