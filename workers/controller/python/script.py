"""A controller as a script: a coroutine that builds the sequence step by step.

async def main(ctx):
    await ctx.fixed("The answer is ")
    await ctx.gen(regex="[0-9]+", max_tokens=5)

Source: AICI's pyctrl, ``AiciAsync``. A fork replays the coroutine with the recorded answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence

from ....protocol.errors import Code, ControllerError, RequestError
from .. import interface
from ..host import Host
from ..interface import AGAIN, CONTINUE, Answer
from .author_calls import AuthorCalls
from .awaitable_calls import check_awaited
from .context import Context
from .operations import Operation, Stop
from .transcript import Question, Transcript

Script = Callable[[Context], Coroutine[Operation, None, object]]
"""A coroutine function with one argument."""


class ScriptProgram:
    """A program that runs a script; raises RequestError if the function is not a script."""

    def __init__(self, function: Script, name: str | None = None) -> None:
        self.name = name or ":".join(
            str(getattr(function, part, repr(function))) for part in ("__module__", "__qualname__")
        )
        if not inspect.iscoroutinefunction(function):
            raise RequestError(
                Code.UNKNOWN_CONTROLLER,
                f"{self.name} is {function!r}, which is not a coroutine function; expected "
                "async def main(ctx)",
            )
        signature = inspect.signature(function)
        try:
            signature.bind(None)
        except TypeError as error:
            written = f"async def {getattr(function, '__name__', 'main')}"
            raise RequestError(
                Code.UNKNOWN_CONTROLLER,
                f"{self.name} is {written}{signature}, which cannot be called with one argument, "
                f"the context: {error}; expected {written}(ctx)",
            ) from None
        self._function: Script = function

    def start(self, host: Host) -> interface.Controller:
        """Returns a controller that runs the script from its beginning."""
        return ScriptController(self.name, self._function, host, Transcript())


class ScriptController:
    """The controller of one sequence: a coroutine and the operation that it waits for."""

    context: type[Context] = Context
    """The class of the coroutine's argument."""

    def __init__(self, name: str, function: Script, host: Host, transcript: Transcript) -> None:
        self._name = name
        self._function = function
        self._host = host
        self._transcript = transcript
        self._calls = AuthorCalls(name, host, lambda: transcript.replaying)
        self._context = self.context(host, transcript)
        self._coroutine = function(self._context)
        self._operation: Operation | None = None
        """The operation that the script awaits; None before init_prompt."""

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Runs the script to the first operation that it awaits."""
        with self._calls.during("init_prompt"):
            self._transcript.begin(prompt)
            self._resume()

    def pre_process(self) -> Answer:
        """Calls pre_process of the current operation. If this call finishes the operation, the
        script runs to its next operation, and pre_process of that operation is called."""
        with self._calls.during("pre_process"):
            while True:
                operation = self._current()
                answer = operation.pre_process()
                if not operation.finished:
                    return answer

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """Calls mid_process of the current operation. If this call finishes the operation, for
        example a fork or a text, the script runs to its next operation, and mid_process of that
        operation is called."""
        with self._calls.during("mid_process"):
            while True:
                operation = self._current()
                answer = operation.mid_process(fork_group, mask)
                if not operation.finished:
                    return AGAIN if answer is None else answer

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Records the tokens and passes them to the current operation."""
        with self._calls.during("post_process"):
            self._transcript.change(tokens, backtrack)
            operation = self._operation
            if operation is None:
                return CONTINUE
            operation.post_process(tokens)
            runs = operation.finished and operation.posts
            return self._current().after_post() if runs else CONTINUE

    def fork(self, host: Host) -> interface.Controller:
        """A controller for the forked sequence. Its script is replayed up to the operation that the
        script of this controller awaits.

        Raises ControllerError if the replayed script does not repeat the recorded calls on its
        context.
        """
        if self._operation is None:
            return type(self)(self._name, self._function, host, Transcript())
        transcript = self._transcript.copy(self._operation.question)
        child = type(self)(self._name, self._function, host, transcript)
        try:
            with child._calls.during("fork"):
                child._resume()
                assert child._operation is not None
                child._operation.resume(self._operation)
                transcript.catch_up(self._transcript)
        except BaseException:
            child.close()
            raise
        return child

    def close(self) -> None:
        """Closes the coroutine, which runs the script's ``finally`` blocks."""
        try:
            with self._calls.during("close"):
                self._coroutine.close()
        except ControllerError:
            pass  # The error is in the log, and the sequence has ended.

    def _current(self) -> Operation:
        """The operation that the script awaits. If this operation is finished, the script first
        runs to its next unfinished operation."""
        while self._operation is None or self._operation.finished:
            self._resume()
        return self._operation

    def _resume(self) -> None:
        """Runs the script to its next operation."""
        transcript = self._transcript
        operation: object = None
        end: StopIteration | None = None
        try:
            operation = self._coroutine.send(None)
        except StopIteration as stopped:
            end = stopped
        finally:
            if transcript.failure is not None:
                raise transcript.failure
            check_awaited(self._context.unawaited)
        if end is not None:
            if transcript.replaying:
                raise transcript.unlike("its end")
            if end.value is not None:
                self._host.log.write(f"{end.value}\n".encode())
            self._operation = Stop(Question("end"))
            return
        if not isinstance(operation, Operation):
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the script awaits {operation!r}; it may only await the calls of its ctx",
            )
        self._operation = operation
