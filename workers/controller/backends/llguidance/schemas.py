"""Converts JSON schemas to llguidance grammars."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import msgspec
from llguidance import LLMatcher

from .....protocol.decoders import json_decoder
from .....protocol.json_schema import needs_rewriting, rewritten
from .....protocol.json_schema.relaxing import Measure, Path, relaxed
from ...pool import tenant_of_thread
from ..compiling import bounds
from ..compiling.kept import Kept
from ..compiling.processes import Processes
from ..compiling.shared import Shared
from .matchers import Weakened
from .plain import MAX_TEXT
from .spacing import spaced_schema

KEPT_SCHEMAS = 64
"""Maximum rewritten schemas that are cached. All sequences of a request use the same cached
schema."""
KEPT_CHARACTERS = 1024 * 1024
"""Maximum characters of all cached schemas."""


def schema_grammar(schema: str, implement: Callable[[str], str]) -> str:
    """The grammar of the JSON values that match a schema. ``implement`` rewrites the keywords that
    llguidance does not implement, as ``implemented`` does.

    Raises RefusedGrammar if the options of the schema are not valid, and ValueError if the schema
    is not a JSON object.
    """
    text, options = spaced_schema(schema)
    return LLMatcher.grammar_from_json_schema(implement(text), options)


def implemented(text: str) -> str:
    """Rewrites keywords that llguidance does not implement, where that is possible
    (``protocol.json_schema``). This may take 0.2 s of CPU time."""
    root = _parsed(text)
    found = rewritten(root)
    return text if found.schema is root else json.dumps(found.schema)


def _parsed(text: str) -> object:
    """The value of a JSON text; None if the text is long or not valid JSON. llguidance then reports
    the error."""
    try:
        return json.loads(text) if len(text) <= MAX_TEXT else None
    except (ValueError, RecursionError):
        return None


class _Relaxing(msgspec.Struct):
    """The input of ``relaxed_text``."""

    schema: str
    measures: list[Measure]
    empty: list[str]


class _Relaxed(msgspec.Struct):
    """The result of ``relaxed_text``."""

    schema: str
    places: list[Path]


def relaxed_text(task: bytes) -> bytes:
    """Rewrites and relaxes a schema (``protocol.json_schema``). ``task`` is an encoded
    ``_Relaxing``; returns an encoded ``_Relaxed``."""
    given = json_decoder(_Relaxing).decode(task)
    root = _parsed(given.schema)
    made = rewritten(root).schema
    found = relaxed(root, made, frozenset(given.measures), frozenset(given.empty))
    return msgspec.json.encode(_Relaxed(json.dumps(found.schema), found.places))


class Rewriting:
    """Rewrites the schemas of a worker in separate processes (``implemented``), and caches the
    results. Thread-safe."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._shared: Shared[str] = Shared(2 * bounds.WALL_S)
        self._kept: Kept[bytes, str] = Kept(KEPT_SCHEMAS, KEPT_CHARACTERS)

    def implemented(self, text: str) -> str:
        """The result of ``implemented``. Raises RefusedGrammar if the rewriting exceeds the bounds
        of the processes, and UnavailableError if no process becomes free in time."""
        key = hashlib.sha256(text.encode()).digest()
        found = self._kept.get(key)
        if found is None:
            found = self._shared.get(key, lambda: self._made(text))
            self._kept.add(tenant_of_thread(), key, found, len(found))
        return found

    def relaxed(
        self, text: str, measures: frozenset[Measure], empty: list[str]
    ) -> tuple[str, Weakened | None]:
        """The relaxed form of a schema, and the schema with the places where keywords were left
        out. The second value is None if masks enforce the whole schema. ``empty``: references whose
        targets allow no value. Raises the errors of ``implemented``."""
        task = msgspec.json.encode(_Relaxing(text, sorted(measures), empty))
        found = json_decoder(_Relaxed).decode(self._processes.run("relax", task))
        return found.schema, Weakened(text, found.places) if found.places else None

    def _made(self, text: str) -> str:
        if not needs_rewriting(_parsed(text)):
            return text
        return self._processes.run("rewrite", text.encode()).decode()
