"""Triton's interpreter, which prepares its language once and not for each call of a function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from . import INTERPRETED


@pytest.fixture(scope="session", autouse=True)
def prepared_once() -> Iterator[None]:
    """A launch prepares ``triton.language``. Each function that a kernel calls, as ``tl.sum`` does,
    prepares it again, which takes ten times as long as the function."""
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    prepared: set[int] = set()

    def call(function: Any, *args: Any, **named: Any) -> Any:
        scope = function.fn.__globals__
        if tl not in scope.values() and id(scope) not in prepared:
            prepared.add(id(scope))
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **named)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield
