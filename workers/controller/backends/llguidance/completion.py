"""Finds a short *completion*: a text that completes a given text under an llguidance grammar. The
search is bounded and uses the grammar's masks.

llguidance itself does not compute completions. A *matcher* of llguidance follows one text under a
grammar, and computes the masks. The search uses a matcher of the same grammar over a vocabulary of
the 256 bytes. Visiting one state of the matcher takes a microsecond.

The search looks for the nearest *place* where a closing bracket, a comma or the closing quote of a
string is allowed. The *way* to this place is the shortest sequence of bytes that leads there. The
search appends the way, and then the bracket, comma or quote. It repeats this until the text may
end. If a property's name may begin, the names that the schema requires are tried first. The search
never backtracks, because every text that the grammar allows has a completion.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from llguidance import LLMatcher

from .checking.budget import Budget, Exhausted
from .checking.obeying import similar
from .checking.walks import Checks, Invalid, Walk
from .consuming import consume
from .distinct_names import counts_names, repeated, with_distinct_names
from .patterns import Pattern, patterns_of, required_names
from .trial import byte_tokenizer, parser_limits

MAX_BYTES = 16_384
"""Maximum bytes of a completion."""
MAX_STEPS = 4_000
"""Maximum states that one search visits."""
MAX_NEAR = 200
"""Maximum states that are visited on the way to one place. After this number, the search takes the
best way found so far."""
FEW_NEAR = 16
"""After visiting this number of states on the way to one place, the search accepts any way, not
only the shortest. In a string, it first tries matches of the schema's patterns. If a completion of
an earlier text is known, it tries these matches immediately."""
FEW_BYTES = 20
"""If at most this number of different bytes may follow, each of them is tried."""
FEW_BRANCHES = 4
"""If at most this number of different bytes may follow, all of them have the same priority, even
bytes that seem to lead to the same state."""
MAX_RUN = 1_024
"""Maximum number of times that one byte is repeated to fill a string."""
FREE_BYTES = 128
"""A text counts as free text if more than this number of the 256 bytes may follow."""
MAX_SIMILAR = 100
"""Maximum number of similar completions that are tried if the values of the found completion do not
pass the checks."""
MAX_CHECKS = 20_000
"""Maximum steps of the checks of all similar completions together (``checking.budget.Budget``)."""
BYTES_OF_CHECK = 8
"""Number of bytes of a similar completion that count as one step of its check."""
MAX_TAILS = 8
"""Maximum suffixes of the last completion that are tried at each place."""

_VALUES = (b"0", b'""', b"[]", b"{}", b"null", b"true", b"false")
"""Values that are tried first if a value may begin."""

_END = byte_tokenizer().eos_token
_OPENING = ord('"')
_QUOTE = 1 << _OPENING


def _bits(characters: str) -> int:
    return sum(1 << ord(character) for character in characters)


_BRACKETS, _COMMA = _bits("}])"), _bits(",")
_ALL_BYTES = (1 << 256) - 1
_CLASSES = tuple(
    map(
        _bits,
        (
            *('"', "123456789", "0", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
            *"-:./@_ ,+#=;|$%&*()[]{}<>?!^~`'",
        ),
    )
)
"""Classes of bytes. A grammar rarely distinguishes the bytes of one class, so only the first
allowed byte of each class is tried. Zero comes after the other digits, because many programs refuse
the year 0000."""
_LISTED = sum(_CLASSES)
_DIGITS, _ZERO = _bits("0123456789"), _bits("0")

_STAY, _ADVANCED = -1, -2
"""Values of ``_Way.byte`` for a way whose next byte has not been chosen yet: ``_STAY`` before the
forced bytes are appended to the way, ``_ADVANCED`` afterwards."""
_Mask = int


def shortest_text(grammar: str, until: float) -> bytes | None:
    """Searches for the shortest text of a grammar. Returns None if the search does not find a text
    before this thread has used ``until`` seconds of CPU time."""
    return Completions(grammar).start().find(until)


class Completions:
    """Finds completions of texts under one grammar. The caller serializes all calls of this object
    and of the objects that it creates, because their matchers share the lexer's states."""

    def __init__(self, grammar: str, checks: Checks | None = None) -> None:
        """``checks``: the checks that the values of a completed text have to pass; None if masks
        enforce the whole schema."""
        self._grammar = grammar
        self.checks = checks
        self._matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=parser_limits())
        self._patterns: list[Pattern] | None = None
        self._names: list[bytes] | None = None
        self._shortest: bytes | None = None
        self.counts_names = counts_names(grammar)
        """Whether names are counted. If so, an object of a completion must not repeat a name."""

    def start(self) -> Completion:
        """A ``Completion`` of the empty text."""
        return Completion(self, self._matcher.deep_copy())

    def shortest(self, until: float) -> bytes | None:
        """A completion of the empty text. Later searches try suffixes of this completion for other
        texts."""
        if self._shortest is None:
            matcher = self._matcher.deep_copy()
            found = _Search(self, matcher, 0, b"").run(b"", until)
            self._shortest = self.start().obeying(self.distinct(b"", found, matcher))
        return self._shortest

    def distinct(self, text: bytes, found: bytes | None, matcher: LLMatcher) -> bytes | None:
        """The completion ``found`` of a text. If ``counts_names`` is true, repeated names are
        replaced."""
        if found is None or not self.counts_names:
            return found
        return with_distinct_names(text, found, partial(_completes, matcher))

    @property
    def names(self) -> list[bytes]:
        """Names of properties that are required somewhere in the schema, as they are written in
        JSON."""
        if self._names is None:
            self._names = required_names(self._grammar)
        return self._names

    @property
    def patterns(self) -> list[Pattern]:
        """The patterns of the schema, compiled when a search first needs them."""
        if self._patterns is None:
            self._patterns = patterns_of(self._grammar)
        return self._patterns


