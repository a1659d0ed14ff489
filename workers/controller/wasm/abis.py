"""Recognizes the ABI of a module by the module's exports, and checks its imports and exports. An
*ABI* defines the functions that the worker and a module call in each other. There are two: the
native ABI of this project, and AICI's.

The worker later calls a guest's functions without checking their types. So the checks in this file
protect the worker's memory. Source: ``docs/controllers-reference.md`` (native), and AICI's crate
``aici_abi``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from ....protocol.errors import Code, RequestError
from ..limits import Limits
from .aici import FUNCTIONS as AICI_FUNCTIONS
from .host_functions import HostFunction
from .native import FUNCTIONS as NATIVE_FUNCTIONS
from .native import START, VERSION
from .wasm_binary import FUNC, KINDS, MEMORY, Binary, Import, read
from .wasm_code import why_no_copy
from .wasm_reader import FunctionType

Abi = Literal["native", "aici"]

_LETTERS = {"i": "i32", "I": "i64"}


def _types(
    functions: Mapping[tuple[str, str], HostFunction],
) -> dict[tuple[str, str], FunctionType]:
    return {name: _type(f.params, f.results) for name, f in functions.items()}


def _type(params: str, results: str = "") -> FunctionType:
    return FunctionType(tuple(_LETTERS[p] for p in params), tuple(_LETTERS[r] for r in results))


IMPORTS: dict[Abi, dict[tuple[str, str], FunctionType]] = {
    "native": _types(NATIVE_FUNCTIONS),
    "aici": _types(AICI_FUNCTIONS),
}
"""For each ABI: the functions that a module may import, by module and name, with their types."""

EXPORTS: dict[Abi, dict[str, FunctionType]] = {
    "native": {
        START: _type("", "i"),
        "tokenbus_grow": _type("i", "i"),
        "tokenbus_init_prompt": _type("", "i"),
        "tokenbus_pre_process": _type("", "i"),
        "tokenbus_mid_process": _type("", "i"),
        "tokenbus_post_process": _type("", "i"),
    },
    "aici": {
        "aici_init": _type(""),
        "aici_create": _type("", "i"),
        "aici_init_prompt": _type("i"),
        "aici_pre_process": _type("i"),
        "aici_mid_process": _type("i"),
        "aici_post_process": _type("i"),
    },
}
"""The exports that a module of each ABI must have."""

OPTIONAL: dict[str, FunctionType] = {
    "_start": _type(""),
    "_initialize": _type(""),
    "aici_panic": _type(""),
}
"""Exports that a module may have, with their types. The worker calls ``_start`` or ``_initialize``,
and never ``aici_panic``."""

MAX_MUTABLE_GLOBALS = 128
"""Maximum number of mutable globals of a module. Each fork copies them one by one."""
MAX_EXPORTS = 1000
MAX_IMPORTS = 256
"""Maximum number of imports of a module. The number is bounded because a module may import one
function many times."""

_TAGS = 13
"""The number of the section that declares exceptions."""

_OTHER_VERSION = re.compile(r"tokenbus_abi_v(\d+)")


class Examined(NamedTuple):
    """The result of ``examine``."""

    abi: Abi
    why_no_fork: str | None
    """The reason why sequences with this module cannot fork; None if they can."""


def examine(wasm: bytes, limits: Limits) -> Examined:
    """Checks a module. Returns the module's ABI, and the reason why its sequences cannot fork.

    Raises RequestError if this worker cannot run the module. The message says which export is
    missing, which import is unknown, or which limit is exceeded.
    """
    binary = read(wasm)
    abi = _abi(binary)
    _check_counts(binary)
    if binary.section(_TAGS) is not None:
        raise _refusal("the module uses exceptions; compile it without exceptions")
    _check_memory(binary, limits)
    _check_tables(binary, limits)
    _check_exports(binary, abi)
    for wanted in binary.imports:
        _check_import(binary, wanted, abi)
    return Examined(abi, why_no_copy(binary))


def _abi(binary: Binary) -> Abi:
    functions = binary.exported(FUNC)
    if START in functions:
        return "native"
    if {"aici_create", "aici_mid_process"} & functions.keys():
        return "aici"
    for name in functions:
        other = _OTHER_VERSION.fullmatch(name)
        if other is not None:
            raise _refusal(
                f"the module is for version {other[1]} of the native ABI (it exports {name}); this "
                f"worker supports version {VERSION}: compile it with this worker's SDK"
            )
    raise _refusal(
        f"the module is not a controller: it exports neither {START} (native, docs/controllers.md) "
        f"nor {', '.join(EXPORTS['aici'])} (AICI); {_exported(functions)}"
    )


def _check_counts(binary: Binary) -> None:
    """Checks the numbers of items that the worker processes one by one whenever it creates or
    copies an instance."""
    for what, count, most in (
        ("mutable globals", sum(kind.mutable for kind in binary.globals), MAX_MUTABLE_GLOBALS),
        ("exports", len(binary.exports), MAX_EXPORTS),
        ("imports", len(binary.imports), MAX_IMPORTS),
    ):
        if count > most:
            raise _refusal(f"the module has {count} {what}; at most {most} are allowed")


def _check_memory(binary: Binary, limits: Limits) -> None:
    memories = binary.memories
    if len(memories) > 1:
        raise _refusal(f"the module has {len(memories)} memories; one is allowed")
    if not memories or binary.exported(MEMORY).get("memory") != 0:
        raise _refusal(
            "the module does not export a memory with the name 'memory'; "
            f"{_exported(binary.exported(MEMORY))}"
        )
    if any(wanted.kind == MEMORY for wanted in binary.imports):
        raise _refusal("the module imports its memory; it must have one of its own")
    [memory] = memories
    if memory.shared:
        raise _refusal("the module's memory is shared; compile the module without threads")
    if memory.is_64:
        raise _refusal("the module has a 64-bit memory; compile it for wasm32")
    size = memory.minimum * memory.page_bytes
    if size > limits.memory_bytes:
        raise _refusal(
            f"the module's memory begins with {size} bytes; at most {limits.memory_bytes} are "
            "allowed"
        )


def _check_tables(binary: Binary, limits: Limits) -> None:
    for table in binary.tables:
        if table.minimum > limits.table_elements:
            raise _refusal(
                f"the module has a table of {table.minimum} elements; at most "
                f"{limits.table_elements} are allowed"
            )


def _check_exports(binary: Binary, abi: Abi) -> None:
    functions = binary.exported(FUNC)
    missing = [name for name in EXPORTS[abi] if name not in functions]
    if missing:
        raise _refusal(
            f"the module exports {START if abi == 'native' else 'functions of AICI'}, so it must "
            f"export {', '.join(missing)} too"
        )
    for name, kind in {**EXPORTS[abi], **OPTIONAL}.items():
        if name in functions and (has := binary.function_type(functions[name])) != kind:
            raise _refusal(f"the export {name} is {has}; it must be {kind}")


def _check_import(binary: Binary, wanted: Import, abi: Abi) -> None:
    name = f"{_shown(wanted.module)}.{_shown(wanted.name)}"
    if wanted.kind != FUNC:
        raise _refusal(
            f"the import {name} is a {KINDS[wanted.kind]}; only functions can be imported"
        )
    known = IMPORTS[abi].get((wanted.module, wanted.name))
    if known is None:
        modules = sorted({module for module, _ in IMPORTS[abi]})
        near = [n for m, n in IMPORTS[abi] if m == wanted.module]
        there = f"{wanted.module} has {', '.join(near)}" if 0 < len(near) < 20 else ""
        raise _refusal(
            f"the import {name} is unknown; {there or 'known modules are ' + ', '.join(modules)}"
        )
    has = binary.type_of(wanted.type)
    if has != known:
        raise _refusal(f"the import {name} is {has}; it must be {known}")


def _refusal(message: str) -> RequestError:
    return RequestError(Code.INVALID_FIELD, message, path="$.data")


def _exported(names: Mapping[str, int]) -> str:
    shown = [_shown(name) for name in list(names)[:12]]
    return f"it exports {', '.join(shown) or 'nothing of that kind'}" + (
        ", …" if len(names) > 12 else ""
    )


def _shown(name: str) -> str:
    """A name from the module, shortened and without unprintable characters, for an error
    message."""
    short = name if len(name) <= 60 else name[:57] + "..."
    return short if short.isprintable() else repr(short)[1:-1]
