"""A guest: a Wasm instance in its own Wasmtime store. This module has fast ways to call the
instance, to read and write its memory, and to clone it.

Most of the cost of a call is the transition from Python to Wasmtime. A call through
``wasmtime_func_call_unchecked`` takes 1.3 us. ``Func.__call__`` takes 13 us, because it looks up
types in each call. Memory is read directly at its address. Entering a host function takes 3 us. The
*epoch* is Wasmtime's counter for interrupting guests (``sandbox.py``).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import wasmtime
from wasmtime import _ffi as ffi

from ....protocol.errors import Code, ControllerError
from ..guest_clock import call_cpu_s
from ..guest_memory import TenantMemory
from ..limits import Limits
from .exported_state import TABLE_EXPORT
from .function_tables import copy_tables, names_by_address
from .host_functions import BULK_BYTES, WORK_BYTES, running

Values = ctypes.Array[ffi.wasmtime_val_raw_t]

_dll = ctypes.CDLL(str(ffi.filename))
_held = ctypes.PyDLL(str(ffi.filename))
"""Wasmtime's library, loaded a second time for short calls. Its functions keep the GIL when they
are called through ``_held``, because releasing the GIL takes longer than a short call."""

# Most of the functions have no argtypes, because their arguments already have the right types.
_call = _dll.wasmtime_func_call_unchecked
_call.restype = ctypes.c_void_p
_data_size = _held.wasmtime_memory_data_size
_data_size.restype = ctypes.c_size_t
_error_new = _held.wasmtime_error_new
_error_new.restype = ctypes.c_size_t

_OnEpoch = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint8),
)
_set_epoch_callback = _held.wasmtime_store_epoch_deadline_callback
_set_epoch_callback.restype = None
_set_epoch_callback.argtypes = [ctypes.c_void_p, _OnEpoch, ctypes.c_void_p, ctypes.c_void_p]
_set_fuel = _held.wasmtime_context_set_fuel
_set_fuel.restype = ctypes.c_void_p
_get_fuel = _held.wasmtime_context_get_fuel
_get_fuel.restype = ctypes.c_void_p
KILL_S = 1.0
"""If instructions are counted, a call ends when it has executed its maximum number of instructions.
It also ends when its CPU time exceeds its time limit by this number of seconds."""
WORK_S = 3e-6
"""CPU time that is charged for a unit of host work (``Guest.host_work``), in seconds. If
instructions are counted, a unit counts as the number of instructions that a guest may execute in
this time."""
_madvise = ctypes.CDLL(None).madvise
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which Linux has since 5.14. On older kernels, madvise has no effect here."""

_TRAPS = {
    wasmtime.TrapCode.STACK_OVERFLOW: "its stack of {stack} bytes overflowed",
    wasmtime.TrapCode.MEMORY_OUT_OF_BOUNDS: "it reached outside its memory",
    wasmtime.TrapCode.TABLE_OUT_OF_BOUNDS: "it reached outside a table",
    wasmtime.TrapCode.INDIRECT_CALL_TO_NULL: "it called a function pointer that is null",
    wasmtime.TrapCode.BAD_SIGNATURE: "it called a function pointer of another type",
    wasmtime.TrapCode.INTEGER_OVERFLOW: "an integer overflowed",
    wasmtime.TrapCode.INTEGER_DIVISION_BY_ZERO: "it divided by zero",
    wasmtime.TrapCode.BAD_CONVERSION_TO_INTEGER: "it converted NaN to an integer",
    wasmtime.TrapCode.UNREACHABLE: "it trapped (unreachable: an abort, a panic or an assertion)",
}


def _on_epoch(context: Any, data: Any, delta: Any, kind: Any) -> int:
    """Called at each epoch tick (every ``sandbox.TICK_S``) while a guest runs. Stops the guest if
    it has used up its CPU time.

    The time of a call counts from its first tick. So a call that ends before a tick does not read
    the clock.
    """
    guest = running.guest
    now = call_cpu_s()
    if guest._ticked_at is None:
        guest._ticked_at = now
    elif now - guest._ticked_at >= guest._limit_s + guest._more_s:
        guest._timed_out = True
        made: int = _error_new(b"timed out")
        return made
    delta[0] = 1
    kind[0] = 0
    return 0


_epoch_callback = _OnEpoch(_on_epoch)


