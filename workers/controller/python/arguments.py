"""What the user gave as ``controller_arg``."""

from __future__ import annotations

import json


def parsed(arg: bytes) -> object:
    """The argument: what it is as JSON, else its text; None where none was given."""
    if not arg:
        return None
    text = arg.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text