class Completion:
    """A text, and the last completion that was found for this text or for its beginning."""

    def __init__(self, shared: Completions, matcher: LLMatcher) -> None:
        self._shared = shared
        self._matcher = matcher
        self._quoted = 0
        """1 in a string of JSON, 2 after a backslash in such a string, 0 elsewhere."""
        self._string = b""
        """The bytes of the current string so far; empty if the text does not end in a string."""
        self._known: bytes | None = None
        self._since = 0
        """Number of bytes that were appended since the last completion was found. If the completion
        began with the appended bytes, they were removed from the completion, and the number is
        0."""
        self._begun = False
        """Whether the text has any bytes."""
        self._text = b""
        """The whole text; empty if names are not counted."""
        self._walk = Walk()
        self._checked = b""
        """The whole text; empty if its values are not checked."""
        self.steps = 0
        """The number of states that searches have visited, plus the number of completions whose
        values were checked."""

    def copy(self) -> Completion:
        """A copy with the same text and completion."""
        other = Completion(self._shared, self._matcher.deep_copy())
        other._quoted, other._string = self._quoted, self._string
        other._known, other._since = self._known, self._since
        other._begun, other._text = self._begun, self._text
        other._walk, other._checked = self._walk, self._checked
        return other

    def append(self, text: bytes) -> bool:
        """Appends bytes to the text; returns whether the grammar and the checks allow them."""
        if self._shared.checks is not None:
            walk = self._walk_after(text, Budget(MAX_CHECKS))
            if walk is None:
                return False
            self._walk, self._checked = walk, self._checked + text
        if consume(self._matcher, text) is None:
            return False
        self._begun = self._begun or bool(text)
        if self._shared.counts_names:
            self._text += text
        self._quoted = _quotes(self._quoted, text)
        self._string = _string(self._string, self._quoted, text)
        if self._known is not None and not self._since and self._known.startswith(text):
            self._known = self._known[len(text) :]
        else:
            self._since += len(text)
        return True

    @property
    def in_string(self) -> bool:
        """Whether the text ends in a string of JSON, but not after a backslash."""
        return self._quoted == 1

    def keep(self, known: bytes) -> bool:
        """If the bytes ``known`` complete the text, stores them as the completion. Returns whether
        these bytes complete the text."""
        if not self.fits(known):
            return False
        self._known, self._since = known, 0
        return True

    def fits(self, text: bytes, budget: Budget | None = None) -> bool:
        """Whether these bytes complete the text and the values of the whole text pass the checks.
        If names are counted, no name may be repeated. ``budget``: the steps that several checks
        share."""
        return (
            _completes(self._matcher, text)
            and not (self._shared.counts_names and repeated(self._text + text, len(self._text)))
            and self._obeys(text, budget or Budget(MAX_CHECKS))
        )

    def obeying(self, found: bytes | None, budget: Budget | None = None) -> bytes | None:
        """Returns the completion ``found`` if its values pass the checks. If they do not, returns a
        similar completion whose values pass, or None if no such completion is found. ``budget``:
        the steps of several checks together."""
        if found is None or self._shared.checks is None:
            return found
        budget = budget or Budget(MAX_CHECKS)
        tried = chain((found,), islice(similar(found, self.in_string), MAX_SIMILAR))
        for one in tried:
            self.steps += 1
            if self.fits(one, budget):
                return one
        return None

    def _obeys(self, text: bytes, budget: Budget) -> bool:
        checks = self._shared.checks
        if checks is None:
            return True
        try:
            budget.take(len(text) // BYTES_OF_CHECK)
            walk = self._walk_after(text, budget)
            return walk is not None and checks.ends(walk, self._checked + text, budget)
        except Exhausted:
            return False

    def _walk_after(self, text: bytes, budget: Budget) -> Walk | None:
        """The walk after more text; None if a value of the text does not pass the checks."""
        assert self._shared.checks is not None
        try:
            return self._shared.checks.after(self._walk, self._checked, text, budget)
        except (Invalid, Exhausted):
            return None

    @property
    def free(self) -> bool:
        """Whether the text may end here, and nearly any text may follow, for example free text
        before an optional tool call."""
        return self._matcher.is_accepting() and _mask(self._matcher).bit_count() > FREE_BYTES

    def find(self, until: float = math.inf, budget: Budget | None = None) -> bytes | None:
        """Bytes that complete the text. The last result is reused if it still completes the text,
        for example in the middle of a string.

        None if the search does not find a completion before the thread's CPU time reaches ``until``
        seconds. ``budget``: the steps of several checks together.
        """
        if self._known is None and not self._begun:
            self._known = self._shared.shortest(until)
        known, since = self._known, self._since
        if known is None:
            known, since = self._shared.shortest(until) or b"", 0
        elif not since:
            return known
        # In free text, the last completion still completes the longer text. In a date, the appended
        # bytes replace the first bytes of the last completion.
        for text in (known, known[since:]) if since else ():
            if self.fits(text, budget):
                self._known, self._since = text, 0
                return text
        search = _Search(self._shared, self._matcher, self._quoted, self._string)
        found = search.run(known, until)
        found = self.obeying(self._shared.distinct(self._text, found, self._matcher), budget)
        self._known, self._since = found, 0
        self.steps += search.steps
        return self._known


class _Way(NamedTuple):
    """The beginning of a way to the next place (see the module's docstring), as far as the search
    has followed this way."""

    length: int
    others: int
    """Number of bytes of the way that were not the first choice: other bytes were tried earlier in
    the same state."""
    repeats: int
    """Number of bytes of the way that led to the same mask as a byte that was tried earlier in the
    same state."""
    byte: int
    """The next byte of the way, or ``_STAY``, or ``_ADVANCED``."""
    path: bytes
    matcher: LLMatcher
    """The matcher before ``byte``."""
    quoted: int
    before: _Mask
    """The mask that allowed the last byte; 0 at the beginning."""

    def cost(self, near: bool) -> int:
        """The cost of the way. The search follows the way with the lowest cost first. Normally the
        length counts most, so that the shortest way is found. If ``near`` is true, ``others``
        counts most, so that some way is found soon."""
        return self.length + (12 * self.others if near else 4 * self.repeats)


class _Search:
    def __init__(self, shared: Completions, matcher: LLMatcher, quoted: int, string: bytes) -> None:
        self._shared = shared
        self._matcher = matcher.deep_copy()
        self._quoted = quoted
        self._string = string
        self._path = b""
        self.steps = 0
        self._until = math.inf
        self._known = False
        """Whether a completion of an earlier text is known. Then this search does not have to find
        the shortest completion."""
        self._tails: list[bytes] = []
        """Suffixes of an earlier completion that are tried after the opening quote of a string."""

    def run(self, known: bytes, until: float) -> bytes | None:
        """Searches for a completion of the text. ``known`` is the completion of an earlier text,
        whose suffixes are tried first."""
        self._until, self._known = until, bool(known)
        starts = [at for at, byte in enumerate(known) if byte in b'"}]),']
        tails = [known[at:] for at in starts[:MAX_TAILS]]
        strings = [at + 1 for at in starts if known[at] == _OPENING]
        self._tails = [known[at:] for at in strings[:MAX_TAILS]]
        while len(self._path) < MAX_BYTES and self.steps < MAX_STEPS:
            for tail in tails:
                if _completes(self._matcher, tail):
                    return self._path + tail
            if self._matcher.is_accepting():
                return self._path
            if not self._go_on():
                return None
        return None

    def _take(self, matcher: LLMatcher, quoted: int, path: bytes) -> bool:
        self._matcher, self._quoted = matcher, quoted
        self._string = _string(self._string, quoted, path)
        self._path += path
        return True

    def _value(self, matcher: LLMatcher, path: bytes) -> bool:
        """Appends one of the shortest JSON values if it is allowed and may end there. Returns
        whether a value was appended."""
        for value in _VALUES:
            if matcher.validate_tokens(list(value)) < len(value):
                continue
            after = matcher.deep_copy()
            after.consume_tokens(list(value))
            if after.is_accepting() or _mask(after) & (_BRACKETS | _COMMA):
                return self._take(after, 0, path + value)
        return False

    def _name(self, matcher: LLMatcher, path: bytes) -> bool:
        """Completes the current string to a required name if one fits. Returns whether the string
        was completed."""
        begun = _string(self._string, 1, path)
        quote = 1 + len(begun)
        before = (self._path[-quote - 2 :] + path)[:-quote]
        if before.rstrip().endswith(b":"):
            return False  # The string is a value.
        for name in self._shared.names:
            end = name[len(begun) :] + b'":'
            if name.startswith(begun) and matcher.validate_tokens(list(end)) == len(end):
                matcher.consume_tokens(list(end))
                return self._take(matcher, 0, path + end)
        return False

    def _match(self, matcher: LLMatcher, path: bytes) -> bool:
        """Completes the current string to a match of one of the schema's patterns if one fits.
        Returns whether the string was completed."""
        string = _string(self._string, 1, path)
        ends = {end for one in self._shared.patterns for end in one.ends(string)}
        for end in sorted(sorted(ends), key=len):
            last = end + b'"'
            if matcher.validate_tokens(list(last)) == len(last):
                matcher.consume_tokens(list(last))
                return self._take(matcher, 0, path + last)
        return False

    def _go_on(self) -> bool:
        """Advances to the next place; returns False if the grammar does not allow any byte or the
        CPU time is used up."""
        few, most = self.steps + FEW_NEAR, self.steps + MAX_NEAR
        near = ran = tried = matched = False
        string: tuple[LLMatcher, bytes] | None = None
        first = _Way(0, 0, 0, _STAY, b"", self._matcher.deep_copy(), self._quoted, 0)
        ways = [(0, 0, first)]
        number = 0
        while ways:
            length, others, repeats, byte, path, matcher, quoted, before = heapq.heappop(ways)[2]
            self.steps += 1
            if self._until < math.inf and time.thread_time() > self._until:
                return False
            if byte >= 0:
                matcher = matcher.deep_copy()
                matcher.consume_token(byte)
            if byte != _ADVANCED and (forced := matcher.compute_ff_bytes()):
                matcher.consume_tokens(list(forced))
                path += forced
                if byte == _STAY:
                    return self._take(matcher, _quotes(quoted, forced), path)
                length += len(forced)
                number += 1
                way = _Way(
                    length,
                    others,
                    repeats,
                    _ADVANCED,
                    path,
                    matcher,
                    _quotes(quoted, forced),
                    before,
                )
                heapq.heappush(ways, (way.cost(near), number, way))
                continue
            mask = _mask(matcher)
            whole = matcher.is_accepting()
            closing = mask & _QUOTE if quoted == 1 else 0
            if not quoted:
                closing = mask & _BRACKETS or mask & _COMMA
            if whole or closing or self.steps >= most:
                if not whole:
                    if not mask:
                        return False
                    byte = _lowest(closing or mask)
                    matcher.consume_token(byte)
                    path += bytes((byte,))
                    quoted = _quotes(quoted, path[-1:])
                return self._take(matcher, quoted, path)
            if not quoted and not tried:
                tried = True
                if self._value(matcher, path):
                    return True
            if quoted == 1 and string is None:
                if self._name(matcher, path):
                    return True
                for tail in self._tails if (path or self._path).endswith(b'"') else ():
                    if _completes(matcher, tail):
                        matcher.consume_tokens(list(tail))
                        return self._take(matcher, 0, path + tail)
                string = matcher.deep_copy(), path
            if string is not None and not matched and (self._known or self.steps >= few):
                matched = True
                if self._match(*string):
                    return True
            if self.steps >= few and not near:
                near = True
                ways = [(way.cost(near), at, way) for _, at, way in ways]
                heapq.heapify(ways)
            followed: set[tuple[_Mask, bool]] = set()
            repeated = mask.bit_count() > FEW_BRANCHES
            for byte in _tried(mask, before, quoted):
                matcher.consume_token(byte)
                after = _mask(matcher), matcher.is_accepting()
                matcher.rollback(1)
                number += 1
                step = path + bytes((byte,))
                way = _Way(
                    length + 1,
                    others + bool(followed),
                    repeats + (repeated and after in followed),
                    byte,
                    step,
                    matcher,
                    _quotes(quoted, step[-1:]),
                    mask,
                )
                followed.add(after)
                heapq.heappush(ways, (way.cost(near), number, way))
                if quoted == 1 and after[0] & _QUOTE and way.cost(near) == length + 1:
                    break  # No other way is shorter.
            if followed == {(mask, False)} and not ran:
                ran = True
                matcher = matcher.deep_copy()
                run = self._run(matcher, mask)
                if run is not None:
                    number += 1
                    way = _Way(0, 0, 0, _STAY, path + run, matcher, quoted, 0)
                    heapq.heappush(ways, (0, number, way))
        return False

    def _run(self, matcher: LLMatcher, mask: _Mask) -> bytes | None:
        """Repeats one byte until the mask changes, for example until a string has its minimum
        length. Returns the repeated bytes; None if the mask does not change within ``MAX_RUN``
        bytes."""
        byte = _lowest(mask & ~_ZERO or mask)
        most = 1
        while (changed := _changes(matcher, mask, byte, most)) is None:
            if most >= MAX_RUN:
                return None
            most *= 2
        unchanged = most // 2
        while changed - unchanged > 1:
            middle = (unchanged + changed) // 2
            found = _changes(matcher, mask, byte, middle)
            unchanged, changed = (middle, changed) if found is None else (unchanged, found)
        run = [byte] * changed
        matcher.consume_tokens(run)
        return bytes(run)


def _changes(matcher: LLMatcher, mask: _Mask, byte: int, number: int) -> int | None:
    """Returns a number of repetitions of a byte after which the mask is different. Returns None if
    the mask is still the same after ``number`` repetitions."""
    run = [byte] * number
    allowed: int = matcher.validate_tokens(run)
    if allowed < number:
        return allowed
    after = matcher.deep_copy()
    after.consume_tokens(run)
    return None if _mask(after) == mask else number


def _completes(matcher: LLMatcher, text: bytes) -> bool:
    return matcher.validate_tokens([*text, _END]) == len(text) + 1


def _mask(matcher: LLMatcher) -> _Mask:
    return int.from_bytes(matcher.compute_bitmask(), "little") & _ALL_BYTES


def _lowest(mask: _Mask) -> int:
    return (mask & -mask).bit_length() - 1


def _tried(mask: _Mask, before: _Mask, quoted: int) -> Iterator[int]:
    """The bytes of a mask that are tried, in order. Bytes that the previous mask did not allow come
    first."""
    if not mask & _LISTED or (mask.bit_count() <= FEW_BYTES and not (quoted and mask & _DIGITS)):
        groups: Sequence[_Mask] = [1 << byte for byte in range(256) if mask >> byte & 1]
    else:
        groups = _CLASSES
    for part in (mask & ~before, mask & before):
        for group in groups:
            if part & group:
                yield _lowest(part & group)


def _string(string: bytes, quoted: int, text: bytes) -> bytes:
    """The new ``Completion._string`` after ``text``, which leads to the new value ``quoted`` of
    ``Completion._quoted``."""
    if not quoted:
        return b""
    # An escaped quote also counts as the beginning of a string. So a match of a pattern may begin
    # after this quote.
    _, quote, inside = text.rpartition(b'"')
    return inside if quote else string + text


def _quotes(quoted: int, text: bytes) -> int:
    """The new ``Completion._quoted`` after a text."""
    if b'"' not in text and b"\\" not in text:
        return 1 if quoted == 2 and text else quoted
    for byte in text:
        if quoted == 1:
            quoted = 0 if byte == 34 else 2 if byte == 92 else 1
        elif quoted == 2 or byte == 34:
            quoted = 1
    return quoted
