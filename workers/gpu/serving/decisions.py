"""Decodes the decisions of a RESULT, and the masks and biases to which they refer."""

from __future__ import annotations

import contextlib
import logging
from itertools import zip_longest
from typing import NamedTuple

import msgspec
import numpy as np

from ....protocol.bodies import decode_as
from ....protocol.decoders import msgpack_decoder
from ....protocol.errors import Code, ControllerError
from ....protocol.worker_messages import Result, StepResult
from ..sampling.biases import Bias, read_bias
from ..sampling.distributions import TokenOptions
from ..sampling.under import Under
from .mask_file import MaskFile

log = logging.getLogger(__name__)

_decode_result = msgpack_decoder(Result).decode
_decode_entry = msgpack_decoder(StepResult).decode
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Invalid(NamedTuple):
    """A malformed entry whose request and sequence could be decoded."""

    request: int
    seq: int
    error: str


class Decisions(NamedTuple):
    """The decoded entries of a RESULT."""

    valid: list[StepResult]
    invalid: list[Invalid]
    usual: list[int]
    """Decisions of the most frequent kind, in a short form (``Result.usual``)."""
    host: str
    """The machine id of the controller worker."""
    attempts: dict[int, int]
    """``Result.attempts``: for each restarted controller whose first decision is in this message,
    its ``Start.attempt``. The keys are requests."""


class _RawResult(msgspec.Struct):
    sequences: list[msgspec.Raw]
    usual: list[int] = []
    host: str = ""
    attempts: dict[int, int] = {}


class _Name(msgspec.Struct, array_like=True):
    """The first fields of a StepResult, which identify its sequence."""

    request: int
    seq: int


_decode_name = msgpack_decoder(_Name).decode


def decode_decisions(body: bytes) -> Decisions:
    """Decodes the entries of a RESULT's body. If an entry is malformed, the other entries are still
    decoded.

    Raises RequestError if the body is not a list of entries.
    """
    try:
        result = _decode_result(body)
    except _UNDECODABLE:
        return _one_by_one(body)
    return Decisions(result.sequences, [], result.usual, result.host, result.attempts)


def _one_by_one(body: bytes) -> Decisions:
    raw: _RawResult = decode_as(_RawResult, body, "msgpack")
    found = Decisions([], [], raw.usual, raw.host, raw.attempts)
    for entry in raw.sequences:
        try:
            found.valid.append(_decode_entry(entry))
        except _UNDECODABLE as error:
            try:
                named = _decode_name(entry)
            except _UNDECODABLE:
                log.warning("an entry of a RESULT does not identify its sequence: %s", error)
            else:
                found.invalid.append(Invalid(named.request, named.seq, str(error)))
    return found


def mask_of(one: StepResult, file: MaskFile | None, attachments: list[bytes]) -> np.ndarray | None:
    """The mask of a decision, u32 ``[words]``; None if it allows every token.

    Raises ControllerError if the decision refers to a mask that does not exist.
    """
    if one.row is not None:
        return _mask_in_row(one.row, file)
    if one.attachment is not None:
        return _attached("mask", one.attachment, attachments)
    return None


def bias_of(
    one: StepResult, file: MaskFile | None, attachments: list[bytes], vocab: int
) -> Bias | None:
    """The bias of a decision; None if the decision has no bias. Raises ControllerError if the
    decision refers to a bias that does not exist or is not valid."""
    if one.bias_row is not None:
        return _bias_in_row(one.bias_row, file, vocab)
    if one.bias_attachment is not None:
        return read_bias(_attached("bias", one.bias_attachment, attachments), vocab)
    return None


def _mask_in_row(row: int, file: MaskFile | None) -> np.ndarray:
    found: np.ndarray = _with_row("mask", row, file).rows[row]
    return found


def _bias_in_row(row: int, file: MaskFile | None, vocab: int) -> Bias:
    return read_bias(_with_row("bias", row, file).biases[row], vocab)


def _with_row(what: str, row: int, file: MaskFile | None) -> MaskFile:
    """Returns ``file``. Raises ControllerError if the file does not exist or does not have the row.
    ``what``: "mask" or "bias", for the message of the error."""
    if file is None or not 0 <= row < len(file.rows):
        rows = 0 if file is None else len(file.rows)
        raise _wrong(what, f"row {row} of a mask file with {rows} rows")
    return file


def _attached(what: str, place: int, attachments: list[bytes]) -> np.ndarray:
    """The u32 words of an attachment. Raises ControllerError if the attachment does not exist or is
    not valid. ``what``: "mask" or "bias", for the message of the error."""
    if not 0 <= place < len(attachments):
        raise _wrong(what, f"attachment {place} of a message with {len(attachments)} attachments")
    data = attachments[place]
    if len(data) % 4:
        raise _wrong(what, f"an attachment of {len(data)} bytes, which is not a multiple of 4")
    return np.frombuffer(data, dtype=np.uint32)


def _wrong(what: str, fault: str) -> ControllerError:
    return ControllerError(Code.CONTROLLER_FAILED, f"the controller's {what} is {fault}")


def options_of(one: StepResult, vocab: int) -> TokenOptions | None:
    """The sampling options of a decision, without mask and bias; None if the decision does not have
    such options. Raises ControllerError if the query names a token outside the vocabulary."""
    if one.query is None and one.override is None:
        return None
    tokens = one.query.tokens if one.query is not None else ()
    if tokens and max(tokens) >= vocab:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the controller's query names token {max(tokens)}; the model has tokens 0 to "
            f"{vocab - 1}",
        )
    return TokenOptions(one.query, one.override)


def unders_along(
    one: StepResult, file: MaskFile | None, attachments: list[bytes], vocab: int
) -> list[Under]:
    """The mask and bias for the position after each token of a draft, from a decision. The list
    ends before the first mask or bias that is not valid."""
    found: list[Under] = []
    with contextlib.suppress(ControllerError):
        for place, bias_place in zip_longest(one.along, one.biases_along[: len(one.along)]):
            decision = StepResult(one.request, one.seq, one.action)
            if one.row is not None:
                decision.row, decision.bias_row = place, bias_place
            else:
                decision.attachment, decision.bias_attachment = place, bias_place
            mask = mask_of(decision, file, attachments)
            found.append(Under(mask, bias_of(decision, file, attachments, vocab)))
    return found


def just_samples(one: StepResult) -> bool:
    """Whether a decision only samples. Such a decision may have a mask, a bias and options."""
    more = one.backtrack or one.ff_tokens or one.logs or one.storage or one.wakes
    more = more or one.messages or one.prompt or one.pin is not None or one.awaits
    return one.action == "sample" and not more
