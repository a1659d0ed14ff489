"""Checks values against schemas, in the process that renders templates."""

from __future__ import annotations

import re
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import validator_for
from referencing import Registry

FORMATS = Draft202012Validator.FORMAT_CHECKER
LOCAL: Registry[Any] = Registry()
"""A registry without other schemas, so that only references within a schema are resolved. By
default, jsonschema would open the URLs of other references."""


def states_of(schema: dict[str, Any], value: Any, keywords: list[str]) -> dict[str, str]:
    """For each keyword of ``keywords``, the outcome of the check of ``value`` against ``schema``:
    ``checked`` (the value passes), ``failed`` or ``not checked``."""
    checked = dict.fromkeys(keywords, "checked")
    if "format" in checked:
        # The keyword ``format`` is checked here only for formats that llguidance does not
        # implement. jsonschema ignores most of them too, so a missing error does not show that the
        # value passes.
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
