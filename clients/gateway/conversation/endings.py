"""How an answer has ended: its receipt, and whether it was cut off."""

from __future__ import annotations

from ....protocol.messages import ConstraintEnd, Token
from ... import GeneratedSequence
from .constraints import Constraint, Receipt
from .growing import GrowingChoice


def is_cut(reason: str | None, called: bool, ended: ConstraintEnd | None) -> bool:
    """Whether the maximum number of tokens has cut an answer off.

    ``called``: whether the answer has calls. If these calls are complete, the client can make them,
    so the answer is not cut off. vLLM reports such answers in the same way. ``ended``: how the
    answer's constraint ended. Calls that were closed early may lack a part of their arguments.
    """
    return reason == "length" and not (called and ended == "complete")


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
