"""Compiles the arguments of constraints (regular expressions, choices, grammars) to tables: the
transitions of an automaton or of a parser, as bytes that the grammar guest reads.

Each public method of ``Tables`` takes the argument of one constraint. If the argument is not valid,
the method raises RequestError with the path ``$.controller_arg``. Tables are cached in memory, and
on disk if compiling them takes longer than reading them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from .....grammars import library
from .....grammars.regex import Dfa
from .....grammars.substring import compile_substring
from .....grammars.yacc import CompiledGrammar, GrammarError
from .....grammars.yacc.compiled import VERSION
from .....protocol.decoders import convert, msgpack_decoder
from .....protocol.expected_values import parted, plain
from ...pool import tenant_of_thread, waiting
from ..compiling.bounds import RefusedGrammar
from ..compiling.kept import Kept
from ..compiling.meter import CompileMeter
from ..compiling.processes import Processes
from ..compiling.shared import Shared
from ..compiling.tasks import Kind
from .automata import MAKERS, quickly
from .file_cache import FileCache
from .refusals import refusal
from .yacc_compiler import WALL_S, compile_apart

log = logging.getLogger(__name__)

MAX_BYTES = 256 * 1024**2
"""Maximum bytes of tables on disk."""
WORTH_S = 0.02
"""Tables are written to disk if compiling them took longer than this number of seconds."""
MAX_KEPT = 1_024
"""Maximum number of arguments whose tables are cached in memory. Most tables have a few
kilobytes."""
MAX_KEPT_BYTES = 256 * 1024**2
"""Maximum bytes of tables in memory. The tables of an argument of 40 kB may have 16 MiB."""
GRAMMAR_CHARACTERS = 1 << 20
"""Maximum characters of a grammar that the compiler accepts."""


class Tables:
    """Compiles and caches the tables of the constraints of this grammar backend."""

    def __init__(self, folder: Path | None, processes: Processes, meter: CompileMeter) -> None:
        """``folder`` stores tables between runs of the worker, and is created with mode 0700. If
        ``folder`` is None, tables are not stored on disk."""
        self._files = None if folder is None else FileCache(folder, ".tables", MAX_BYTES)
        self._processes = processes
        self._meter = meter
        self._kept: Kept[str, bytes] = Kept(MAX_KEPT, MAX_KEPT_BYTES)
        self._compiled: Shared[bytes] = Shared(WALL_S)
        self._version = f"{version('tokenbus')}, tables {VERSION}"
        self._names = frozenset(library.names())

    def regex(self, arg: bytes) -> bytes:
        """The tables of a pattern, or of a library pattern given as ``{"library": NAME}``."""
        pattern = _named(arg, "regex", "pattern", library.regex)
        if not pattern:
            raise refusal("the argument of regex is empty; it must be a regular expression")
        return self._automata("regex", json.dumps(pattern).encode())

    def choice(self, arg: bytes) -> bytes:
        """The tables of a JSON list of texts, or of ``{"choices": [...]}``."""
        try:
            given = msgspec.json.decode(arg)
            if isinstance(given, dict) and list(given) == ["choices"]:
                given = given["choices"]
            choices = convert(given, list[str])
        except msgspec.MsgspecError as error:
            shown = arg[:100].decode("utf-8", "replace")
            message, path = parted(error)
            where = "" if path == "$" else f" at {path}"
            wrong = f"is {shown!r}: {plain(message)}{where}" if arg else "is missing"
            raise refusal(
                f"the argument of choice {wrong}; it must be a JSON list of strings, "
                'or {"choices": [...]}'
            ) from None
        if not choices:
            raise refusal("the argument of choice is an empty list; it must have at least one text")
        return self._automata("choice", json.dumps(choices).encode())

    def substring(self, arg: bytes) -> bytes:
        """The tables of a text whose substrings are allowed. The argument is the text itself or
        ``{"text": TEXT}``."""
        text = _named(arg, "substring", "text")
        if not text:
            raise refusal("the argument of substring is empty; it must be a text")

        def make() -> bytes:
            try:
                return compile_substring(text).to_bytes()
            except ValueError as error:
                raise refusal(f"substring: {error}") from None

        return self._get("substring", text, make)

    def combination(self, arg: bytes) -> dict[str, bytes]:
        """The tables of the regular parts of a combination (``combination.py``), by the paths of
        the parts."""
        return msgpack_decoder(dict[str, bytes]).decode(self._automata("combination", arg))

    def yacc(self, arg: bytes) -> bytes:
        """The tables of a yacc grammar. The argument is its text, the name of a library grammar, or
        ``{"library": NAME}``."""
        text = _named(arg, "yacc", "grammar", library.grammar)
        if not text.strip():
            raise refusal(
                "the argument of yacc is empty; it must be a grammar, or the name of a library "
                "grammar: " + ", ".join(library.names())
            )
        if re.fullmatch(r"\w+", text) and text not in self._names:
            known = ", ".join(sorted(self._names))
            raise refusal(f"yacc: {text!r} is not in the library; it must be one of {known}")
        if text in self._names:
            text = library.grammar(text)
        if len(text) > GRAMMAR_CHARACTERS:
            raise refusal(
                f"yacc: the grammar has {len(text)} characters; at most {GRAMMAR_CHARACTERS} are "
                "allowed"
            )

        def make() -> bytes:
            try:
                with waiting():
                    return compile_apart(text, tenant_of_thread())
            except GrammarError as error:
                raise refusal(f"yacc: {error}") from None

        return self._get("yacc", text, make)

    # --- inside ---------------------------------------------------------------------------------

    def _automata(self, kind: Kind, arg: bytes) -> bytes:
        def make() -> bytes:
            tables = quickly(MAKERS[kind], arg)
            if tables is not None:
                return tables
            try:
                return self._processes.run(kind, arg)
            except RefusedGrammar as error:
                raise refusal(str(error)) from None

        return self._get(kind, arg.decode("utf-8", "surrogatepass"), make)

    def _get(self, kind: str, text: str, make: Callable[[], bytes]) -> bytes:
        key = _key(f"{self._version}, {kind}\n{text}")
        tables = self._kept.get(key)
        if tables is not None:
            self._meter.hit(kind)
            return tables
        return self._compiled.get(key, lambda: self._made(kind, key, make))

    def _made(self, kind: str, key: str, make: Callable[[], bytes]) -> bytes:
        """The tables of a key: from memory, from disk or from ``make``. Called in one thread at a
        time for each tenant and key."""
        tables = self._kept.get(key)
        if tables is not None:
            return tables
        with self._meter.measured(kind):
            began = time.perf_counter()
            tables = self._read(kind, key)
            if tables is None:
                tables = make()
                if time.perf_counter() - began > WORTH_S:
                    self._write(key, tables)
        self._kept.add(tenant_of_thread(), key, tables, len(tables))
        return tables

    def _read(self, kind: str, key: str) -> bytes | None:
        if self._files is None:
            return None
        try:
            tables = self._files.path(key).read_bytes()
            _check(kind, tables)
        except OSError:
            return None
        except ValueError as error:
            log.warning(
                "the tables %s on disk cannot be used and are compiled again: %s", key[:12], error
            )
            return None
        return tables

    def _write(self, key: str, tables: bytes) -> None:
        if self._files is None:
            return
        try:
            self._files.write(key, tables)
        except OSError as error:
            log.warning("the tables %s cannot be written to disk: %s", key[:12], error)


def _check(kind: str, tables: bytes) -> None:
    """Raises ValueError if tables from disk are damaged."""
    match kind:
        case "yacc":
            CompiledGrammar.from_bytes(tables)
        case "combination":
            for each in msgpack_decoder(dict[str, bytes]).decode(tables).values():
                Dfa.from_bytes(each)
        case _:
            Dfa.from_bytes(tables)


def _key(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _named(
    arg: bytes, constraint: str, field: str, of_library: Callable[[str], str] | None = None
) -> str:
    """The text that an argument gives: the argument itself, the ``field`` of an object, or the
    library text that the field ``library`` names."""
    try:
        text = arg.decode()
    except UnicodeDecodeError as error:
        raise refusal(f"the argument of {constraint} is not UTF-8 text: {error}") from None
    if not text.startswith('{"'):
        return text
    try:
        given: dict[str, Any] = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    match given:
        case {"library": str(name)} if of_library is not None and len(given) == 1:
            try:
                return of_library(name)
            except KeyError as error:
                raise refusal(f"{constraint}: {error.args[0]}") from None
        case _ if len(given) == 1 and isinstance(given.get(field), str):
            return str(given[field])
    or_library = ' or {"library": NAME}' if of_library is not None else ""
    raise refusal(
        f"the argument of {constraint} is an object with the fields {', '.join(given)}; it must be "
        f'text, {{"{field}": TEXT}}{or_library}'
    )
