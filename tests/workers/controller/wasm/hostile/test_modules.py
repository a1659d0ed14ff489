"""Modules that are not controllers: each is refused with its reason."""

from __future__ import annotations

import pytest
from tokenbus.clients import RequestError

from .....worlds.hostile_guests import System
from .guests import guest

pytestmark = pytest.mark.process


def test_a_module_of_50_mb_is_refused(system: System) -> None:
    """The client already refuses the module. Another test sends such a module to the broker without
    this check."""
    wasm = guest() + b"\0" + b"\xf8\xf0\xea\x17" + bytes(50_000_000 - 8)

    def act() -> RequestError:
        with pytest.raises(RequestError) as caught:
            system.client.upload_controller(wasm)
        return caught.value

    error = system.undisturbed(act)
    assert (error.code, error.path) == ("too_large", "$.data")
    assert error.message == f"the module has {len(wasm)} bytes; the limit is 16777216"


REFUSED = {
    "the import tokenbus.open is unknown; tokenbus has log, fail, seq_id": guest(
        imports='(import "tokenbus" "open" (func (param i32)))'
    ),
    "the import env.system is unknown; known modules are tokenbus, wasi_snapshot_preview1": guest(
        imports='(import "env" "system" (func (param i32) (result i32)))'
    ),
    "the import env.count is a global; only functions can be imported": guest(
        imports='(import "env" "count" (global i32))'
    ),
    "the import tokenbus.log is (i64) -> (); it must be (i32, i32) -> ()": guest(
        imports='(import "tokenbus" "log" (func (param i64)))'
    ),
    "the module is for version 2 of the native ABI (it exports tokenbus_abi_v2); this worker "
    "supports version 1": guest().replace(b"tokenbus_abi_v1", b"tokenbus_abi_v2"),
    "not Wasm": b"#!/bin/sh\nrm -rf /\n",
    "this is not Wasm: it is empty": b"",
    "137 are there": guest()[:-20],
    "the module is not a controller: ": b"\0asm\1\0\0\0",
}
"""The text of each error, and the refused module."""


def test_what_is_no_controller_is_refused(system: System) -> None:
    def every() -> dict[str, RequestError]:
        errors = {}
        for says, wasm in REFUSED.items():
            with pytest.raises(RequestError) as caught:
                system.client.upload_controller(wasm)
            errors[says] = caught.value
        return errors

    for says, error in system.undisturbed(every).items():
        assert (type(error), error.code, error.path) == (RequestError, "invalid_field", "$.data")
        assert says in error.message
