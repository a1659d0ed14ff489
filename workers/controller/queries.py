"""Checks of a controller's queries and of its overrides of sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index

from ...protocol.errors import Code, ControllerError
from ...protocol.sampling import MAX_QUERY_TOKENS, MAX_QUERY_TOP, Override, Query

_MAX_SEED = 2**63 - 1


def checked_query(query: object, size: int) -> Query:
    """Checks a query for a vocabulary of ``size`` tokens, and returns it without repeated tokens.
    Raises ControllerError for the first invalid value."""
    if not isinstance(query, Query):
        raise _wrong(f"the query is {query!r}; expected Query(top, tokens)")
    top = _whole("top of the query", query.top, 0, MAX_QUERY_TOP)
    if not isinstance(query.tokens, Iterable):
        raise _wrong(f"the tokens of the query are {query.tokens!r}; expected a list of ids")
    tokens = list(dict.fromkeys(query.tokens))
    if len(tokens) > MAX_QUERY_TOKENS:
        raise _wrong(f"the query has {len(tokens)} tokens; at most {MAX_QUERY_TOKENS} are allowed")
    return Query(top, [_whole("a token of the query", token, 0, size - 1) for token in tokens])


def checked_override(override: object) -> Override:
    """Checks an override, and returns it with its numbers converted to float and int. Raises
    ControllerError for the first invalid value."""
    if not isinstance(override, Override):
        raise _wrong(f"the override is {override!r}; expected Override(temperature, top_p, seed)")
    temperature, top_p, seed = override.temperature, override.top_p, override.seed
    if temperature is not None and not 0 <= _number("temperature", temperature) < float("inf"):
        raise _wrong(f"the temperature of the override is {temperature}; expected 0 or more")
    if top_p is not None and not 0 < _number("top_p", top_p) <= 1:
        raise _wrong(f"the top_p of the override is {top_p}; expected a number above 0, at most 1")
    return Override(
        None if temperature is None else float(temperature),
        None if top_p is None else float(top_p),
        None if seed is None else _whole("the seed of the override", seed, 0, _MAX_SEED),
    )


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise _wrong(f"the {name} of the override is {value!r}; expected a number") from None


def _whole(name: str, value: object, least: int, most: int) -> int:
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise _wrong(f"{name} is {value!r}; expected a whole number, {least} to {most}")
    return number


def _wrong(message: str) -> ControllerError:
    return ControllerError(Code.CONTROLLER_FAILED, message)
