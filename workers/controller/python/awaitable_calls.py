"""The calls of a script on its context, such as ``ctx.gen(…)``. A call takes effect only when it is
awaited."""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from ....protocol.errors import Code, ControllerError
from .author_calls import place

T = TypeVar("T")
P = ParamSpec("P")


class HasAwaitableCalls(Protocol):
    """An object with awaitable calls."""

    unawaited: list[AwaitableCall[Any]]
    """Calls that have not been awaited yet."""


C = TypeVar("C", bound=HasAwaitableCalls)


class AwaitableCall(Generic[T]):
    """A call that a script makes at the source line ``where``. ``text`` is the call as error
    messages show it."""

    def __init__(
        self,
        answer: Coroutine[Any, Any, T],
        text: str,
        where: str,
        unawaited: list[AwaitableCall[Any]],
    ) -> None:
        self._answer = answer
        self._unawaited = unawaited
        self.text = text
        self.where = where
        unawaited.append(self)

    def __await__(self) -> Generator[Any, None, T]:
        if self in self._unawaited:
            self._unawaited.remove(self)
        return self._answer.__await__()

    def drop(self) -> None:
        """Closes the call's coroutine, so that Python does not warn that the coroutine was never
        awaited."""
        self._answer.close()


def awaitable_call(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[C, P], Awaitable[T]]:
    """Decorates a coroutine method. If a script does not await a call of the method,
    ``check_awaited`` reports this call."""

    @functools.wraps(method)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        answer = method(self, *args, **kwargs)
        code = (frame := sys._getframe(1)).f_code
        where = place(code.co_filename, frame.f_lineno, code.co_name)
        return AwaitableCall(answer, f"ctx.{method.__name__}(…)", where, self.unawaited)

    return call


def check_awaited(unawaited: list[AwaitableCall[Any]]) -> None:
    """Raises ControllerError for the first call that was not awaited, with its source line.

    Called when a script awaits another call, or has ended.
    """
    if not unawaited:
        return
    first = unawaited[0]
    for call in unawaited:
        call.drop()
    unawaited.clear()
    raise ControllerError(
        Code.CONTROLLER_FAILED,
        f"{first.text} was not awaited, so it has no effect; expected "
        f"await {first.text}, at {first.where}",
    )
