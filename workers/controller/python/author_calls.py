"""Calls into an author's code: exceptions become errors of the stream, slow calls are logged."""

from __future__ import annotations

import linecache
import os
import site
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from ....protocol import errors
from ....protocol.errors import Code, ControllerError, TokenbusError
from ..host import Host

_OURS = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], Path(errors.__file__).parent)
)
_NOT_THE_AUTHORS = tuple(
    {sysconfig.get_path("stdlib"), *map(str, site.getsitepackages()), "<frozen"}
)
_PLACE = {"post_process": 0, "pre_process": 1, "mid_process": 2}


class AuthorCalls:
    """The calls of one sequence into the code of ``name``.

    An author's code is trusted and cannot be interrupted, so its limits only make a line in the
    sequence's own log: for init_prompt its own limit, for the three calls of a round the sum of
    theirs, as they are made one after another while the model computes. Times are of this
    thread's CPU.
    """

    def __init__(self, name: str, host: Host) -> None:
        self._name = name
        self._host = host
        self._round_s = 0.0
        self._last = len(_PLACE)
        self._told = False

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Around one call; any exception becomes a ControllerError of one line that names the
        author's. The traceback of the author's own lines goes to the sequence's log.
        """
        start = time.thread_time()
        try:
            yield
        except BaseException as error:
            trace = author_trace(error)
            text = f"{call} of {self._name} failed:\n{trace}"
            self._host.log.write(text.encode("utf-8", "backslashreplace"))
            raise self._failure(error) from error
        finally:
            self._spent(call, time.thread_time() - start)

    def _failure(self, error: BaseException) -> ControllerError:
        where = author_line(error.__traceback__)
        at = f", at {where}" if where else ""
        if isinstance(error, TokenbusError):
            return ControllerError(error.code, f"{self._name}: {one_line(error.message)}{at}")
        kind, text = type(error).__name__, one_line(str(error))
        told = f"{kind}: {text}" if text else kind
        return ControllerError(Code.CONTROLLER_FAILED, f"{self._name} raised {told}{at}")

    def _spent(self, call: str, seconds: float) -> None:
        limits = self._host.limits
        if call not in _PLACE:
            if seconds > limits.init_s:
                self._warn(call, seconds, limits.init_s)
            return
        if _PLACE[call] <= self._last:
            self._round_s, self._told = 0.0, False
        self._last = _PLACE[call]
        self._round_s += seconds
        limit = limits.post_s + limits.pre_s + limits.mid_s
        if self._round_s > limit and not self._told:
            self._told = True
            self._warn(f"a round, up to its {call},", self._round_s, limit)

    def _warn(self, what: str, seconds: float, limit: float) -> None:
        self._host.log.write(
            f"[{self._name}: {what} took {1e3 * seconds:.1f} ms of CPU; more than "
            f"{1e3 * limit:.1f} ms makes the sequence late]\n".encode()
        )


def author_line(trace: TracebackType | None) -> str:
    """The innermost line of a traceback that is the author's: neither ours nor a library's."""
    frames = _authors(traceback.extract_tb(trace))
    if not frames:
        return ""
    frame = frames[-1]
    return place(frame.filename, frame.lineno or 0, frame.name)


def author_trace(error: BaseException) -> str:
    """The traceback of an exception, and of those that led to it, with the author's lines only."""
    told = traceback.TracebackException.from_exception(error)
    parts = [told]
    while parts:
        part = parts.pop()
        part.stack = traceback.StackSummary.from_list(_authors(part.stack))
        parts += [cause for cause in (part.__cause__, part.__context__) if cause is not None]
    return "".join(told.format())


def place(filename: str, line: int, function: str) -> str:
    """A line of code, for people: its file, its number, its function and its text."""
    text = linecache.getline(filename, line).strip()
    where = f"{Path(filename).name}:{line} in {function}"
    return f"{where}: {text}" if text else where


def one_line(text: str) -> str:
    """Text with its lines one after another."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _authors(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The frames that are the author's; where none is, those that are not ours."""
    others = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    own = [frame for frame in others if not frame.filename.startswith(_NOT_THE_AUTHORS)]
    return own or others
