"""Errors with stable codes. An ``ERROR`` message contains the code. The code determines the
exception that a client raises.

The code is part of the protocol, because programs compare it. The message is for people. It says
which value is wrong and why, and then what would be right.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """The reasons for which Tokenbus refuses a request or ends a stream."""

    # The request is invalid; sending it again unchanged usually fails again.
    BAD_MESSAGE = "bad_message"
    UNKNOWN_TYPE = "unknown_type"
    UNSUPPORTED_VERSION = "unsupported_version"
    INVALID_FIELD = "invalid_field"
    TOO_LARGE = "too_large"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    EMPTY_PROMPT = "empty_prompt"
    PROMPT_TOO_LONG = "prompt_too_long"
    DUPLICATE_STREAM = "duplicate_stream"
    UNKNOWN_STREAM = "unknown_stream"
    UNKNOWN_BUFFER = "unknown_buffer"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_CONTROLLER = "unknown_controller"
    CONFLICT = "conflict"
    MODEL_LOAD_FAILED = "model_load_failed"
    NOT_ALLOWED = "not_allowed"
    UNSUPPORTED = "unsupported"
    # The controller of the stream failed.
    CONTROLLER_FAILED = "controller_failed"
    CONTROLLER_TIMEOUT = "controller_timeout"
    DEADLOCK = "deadlock"
    # A call of a tool by the controller failed.
    TOOL_FAILED = "tool_failed"
    # Several workers in a row died while they ran the request. Or the processes that ran the
    # request's module died several times.
    QUARANTINED = "quarantined"
    # The service is unavailable at the moment; the same request may succeed later.
    QUEUE_FULL = "queue_full"
    CLIENT_LIMIT = "client_limit"
    STORE_FAILED = "store_failed"
    NO_WORKER = "no_worker"
    WORKER_LOST = "worker_lost"
    SHUTTING_DOWN = "shutting_down"
    # Errors of this client's session or connection, or the end of a request's time.
    SLOW_CLIENT = "slow_client"
    SESSION_TAKEN = "session_taken"
    SESSION_LOST = "session_lost"
    CONNECTION_LOST = "connection_lost"
    TIMEOUT = "timeout"
    # Tokenbus or the code of the model has an error.
    INTERNAL = "internal"


RETRYABLE = frozenset(
    {
        Code.QUEUE_FULL,
        Code.CLIENT_LIMIT,
        Code.STORE_FAILED,
        Code.NO_WORKER,
        Code.WORKER_LOST,
        Code.SHUTTING_DOWN,
        Code.SESSION_LOST,
        Code.CONNECTION_LOST,
    }
)
"""Codes of errors after which the same request may succeed if it is sent again."""


class TokenbusError(Exception):
    """The base class of all errors with a code.

    ``path`` names the faulty field (``$.max_tokens``). ``stream_id`` is the stream that has ended.
    ``retry_after_s`` is the number of seconds to wait before another attempt.
    """

    def __init__(
        self,
        code: Code | str,
        message: str,
        *,
        path: str | None = None,
        stream_id: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.path = path
        self.stream_id = stream_id
        self.retry_after_s = retry_after_s

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed if it is sent again."""
        return self.code in RETRYABLE

    def __str__(self) -> str:
        where = f" (at {self.path})" if self.path and self.path not in self.message else ""
        return f"{self.message}{where} [{self.code}]"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.__dict__))


def _rebuild(kind: type[TokenbusError], state: dict[str, object]) -> TokenbusError:
    error = kind.__new__(kind, state["message"])
    error.__dict__.update(state)
    return error


class RequestError(TokenbusError):
    """The request is invalid or quarantined; it usually fails again if it is sent again
    unchanged."""


class ControllerError(TokenbusError):
    """The controller of the stream failed, exceeded a limit, is in a deadlock, or called a tool
    that failed."""


class UnavailableError(TokenbusError):
    """The service cannot process the request at the moment, for example because a queue is full,
    the service restarts, or a worker was lost."""


class ConnectionLostError(UnavailableError):
    """The broker does not answer, the session has ended, or another connection has taken the
    session over."""


class RequestTimeoutError(TokenbusError):
    """The ``timeout_s`` of the request has passed."""


class SlowClientError(TokenbusError):
    """The client did not read its tokens fast enough, and the broker ended its streams."""


class ServiceError(TokenbusError):
    """An internal error of the service. The service's log has the details."""


_KINDS: dict[str, type[TokenbusError]] = {
    Code.CONTROLLER_FAILED: ControllerError,
    Code.CONTROLLER_TIMEOUT: ControllerError,
    Code.DEADLOCK: ControllerError,
    Code.TOOL_FAILED: ControllerError,
    Code.QUEUE_FULL: UnavailableError,
    Code.CLIENT_LIMIT: UnavailableError,
    Code.STORE_FAILED: UnavailableError,
    Code.NO_WORKER: UnavailableError,
    Code.WORKER_LOST: UnavailableError,
    Code.SHUTTING_DOWN: UnavailableError,
    Code.SESSION_TAKEN: ConnectionLostError,
    Code.SESSION_LOST: ConnectionLostError,
    Code.CONNECTION_LOST: ConnectionLostError,
    Code.SLOW_CLIENT: SlowClientError,
    Code.TIMEOUT: RequestTimeoutError,
    Code.INTERNAL: ServiceError,
}


def error_for(
    code: str,
    message: str,
    *,
    path: str | None = None,
    stream_id: int | None = None,
    retry_after_s: float | None = None,
) -> TokenbusError:
    """Makes an exception of the type that belongs to ``code``; a RequestError if the code is
    unknown."""
    kind = _KINDS.get(code, RequestError)
    return kind(code, message, path=path, stream_id=stream_id, retry_after_s=retry_after_s)
