"""Converts errors to HTTP answers, with a status and a body in the form of the interface."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from ...protocol.errors import Code, TokenbusError, UnavailableError
from .json import json_response

_STATUS: dict[str, int] = {
    Code.TOO_LARGE: 413,
    Code.UNKNOWN_MODEL: 404,
    Code.UNKNOWN_CONTROLLER: 404,
    Code.NOT_ALLOWED: 403,
    Code.CONFLICT: 409,
    Code.MODEL_LOAD_FAILED: 502,
    Code.QUEUE_FULL: 503,
    # The broker sends this code if the gateway's own session exceeds a limit. If a user of the
    # gateway exceeds a share (``UserShares``), the status is 429 instead.
    Code.CLIENT_LIMIT: 503,
    Code.STORE_FAILED: 503,
    Code.NO_WORKER: 503,
    Code.WORKER_LOST: 503,
    Code.SHUTTING_DOWN: 503,
    Code.SESSION_TAKEN: 503,
    Code.SESSION_LOST: 503,
    Code.CONNECTION_LOST: 503,
    Code.SLOW_CLIENT: 503,
    Code.TIMEOUT: 504,
    Code.INTERNAL: 500,
}
"""The HTTP status for each error code of the bus. A code that is not in this table has the status
400. With such a code, the request is not valid, or its controller or a tool has failed."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "server_error",
    504: "timeout_error",
}
"""OpenAI's error type for a status; ``invalid_request_error`` for all other statuses."""

_CODES: dict[str, str] = {
    Code.UNKNOWN_MODEL: "model_not_found",
    Code.PROMPT_TOO_LONG: "context_length_exceeded",
}
"""OpenAI's names of error codes that have another name on the bus."""


class UserLimitError(UnavailableError):
    """A user has used up a share of the streams, of the memory for bodies, or of the WebSockets.
    Over HTTP, the user receives a 429. Other users are not affected."""


class ApiError(Exception):
    """The error with which a request is answered.

    ``type``, ``code`` and ``param`` are OpenAI's fields: the class of the error, its reason, and
    the faulty field, such as ``messages[0].content``. ``retry_after_s`` becomes ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(status, "invalid_request_error")
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))

    def body(self, path: str = "") -> ErrorAnswer | _Form:
        """The error in the form of the interface at ``path``. The default is OpenAI's form."""
        for form, doors in _FORMS:
            if any(path == door or path.startswith(f"{door}/") for door in doors):
                return form.of(self)
        return ErrorAnswer(ErrorDetails(self.message, self.type, self.param, self.code))

    def response(self, path: str = "") -> Response:
        """The HTTP response for a failed request at ``path``."""
        return json_response(self.body(path), self.status, self.headers)


def invalid_field(param: str | None, message: str) -> ApiError:
    """The error 400 for a wrong field ``param``."""
    return ApiError(400, message, code="invalid_field", param=param)


class ErrorDetails(Struct):
    """An error of a request."""

    message: str
    type: str
    param: str | None
    """The faulty field."""
    code: str | None


class ErrorAnswer(Struct):
    """An error in OpenAI's form."""

    error: ErrorDetails


class AiciError(Struct):
    """An error in the form of the vLLM version that AICI used. AICI's client reads ``message``."""

    message: str
    type: str
    param: str | None
    code: str | None
    object: Literal["error"] = "error"

    @classmethod
    def of(cls, error: ApiError) -> AiciError:
        """Converts an error to AICI's form."""
        return cls(error.message, error.type, error.param, error.code)


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error type for a status; ``invalid_request_error`` for all other statuses."""


class AnthropicDetails(Struct):
    """An error of a request, in Anthropic's form."""

    type: str
    message: str
    details: AnthropicCode | UnsetType = UNSET


class AnthropicCode(Struct):
    """``details`` of an error: its code, which programs can compare."""

    error_code: str


class AnthropicError(Struct):
    """An error in Anthropic's form."""

    error: AnthropicDetails
    type: Literal["error"] = "error"

    @classmethod
    def of(cls, error: ApiError) -> AnthropicError:
        """Converts an error to Anthropic's form."""
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
        details = AnthropicCode(error.code) if error.code else UNSET
        return cls(AnthropicDetails(kind, error.message, details))


class OllamaError(Struct):
    """An error of a request, in Ollama's form."""

    error: str

    @classmethod
    def of(cls, error: ApiError) -> OllamaError:
        """Converts an error to Ollama's form."""
        return cls(error.message)


class UpdateError(Struct):
    """An error of SGLang's ``/update_weights_from_disk``."""

    message: str
    error: ErrorDetails
    success: Literal[False] = False

    @classmethod
    def of(cls, error: ApiError) -> UpdateError:
        """Converts an error to the form of an update's answer."""
        details = ErrorDetails(error.message, error.type, error.param, error.code)
        return cls(error.message, details)


_Form = AiciError | AnthropicError | OllamaError | UpdateError
_FORMS: tuple[tuple[type[_Form], tuple[str, ...]], ...] = (
    (OllamaError, ("/api",)),
    (AnthropicError, ("/v1/messages",)),
    (UpdateError, ("/update_weights_from_disk",)),
    (AiciError, ("/v1/run", "/v1/controllers", "/v1/aici_modules")),
)
"""Forms of errors, each with the paths that use it. All other paths use OpenAI's form."""


def from_tokenbus(error: TokenbusError) -> ApiError:
    """The ApiError for an error of the bus."""
    status = 429 if isinstance(error, UserLimitError) else _STATUS.get(error.code, 400)
    retry_after_s = error.retry_after_s
    if retry_after_s is None and status in (429, 503):
        retry_after_s = 1.0
    return ApiError(
        status,
        error.message,
        code=_CODES.get(error.code, str(error.code)),
        param=field_name(error.path),
        retry_after_s=retry_after_s,
    )


def as_api_error(error: ApiError | TokenbusError) -> ApiError:
    """An error of the gateway or of the bus as an ApiError."""
    return error if isinstance(error, ApiError) else from_tokenbus(error)


def field_name(path: str | None) -> str | None:
    """Converts a path such as ``$.messages[0].role`` to OpenAI's form ``messages[0].role``."""
    return path.removeprefix("$").removeprefix(".") or None if path else None
