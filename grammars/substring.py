"""Compiles a text to the automaton over bytes that matches every substring of the text.

The automaton is a suffix automaton of the text, but its strings begin only at the first byte of a
character. It is built byte by byte. If several strings occur in the text and their occurrences end
at the same places, one state stands for all of them, because the same continuations are possible
after each of them. The automaton has at most two states for each byte of text.

In UTF-8, the first byte of a character differs from its other bytes. Strings that begin inside a
character are left out: in the state of the empty string, only first bytes of characters have
transitions. A state accepts if its strings end between two characters. This is the same for all
strings of a state, because they end at the same places.

Sources: A. Blumer et al., The smallest automaton recognizing the subwords of a text, Theoretical
Computer Science 40, 1985; S. Inenaga and M. Takeda, On-line linear-time construction of word suffix
trees, 2006, for strings that begin at some places only.
"""

from __future__ import annotations

from array import array

from .regex.bounds import shown
from .regex.dfa import Dfa

MAX_TEXT_BYTES = 65_536
"""Maximum number of bytes of a text in UTF-8."""
MAX_STATES = 65_535
"""Maximum number of states, including the dead state. The guest engine has 16 bits for a state."""
_WORD = "I" if array("I").itemsize == 4 else "L"
_DEAD, _START = 0, 1
_CONTINUES = bytes(byte & 0xC0 == 0x80 for byte in range(256))


class SubstringError(ValueError):
    """The text is too long, needs too many states, or has a lone surrogate."""


def compile_substring(text: str) -> Dfa:
    """The automaton that matches each substring of a text, including the empty text. A substring
    consists of whole characters.

    The automaton has about 1.5 states for each byte of prose, and at most 2. If the end of the text
    also occurs elsewhere in the text, the automaton is not minimal, but has only a few states more.
    Raises SubstringError if the text has more than ``MAX_TEXT_BYTES`` bytes of UTF-8, needs more
    than ``MAX_STATES`` states, or has a lone surrogate.
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
    # Class 0 contains all bytes that are not in the text, such as 0xFF.
    classes = bytearray(256)
    for number, byte in enumerate(letters, 1):
        classes[byte] = number
    width = len(letters) + 1
    try:
        transitions, accepting = _states(data, bytes(classes), width)
    except _TooMany as error:
        raise SubstringError(
            f"the text of {len(data):,} bytes needs more than {MAX_STATES:,} states; its first "
            f"{error.fits:,} bytes fit, and so does every text of at most {MAX_STATES // 2:,} "
            f"bytes (text {shown(text)})"
        ) from None
    return Dfa(bytes(classes), width, transitions, _START, accepting)


class _TooMany(Exception):
    """The automaton has too many states. An automaton of only the first ``fits`` bytes of the text
    would not exceed the maximum."""

    def __init__(self, fits: int) -> None:
        super().__init__(fits)
        self.fits = fits


def _states(data: bytes, classes: bytes, width: int) -> tuple[array[int], bytes]:
    """The transitions of the automaton, and a byte for each state: 1 if the state accepts, 0 if it
    does not."""
    blank = array(_WORD, bytes(4 * width))
    nexts = blank * 2
    # For each state: the length of its longest string, and its suffix link. The link leads to the
    # state of a suffix of this string: the longest suffix that begins at the first byte of a
    # character and occurs at more places.
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
        # Only the shorter strings of the target also end at this place, so they get a separate
        # state.
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
