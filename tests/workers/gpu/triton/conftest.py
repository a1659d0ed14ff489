"""Triton's interpreter for the tests: it prepares its language once, and multiplies bfloat16
correctly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from . import INTERPRETED


@pytest.fixture(scope="session", autouse=True)
def prepared_once() -> Iterator[None]:
    """Makes the interpreter prepare ``triton.language`` only at a launch. Without this, each
    function that a kernel calls prepares it again, which takes ten times as long as the
    function."""
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


@pytest.fixture(scope="session", autouse=True)
def bfloat16_products() -> Iterator[None]:
    """Makes ``tl.dot`` multiply bfloat16 as float32, as a GPU does. The interpreter would multiply
    the bits as integers."""
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(builder, widened(a), widened(b), *rest)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        numbers = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield
