"""The messages between a worker and its guest processes.

The worker decodes every answer with these types, because a compromised process can send any bytes.
While the worker decodes an answer, its other threads wait (for the GIL). So an answer has few
values: its tokens are bytes, its lists are short, and unknown fields are refused before they are
read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ....protocol.decoders import msgpack_decoder
from ....protocol.errors import Code, ControllerError, TokenbusError
from ....protocol.sampling import (
    MAX_SCORED_TEXTS,
    MAX_SCORED_TOKENS,
    Distribution,
    Override,
    Query,
    Scores,
)
from ..interface import Action
from ..limits import Limits
from ..wasm.aici_storage import NAME_BYTES
from ..wasm.compiled_modules import Abi

Count = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]
"""CPU time in seconds. It counts towards the tenant's share of the thread pool."""
MAX_ITEMS = 512
"""Maximum items of a request. A batch has fewer items (``batches.py``)."""
MAX_TOKENS = 524_288
"""Maximum tokens of an answer. The sandbox in the process has a lower limit on the tokens that a
guest appends."""
MAX_TEXT_TOKENS = 1024 * 1024
"""Maximum tokens of a text about which a script asks a constraint."""
MAX_GENERATE_BYTES = 8 * 1024 * 1024
"""Maximum bytes of the JSON with which a script lets the model generate a text."""
MAX_ERROR = 16_384
"""Maximum characters of an error message. The rest is cut off."""
Tokens = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
"""Tokens as u32 (``packed``)."""
_ScoredText = Annotated[bytes, Meta(max_length=4 * MAX_SCORED_TOKENS)]
VariableName = Annotated[str, Meta(max_length=NAME_BYTES)]


class HostSpec(Struct, array_like=True, frozen=True):
    """The fields of a ``Host`` that are sent to a guest process."""

    request: int
    seq: int
    arg: bytes
    limits: Limits
    max_tokens: int
    ignore_eos: bool
    counted: bool
    """Whether the guest's memory counts towards its tenant's share."""


class Message(Struct, array_like=True, tag=str.lower, forbid_unknown_fields=True):
    """A message. Its type is the lower-case name of its class."""


class OfController(Message):
    """A message about a controller. ``handle`` is the number of the controller in its process."""

    handle: int


class Load(Message):
    """Loads a compiled module."""

    module: str
    abi: Abi
    why_no_fork: str | None
    code: bytes
    script: bytes | None = None
    """The text of a script; None for a module, and for a script in the request's argument."""


class Begin(OfController):
    """Creates a controller of a module, with the number ``handle``."""

    module: str
    host: HostSpec


class Prompt(OfController):
    """Calls init_prompt of a controller."""

    tokens: list[int]


class Item(Struct, array_like=True):
    """The round of one controller: post_process if ``tokens`` is not None, then pre_process and
    mid_process. The round ends early at a call that does not return CONTINUE."""

    handle: int
    tokens: list[int] | None = None
    backtrack: int = 0
    last: bool = False
    """Whether only post_process is called, because the sequence has ended."""
    distributions: list[Distribution] = []
    limits: Limits | None = None
    """The new limits; None if the limits have not changed."""
    scores: Scores = []
    """The scores of the texts that the controller has scored. ``tokens`` is then empty."""
    refusal: str = ""
    """The reason why a context or a constraint was refused, as in ``Host.refusal``. Empty if
    nothing was refused."""
    logprobs: list[float | None] = []
    """The log-probabilities of the tokens, as in ``Host.logprobs``."""


class Advance(Message):
    """Runs the rounds of several controllers one after another."""

    items: list[Item]


class Mid(OfController):
    """Calls mid_process of a controller after a fork. If mid_process returns AGAIN, also makes the
    calls that follow."""

    group: list[int]


class Fork(OfController):
    """Copies a controller to ``child``."""

    child: int
    host: HostSpec


class Close(OfController):
    """Frees a controller."""


class Told(Message):
    """The worker's answer to an ``Asked``."""

    ok: bool = True
    """The result, depending on the question: whether a variable was written, whether an input has
    arrived, or whether a text under a constraint may end."""
    version: int = 0
    """The version of a variable, or 1 if a text under a constraint must end."""
    value: bytes | None = None
    """A variable's value, an input, the name of a tool call's record, or the mask of the next
    tokens."""
    error: Fault | None = None


class Fault(Struct, array_like=True, forbid_unknown_fields=True):
    """The error of a call that failed."""

    code: str
    message: str

    @classmethod
    def of(cls, error: TokenbusError) -> Fault:
        """The fault that an exception reports."""
        return cls(str(error.code), error.message)

    def error(self) -> TokenbusError:
        """The exception of the fault. Unknown codes are replaced and long texts are cut, because a
        compromised process may send any bytes."""
        code = self.code if self.code in set(Code) else Code.CONTROLLER_FAILED
        known = code in (Code.CONTROLLER_FAILED, Code.CONTROLLER_TIMEOUT)
        return (ControllerError if known else TokenbusError)(code, self.message[:MAX_ERROR])


ToGuest = Load | Begin | Prompt | Advance | Mid | Fork | Close | Told


