"""Calls into an author's code (the class or the script of a controller). Exceptions become errors
of the sequence, and slow calls are logged."""

from __future__ import annotations

import linecache
import os
import site
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from ....protocol import errors
from ....protocol.errors import Code, ControllerError, TokenbusError
from ..guest_clock import call_cpu_s
from ..host import Host
from .printed import printing_to

_OURS = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], Path(errors.__file__).parent)
)
_NOT_THE_AUTHORS = tuple(
    {sysconfig.get_path("stdlib"), *map(str, site.getsitepackages()), "<frozen"}
)
_PLACE = {"post_process": 0, "pre_process": 1, "mid_process": 2}


class AuthorCalls:
    """The calls of one sequence into an author's code. ``name``: the name of the controller, for
    messages.

    An author's code is trusted and cannot be interrupted. So a call that exceeds its limit only
    causes a line in the sequence's log. ``init_prompt`` has its own limit. The three calls of a
    round run one after another while the model computes, so the sum of their times is compared with
    the sum of their limits. Times are CPU time of this thread.
    """

    def __init__(self, name: str, host: Host, replaying: Callable[[], bool] | None = None) -> None:
        """``replaying`` returns whether the code is being replayed. During a replay, the output of
        the code is dropped, because the log already has this output."""
        self._name = name
        self._host = host
        self._replaying = replaying
        self._round_s = 0.0
        self._last = len(_PLACE)
        self._warned = False

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Wraps one call. Any exception becomes a ControllerError, whose one-line message names the
        line of the author's code. The traceback of the author's lines and the output of the code
        are written to the sequence's log (``printed.captured``).
        """
        start = call_cpu_s()
        try:
            with printing_to(self._host.log, self._replaying):
                yield
        except BaseException as error:
            trace = author_trace(error)
            text = f"{call} of {self._name} failed:\n{trace}"
            self._host.log.write(text.encode("utf-8", "backslashreplace"))
            raise self._failure(error) from error
        finally:
            self._spent(call, call_cpu_s() - start)

    def _failure(self, error: BaseException) -> ControllerError:
        where = author_line(error.__traceback__)
        at = f", at {where}" if where else ""
        if isinstance(error, TokenbusError):
            return ControllerError(error.code, f"{self._name}: {one_line(error.message)}{at}")
        kind, text = type(error).__name__, one_line(str(error))
        raised = f"{kind}: {text}" if text else kind
        return ControllerError(Code.CONTROLLER_FAILED, f"{self._name} raised {raised}{at}")

    def _spent(self, call: str, seconds: float) -> None:
        limits = self._host.limits
        if call not in _PLACE:
            if seconds > limits.init_s:
                self._warn(call, seconds, limits.init_s)
            return
        if _PLACE[call] <= self._last:
            self._round_s, self._warned = 0.0, False
        self._last = _PLACE[call]
        self._round_s += seconds
        limit = limits.post_s + limits.pre_s + limits.mid_s
        if self._round_s > limit and not self._warned:
            self._warned = True
            self._warn(f"a round, up to its {call},", self._round_s, limit)

    def _warn(self, what: str, seconds: float, limit: float) -> None:
        self._host.log.write(
            f"[{self._name}: {what} took {1e3 * seconds:.1f} ms of CPU; more than "
            f"{1e3 * limit:.1f} ms can delay the sequence]\n".encode()
        )


def author_line(trace: TracebackType | None) -> str:
    """Describes the innermost line of a traceback that belongs to the author's code. Lines of
    Tokenbus and of libraries do not count. The result is empty if only such lines are left."""
    frames = _authors(traceback.extract_tb(trace))
    if not frames:
        return ""
    frame = frames[-1]
    return place(frame.filename, frame.lineno or 0, frame.name)


def author_trace(error: BaseException) -> str:
    """The traceback of an exception and of its causes, with the author's lines only."""
    formatted = traceback.TracebackException.from_exception(error)
    parts = [formatted]
    while parts:
        part = parts.pop()
        part.stack = traceback.StackSummary.from_list(_authors(part.stack))
        parts += [cause for cause in (part.__cause__, part.__context__) if cause is not None]
    return "".join(formatted.format())


def place(filename: str, line: int, function: str) -> str:
    """Describes a line of code for an error message: file, line number, function and source."""
    text = linecache.getline(filename, line).strip()
    where = f"{Path(filename).name}:{line} in {function}"
    return f"{where}: {text}" if text else where


def one_line(text: str) -> str:
    """The lines of a text, joined by spaces."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _authors(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The frames of the author's code; if a traceback does not have such frames, all frames outside
    of Tokenbus."""
    others = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    own = [frame for frame in others if not frame.filename.startswith(_NOT_THE_AUTHORS)]
    return own or others
