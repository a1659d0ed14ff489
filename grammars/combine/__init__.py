"""Constraints put together: automata in sequence, in alternation, repeated, or up to a stop.

Each operation gives a ``Dfa``, as the compilers of ``regex`` and ``substring`` do, so that a
combination can be a part of another. The way of one, one file for each step:

    rows         bytes that no part tells apart are one label; the rows of the parts by label
    places       where a text may be in several parts at once: the states of a subset construction
    stops        where a text is in a part, and how much of a stop it has just read
    build        all states that are reached, a smaller automaton of them, and its table
    operations   what may follow what
"""

from .build import CombinationError
from .operations import alternation, repetition, sequence, stop_at

__all__ = ["CombinationError", "alternation", "repetition", "sequence", "stop_at"]
