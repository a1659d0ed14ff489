"""AICI's storage commands: a guest sends JSON, which reads or writes a variable of the guest's
request.

Source: AICI's crate ``aici_abi``. This module does not report writes to the client, because
``Variables`` does.
"""

from __future__ import annotations

import binascii
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ....protocol.decoders import json_decoder
from ....protocol.errors import Code, ControllerError
from ..host import Stored, Variables, Written
from .aici_calls import decode, shown

NAME_BYTES = 256
"""Maximum bytes of a variable's name in UTF-8."""


class _Read(Struct):
    name: str


class _Write(Struct):
    name: str
    value: str
    op: Literal["Set", "Append"]
    when_version_is: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


class _Command(Struct, rename="pascal", forbid_unknown_fields=True):
    read_var: _Read | UnsetType = UNSET
    write_var: _Write | UnsetType = UNSET


_command = json_decoder(_Command)

_COMMAND_IS = (
    '{"ReadVar":{"name":"a"}} or {"WriteVar":{"name":"a","value":"00ff","op":"Set" or '
    '"Append","when_version_is":null or a number}}, in UTF-8'
)


def max_bytes(variable_bytes: int) -> int:
    """Maximum bytes of a command whose value has at most ``variable_bytes`` bytes. A value has two
    hexadecimal digits for each byte, and each byte of a name may be escaped with six characters."""
    return 2 * variable_bytes + 6 * NAME_BYTES + 256


def run_command(data: bytes, variables: Variables, variable_bytes: int) -> bytes:
    """Runs a command and returns its answer. Raises ControllerError for an invalid command."""
    command = decode(_command, data, "the storage command", _COMMAND_IS)
    read, write = command.read_var, command.write_var
    if isinstance(read, _Read) and write is UNSET:
        return _variable(variables.get(_name(read.name)))
    if isinstance(write, _Write) and read is UNSET:
        act = variables.set if write.op == "Set" else variables.append
        value = _value(write.value, variable_bytes)
        return _written(act(_name(write.name), value, write.when_version_is))
    raise ControllerError(
        Code.CONTROLLER_FAILED,
        f"{shown(data)} is not exactly one storage command, because it has both ReadVar and "
        f"WriteVar, or neither; expected {_COMMAND_IS}",
    )


def _name(name: str) -> str:
    try:
        size = len(name.encode())
    except UnicodeError as error:
        raise ControllerError(
            Code.CONTROLLER_FAILED, f"the variable name is not UTF-8: {error}"
        ) from None
    if not 0 < size <= NAME_BYTES:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the variable name has {size} bytes of UTF-8; a name has 1 to {NAME_BYTES}",
        )
    return name


def _value(text: str, most: int) -> bytes:
    try:
        value = binascii.unhexlify(text)
    except ValueError as error:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the variable's value {shown(text.encode('utf-8', 'replace'))} is not hexadecimal: "
            f"{error}; expected two digits for each byte",
        ) from None
    if len(value) > most:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the variable's value has {len(value)} bytes; at most {most} are allowed",
        )
    return value


def _variable(stored: Stored | None) -> bytes:
    if stored is None:
        return b'{"VariableMissing":{}}'
    value = stored.value.hex().encode()
    return b'{"ReadVar":{"version":%d,"value":"%b"}}' % (stored.version, value)


def _written(written: Written) -> bytes:
    if written.ok:
        return b'{"WriteVar":{"version":%d}}' % written.version
    return _variable(Stored(written.version, written.value) if written.version else None)
