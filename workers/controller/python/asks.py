"""What a script asks of its context: made by a call, answered where it is awaited."""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from ....protocol.errors import Code, ControllerError
from .calls import place

T = TypeVar("T")
P = ParamSpec("P")


class Asks(Protocol):
    """What has calls that ask."""

    unawaited: list[Ask[Any]]
    """Asks that were made and not awaited yet."""


C = TypeVar("C", bound=Asks)


class Ask(Generic[T]):
    """A call that was made, ``text`` as its author may have written it, at ``where``."""

    def __init__(
        self, answer: Coroutine[Any, Any, T], text: str, where: str, unawaited: list[Ask[Any]]
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
        """It will not be awaited: says to Python that this is known."""
        self._answer.close()


def asks(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[C, P], Awaitable[T]]:
    """Makes a coroutine method one whose calls are known before they are awaited."""

    @functools.wraps(method)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        answer = method(self, *args, **kwargs)
        code = (frame := sys._getframe(1)).f_code
        where = place(code.co_filename, frame.f_lineno, code.co_name)
        return Ask(answer, f"ctx.{method.__name__}(…)", where, self.unawaited)

    return call


def check_awaited(unawaited: list[Ask[Any]]) -> None:
    """Raises ControllerError for the first ask that nobody awaits, naming it and its line.

    To be called where a script waits for something else, or is over.
    """
    if not unawaited:
        return
    first = unawaited[0]
    for ask in unawaited:
        ask.drop()
    unawaited.clear()
    raise ControllerError(
        Code.CONTROLLER_FAILED,
        f"{first.text} was not awaited and does nothing by itself; right would be "
        f"await {first.text}, at {first.where}",
    )
