"""Combines automata: in a sequence, in an alternation, in a repetition, or up to a stop (a literal
text that ends the combination).

Each operation returns a ``Dfa``, as the compilers of ``regex`` and ``substring`` do, so that a
combination can be a part of another combination. There is one file for each step:

    rows         relabels the transitions of the parts with common classes of bytes
    places       the states of a sequence, an alternation or a repetition: a subset construction
    stops        the states of a text that ends with a stop
    build        finds all reachable states, minimises their automaton, and makes its table
    operations   the four operations
"""

from .build import CombinationError
from .operations import alternation, repetition, sequence, stop_at

__all__ = ["CombinationError", "alternation", "repetition", "sequence", "stop_at"]
