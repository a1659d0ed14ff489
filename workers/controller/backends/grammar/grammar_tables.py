"""Tables of what users write: regular expressions, grammars, texts whose parts are wanted.

Each takes the argument of its constraint, and raises RequestError at ``$.controller_arg`` where it
is wrong. Tables are kept: in memory, and those that take long to make on disk too.
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
"""How long a pattern may take to compile, in seconds: other rounds share the interpreter."""
MOST_STATES = 65_000
"""Of an automaton; the guest counts them in 16 bits."""
WAIT_S = 5.0
"""How long a request waits for the same grammar to be compiled for another one, in seconds."""
MOST_BYTES = 256 * 1024**2
"""Of tables on disk."""
KEPT = 256
"""Tables of patterns, and of grammars, that are kept in memory."""
GRAMMAR_CHARACTERS = 1 << 20
"""Characters of a grammar, as the compiler takes them."""


def regex_tables(arg: bytes) -> bytes:
    """Of a pattern, or of one of the library as ``{"library": NAME}``."""
    pattern = _named(arg, "regex", "pattern", library.regex)
    if not pattern:
        raise refusal("regex needs a regular expression as its argument")
    return _automaton(pattern)


@lru_cache(maxsize=KEPT)
def _automaton(pattern: str) -> bytes:
    try:
        return compile_regex(pattern, max_seconds=REGEX_S).to_bytes()
    except RegexError as error:
        raise refusal(f"regex: {error}") from None


def choice_tables(arg: bytes) -> bytes:
    """Of a list of texts, or of ``{"choices": [...]}``."""
    try:
        given = msgspec.json.decode(arg)
        if isinstance(given, dict) and list(given) == ["choices"]:
            given = given["choices"]
        choices = msgspec.convert(given, list[str])
    except msgspec.MsgspecError as error:
        raise refusal(
            'the argument of choice is a JSON list of strings, or {"choices": [...]}; this is '
            f"{arg[:100].decode('utf-8', 'replace')!r}: {error}"
        ) from None
    if not choices:
        raise refusal("the argument of choice is a list of at least one text; this one is empty")
    return _choices(tuple(choices))


@lru_cache(maxsize=KEPT)
def _choices(choices: tuple[str, ...]) -> bytes:
    try:
        return compile_choice(choices, max_states=MOST_STATES, max_seconds=REGEX_S).to_bytes()
    except (RegexError, UnicodeEncodeError) as error:
        raise refusal(f"choice: {error}") from None


@lru_cache(maxsize=KEPT)
def substring_tables(arg: bytes) -> bytes:
    """Of the text whose parts are wanted, itself or as ``{"text": TEXT}``."""
    text = _named(arg, "substring", "text")
    if not text:
        raise refusal("substring needs a text as its argument")
    try:
        return compile_substring(text).to_bytes()
    except ValueError as error:
        raise refusal(f"substring: {error}") from None


class GrammarTables:
    """Tables of grammars: by their text, or one of the library by its name."""

    def __init__(self, folder: Path | None) -> None:
        """``folder`` is where they are kept; None: nowhere. It is made for this user alone."""
        self._files = None if folder is None else FileCache(folder, ".tables", MOST_BYTES)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._made_by = f"{version('tokenbus')}, tables {VERSION}"
        self._names = frozenset(library.names())

    def __call__(self, arg: bytes) -> bytes:
        """Of a grammar's text, of a name of the library, or ``{"library": NAME}``."""
        text = _named(arg, "yacc", "grammar", library.grammar)
        if not text.strip():
            raise refusal(
                "yacc needs a grammar as its argument, or the name of one in the library: "
                + ", ".join(library.names())
            )
        if re.fullmatch(r"\w+", text) and text not in self._names:
            known = ", ".join(sorted(self._names))
            raise refusal(f"yacc: {text!r} is not in the library; there are {known}")
        if text in self._names:
            text = library.grammar(text)
        if len(text) > GRAMMAR_CHARACTERS:
            raise refusal(
                f"yacc: a grammar has at most {GRAMMAR_CHARACTERS} characters; this one has "
                f"{len(text)}"
            )
        key = hashlib.sha256(f"{self._made_by}\n{text}".encode()).hexdigest()
        with self._lock:
            tables = self._kept.get(key)
            if tables is not None:
                self._kept.move_to_end(key)
                return tables
            turn = self._turns.setdefault(key, threading.Lock())
        with waiting():
            has_turn = turn.acquire(timeout=WAIT_S)
        if not has_turn:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"this grammar has been compiled for {WAIT_S:g} s; try again",
                retry_after_s=WAIT_S,
            )
        try:
            return self._made(key, text)
        finally:
            turn.release()

    def _made(self, key: str, text: str) -> bytes:
        """The tables of a text that were not at hand before this thread had its turn."""
        tables = self._kept.get(key) or self._read(key)
        if tables is None:
            try:
                with waiting():
                    tables = compile_apart(text)
            except GrammarError as error:
                raise refusal(f"yacc: {error}") from None
            self._write(key, tables)
        with self._lock:
            self._kept[key] = tables
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
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
            log.warning("the tables %s are made again: %s", key[:12], error)
            return None
        return tables

    def _write(self, key: str, tables: bytes) -> None:
        if self._files is None:
            return
        try:
            self._files.write(key, tables)
        except OSError as error:
            log.warning("the tables %s cannot be kept: %s", key[:12], error)


def _named(
    arg: bytes, constraint: str, field: str, of_library: Callable[[str], str] | None = None
) -> str:
    """The text of an argument: itself, or an object's ``field`` or ``library``."""
    try:
        text = arg.decode()
    except UnicodeDecodeError as error:
        raise refusal(
            f"the argument of {constraint} is text, and this is not UTF-8: {error}"
        ) from None
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
    library_too = ' or {"library": NAME}' if of_library is not None else ""
    raise refusal(
        f'the argument of {constraint} is text, {{"{field}": TEXT}}{library_too}; this has '
        + ", ".join(given)
    )
