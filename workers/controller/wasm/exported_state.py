"""Adds exports to a module for all of its state, so that instances of the module can be copied."""

from __future__ import annotations

from .wasm_binary import FUNC, OWN_EXPORT, TABLE, Export, read, with_exported_globals
from .wasm_code import changes_tables, why_no_copy

TABLE_EXPORT = f"{OWN_EXPORT}table:"
FUNCTION_EXPORT = f"{OWN_EXPORT}function:"


def with_exported_state(wasm: bytes) -> bytes:
    """The module with its mutable globals exported. If instances can be copied (``why_no_copy``)
    and the code changes tables, all tables and all functions that may be in them are exported too.

    Raises WasmError if the module cannot be read, or if exports must be added and one of the
    module's own names begins with ``OWN_EXPORT``.
    """
    binary = read(wasm)
    more: dict[str, Export] = {}
    if why_no_copy(binary) is None and changes_tables(binary):
        named = set(binary.exported(FUNC).values())
        for index in range(len(binary.tables)):
            more[f"{TABLE_EXPORT}{index}"] = Export(TABLE, index)
        for index in sorted(binary.references - named):
            more[f"{FUNCTION_EXPORT}{index}"] = Export(FUNC, index)
    return with_exported_globals(wasm, more)
