"""Writes the output of an author's code (``print``, ``sys.stdout``, ``sys.stderr``) to the log of
the sequence that runs the code.

``sys.stdout`` and ``sys.stderr`` belong to the whole process. So while ``captured`` is active, each
thread's output is handled separately. The output of a thread that runs a call of a controller goes
to the log of the call's sequence. The output of any other thread goes to the worker's output, even
if the author's code started the thread.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..logs import Log

_NAMES = ("stdout", "stderr")


class _Call(threading.local):
    """The call of a controller that this thread runs."""

    log: Log | None = None
    muted: Callable[[], bool] | None = None
    """Returns whether output is dropped now. The output of a replayed script is dropped, because
    the script has printed it before. None if output is never dropped."""


_call = _Call()


@contextmanager
def printing_to(log: Log, muted: Callable[[], bool] | None = None) -> Iterator[None]:
    """Writes this thread's output to ``log``. Output is dropped while ``muted`` returns True. This
    is the case during a replay, because the script has printed the same text before."""
    before = _call.log, _call.muted
    _call.log, _call.muted = log, muted
    try:
        yield
    finally:
        _call.log, _call.muted = before


def _written(data: bytes) -> bool:
    """Writes data to the log of the call that this thread runs. Returns False if the thread does
    not run a call."""
    log = _call.log
    if log is None:
        return False
    if _call.muted is None or not _call.muted():
        log.write(data)
    return True


class _Bytes(io.RawIOBase):
    """The attribute ``buffer`` of ``sys.stdout`` or ``sys.stderr``."""

    def __init__(self, usual: Callable[[], Any]) -> None:
        self._usual = usual

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        given = bytes(data)
        if not _written(given):
            self._usual().buffer.write(given)
        return len(given)

    def flush(self) -> None:
        if _call.log is None:
            self._usual().buffer.flush()


class _Text(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr``; everything except output is delegated to the usual
    stream."""

    def __init__(self, usual: Any) -> None:
        self.usual = usual
        self._buffer = _Bytes(lambda: self.usual)

    @property
    def buffer(self) -> Any:
        return self._buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8" if _call.log is not None else self.usual.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return "backslashreplace" if _call.log is not None else self.usual.errors

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str) or not _written(text.encode("utf-8", "backslashreplace")):
            self.usual.write(text)
        return len(text)

    def flush(self) -> None:
        if _call.log is None:
            self.usual.flush()

    def isatty(self) -> bool:
        return _call.log is None and bool(self.usual.isatty())

    def fileno(self) -> int:
        return int(self.usual.fileno())

    def close(self) -> None:
        """Does nothing, because the controllers of other sequences also print to this stream."""


_lock = threading.Lock()
_uses = 0


@contextmanager
def captured() -> Iterator[None]:
    """Redirects the output of controllers to their logs. Several workers of one process may capture
    output at the same time. The last worker that ends restores the streams, unless other code has
    replaced them."""
    global _uses
    with _lock:
        _uses += 1
        for name in _NAMES:
            if not isinstance(getattr(sys, name), _Text):
                setattr(sys, name, _Text(getattr(sys, name)))
    try:
        yield
    finally:
        with _lock:
            _uses -= 1
            for name in _NAMES:
                stream = getattr(sys, name)
                if not _uses and isinstance(stream, _Text):
                    setattr(sys, name, stream.usual)
