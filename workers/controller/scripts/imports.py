"""The functions that QuickJS imports: the functions that every native module may import, and
``next_tokens``. ``next_tokens`` returns the tokens that a constraint allows after a text."""

from __future__ import annotations

import array

from ....protocol.errors import Code, ControllerError, TokenbusError
from ..wasm.host_functions import HostFunction, linkers, running
from ..wasm.native import FUNCTIONS, NativeState

MAX_ARGUMENT_BYTES = 1024 * 1024
"""Maximum bytes of a constraint's argument."""
MAX_ERROR_BYTES = 240
"""Maximum bytes of an error's text, because QuickJS cuts off longer texts."""
QUESTION_BYTES = 65_536
"""A call of ``next_tokens`` counts as much work as copying this number of bytes
(``Guest.charge``)."""
MAY_END, ENDS, REFUSED = 1, 2, 0x8000_0000
"""Flags of the result of ``next_tokens``: the text may end, the text must end, or the constraint
reports an error."""


def _next_tokens(
    state: NativeState,
    kind: int,
    kind_size: int,
    argument: int,
    size: int,
    text: int,
    count: int,
    mask: int,
    mask_size: int,
) -> int:
    guest, questions = state.guest, state.host.questions
    if questions is None:
        raise ControllerError(Code.CONTROLLER_FAILED, "this worker has no constraints")
    if size > MAX_ARGUMENT_BYTES:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the argument of a constraint has {size} bytes; at most {MAX_ARGUMENT_BYTES} are "
            "allowed",
        )
    guest.charge(QUESTION_BYTES + size + 4 * count)
    name = guest.read(kind, kind_size).decode("utf-8", "replace")
    given = guest.read(argument, size).decode("utf-8", "replace")
    tokens = array.array("I", guest.read(text, 4 * count)).tolist()
    try:
        found = questions.next_tokens(name, given, tokens)
    except TokenbusError as error:
        if error.code == Code.CONTROLLER_TIMEOUT:
            raise
        # The script gets an exception with the line of the call.
        message = error.message.encode()[: min(mask_size, MAX_ERROR_BYTES)]
        guest.write(mask, message)
        return REFUSED + len(message)
    finally:
        # The constraint may have run another guest on this thread, so the running guest is set
        # again.
        running.guest = guest
    guest.write_part(mask, found.mask, mask_size)
    return MAY_END * found.may_end + ENDS * found.ends


linker_of = linkers(
    {**FUNCTIONS, ("tokenbus", "next_tokens"): HostFunction("iiiiiiii", "i", _next_tokens)}
)
"""Returns the linker of an engine with these functions."""
