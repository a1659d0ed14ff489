"""How an answer has ended: the reason, and the receipt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ....protocol.messages import ConstraintEnd, Token
from ... import GeneratedSequence
from ..errors import ApiError
from .constraints import Constraint, Receipt
from .growing import GrowingChoice

End = Literal["stop", "length", "tool_calls", "max_tool_turns", "error"]
"""Why an answer ended. ``tool_calls``: the client has to make calls."""


def end_of(reason: str | None, called: bool = False, ended: ConstraintEnd | None = None) -> End:
    """Why a sequence ended. ``reason``: the bus's finish reason.

    ``called``: whether the sequence has calls. If these calls are complete, the client can make
    them, so the maximum number of tokens has not cut the answer off. vLLM reports such answers in
    the same way. ``ended``: how the sequence's constraint ended. Calls that were closed early may
    lack a part of their arguments.
    """
    if reason == "error":
        return "error"
    if reason == "length" and not (called and ended == "complete"):
        return "length"
    return "tool_calls" if called else "stop"


def check_some_succeeded(sequences: Sequence[GeneratedSequence]) -> None:
    """Raises ApiError 400 with the error of the first sequence if every sequence failed."""
    if sequences and all(one.finish_reason == "error" for one in sequences):
        first = sequences[0]
        raise ApiError(
            400, first.error or "the sequences failed", code=first.code or "controller_failed"
        )


def receipt_of(
    constraint: Constraint | None, sequence: GeneratedSequence | GrowingChoice, end: Token | None
) -> Receipt | None:
    """The receipt of an ended choice; None if the receipt would be empty.

    ``end`` is the last entry. If it is None, its values are read from ``sequence``.
    """
    if end is not None:
        ended, error, code, exact = end.constraint, end.error, end.code, end.exact
        messages = end.messages
    else:
        assert isinstance(sequence, GeneratedSequence)
        ended, error, code = sequence.constraint, sequence.error, sequence.code
        exact, messages = sequence.exact, sequence.messages
    receipt = Receipt(
        constraint=constraint.label if constraint is not None and ended is not None else None,
        ended=ended,
        logs=sequence.logs,
        storage=list(sequence.storage),
        messages=list(messages),
        error=error or "",
        code=code or "",
        exact=exact,
    )
    return receipt if receipt != Receipt() else None
