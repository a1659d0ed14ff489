"""The return values of a controller class's calls: ``return sample(mask)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index

from ....protocol.errors import Code, ControllerError
from ....protocol.sampling import Override, Query
from ..host import Host
from ..interface import CONTINUE, Action, Answer
from ..queries import checked_override, checked_query
from .bias_values import BiasValues, bias_of
from .token_set import TokenSet

Mask = TokenSet | Iterable[int] | None
"""The tokens that may be sampled: a TokenSet or any iterable of token ids. None allows every
token."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision that a call of a controller returns. The functions of this module create it."""

    name: str
    action: Action
    count: int = 1
    backtrack: int = 0
    tokens: str | bytes | Sequence[int] = ()
    mask: Mask = None
    bias: BiasValues = None
    query: Query | None = None
    override: Override | None = None


_STOP = Decision("stop", Action.STOP)
_CONTINUE = Decision("go_on", Action.CONTINUE)
_SUSPEND = Decision("suspend", Action.SUSPEND)

RIGHT = {
    "init_prompt": "nothing",
    "pre_process": "go_on(), stop(), suspend(), fork(n), append(tokens)",
    "mid_process": "sample(mask, bias), look(query), splice(backtrack, tokens), append(tokens), "
    "stop()",
    "post_process": "go_on(), stop()",
}
"""The values that each call may return, for error messages."""

_NAMES = {
    "init_prompt": frozenset[str](),
    "pre_process": frozenset({"go_on", "stop", "suspend", "fork", "append"}),
    "mid_process": frozenset({"go_on", "sample", "look", "splice", "append", "stop"}),
    "post_process": frozenset({"go_on", "stop"}),
}
_MAY_BE_NONE = frozenset({"init_prompt", "pre_process", "post_process"})


def stop() -> Decision:
    """Ends the sequence. Allowed in every call except init_prompt."""
    return _STOP


def go_on() -> Decision:
    """Continues with the next call. pre_process and post_process may also return None for this."""
    return _CONTINUE


def suspend() -> Decision:
    """For pre_process: suspends the sequence until it is woken, for example because another
    sequence of the request writes a variable, samples a token or ends.

    When the sequence is woken, pre_process is called again, and may suspend again.
    """
    return _SUSPEND


def fork(count: int) -> Decision:
    """For pre_process: forks the sequence into ``count`` sequences, including this one.

    Each sequence has a copy of the controller. In the same round, the mid_process of each copy
    receives the ids of these sequences as ``fork_group``.
    """
    return Decision("fork", Action.FORK, count=count)


def append(tokens: str | bytes | Sequence[int]) -> Decision:
    """For pre_process and mid_process: appends tokens, or text, and does not sample."""
    return Decision("append", Action.SPLICE, tokens=tokens)


def splice(backtrack: int, tokens: str | bytes | Sequence[int] = ()) -> Decision:
    """For mid_process: drops the last ``backtrack`` tokens, appends tokens or text, and does not
    sample."""
    return Decision("splice", Action.SPLICE, backtrack=backtrack, tokens=tokens)


def sample(
    mask: Mask = None,
    bias: BiasValues = None,
    query: Query | None = None,
    override: Override | None = None,
) -> Decision:
    """For mid_process: samples among the tokens of ``mask``; None allows all.

    ``bias`` is added to the logits before these are divided by the temperature, as ``logit_bias``
    is. It is ``{id: value}``, or a value for each token of the vocabulary (an array of float32 is
    the fastest). Minus infinity forbids a token. ``query`` is a query about the distribution of
    this token, and replaces the controller's attribute ``query``. ``override`` has sampling
    parameters for this token.
    """
    return Decision("sample", Action.CONTINUE, mask=mask, bias=bias, query=query, override=override)


def look(query: Query) -> Decision:
    """For mid_process: reads the distribution of the next token, and does not sample. post_process
    receives no tokens, and the attribute ``distributions`` has the answer. The next ``sample`` or
    ``look`` needs no further forward, unless the sequence has changed or was suspended in
    between."""
    return Decision("look", Action.LOOK, query=query)


def answer_of(call: str, returned: object, host: Host, into: memoryview | None = None) -> Answer:
    """Converts a call's return value to an ``Answer``. Writes the mask of mid_process to ``into``.

    Raises ControllerError, which names the returned value and the allowed values, if the value is
    not allowed.
    """
    if returned is None and call in _MAY_BE_NONE:
        return CONTINUE
    if not isinstance(returned, Decision):
        hint = ""
        if callable(returned) and getattr(returned, "__module__", None) == __name__:
            hint = f", which must be called: {getattr(returned, '__name__', 'stop')}()"
        raise _wrong(f"{call} returned {_short(returned)}{hint}; expected {RIGHT[call]}")
    name = returned.name
    if name not in _NAMES[call]:
        raise _wrong(
            f"{call} returned {name}(…), which is not allowed there; expected {RIGHT[call]}"
        )
    if returned.action is Action.FORK:
        return Answer(Action.FORK, count=_number(f"{call}: fork(n)", returned.count, 1))
    if returned.action is Action.SPLICE:
        drop = _number(f"{call}: splice(backtrack, tokens), backtrack", returned.backtrack, 0)
        tokens = _tokens(f"{call}: {name}(tokens)", returned.tokens, host)
        return Answer(Action.SPLICE, backtrack=drop, tokens=tokens)
    size = host.vocabulary.size
    if returned.action is Action.LOOK:
        return Answer(Action.LOOK, query=checked_query(returned.query, size))
    if into is None or returned.action is not Action.CONTINUE:
        return Answer(returned.action)
    if returned.mask is not None:
        into[:] = _mask(returned.mask, size).mask
    bias = bias_of(returned.bias, size) if returned.bias is not None else None
    query, override = returned.query, returned.override
    return Answer(
        Action.CONTINUE,
        masked=returned.mask is not None,
        bias=bias,
        query=checked_query(query, size) if query is not None else None,
        override=checked_override(override) if override is not None else None,
    )


def _mask(mask: TokenSet | Iterable[int], size: int) -> TokenSet:
    if not isinstance(mask, TokenSet):
        try:
            mask = TokenSet(size, mask)
        except (TypeError, ValueError) as error:
            raise _wrong(
                f"mid_process: sample(mask) with {_short(mask)}: {error}; expected a "
                "TokenSet, an iterable of token ids, or None for every token"
            ) from None
    if mask.size != size:
        raise _wrong(
            f"mid_process: sample(mask) with a mask of {mask.size} tokens; the vocabulary has "
            f"{size}"
        )
    if not mask:
        raise _wrong(
            "mid_process: sample(mask) with a mask that allows no token; expected at least "
            "one, or stop()"
        )
    return mask


def _tokens(what: str, tokens: object, host: Host) -> Sequence[int]:
    if isinstance(tokens, str | bytes):
        text = tokens.encode() if isinstance(tokens, str) else tokens
        return host.vocabulary.tokenize(text)
    if not isinstance(tokens, Iterable):
        raise _wrong(f"{what} with {_short(tokens)}; expected text or a list of token ids")
    size = host.vocabulary.size
    return [_number(f"{what}, a token", token, 0, size - 1) for token in tokens]


def _number(what: str, value: object, least: int, most: int | None = None) -> int:
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        right = f"at least {least}" if most is None else f"{least} to {most}"
        raise _wrong(f"{what} is {_short(value)}; expected a number, {right}")
    return number


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _wrong(message: str) -> ControllerError:
    return ControllerError(Code.CONTROLLER_FAILED, message)
