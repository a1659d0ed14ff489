"""Compiles the arguments of constraints to tables: regular expressions, choices, grammars.

Each function takes the argument of its constraint, and raises RequestError with the path
``$.controller_arg`` if it is not valid. Tables are cached in memory, those of grammars on disk too.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from .....grammars import library
from .....grammars.regex import RegexError, compile_choice, compile_regex
from .....grammars.substring import compile_substring
from .....grammars.yacc import CompiledGrammar, GrammarError
from .....grammars.yacc.compiled import VERSION
from .....protocol.errors import Code, UnavailableError
from ...pool import waiting
from .file_cache import FileCache
from .refusals import refusal
from .yacc_compiler import compile_apart

log = logging.getLogger(__name__)

REGEX_S = 1.0
"""Bound on compiling a pattern, in seconds of CPU time: other rounds share the interpreter lock."""
MOST_STATES = 65_000
"""Most states of an automaton; the guest counts them in 16 bits."""
WAIT_S = 5.0
"""How long a request waits, in seconds, while another request has the same grammar compiled."""
MOST_BYTES = 256 * 1024**2
"""Most bytes of tables on disk."""
KEPT = 256
"""Sizes of the in-memory caches: tables of patterns, of choices, of texts and of grammars each."""
GRAMMAR_CHARACTERS = 1 << 20
"""Most characters of a grammar that the compiler takes."""


def regex_tables(arg: bytes) -> bytes:
    """The tables of a pattern, or of a library pattern given as ``{"library": NAME}``."""
    pattern = _named(arg, "regex", "pattern", library.regex)
    if not pattern:
        raise refusal("the argument of regex is empty; it must be a regular expression")
    return _automaton(pattern)


@lru_cache(maxsize=KEPT)
def _automaton(pattern: str) -> bytes:
    try:
        return compile_regex(pattern, max_seconds=REGEX_S).to_bytes()
    except RegexError as error:
        raise refusal(f"regex: {error}") from None


def choice_tables(arg: bytes) -> bytes:
    """The tables of a JSON list of texts, or of ``{"choices": [...]}``."""
    try:
        given = msgspec.json.decode(arg)
        if isinstance(given, dict) and list(given) == ["choices"]:
            given = given["choices"]
        choices = msgspec.convert(given, list[str])
    except msgspec.MsgspecError as error:
        raise refusal(
            f"the argument of choice is {arg[:100].decode('utf-8', 'replace')!r}: {error}; it must "
            'be a JSON list of strings, or {"choices": [...]}'
        ) from None
    if not choices:
        raise refusal("the argument of choice is an empty list; it must have at least one text")
    return _choices(tuple(choices))


@lru_cache(maxsize=KEPT)
def _choices(choices: tuple[str, ...]) -> bytes:
    try:
        return compile_choice(choices, max_states=MOST_STATES, max_seconds=REGEX_S).to_bytes()
    except (RegexError, UnicodeEncodeError) as error:
        raise refusal(f"choice: {error}") from None


@lru_cache(maxsize=KEPT)
def substring_tables(arg: bytes) -> bytes:
    """The tables of a text whose substrings are allowed, given plain or as ``{"text": TEXT}``."""
    text = _named(arg, "substring", "text")
    if not text:
        raise refusal("the argument of substring is empty; it must be a text")
    try:
        return compile_substring(text).to_bytes()
    except ValueError as error:
        raise refusal(f"substring: {error}") from None


class GrammarTables:
    """Tables of grammars, given by their text or by a library name."""

    def __init__(self, folder: Path | None) -> None:
        """``folder`` stores tables between runs and is created with mode 0700; None: no storage."""
        self._files = None if folder is None else FileCache(folder, ".tables", MOST_BYTES)
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, bytes] = OrderedDict()
        self._turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._version = f"{version('tokenbus')}, tables {VERSION}"
        self._names = frozenset(library.names())

    def __call__(self, arg: bytes) -> bytes:
        """The tables of a grammar's text, of a library name, or of ``{"library": NAME}``."""
        text = _named(arg, "yacc", "grammar", library.grammar)
        if not text.strip():
            raise refusal(
                "the argument of yacc is empty; it must be a grammar, or the name of a library "
                "grammar: " + ", ".join(library.names())
            )
        if re.fullmatch(r"\w+", text) and text not in self._names:
            known = ", ".join(sorted(self._names))
            raise refusal(f"yacc: {text!r} is not in the library; there are {known}")
        if text in self._names:
            text = library.grammar(text)
        if len(text) > GRAMMAR_CHARACTERS:
            raise refusal(
                f"yacc: the grammar has {len(text)} characters; at most {GRAMMAR_CHARACTERS} are "
                "allowed"
            )
        key = hashlib.sha256(f"{self._version}\n{text}".encode()).hexdigest()
        with self._lock:
            tables = self._cached.get(key)
            if tables is not None:
                self._cached.move_to_end(key)
                return tables
            turn = self._turns.setdefault(key, threading.Lock())
        with waiting():
            has_turn = turn.acquire(timeout=WAIT_S)
        if not has_turn:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"another request has had this grammar compiled for {WAIT_S:g} s; try again",
                retry_after_s=WAIT_S,
            )
        try:
            return self._compiled(key, text)
        finally:
            turn.release()

    def _compiled(self, key: str, text: str) -> bytes:
        """The tables of a grammar, for the thread that holds the lock of its key."""
        tables = self._cached.get(key) or self._read(key)
        if tables is None:
            try:
                with waiting():
                    tables = compile_apart(text)
            except GrammarError as error:
                raise refusal(f"yacc: {error}") from None
            self._write(key, tables)
        with self._lock:
            self._cached[key] = tables
            while len(self._cached) > KEPT:
                self._cached.popitem(last=False)
            self._turns.pop(key, None)
        return tables

    def _read(self, key: str) -> bytes | None:
        if self._files is None:
            return None
        try:
            tables = self._files.path(key).read_bytes()
            CompiledGrammar.from_bytes(tables)
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


def _named(
    arg: bytes, constraint: str, field: str, of_library: Callable[[str], str] | None = None
) -> str:
    """The text of an argument: plain, or in the ``field`` or ``library`` of an object."""
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
