"""Checks values against schemas, in the process that renders templates."""

from __future__ import annotations

import re
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import validator_for
from referencing import Registry

FORMATS = Draft202012Validator.FORMAT_CHECKER
LOCAL: Registry[Any] = Registry()
"""A registry without schemas, so that only references within a schema are resolved. With
jsonschema's default registry, references to URLs would be opened."""


def states_of(schema: dict[str, Any], value: Any, keywords: list[str]) -> dict[str, str]:
    """Checks ``value`` against ``schema``. Returns the outcome for each keyword of ``keywords``:
    ``checked`` (the value passes), ``failed`` or ``not checked``."""
    checked = dict.fromkeys(keywords, "checked")
    if "format" in checked:
        # ``keywords`` contains ``format`` only if the schema has formats that llguidance does not
        # implement. jsonschema ignores most of these formats, so a value without an error may have
        # another format.
        checked["format"] = "not checked"
    try:
        make = validator_for(schema, default=Draft202012Validator)
        validator = make(schema, registry=LOCAL, format_checker=FORMATS)
        for error in validator.iter_errors(value):
            checked |= dict.fromkeys(_failed(error) & checked.keys(), "failed")
    except Exception:  # The schema of a client can cause errors of several packages.
        return dict.fromkeys(keywords, "not checked")
    finally:
        # Without this call, the cache of ``re`` would keep the patterns of clients.
        re.purge()
    return checked


def _failed(error: ValidationError) -> set[Any]:
    """The keywords that led to an error, including those in the alternatives of ``anyOf`` and
    ``oneOf``."""
    found = {*error.absolute_schema_path, error.validator}
    for inner in error.context or ():
        found |= _failed(inner)
    return found
