"""Compiles the argument of ``regex``, ``choice`` or ``combination`` to tables, within a time limit.

A compilation is first tried in the worker (``quickly``). If it takes too long, it is stopped and
runs again in a separate process. Each function in ``MAKERS`` raises RequestError if its argument is
not valid, or if compiling takes longer than the limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import msgspec

from .....grammars.regex import RegexError, compile_choice, compile_regex
from .....protocol.errors import RequestError
from .combination import automata, read_combination
from .refusals import refusal

QUICK_S = 0.02
"""Maximum CPU time of a compilation in the worker itself, in seconds. A longer compilation would
keep Python's lock, which rounds need, for too long. Most patterns take a few milliseconds."""
MAX_STATES = 65_000
"""Maximum number of states of an automaton; the grammar guest stores a state's number in 16
bits."""

Maker = Callable[[bytes, float], bytes]
"""A function that compiles an argument to tables, within a number of seconds of CPU time."""


def regex(arg: bytes, seconds: float) -> bytes:
    """The tables of a pattern, which is a JSON string."""
    try:
        return compile_regex(json.loads(arg), max_seconds=seconds).to_bytes()
    except RegexError as error:
        raise refusal(f"regex: {error}") from None


def choice(arg: bytes, seconds: float) -> bytes:
    """The tables of a JSON list of texts."""
    texts = json.loads(arg)
    try:
        return compile_choice(texts, max_states=MAX_STATES, max_seconds=seconds).to_bytes()
    except (RegexError, UnicodeEncodeError) as error:
        raise refusal(f"choice: {error}") from None


def combination(arg: bytes, seconds: float) -> bytes:
    """The tables of the regular parts of a combination (``combination.py``), by the paths of the
    parts, as msgpack."""
    return msgspec.msgpack.encode(automata(read_combination(arg), seconds))


MAKERS: dict[str, Maker] = {"regex": regex, "choice": choice, "combination": combination}


def quickly(make: Maker, arg: bytes) -> bytes | None:
    """The result of ``make``; None if it takes longer than ``QUICK_S``."""
    began = time.thread_time()
    try:
        return make(arg, QUICK_S)
    except RequestError:
        # If most of the time is used up, the error may mean that the compiler ran out of time. A
        # compiler stops before the end of its time, because it reserves a share for finding the
        # most expensive part of the argument.
        if time.thread_time() - began > 0.7 * QUICK_S:
            return None
        raise
