"""Sets up the logs of all processes. Each record is one line; in the format ``human``, a traceback
may follow.

A log call about a request has ``extra=about(number)``, with the number that the broker has assigned
to the request. If the client has given the request an id (``x-request-id`` of HTTP, or a trace),
all lines about the request contain this id, in every process.
"""

from __future__ import annotations

import logging
import os
import re
import time
import traceback
from contextvars import ContextVar
from typing import Any

import msgspec

from .settings import Settings

_HUMAN = "%(asctime)s %(levelname)s %(message)s"
_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]")
"""Characters that would begin another line, or control the terminal on which a line is shown."""

task_ids: ContextVar[tuple[str, str]] = ContextVar("tokenbus_task_ids", default=("", ""))
"""In a gateway: the request id and the trace id of the HTTP request that the current task
handles."""

_ids: dict[int, tuple[str, str]] = {}
"""The client's request id and trace id, by the broker's number of the request. Contains only live
requests of this process that have such an id."""


def set_up(settings: Settings, process: str) -> None:
    """Sends the log records of this process to standard error, in the format of the setting
    ``log_format``.

    ``process`` is the name of this process in JSON lines, for example ``broker`` or ``gpu``.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter(process) if settings.log_format == "json" else HumanFormatter()
    )
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def take_over(*packages: str) -> None:
    """Removes the handlers that imported packages have installed, so that the packages' records are
    logged as ``set_up`` says."""
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in packages:
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True


def about(request: int) -> dict[str, int]:
    """The ``extra`` for log calls about a request. ``request``: the number that the broker has
    assigned to the request."""
    return {"request": request}


def begin(request: int, request_id: str, trace: str) -> None:
    """Stores the ids for the request's log lines. The trace id is that of ``trace`` (a
    ``traceparent``). The request id is ``request_id`` or, if this is empty, the trace id."""
    if request_id or trace:
        trace_id = trace.split("-")[1] if trace.count("-") >= 3 else ""
        _ids[request] = (request_id or trace_id, trace_id)


def end(request: int) -> None:
    """Removes the ids of a request that has ended."""
    _ids.pop(request, None)


def ids_of(record: logging.LogRecord) -> tuple[str, str]:
    """The request id and the trace id of a record; each is empty if the record has none."""
    named = getattr(record, "request_id", ""), getattr(record, "trace_id", "")
    return named if any(named) else _ids.get(getattr(record, "request", 0)) or task_ids.get()


class HumanFormatter(logging.Formatter):
    """Formats a record as ``2026-11-22 08:20:01,123 INFO message [request id]``, and escapes its
    control characters."""

    def __init__(self) -> None:
        super().__init__(_HUMAN)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        request_id, _ = ids_of(record)
        line = super().formatMessage(record)
        if _CONTROL.search(line):
            line = _CONTROL.sub(lambda found: repr(found[0])[1:-1], line)
        return f"{line} [{request_id}]" if request_id else line


class JsonFormatter(logging.Formatter):
    """Formats a record as one line with a JSON object. The keys of the object are ``time`` (UTC),
    ``level``, ``process``, ``pid``, ``logger`` and ``message``.

    The object may also have ``request`` (the broker's number), ``request_id``, ``trace_id``,
    ``exception``, and the keys in ``fields`` of the record.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._pid = os.getpid()

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": self._pid,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id, trace_id = ids_of(record)
        if request := getattr(record, "request", 0):
            line["request"] = request
        if request_id:
            line["request_id"] = request_id
        if trace_id:
            line["trace_id"] = trace_id
        line.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return _encoded(line)


def _encoded(line: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(line).decode()
    except (TypeError, ValueError):
        # A value may contain the name of a file, whose bytes may not be valid Unicode.
        plain = {name: _escaped(value) for name, value in line.items()}
        return msgspec.json.encode(plain).decode()


def _escaped(value: Any) -> Any:
    return (
        value if isinstance(value, int) else str(value).encode("utf-8", "backslashreplace").decode()
    )
