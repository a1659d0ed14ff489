"""Combines automata: in a sequence, in an alternation, in a repetition, or up to a stop (a literal
text that ends the combination).

Each operation returns a ``Dfa``, as the compilers of ``regex`` and ``substring`` do, so that a
combination can be a part of another combination. There is one file for each step:

    rows         the transitions of the parts by labels: bytes with the same label are equivalent
    places       the states of several parts in which a text may be: a subset construction
    stops        pairs of a state of the part and the number of matched bytes of the stop
    build        all states that are reached, their minimal automaton, and its table
    operations   the four operations
"""

from .build import CombinationError
from .operations import alternation, repetition, sequence, stop_at

__all__ = ["CombinationError", "alternation", "repetition", "sequence", "stop_at"]