class PreAnswer(Struct, array_like=True, forbid_unknown_fields=True):
    """The answer of pre_process."""

    action: int
    count: Count = 1
    tokens: Tokens = b""


class _Query(Query, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A ``Query`` without further fields."""


class _Override(Override, array_like=True, frozen=True, forbid_unknown_fields=True):
    """An ``Override`` without further fields."""


class MidAnswer(Struct, array_like=True, forbid_unknown_fields=True):
    """The answer of mid_process. The mask is in the shared memory of the channel. The number of the
    item in the request is the mask's position in this memory."""

    action: int
    backtrack: Count = 0
    tokens: Tokens = b""
    masked: bool = False
    pairs: Count | None = None
    """Number of pairs of the bias. A dense bias has 0 pairs. None means that the answer has no
    bias."""
    bias: bytes = b""
    shared: Count = 0
    """Number of bytes of the bias in shared memory, where the bias follows the mask of the first
    item. 0 if the bias is in the field ``bias``."""
    query: _Query | None = None
    override: _Override | None = None
    complete: bool = False
    generate: Annotated[bytes, Meta(max_length=MAX_GENERATE_BYTES)] = b""
    texts: Annotated[list[_ScoredText], Meta(max_length=MAX_SCORED_TEXTS)] = []
    name: str = ""
    """The name of a context. The guest process does not check the length of the name. The worker
    checks it, and sends the script an error if the name is too long."""
    pin_s: float = 0.0
    logprobs: bool = False


class Outcome(Struct, array_like=True, omit_defaults=True, forbid_unknown_fields=True):
    """The results of the calls of one controller. The field of a call is None if the call was not
    made or has failed. If a call has failed, it is the call after the last answer, and ``fault`` is
    its error.
    """

    post: int | None = None
    pre: PreAnswer | None = None
    mid: MidAnswer | None = None
    fault: Fault | None = None
    log: bytes = b""
    dropped: Annotated[int, Meta(ge=0)] = 0
    """Number of bytes that did not fit into the log."""
    takes_drafts: bool = False
    slow: bool = False
    """Whether the item took so long that the next round should run on a separate thread."""


class Done(Message):
    """The answer to a request. The outcome of an item is None if the item's round was *usual*: the
    controller accepted the tokens, wrote only a mask, and logged nothing."""

    items: Annotated[list[Outcome | None], Meta(max_length=MAX_ITEMS)]
    cpu_s: Seconds = 0.0
    """Seconds of CPU time that the request took."""


class ConstrainedText(Struct, array_like=True, forbid_unknown_fields=True):
    """The value of the question ``next_tokens``: the argument of the constraint, and the tokens of
    the text."""

    argument: str
    tokens: Annotated[bytes, Meta(max_length=4 * MAX_TEXT_TOKENS)]


Question = Literal[
    "get", "await_write", "set", "append", "receive", "send", "call", "memory", "next_tokens"
]


class Asked(Message):
    """A question of a guest to its worker during a call.

    ``get``, ``await_write``, ``set`` and ``append`` read or write the variable ``name``. ``number``
    is the awaited version, or the version that a write expects. ``receive`` requests the next
    input. ``send`` sends the text ``value`` to the client. ``call`` calls the tool ``name``.
    ``memory`` requests ``number`` bytes. ``next_tokens`` requests the tokens that the constraint
    ``name`` allows after a text, and ``value`` is a ``ConstrainedText``.
    """

    handle: int
    what: Question
    name: VariableName = ""
    value: bytes = b""
    number: int | None = None


FromGuest = Done | Asked

encode = msgspec.msgpack.Encoder().encode
decode_to_guest = msgpack_decoder(ToGuest).decode
decode_text = msgpack_decoder(ConstrainedText).decode
decode_from_guest = msgpack_decoder(FromGuest).decode
_decoders = {kind: msgpack_decoder(kind).decode for kind in (PreAnswer, MidAnswer, Asked)}


def packed(tokens: Iterable[int]) -> bytes:
    """Tokens as u32, little-endian. Raises ControllerError if a script has passed a value that is
    not a token id."""
    try:
        return array("I", list(tokens)).tobytes()
    except (TypeError, OverflowError) as error:
        raise ControllerError(Code.CONTROLLER_FAILED, f"a token id is not valid: {error}") from None


def unpacked(data: bytes) -> list[int]:
    """The tokens that ``packed`` has encoded. Raises ValueError if the size is not valid."""
    tokens = array("I")
    tokens.frombytes(data)
    return tokens.tolist()


def encode_checked(message: PreAnswer | MidAnswer | Asked) -> bytes:
    """Encodes a message of a guest process. Raises ControllerError if a script has passed a value
    of a wrong type or out of range. The worker would kill the process if it sent such a message."""
    try:
        data = encode(message)
        _decoders[type(message)](data)
    except (ValueError, TypeError, OverflowError) as error:
        what = message.what if isinstance(message, Asked) else Action(message.action).name.lower()
        # The remaining part of msgspec's text is the position in the encoded message.
        reason = str(error).partition(" - at ")[0]
        raise ControllerError(Code.CONTROLLER_FAILED, f"{what}: {reason}") from None
    return data
