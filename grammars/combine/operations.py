"""The operations on automata: sequence, alternation, repetition, and a text that ends with a
stop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..regex import Dfa, compile_regex
from ..regex.bounds import Budget, Exhausted, shown
from .build import CombinationError, built
from .places import END, Places, State, stride_of
from .stops import Stopped

MAX_STATES = 65_535
"""Maximum number of states, including the dead state. The guest engine has 16 bits for a state."""
MAX_STOP_BYTES = 1_024
"""Maximum number of bytes of a stop in UTF-8."""
_LOOKED_AT = 200_000
"""Maximum number of places (``places.py``) that are examined to find the part that is too large."""


def sequence(
    parts: Sequence[Dfa], *, max_states: int = MAX_STATES, max_seconds: float = 5.0
) -> Dfa:
    """The automaton of a sequence of parts. It matches a text of the first part, followed by a text
    of the second part, and so on.

    ``max_states``: the maximum number of states, before and after minimisation. ``max_seconds``:
    the maximum CPU time of this thread. Raises CombinationError if ``parts`` is empty or a limit is
    exceeded. If a limit is exceeded, the message names the part with the most states in the
    combination.
    """
    _some("sequence", parts)
    stride = stride_of(parts)
    after: list[State] = []
    following = frozenset((END,))
    for number in reversed(range(len(parts))):
        after.append(following)
        start = frozenset((number * stride + parts[number].start,))
        following = start | following if _takes_nothing(parts[number]) else start
    after.reverse()
    return _placed("sequence", parts, following, after, Budget(max_states, max_seconds))


def alternation(
    parts: Sequence[Dfa], *, max_states: int = MAX_STATES, max_seconds: float = 5.0
) -> Dfa:
    """The automaton that matches a text if at least one of the parts matches it. Limits and errors
    are the same as for ``sequence``."""
    _some("alternation", parts)
    stride = stride_of(parts)
    first = {number * stride + part.start for number, part in enumerate(parts)}
    if any(map(_takes_nothing, parts)):
        first.add(END)
    after = [frozenset((END,))] * len(parts)
    budget = Budget(max_states, max_seconds)
    return _placed("alternation", parts, frozenset(first), after, budget)


def repetition(
    part: Dfa,
    least: int,
    most: int | None,
    *,
    max_states: int = MAX_STATES,
    max_seconds: float = 5.0,
) -> Dfa:
    """The automaton of a repeated part. It matches ``least`` to ``most`` texts of the part, one
    after another.

    If ``most`` is None, it matches ``least`` texts or more. The limits are the same as for
    ``sequence``. Raises CombinationError if a limit is exceeded, if ``least`` is negative, or if
    ``most`` is less than ``least``.
    """
    counts = f"{least:,} to {most:,} times" if most is not None else f"{least:,} times or more"
    if least < 0 or (most is not None and most < least):
        raise CombinationError(
            f"cannot repeat a part {counts}: the counts must be 0 or more, the lower one first"
        )
    if max(least, most or 0) > max_states:
        raise CombinationError(
            f"cannot repeat a part {counts}: at most {max_states:,} times are allowed"
        )
    if most == 0:
        return compile_regex("")
    # If the part matches the empty text, so does any number of copies, and the minimum is 0.
    if _takes_nothing(part):
        least = 0
    copies = max(least, 1) if most is None else most
    after: list[State] = []
    for copy in range(1, copies + 1):
        following = {END} if copy >= least else set()
        if copy < copies:
            following.add(copy * part.num_states + part.start)
        elif most is None:
            following.add((copy - 1) * part.num_states + part.start)
        after.append(frozenset(following))
    first = frozenset((part.start, END) if least == 0 else (part.start,))
    counted_to = None if most is None else max(least - 1, 0)
    budget = Budget(max_states, max_seconds)
    return _placed(f"repetition, {counts},", [part] * copies, first, after, budget, counted_to)


def stop_at(
    part: Dfa | None, stop: str, *, max_states: int = MAX_STATES, max_seconds: float = 5.0
) -> Dfa:
    """The automaton of texts that end with ``stop``, contain no other ``stop``, and match a part.

    The stop belongs to the text: the part must match the whole text, including the stop. An earlier
    stop is not allowed even if it overlaps the stop at the end. If ``part`` is None, any text may
    precede the stop.

    Limits and errors are the same as for ``sequence``. Also raises CombinationError if the stop is
    empty, has more than ``MAX_STOP_BYTES`` bytes or contains a lone surrogate, and if the automaton
    would not match any text. For example, the part ``.*`` and a newline as the stop raise it,
    because no text of ``.*`` contains a newline. If the stop should follow the part, use
    ``stop_at(sequence([part, compile_choice([stop])]), stop)``.
    """
    try:
        data = stop.encode()
    except UnicodeEncodeError:
        raise CombinationError(f"the stop {shown(stop)} has a lone surrogate") from None
    if not 1 <= len(data) <= MAX_STOP_BYTES:
        raise CombinationError(
            f"the stop has {len(data):,} bytes; 1 to {MAX_STOP_BYTES:,} are allowed ({shown(stop)})"
        )
    inner = _any_text() if part is None else part
    budget = Budget(max_states, max_seconds)
    try:
        found = built(Stopped(inner, data, budget), budget, [])
    except Exhausted as over:
        raise CombinationError(
            f"the text up to the stop {shown(stop)} {over.what}: the part alone has "
            f"{inner.num_states:,} states, and the stop has {len(data):,} bytes"
        ) from None
    if found is None:
        raise CombinationError(
            f"the language is empty: texts of the part never end with their first {shown(stop)}; "
            "if the stop should follow the part, make a sequence of the part and the stop"
        )
    return found


@lru_cache(maxsize=1)
def _any_text() -> Dfa:
    return compile_regex("(?s).*")


def _some(what: str, parts: Sequence[Dfa]) -> None:
    if not parts:
        raise CombinationError(f"the {what} has 0 parts; expected at least 1")


def _takes_nothing(part: Dfa) -> bool:
    return bool(part.accepting[part.start])


def _placed(
    what: str,
    copies: Sequence[Dfa],
    first: State,
    after: Sequence[State],
    budget: Budget,
    counted_to: int | None = None,
) -> Dfa:
    """Builds the automaton of a combination. The other arguments are those of ``Places``. ``what``
    describes the combination in errors. Raises CombinationError if a limit is exceeded, or if the
    automaton does not match any text."""
    reached: list[State] = []
    try:
        found = built(Places(copies, first, after, budget, counted_to), budget, reached)
    except Exhausted as over:
        raise CombinationError(f"the {what} {over.what}: {_grown(copies, reached)}") from None
    if found is None:
        raise CombinationError(f"the language is empty: the {what} matches no text")
    return found


def _grown(copies: Sequence[Dfa], reached: Sequence[State]) -> str:
    """A text for the error about an exceeded limit. It names the part that adds the most states,
    which is the part whose places (``places.py``) form the most different sets."""
    stride = stride_of(copies)
    parts = list({id(part): part for part in copies}.values())
    if len(parts) == 1 < len(copies):
        return f"its part alone has {parts[0].num_states:,} states"
    sets: list[set[State]] = [set() for _ in copies]
    looked_at = 0
    for state in reversed(reached):
        looked_at += len(state)
        if looked_at > _LOOKED_AT:
            break
        own: dict[int, list[int]] = {}
        for place in state - {END}:
            own.setdefault(place // stride, []).append(place)
        for copy, places in own.items():
            sets[copy].add(frozenset(places))
    # The error names the part with the most states in ``reached``. Among parts with equally many,
    # it names the part whose own automaton has the most states.
    worst = max(range(len(copies)), key=lambda copy: (len(sets[copy]), copies[copy].num_states))
    return (
        f"part {worst + 1} of {len(copies)}, which alone has {copies[worst].num_states:,} states, "
        "needs the most"
    )
