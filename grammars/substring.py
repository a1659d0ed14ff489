"""Every substring of a text, as an automaton over bytes.

The suffix automaton, built byte by byte, in which a string may only begin at a character. A state
is a set of ends: the places of the text at which its strings end. Two strings that end at the same
places are followed by the same texts, so that there are at most two states for a byte of text.

The automaton is built on bytes and not on characters, so that nothing has to be expanded: in UTF-8
the first byte of a character differs from the others. The empty string continues with a first byte
only, and a state accepts if its strings end between two characters; all its strings begin at a
character and end at the same places, so that this holds for all of them or none.

Sources: A. Blumer et al., The smallest automaton recognizing the subwords of a text, Theoretical
Computer Science 40, 1985; S. Inenaga and M. Takeda, On-line linear-time construction of word suffix
trees, 2006, for strings that begin at some places only.
"""

from __future__ import annotations

from array import array

from .regex.bounds import shown
from .regex.dfa import Dfa

MAX_TEXT_BYTES = 65_536
"""Bytes of UTF-8 of a text."""
MAX_STATES = 65_535
"""States, the dead one included: the guest engine has 16 bits for a state."""
_WORD = "I" if array("I").itemsize == 4 else "L"
_DEAD, _START = 0, 1
_CONTINUES = bytes(byte & 0xC0 == 0x80 for byte in range(256))


class SubstringError(ValueError):
    """A text for which there is no automaton: too long, too many states, or a lone surrogate."""


def compile_substring(text: str) -> Dfa:
    """The automaton of every substring of a text: whole characters, the empty text among them.

    About 1.4 states for a byte of prose and at most 2; a few more than the minimal automaton has if
    the end of the text also occurs elsewhere in it. Raises SubstringError if the text has more than
    ``MAX_TEXT_BYTES`` bytes of UTF-8, needs more than ``MAX_STATES`` states, or has a lone
    surrogate.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise SubstringError(
            f"the text has a lone surrogate at character {error.start:,}, which UTF-8 cannot write"
        ) from None
    if len(data) > MAX_TEXT_BYTES:
        raise SubstringError(
            f"the text has {len(data):,} bytes; at most {MAX_TEXT_BYTES:,} are allowed "
            f"(text {shown(text)})"
        )
    letters = sorted(set(data))
    # Class 0 is that of all bytes that are not in the text, such as 0xFF.
    classes = bytearray(256)
    for number, byte in enumerate(letters, 1):
        classes[byte] = number
    width = len(letters) + 1
    try:
        transitions, accepting = _states(data, bytes(classes), width)
    except _TooMany as error:
        raise SubstringError(
            f"the text of {len(data):,} bytes makes more than {MAX_STATES:,} states; its first "
            f"{error.fits:,} bytes do not, nor do {MAX_STATES // 2:,} bytes of any text "
            f"(text {shown(text)})"
        ) from None
    return Dfa(bytes(classes), width, transitions, _START, accepting)


class _TooMany(Exception):
    """There are too many states; the first ``fits`` bytes do not need too many."""

    def __init__(self, fits: int) -> None:
        super().__init__(fits)
        self.fits = fits


def _states(data: bytes, classes: bytes, width: int) -> tuple[array[int], bytes]:
    """The transitions and which states accept."""
    blank = array(_WORD, bytes(4 * width))
    nexts = blank * 2
    # For each state, the length of its longest string, and the state of the longest end of that
    # string, itself begun at a character, that ends at more places.
    length = [0, 0]
    link = [_DEAD, _DEAD]
    accepting = bytearray((0, 1))
    inside = data.translate(_CONTINUES)
    last = _START
    for at, (label, continues, cut) in enumerate(
        zip(data.translate(classes), inside, (inside + b"\0")[1:], strict=True)
    ):
        new = len(link)
        if new >= MAX_STATES:
            raise _TooMany(at)
        nexts.extend(blank)
        length.append(at + 1)
        accepting.append(not cut)
        # A byte within a character does not continue the empty string.
        stop = _START if continues else _DEAD
        state = last
        last = new
        while state > stop and not nexts[place := state * width + label]:
            nexts[place] = new
            state = link[state]
        if state <= stop:
            link.append(_START)
            continue
        target = nexts[place]
        longest = length[state] + 1
        if length[target] == longest:
            link.append(target)
            continue
        # The shorter strings of the target end here too: they become a state of their own.
        split = new + 1
        if split >= MAX_STATES:
            raise _TooMany(at)
        link.append(split)
        nexts.extend(nexts[target * width : target * width + width])
        length.append(longest)
        accepting.append(accepting[target])
        link.append(link[target])
        link[target] = split
        while state > stop and nexts[place := state * width + label] == target:
            nexts[place] = split
            state = link[state]
    return nexts, bytes(accepting)
