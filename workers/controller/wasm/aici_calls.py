"""Encodes the arguments of AICI's four calls as JSON, and decodes the guest's results.

Source: AICI's crate ``aici_abi``. The functions of this file raise ControllerError if a result has
the wrong format. The error shows the first bytes of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from ....protocol.decoders import json_decoder
from ....protocol.errors import Code, ControllerError
from .. import biases
from ..interface import CONTINUE, STOP, SUSPEND, Action, Answer

SHOWN_BYTES = 200
"""Maximum bytes of a guest's result in an error message."""

MAX_VALUES = 70_000
"""Maximum values in the result of a call. The number is bounded because other threads of the worker
do not run while a result is decoded. The bound is larger than the maximum number of tokens that a
call can append."""
MAX_LISTS = 1024
"""Maximum lists and objects in the result of a call. The bound is larger than the maximum number of
sequences of a request, because pre_process returns a list for each sequence."""
_SMALL_BYTES = MAX_LISTS
"""JSON of at most this number of bytes cannot exceed the two limits above."""

_U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]


class Nothing(Struct):
    """The JSON object ``{}``."""


class _Pre(Struct):
    attention_masks: list[list[float]]
    suspend: bool = False
    ff_tokens: list[_U32] = []


class _Splice(Struct):
    backtrack: _U32
    ff_tokens: list[_U32]


class _Sample(Struct):
    bias: list[float | None] = []
    """For each token, the number that is added to its logit. null stands for minus infinity,
    because Rust writes an infinity as null in JSON."""


class _Mid(Struct, rename="pascal", forbid_unknown_fields=True):
    stop: Nothing | UnsetType = UNSET
    sample_with_bias: _Sample | UnsetType = UNSET
    splice: _Splice | UnsetType = UNSET


class _Post(Struct):
    stop: bool


_T = TypeVar("_T")

_init = json_decoder(Nothing)
_pre = json_decoder(_Pre)
_mid = json_decoder(Literal["Stop"] | _Mid)
_post = json_decoder(_Post)
_numbers = msgspec.json.Encoder().encode

_MID_IS = (
    '"Stop", {"SampleWithBias":{}} or {"Splice":{"backtrack":n,"ff_tokens":[ids]}}; ids and n are '
    '0 or more; SampleWithBias may have a "bias", a number for each token'
)


def init_prompt_argument(prompt: Sequence[int]) -> bytes:
    """The argument of init_prompt."""
    return b'{"prompt":%b}' % _numbers(list(prompt))


def mid_process_argument(fork_group: Sequence[int]) -> bytes:
    """The argument of mid_process."""
    return b'{"fork_group":%b}' % _numbers(list(fork_group))


def post_process_argument(tokens: Sequence[int], backtrack: int) -> bytes:
    """The argument of post_process: ``backtrack`` tokens were dropped, then ``tokens`` were
    appended."""
    if len(tokens) == 1:
        return b'{"tokens":[%d],"backtrack":%d}' % (tokens[0], backtrack)
    return b'{"tokens":%b,"backtrack":%d}' % (_numbers(list(tokens)), backtrack)


def check_init_prompt(result: bytes) -> None:
    """Raises ControllerError if ``result`` is not a result of init_prompt."""
    _decode_result(_init, result, "init_prompt returned", "{}")


def pre_process_answer(result: bytes) -> Answer:
    """Converts a result of pre_process to an ``Answer``.

    A result may have several actions. If it stops, its other actions do not apply. If it suspends
    and does not stop, its tokens and its fork do not apply. If it neither stops nor suspends,
    tokens are appended, and then the sequence forks.
    """
    said = _decode_result(
        _pre,
        result,
        "pre_process returned",
        '{"attention_masks":[[]],"suspend":false,"ff_tokens":[]}: one mask for each sequence '
        "after the call, each empty or of ones; ids are 0 or more",
    )
    masks = said.attention_masks
    for mask in masks:
        if mask and mask.count(1.0) != len(mask):
            weight = next(weight for weight in mask if weight != 1.0)
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"pre_process returned an attention mask with the weight {weight:g}; this engine "
                "attends to all tokens alike, so each weight of an attention mask must be 1",
            )
    if not masks:
        return STOP
    if said.suspend:
        return SUSPEND
    if len(masks) > 1:
        return Answer(Action.FORK, count=len(masks), tokens=said.ff_tokens)
    return Answer(Action.SPLICE, tokens=said.ff_tokens) if said.ff_tokens else CONTINUE


