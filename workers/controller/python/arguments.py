"""Decodes the request's ``controller_arg``."""

from __future__ import annotations

import json


def parsed(arg: bytes) -> object:
    """The argument decoded as JSON, or as text if it is not JSON; None if it is empty."""
    if not arg:
        return None
    text = arg.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text
