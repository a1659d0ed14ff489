"""The error for a constraint's argument that is not valid."""

from __future__ import annotations

from .....protocol.errors import Code, RequestError


def refusal(message: str) -> RequestError:
    """A RequestError whose path is the request's ``controller_arg``."""
    return RequestError(Code.INVALID_FIELD, message, path="$.controller_arg")