def mid_process_answer(result: bytes, masked: bool, size: int) -> Answer:
    """Converts a result of mid_process to an ``Answer``, for a vocabulary of ``size`` tokens.
    ``masked``: the guest has written a mask during the call."""
    said = _decode_result(_mid, result, "mid_process returned", _MID_IS)
    if isinstance(said, str):
        return STOP
    if (said.stop, said.sample_with_bias, said.splice).count(UNSET) != 2:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"mid_process returned {shown(result)}, which must have exactly one of "
            f"Stop, SampleWithBias and Splice; expected {_MID_IS}",
        )
    splice = said.splice
    if isinstance(splice, _Splice):
        if splice.backtrack <= 1 and not splice.ff_tokens:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the splice of mid_process, backtrack {splice.backtrack} and no ff_tokens, does "
                "nothing: backtrack counts the token about to be generated, so that 1 drops none",
            )
        return Answer(
            Action.SPLICE, backtrack=max(0, splice.backtrack - 1), tokens=splice.ff_tokens
        )
    if said.stop is not UNSET:
        return STOP
    sampled = said.sample_with_bias
    if not isinstance(sampled, _Sample) or not sampled.bias:
        return _MASKED if masked else CONTINUE
    values = np.array([-np.inf if v is None else v for v in sampled.bias], dtype=np.float64)
    with np.errstate(over="ignore"):
        bias = biases.dense(values.astype(np.float32), size)
    return Answer(Action.CONTINUE, masked=masked, bias=bias)


def post_process_answer(result: bytes) -> Answer:
    """Converts a result of post_process to an ``Answer``."""
    said = _decode_result(_post, result, "post_process returned", '{"stop":false}')
    return STOP if said.stop else CONTINUE


def _decode_result(decoder: msgspec.json.Decoder[_T], data: bytes, what: str, right: str) -> _T:
    """Decodes the result of a call. Raises ControllerError if the result has too many values or the
    wrong format."""
    if len(data) > _SMALL_BYTES:
        _check_counts(data, what)
    return decode(decoder, data, what, right)


def decode(decoder: msgspec.json.Decoder[_T], data: bytes, what: str, right: str) -> _T:
    """Decodes a value from a guest. Raises ControllerError if the value has the wrong format. The
    message contains ``right``, which describes the expected format."""
    try:
        return decoder.decode(data)
    except RecursionError:
        wrong = "it is nested too deeply"
    except (msgspec.MsgspecError, UnicodeError) as error:
        wrong = str(error)
    raise ControllerError(
        Code.CONTROLLER_FAILED, f"{what} {shown(data)}: {wrong}; expected {right}"
    )


def _check_counts(data: bytes, what: str) -> None:
    """Raises ControllerError if JSON has too many values to be decoded."""
    for kind, count, most in (
        ("values", data.count(b",") + 1, MAX_VALUES),
        ("lists and objects", data.count(b"[") + data.count(b"{"), MAX_LISTS),
    ):
        if count > most:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"{what} JSON with {count} {kind}; at most {most} are allowed",
            )


def shown(data: bytes) -> str:
    """The beginning of a value from a guest, on one line, for an error message."""
    if not data:
        return "nothing"
    text = data[:SHOWN_BYTES].decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(data) <= SHOWN_BYTES else f"{text}… ({len(data)} bytes)"


_MASKED = Answer(Action.CONTINUE, masked=True)
