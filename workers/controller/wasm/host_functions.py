"""The host functions that guests import. They are linked once for each engine. A guest's call of a
host function takes 3 us, in addition to the time of the Python function."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import wasmtime
from wasmtime import _ffi as ffi

from ....protocol.errors import Code, ControllerError

if TYPE_CHECKING:
    from .instance import Guest

_held = ctypes.PyDLL(str(ffi.filename))
"""Wasmtime's library, loaded a second time for short calls. Its functions keep the GIL when they
are called through ``_held``, because releasing the GIL takes longer than a short call. The
functions have no argtypes, because all arguments already have the right type."""
_trap_new = _held.wasmtime_trap_new
_trap_new.restype = ctypes.c_size_t
_define = _held.wasmtime_linker_define_func_unchecked
_define.restype = ctypes.c_void_p

_OnImport = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.POINTER(ffi.wasmtime_val_raw_t),
    ctypes.c_size_t,
)


class _Running(threading.local):
    """The guest that runs on this thread."""

    guest: Guest


running = _Running()

CHECKED_WORK = 32
"""Units of host work after which the CPU time of a call is checked. A unit is a call of a host
function, or ``WORK_BYTES`` copied bytes."""
WORK_BYTES = 256
"""Copying this number of bytes takes about as long as entering a host function."""
BULK_BYTES = CHECKED_WORK * WORK_BYTES


class HostFunction(NamedTuple):
    """A host function. The letters of ``params`` and ``results`` are the types: ``i`` is i32, ``I``
    is i64."""

    params: str
    results: str
    call: Callable[..., int | None]
    """The Python function. Its arguments are ``Guest.host`` and then the guest's arguments as
    unsigned numbers."""


_TYPES = {"i": wasmtime.ValType.i32, "I": wasmtime.ValType.i64}
_MASKS = {"i": 0xFFFF_FFFF, "I": 0xFFFF_FFFF_FFFF_FFFF}


def make_linker(
    engine: wasmtime.Engine, functions: Mapping[tuple[str, str], HostFunction]
) -> wasmtime.Linker:
    """A linker for any number of guests, with these host functions by module and name."""
    linker = wasmtime.Linker(engine)
    kept = []
    for (module, name), function in functions.items():
        kind = wasmtime.FuncType(
            [_TYPES[t]() for t in function.params], [_TYPES[t]() for t in function.results]
        )
        callback = _OnImport(_entered(function))
        kept.append(callback)
        error = _define(
            linker.ptr(),
            module.encode(),
            ctypes.c_size_t(len(module.encode())),
            name.encode(),
            ctypes.c_size_t(len(name.encode())),
            kind.ptr(),
            callback,
            None,
            None,
        )
        if error:
            raise RuntimeError(f"{module}.{name} cannot be linked")
    linker._tokenbus_kept = kept  # type: ignore[attr-defined]
    return linker


def linkers(
    functions: Mapping[tuple[str, str], HostFunction],
) -> Callable[[wasmtime.Engine], wasmtime.Linker]:
    """Returns a function that makes an engine's linker with these host functions. The function
    caches the linker of each engine."""
    return cache(partial(make_linker, functions=functions))


def _entered(function: HostFunction) -> Callable[[Any, Any, Any, int], int]:
    """The function that Wasmtime calls: it converts arguments to Python, and exceptions to
    traps."""
    call, params = function.call, function.params
    wide = "I" in params or "I" in function.results
    count = len(params)
    returns = bool(function.results)
    fields = ["i64" if t == "I" else "i32" for t in params]
    masks = [_MASKS[t] for t in params]
    result_field = "i64" if function.results == "I" else "i32"

    def enter(env: Any, caller: Any, values: Any, size: int) -> int:
        guest = running.guest
        try:
            if wide:
                arguments = [
                    getattr(values[i], f) & m
                    for i, (f, m) in enumerate(zip(fields, masks, strict=True))
                ]
            else:
                arguments = [values[i].i32 & 0xFFFF_FFFF for i in range(count)]
            result = call(guest.host, *arguments)
            if returns:
                setattr(values[0], result_field, result)
            work = guest.host_work + 1
            guest.host_work = work
            if work >= CHECKED_WORK:
                guest.check_time()
        except BaseException as error:
            guest.fault = error if guest.base else _too_early()
            return int(_trap_new(b"host", ctypes.c_size_t(4)))
        return 0

    return enter


def _too_early() -> ControllerError:
    return ControllerError(
        Code.CONTROLLER_FAILED,
        "the module's start section calls the host before the instance exists; call the host in "
        "`_initialize`",
    )
