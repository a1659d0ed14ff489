"""The operations of a script in MicroPython that decides single steps itself (``python.steps``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....protocol.errors import Code, ControllerError
from ..host import Host
from ..interface import Action, Answer
from ..python.bias_values import bias_of
from ..python.operations import Operation
from ..python.steps import AtMid, AtPre, Posted, Step, Suspend
from ..python.token_set import TokenSet
from ..python.transcript import Question

STEPS = frozenset({"at_pre", "at_mid", "suspend", "append_tokens", "splice", "sample", "posted"})
"""The calls of the interpreter's library that need an operation of ``python.steps``."""

_WAITS: dict[str, Callable[[Question], Operation]] = {
    "at_pre": AtPre,
    "at_mid": AtMid,
    "suspend": Suspend,
}


def step_of(host: Host, name: str, given: Sequence[Any], question: Question) -> Operation:
    """Makes the operation of a call from the call's arguments; raises ControllerError for a wrong
    argument."""
    if name in _WAITS:
        return _WAITS[name](question)
    if name == "posted":
        [stops] = given
        return Posted(question, bool(stops))
    if name == "sample":
        mask, bias = given
        allowed = None if mask is None else _allowed(mask, host.vocabulary.size)
        added = bias_of(bias, host.vocabulary.size)
        answer = Answer(Action.CONTINUE, masked=allowed is not None, bias=added)
        return Step(question, answer, allowed, in_pre=False)
    *before, tokens = given
    drop = before[0] if before else 0
    answer = Answer(Action.SPLICE, backtrack=_number(drop), tokens=_tokens(tokens, host))
    return Step(question, answer, None, in_pre=name == "append_tokens")


def _allowed(mask: Any, size: int) -> TokenSet:
    """The set of tokens in ``mask``, which has the bytes of a mask or a list of token ids."""
    if not isinstance(mask, bytes):
        try:
            mask = TokenSet(size, mask).mask
        except (TypeError, ValueError) as error:
            raise _wrong(f"sample: {error}; expected a set of token ids") from None
    found = TokenSet(size)
    if len(mask) != len(found.mask):
        raise _wrong(f"sample: a mask of {len(mask)} bytes; expected {len(found.mask)}")
    found.mask = mask
    if not found:
        raise _wrong("sample: no token is allowed; expected at least one, or stop()")
    return found


def _tokens(tokens: Any, host: Host) -> list[int]:
    if isinstance(tokens, str | bytes):
        text = tokens.encode() if isinstance(tokens, str) else tokens
        most = host.limits.max_text(host.limits.script_s)
        if len(text) > most:
            raise _wrong(f"the text to append has {len(text)} bytes; at most {most} are allowed")
        return host.vocabulary.tokenize(text)
    size = host.vocabulary.size
    right = isinstance(tokens, list) and all(
        isinstance(token, int) and 0 <= token < size for token in tokens
    )
    if not right:
        raise _wrong("tokens that are not valid; expected text or a list of token ids")
    if len(tokens) > host.limits.appended_tokens:
        most = host.limits.appended_tokens
        raise _wrong(f"{len(tokens)} tokens to append; at most {most} are allowed at once")
    return list(tokens)


def _number(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise _wrong(f"splice(backtrack={value!r}); expected a number, at least 0")
    return value


def _wrong(message: str) -> ControllerError:
    return ControllerError(Code.CONTROLLER_FAILED, message)