class Spares:
    """Stores instances whose sequences have finished. Later forks of sequences with the same module
    reuse these instances.

    Most of the cost of a fork is the allocation of its memory by the system, page by page. The
    pages of a spare instance are already allocated. A fork overwrites all of the instance's memory,
    so that a sequence never reads the memory of another sequence.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._kept: list[Guest] = []
        """The most recently added instance comes last."""

    def keep(self, guest: Guest) -> None:
        """Adds a guest whose sequence has finished. Frees the oldest spare guests while the memory
        of all spare guests exceeds the limit."""
        evicted = []
        with self._lock:
            self._kept.append(guest)
            self._bytes += guest.size
            while self._bytes > self._limit:
                evicted.append(self._kept.pop(0))
                self._bytes -= evicted[-1].size
        for old in evicted:
            old.free()

    def take(self, template: Template, size: int) -> Guest | None:
        """A stored guest of a template with a memory of ``size`` bytes; None if no such guest is
        stored."""
        with self._lock:
            for at in range(len(self._kept) - 1, -1, -1):
                guest = self._kept[at]
                if guest.template is template and guest.size == size:
                    self._bytes -= size
                    return self._kept.pop(at)
        return None


INSTANCE_BYTES = 512 * 1024
"""Estimated bytes of an instance in addition to its memory: tables, globals, and its host
objects."""

SPARES = Spares(64 * 1024 * 1024)


class Template:
    """A module with its imports linked, from which guests are created."""

    def __init__(
        self, linker: wasmtime.Linker, module: wasmtime.Module, engine: wasmtime.Engine
    ) -> None:
        """Raises wasmtime.WasmtimeError if an import is missing."""
        self.engine = engine
        self.linker = linker
        self.made = linker.instantiate_pre(module)
        self.globals = [
            export.name
            for export in module.exports
            if isinstance(export.type, wasmtime.GlobalType) and export.type.mutable
        ]
        self.exports = {
            export.name for export in module.exports if isinstance(export.type, wasmtime.FuncType)
        }
        self.tables = [e.name for e in module.exports if e.name.startswith(TABLE_EXPORT)]
        """The names of the tables that a fork copies; empty if the module's code does not change
        tables."""
        self.functions = sorted(self.exports) if self.tables else []
        """The names of the functions that may be in the copied tables."""


class Guest:
    """An instance of a template. Host functions receive ``host`` as their first argument.

    Used by one thread at a time. A call that fails raises ControllerError. After a failed call, the
    guest must not be called again.
    """

    def __init__(
        self, template: Template, host: Any, limits: Limits, memory: TenantMemory | None = None
    ) -> None:
        """Creates the instance, and runs the module's start function if it has one. The bytes of
        the instance count towards ``memory``, if given."""
        self.template = template
        self.host = host
        self.limits: Limits
        self._account = memory
        self._counted = 0
        self._limit_s = limits.init_s
        self._ticked_at: float | None = None
        self._timed_out = False
        self._fuel_per_s = 1000 * limits.fuel_per_ms
        self._more_s = KILL_S if self._fuel_per_s else 0.0
        self.host_work = 0
        """Work of host functions since the guest's CPU time was last checked. A unit is a call of a
        host function, or ``WORK_BYTES`` copied bytes."""
        self.host_bytes = 0
        """Bytes that the host stores for the guest. The Python object that owns the guest sets this
        number before it calls ``count``."""
        self.fault: BaseException | None = None
        self._function_names: dict[int, str] | None = None
        self._is_copy = self._dead = self._closed = False
        self.base = self.size = 0
        self._values: Values = (ffi.wasmtime_val_raw_t * 4)()
        self._trap = ctypes.POINTER(ffi.wasm_trap_t)()
        self._trap_at = ctypes.byref(self._trap)
        self._store = wasmtime.Store(template.engine)
        self._limit_to(limits)
        _set_epoch_callback(
            ctypes.cast(self._store.ptr(), ctypes.c_void_p), _epoch_callback, None, None
        )
        self._context = self._store._context()
        self._instance = ffi.wasmtime_instance_t()
        if self._fuel_per_s:
            self._refuel()
        self._run("start", lambda: self._instantiate())
        exported = self._export("memory")
        if exported is None or exported.kind != ffi.WASMTIME_EXTERN_MEMORY.value:
            raise ControllerError(Code.CONTROLLER_FAILED, "the module does not export a memory")
        self._memory = ffi.wasmtime_memory_t.from_buffer_copy(exported.of.memory)
        self._memory_at = ctypes.byref(self._memory)
        base = ffi.wasmtime_memory_data(self._context, self._memory_at)
        self.base = ctypes.cast(base, ctypes.c_void_p).value or 0
        self.size = _data_size(self._context, self._memory_at)
        self._count_or_free()

    def close(self) -> None:
        """Called when the sequence has finished. Frees the instance, or adds it to the spares for a
        later fork of the module."""
        if self._closed:
            return
        self._closed = True
        self.host = None
        if self._account is not None:
            self._account.give_back(self._counted)
            self._account, self._counted = None, 0
        if self._is_copy and not self._dead and not self.template.tables:
            # The memory may have grown, and the next sequence has to overwrite all of it.
            self.measure()
            SPARES.keep(self)
        else:
            self.free()

    def free(self) -> None:
        """Frees the instance and its memory."""
        self.base = self.size = 0
        self._store.close()

    # --- calls ----------------------------------------------------------------------------------

    def function(self, name: str) -> Any:
        """An exported function, for ``call``; raises ControllerError if it does not exist."""
        export = self._export(name)
        if export is None or export.kind != ffi.WASMTIME_EXTERN_FUNC.value:
            raise ControllerError(Code.CONTROLLER_FAILED, f"the module does not export {name}")
        return ctypes.byref(ffi.wasmtime_func_t.from_buffer_copy(export.of.func))

    @property
    def context(self) -> Any:
        """The store's context, an argument of wasmtime's functions."""
        return self._context

    def table(self, name: str) -> Any:
        """An exported table; raises ControllerError if the module does not export a table of this
        name."""
        export = self._export(name)
        if export is None or export.kind != ffi.WASMTIME_EXTERN_TABLE.value:
            raise ControllerError(Code.INTERNAL, f"the module does not export a table {name}")
        return ffi.wasmtime_table_t.from_buffer_copy(export.of.table)

    def global_value(self, name: str) -> int:
        """The value of an exported global of type i32 or i64."""
        export = self._export(name)
        if export is None or export.kind != ffi.WASMTIME_EXTERN_GLOBAL.value:
            raise ControllerError(Code.INTERNAL, f"the global {name} is not exported")
        value: Any = ffi.wasmtime_val_t()
        ffi.wasmtime_global_get(self._context, ctypes.byref(export.of.global_), value)
        is_long = value.kind == ffi.WASMTIME_I64.value
        number: int = value.of.i64 if is_long else value.of.i32
        return number

    def function_names(self) -> dict[int, str]:
        """Maps the address of each exported function to the function's name. A reference to a
        function contains this address. Empty if the guest's tables are not copied."""
        if self._function_names is None:
            self._function_names = names_by_address(self)
        return self._function_names

    def call(self, function: Any, limit_s: float, name: str) -> int:
        """Calls a function without parameters, for at most ``limit_s`` seconds of CPU time.

        Returns the function's i32. If the function has no result, the returned value is undefined.
        """
        running.guest = self
        self.renew(limit_s)
        values = self._values
        error = _call(self._context, function, values, _FOUR, self._trap_at)
        if error or self._trap:
            self._fail(name, error)
        result: int = values[0].i32
        return result

    def call_with(self, function: Any, limit_s: float, name: str, argument: int) -> int:
        """Like ``call``, for a function with one i32 parameter."""
        self._values[0].i32 = argument
        return self.call(function, limit_s, name)

    @property
    def limit_s(self) -> float:
        """The CPU time that the current call may take, in seconds."""
        return self._limit_s

    def renew(self, limit_s: float) -> None:
        """Sets a new CPU time limit, which counts from now. A host function may do this during a
        call."""
        self._limit_s = limit_s
        self._ticked_at = None
        if self._fuel_per_s:
            self._refuel()

    def spend(self, seconds: float) -> None:
        """Counts ``seconds`` of CPU time that another thread spent for the current call. Raises
        ControllerError if the call has used up its CPU time."""
        if self._ticked_at is None:
            self._ticked_at = call_cpu_s()
        self._ticked_at -= seconds
        self.check_time()

    def charge(self, size: int) -> None:
        """Counts the work of a host function before the work is done. ``size``: the number of bytes
        that could be copied with the same work."""
        if size >= BULK_BYTES and self._ticked_at is None:
            self._ticked_at = call_cpu_s()
        self.host_work += size // WORK_BYTES

    def check_time(self) -> None:
        """Raises ControllerError if the current call has used up its CPU time.

        Host functions call this method. A guest checks the epoch only in its loops and when it
        calls one of its own functions. So ticks of the epoch do not stop a guest that only calls
        host functions.
        """
        if self._fuel_per_s:
            self._burn(int(self.host_work * WORK_S * self._fuel_per_s))
        self.host_work = 0
        now = call_cpu_s()
        if self._ticked_at is None:
            self._ticked_at = now
        elif now - self._ticked_at >= self._limit_s + self._more_s:
            self._timed_out = True
            raise ControllerError(Code.CONTROLLER_TIMEOUT, "timed out")

    @property
    def _fuel(self) -> int:
        """Instructions that the current call may execute."""
        return int(self._limit_s * self._fuel_per_s)

    def _refuel(self) -> None:
        _set_fuel(self._context, ctypes.c_uint64(self._fuel))

    def _burn(self, fuel: int) -> None:
        """Counts work of host functions as if the guest had executed ``fuel`` instructions. Raises
        ControllerError if the call has fewer instructions left."""
        left = ctypes.c_uint64()
        _get_fuel(self._context, ctypes.byref(left))
        if left.value < fuel:
            raise self._out_of_fuel()
        _set_fuel(self._context, ctypes.c_uint64(left.value - fuel))

    def _out_of_fuel(self) -> ControllerError:
        return ControllerError(
            Code.CONTROLLER_TIMEOUT,
            f"it executed more than {self._fuel:,} instructions, the limit for a call of "
            f"{self._limit_s * 1000:g} ms",
        )

    # --- memory ---------------------------------------------------------------------------------

    def measure(self) -> int:
        """Measures the guest's memory, and returns its present size in bytes. ``size`` is the size
        at the last measurement."""
        self.size = _data_size(self._context, self._memory_at)
        return self.size

    def count(self) -> None:
        """Counts the guest's memory and ``host_bytes`` towards its tenant's share. Raises
        ControllerError if the tenant exceeds its share. Called after calls that may have increased
        these numbers: ``init_prompt``, each ``mid_process``, each suspension, and each call of a
        script in Python."""
        if self._account is None:
            return
        size = _data_size(self._context, self._memory_at) + INSTANCE_BYTES + self.host_bytes
        if size > self._counted:
            self._account.take(size - self._counted)
        elif size < self._counted:
            self._account.give_back(self._counted - size)
        self._counted = size

    def check(self, address: int, size: int) -> None:
        """Raises ControllerError if ``[address, address + size)`` is not in the guest's memory."""
        if address + size > self.size and address + size > self.measure():
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"it named {size} bytes at address {address}; its memory ends at {self.size}",
            )

    def read(self, address: int, size: int) -> bytes:
        """Reads bytes of the guest's memory."""
        self.check(address, size)
        return ctypes.string_at(self.base + address, size)

    def write(self, address: int, data: bytes) -> None:
        """Writes into the guest's memory."""
        self.check(address, len(data))
        ctypes.memmove(self.base + address, data, len(data))

    def write_part(self, address: int, data: bytes, size: int) -> None:
        """Writes the first ``size`` bytes of ``data`` into the guest's memory, or all bytes of
        ``data`` if there are fewer."""
        size = min(size, len(data))
        self.check(address, size)
        ctypes.memmove(self.base + address, data, size)

    def zero(self, address: int, size: int) -> None:
        """Writes ``size`` zero bytes into the guest's memory."""
        self.check(address, size)
        ctypes.memset(self.base + address, 0, size)

    def word(self, address: int, value: int) -> None:
        """Writes a u32 into the guest's memory."""
        self.write(address, (value & 0xFFFF_FFFF).to_bytes(4, "little"))

    def grow_to(self, size: int) -> None:
        """Grows the guest's memory to ``size`` bytes."""
        missing = size - self.measure()
        if missing > 0:
            before = ctypes.c_uint64()
            error = ffi.wasmtime_memory_grow(
                self._context, self._memory_at, missing >> 16, ctypes.byref(before)
            )
            if error:
                raise ControllerError(
                    Code.CONTROLLER_FAILED, f"a memory of {size} bytes cannot be allocated"
                )
            self.measure()

    def restore(self, memory: memoryview) -> None:
        """Overwrites the guest's memory with the memory of another guest of the same module. Only
        valid between calls, and for modules whose globals have the same values after each call."""
        self._grow_to(len(memory))
        whole = (ctypes.c_char * len(memory)).from_address(self.base)
        memoryview(whole).cast("B")[:] = memory

    def clone(self, host: Any, limits: Limits) -> Guest:
        """Creates a copy of the guest, with the same memory, globals and tables. The copy's host
        functions receive ``host``. Only valid between calls."""
        size = self.measure()
        if size > limits.memory_bytes:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the controller forks with a memory of {size} bytes; with this number of "
                f"sequences in the request, each may have at most {limits.memory_bytes}",
            )
        other = SPARES.take(self.template, size)
        if other is not None:
            other._limit_to(limits)
            other.host, other._closed, other.host_bytes = host, False, 0
            other._account = self._account
            other._count_or_free()
        else:
            other = self._copy(host, limits, size)
        ctypes.memmove(other.base, self.base, size)
        value = ffi.wasmtime_val_t()
        for name in self.template.globals:
            mine, its = self._export(name), other._export(name)
            if mine is None or its is None:
                raise ControllerError(Code.INTERNAL, f"the global {name} is not exported")
            ffi.wasmtime_global_get(self._context, ctypes.byref(mine.of.global_), value)
            error = ffi.wasmtime_global_set(
                other._context, ctypes.byref(its.of.global_), ctypes.byref(value)
            )
            if error:
                raise ControllerError(Code.INTERNAL, f"the global {name} cannot be copied")
        if self.template.tables:
            self._copy_tables(other)
        return other

    # --- inside ---------------------------------------------------------------------------------

    def _limit_to(self, limits: Limits) -> None:
        self.limits = limits
        self._store.set_limits(
            memory_size=limits.memory_bytes,
            table_elements=limits.table_elements,
            tables=limits.tables,
            instances=1,
            memories=1,
        )

    def _copy_tables(self, other: Guest) -> None:
        try:
            copy_tables(self, other)
        except ControllerError:
            other._dead = True
            other.close()
            raise

    def _copy(self, host: Any, limits: Limits, size: int) -> Guest:
        """Creates a new guest for a forked sequence, with a memory of ``size`` bytes. ``clone``
        then writes the content of this memory."""
        other = Guest(self.template, host, limits, self._account)
        other._is_copy = True
        try:
            other._grow_to(size)
            other.count()
        except ControllerError:
            other._dead = True
            other.close()
            raise
        return other

    def _count_or_free(self) -> None:
        try:
            self.count()
        except ControllerError:
            self._dead = True
            self.close()
            raise

    def _grow_to(self, size: int) -> None:
        """Grows the memory to ``size`` bytes, and lets the system allocate all of its pages."""
        self.grow_to(size)
        # One call allocates all pages. If each page were allocated at its first write, this would
        # take three times as long.
        _madvise(ctypes.c_void_p(self.base), ctypes.c_size_t(size), _POPULATE_WRITE)

    def _instantiate(self) -> int | None:
        error = ffi.wasmtime_instance_pre_instantiate(
            self.template.made.ptr(), self._context, ctypes.byref(self._instance), self._trap_at
        )
        return ctypes.cast(error, ctypes.c_void_p).value if error else None

    def _run(self, name: str, act: Callable[[], int | None]) -> None:
        running.guest = self
        error = act()
        if error or self._trap:
            self._fail(name, error)

    def _export(self, name: str) -> Any:
        found = ffi.wasmtime_extern_t()
        encoded = name.encode()
        there = ffi.wasmtime_instance_export_get(
            self._context,
            ctypes.byref(self._instance),
            ctypes.create_string_buffer(encoded, len(encoded)),
            len(encoded),
            ctypes.byref(found),
        )
        return found if there else None

    def _fail(self, name: str, error: int | None) -> None:
        """Raises the error of a call that failed. ``error``: the address of Wasmtime's error, if it
        returned one."""
        self._dead = True
        fault, self.fault = self.fault, None
        trap, said = None, ""
        if error:
            raised = wasmtime.WasmtimeError._from_ptr(
                ctypes.cast(error, ctypes.POINTER(ffi.wasmtime_error_t))
            )
            said = str(raised)
        if self._trap:
            trap = wasmtime.Trap._from_ptr(self._trap)
            self._trap = ctypes.POINTER(ffi.wasm_trap_t)()
            self._trap_at = ctypes.byref(self._trap)
        if self._timed_out:
            raise ControllerError(
                Code.CONTROLLER_TIMEOUT,
                f"{name} ran for longer than its {self._limit_s * 1000:g} ms",
            )
        if isinstance(fault, ControllerError):
            raise ControllerError(fault.code, f"{name}: {fault.message}") from None
        if fault is not None:
            raise fault
        if trap is not None and trap.trap_code is wasmtime.TrapCode.OUT_OF_FUEL:
            fault = self._out_of_fuel()
            raise ControllerError(fault.code, f"{name}: {fault.message}")
        if trap is not None:
            said = _TRAPS.get(trap.trap_code, trap.message) if trap.trap_code else trap.message
            said = said.format(stack=self.limits.stack_bytes)
            where = " < ".join(f.func_name or f"function {f.func_index}" for f in trap.frames[:4])
            said += f", in {where}" if where else ""
        raise ControllerError(Code.CONTROLLER_FAILED, f"{name}: {said.splitlines()[0]}")


_FOUR = ctypes.c_size_t(4)
