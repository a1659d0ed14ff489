"""What is said of a constraint's argument that is wrong."""

from __future__ import annotations

from .....protocol.errors import Code, RequestError


def refusal(message: str) -> RequestError:
    """The error for the client who gave the argument."""
    return RequestError(Code.INVALID_FIELD, message, path="$.controller_arg")
