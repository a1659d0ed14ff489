"""Copies tables of functions from a guest to its copy in a forked sequence.

A reference to a function is valid in one Wasmtime store only, and each guest has its own store. So
each element of a table is looked up among the guest's exported functions. The copy's element
becomes the copy's function of the same name.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from wasmtime import _ffi as ffi

from ....protocol.errors import Code, ControllerError
from .wasm_code import MAX_TABLE_ELEMENTS

if TYPE_CHECKING:
    from .instance import Guest

_held = ctypes.PyDLL(str(ffi.filename))
"""Wasmtime's library, loaded a second time for short calls. Its functions keep the GIL when they
are called through ``_held``, because releasing the GIL takes longer than a short call."""
_to_raw = _held.wasmtime_func_to_raw
_to_raw.restype = ctypes.c_size_t
_size = _held.wasmtime_table_size
_size.restype = ctypes.c_uint64
_get = _held.wasmtime_table_get
_get.restype = ctypes.c_bool


def copy_tables(source: Guest, target: Guest) -> None:
    """Copies the elements of the tables of ``source`` to ``target``, a new instance of the same
    module. Raises ControllerError if the tables have grown too large."""
    tables = [(source.table(name), target.table(name)) for name in source.template.tables]
    sizes = [_size(source.context, ctypes.byref(of)) for of, _ in tables]
    if sum(sizes) > MAX_TABLE_ELEMENTS:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the controller forks with {sum(sizes)} elements in tables that its code changes; at "
            f"most {MAX_TABLE_ELEMENTS} can be copied",
        )
    functions: dict[int, ffi.wasmtime_val_t] = {}
    for (of, to), size in zip(tables, sizes, strict=True):
        _grow(target, to, size)
        for at in range(size):
            _set(target, to, at, _value(source, target, of, at, functions))


def names_by_address(guest: Guest) -> dict[int, str]:
    """Maps the address of each exported function to the function's name. A reference to a function
    contains this address. Empty if the guest's tables are not copied."""
    template = guest.template
    return {_to_raw(guest.context, guest.function(name)): name for name in template.functions}


def _value(
    source: Guest,
    target: Guest,
    table: Any,
    at: int,
    functions: dict[int, ffi.wasmtime_val_t],
) -> ffi.wasmtime_val_t:
    """Returns the value for element ``at`` of the target's table. This value corresponds to the
    value of the same element of the source's ``table``."""
    value = ffi.wasmtime_val_t()
    _get(source.context, ctypes.byref(table), ctypes.c_uint64(at), ctypes.byref(value))
    if not value.of.funcref.store_id:
        return value
    raw = _to_raw(source.context, ctypes.byref(value.of.funcref))
    found = functions.get(raw)
    if found is None:
        names = source.function_names()
        if raw not in names:
            raise ControllerError(Code.INTERNAL, f"the element {at} of a table is not exported")
        found = functions[raw] = ffi.wasmtime_val_t()
        found.kind = value.kind
        own = target.function(names[raw])
        ctypes.pointer(found.of.funcref)[0] = own._obj
    return found


def _grow(target: Guest, table: Any, size: int) -> None:
    """Grows a table to ``size`` elements; the new elements are null."""
    missing = size - _size(target.context, ctypes.byref(table))
    if missing <= 0:
        return
    null = ffi.wasmtime_val_t()
    null.kind = ffi.WASMTIME_FUNCREF
    before = ctypes.c_uint64()
    error = ffi.wasmtime_table_grow(
        target.context, ctypes.byref(table), missing, ctypes.byref(null), ctypes.byref(before)
    )
    if error:
        raise ControllerError(
            Code.CONTROLLER_FAILED, f"a table of {size} elements cannot be allocated"
        )


def _set(target: Guest, table: Any, at: int, value: ffi.wasmtime_val_t) -> None:
    error = ffi.wasmtime_table_set(target.context, ctypes.byref(table), at, ctypes.byref(value))
    if error:
        raise ControllerError(Code.INTERNAL, f"the element {at} of a table cannot be copied")
