"""Controllers as a script: a coroutine that says what the sequence becomes, one thing at a time.

async def main(ctx):
    await ctx.fixed("The answer is ")
    await ctx.gen(regex="[0-9]+", max_tokens=5)

Source: AICI's pyctrl, ``AiciAsync``. A fork runs the coroutine again on the recorded answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence

from ....protocol.errors import Code, ControllerError, RequestError
from .. import interface
from ..host import Host
from ..interface import CONTINUE, Action, Answer
from .author_calls import AuthorCalls
from .awaitable_calls import check_awaited
from .context import Context
from .operations import Operation, Stop
from .transcript import Question, Transcript

Script = Callable[[Context], Coroutine[Operation, None, object]]
"""A coroutine function with one argument."""


class ScriptProgram:
    """A script; raises RequestError where the function cannot be one."""

    def __init__(self, function: Script, name: str | None = None) -> None:
        self.name = name or ":".join(
            str(getattr(function, part, repr(function))) for part in ("__module__", "__qualname__")
        )
        if not inspect.iscoroutinefunction(function):
            raise RequestError(
                Code.UNKNOWN_CONTROLLER,
                f"{self.name} is no coroutine function: {function!r}; right would be "
                "async def main(ctx)",
            )
        signature = inspect.signature(function)
        try:
            signature.bind(None)
        except TypeError as error:
            written = f"async def {getattr(function, '__name__', 'main')}"
            raise RequestError(
                Code.UNKNOWN_CONTROLLER,
                f"{self.name} is called with one argument, the context, and is "
                f"{written}{signature}: {error}; right would be {written}(ctx)",
            ) from None
        self._function: Script = function

    def start(self, host: Host) -> interface.Controller:
        """The script, at its beginning."""
        return ScriptController(self.name, self._function, host, Transcript())


class ScriptController:
    """The controller of one sequence: a coroutine, and the request that it waits for."""

    def __init__(self, name: str, function: Script, host: Host, transcript: Transcript) -> None:
        self._name = name
        self._function = function
        self._host = host
        self._transcript = transcript
        self._calls = AuthorCalls(name, host)
        self._context = Context(host, transcript)
        self._coroutine = function(self._context)
        self._request: Operation | None = None
        """None before init_prompt."""
        self._detour = _Detour()

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """As ``interface.Controller`` says; the script runs to its first ``await``."""
        with self._calls.during("init_prompt"):
            self._transcript.begin(prompt)
            self._resume()

    def pre_process(self) -> Answer:
        """As ``interface.Controller`` says; the script runs on where its request is finished."""
        with self._calls.during("pre_process"):
            if self._detour.under_way:
                return CONTINUE
            while True:
                request = self._current()
                answer = request.pre_process()
                if not request.finished:
                    return answer

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """As ``interface.Controller`` says; the script runs on from a fork or an ended text."""
        with self._calls.during("mid_process"):
            if self._detour.under_way:
                return self._detour.leave()
            while True:
                request = self._current()
                answer = request.mid_process(fork_group, mask)
                if not request.finished:
                    return self._detour.enter() if answer is None else answer

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """As ``interface.Controller`` says."""
        with self._calls.during("post_process"):
            self._transcript.change(tokens, backtrack)
            if not self._detour.passes() and self._request is not None:
                self._request.post_process(tokens)
            return CONTINUE

    def fork(self, host: Host) -> interface.Controller:
        """As ``interface.Controller`` says; runs the script again up to where this one waits.

        Raises ControllerError where it asks something else on the way than it did.
        """
        if self._request is None:
            return ScriptController(self._name, self._function, host, Transcript())
        transcript = self._transcript.copy(self._request.question)
        child = ScriptController(self._name, self._function, host, transcript)
        try:
            with child._calls.during("fork"):
                child._resume()
                assert child._request is not None
                child._request.resume(self._request)
                transcript.catch_up(self._transcript)
        except BaseException:
            child.close()
            raise
        return child

    def close(self) -> None:
        """As ``interface.Controller`` says; the script's ``finally`` blocks run."""
        try:
            with self._calls.during("close"):
                self._coroutine.close()
        except ControllerError:
            pass  # The log has it, and the sequence is over.

    def _current(self) -> Operation:
        """The request that is waited for; the script runs on as long as it is a finished one."""
        while self._request is None or self._request.finished:
            self._resume()
        return self._request

    def _resume(self) -> None:
        """Runs the script up to its next request."""
        transcript = self._transcript
        request: object = None
        end: StopIteration | None = None
        try:
            request = self._coroutine.send(None)
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
            self._request = Stop(Question("end"))
            return
        if not isinstance(request, Operation):
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the script awaits {request!r}; a script awaits only what its ctx gives",
            )
        self._request = request


class _Detour:
    """From mid_process to pre_process without sampling: a token appended, and taken back.

    A script that forks goes on in mid_process; to suspend or fork there it has to come to
    pre_process first, and a splice that changes nothing is no answer. The two cancel out before
    anybody sees them.
    """

    def __init__(self) -> None:
        self.under_way = False
        self._own = False

    def enter(self) -> Answer:
        """Appends a token, whichever."""
        self.under_way = self._own = True
        return Answer(Action.SPLICE, tokens=(0,))

    def leave(self) -> Answer:
        """Takes it back."""
        self.under_way, self._own = False, True
        return Answer(Action.SPLICE, backtrack=1)

    def passes(self) -> bool:
        """Whether what was just appended or dropped was its own."""
        own, self._own = self._own, False
        return own
