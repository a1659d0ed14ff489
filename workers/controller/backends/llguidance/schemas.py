"""Converts JSON schemas to llguidance grammars."""

from __future__ import annotations

import json
from functools import lru_cache

from llguidance import LLMatcher

from .....protocol.json_schema import rewritten
from .plain import MAX_TEXT
from .spacing import spaced_schema

KEPT = 16
"""Maximum rewritten schemas that are cached. The sequences of a request have the same schema."""
SHORT = 32 * 1024
"""Maximum characters of a schema whose rewritten form is cached."""


def schema_grammar(schema: str) -> str:
    """The grammar of the JSON values that match a schema. Keywords that llguidance does not
    implement are rewritten if possible (``protocol.json_schema``).

    Raises RefusedGrammar if the options of the schema are not valid, and ValueError if the schema
    is not a JSON object.
    """
    text, options = spaced_schema(schema)
    return LLMatcher.grammar_from_json_schema(_implemented(text), options)


def _implemented(text: str) -> str:
    if len(text) > MAX_TEXT:
        return text
    return _kept(text) if len(text) <= SHORT else _rewritten(text)


def _rewritten(text: str) -> str:
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        return text  # llguidance reports the error.
    found = rewritten(root)
    return text if found.schema is root else json.dumps(found.schema)


_kept = lru_cache(KEPT)(_rewritten)
