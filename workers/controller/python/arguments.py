"""Reads a request's ``controller_arg``, and the names of special tokens that the code of a
controller passes."""

from __future__ import annotations

import json

from ....protocol.errors import Code, ControllerError
from ....protocol.special_tokens import SpecialToken
from ..host import Host


def parsed(arg: bytes) -> object:
    """A request's argument: its value if it is JSON, its text if it is not JSON, and None if it is
    empty."""
    if not arg:
        return None
    text = arg.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


def special_token(host: Host, name: str) -> int | None:
    """The id of the special token with the role ``name``, such as ``eos``. None if the model does
    not have this token."""
    found = {token.role: token for token in SpecialToken}.get(name)
    if found is None:
        known = ", ".join(token.role for token in SpecialToken)
        raise ControllerError(
            Code.CONTROLLER_FAILED, f"special_token({name!r}); expected one of {known}"
        )
    return host.vocabulary.special_token(found)
