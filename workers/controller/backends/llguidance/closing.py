"""Decides when to close the text of a sequence under an llguidance grammar, and with which tokens.

A *completion* is a text that completes the text so far. To *close* a text means to append the
tokens of a completion while ``max_tokens`` still has room for them. Tokens are *spare* if
``max_tokens`` allows them in addition to the completion. Tokens are *forced* if the grammar allows
only their text next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .....protocol.errors import ControllerError
from .....protocol.messages import ConstraintEnd
from ...host import Host
from ...interface import COMPLETE, Action, Answer
from ..text_before import closing_line
from .completion import Completion
from .matchers import Grammar
from .near_end import NearEnd
from .token_sets import MAX_STARTS, SOME_STARTS, TokenSets, Words

SPARE = 8
"""Closing begins when only this number of spare tokens is left. If a sixteenth of ``max_tokens`` is
less, that number applies instead. Under a schema, each open value then ends as soon as it may. For
example, a string ends at the end of a word. Under a grammar that is not a schema, the completion is
appended immediately."""
LOOK_EVERY = 32
"""The completion of a text is computed again after a quarter of the spare tokens. If at most
``NEAR`` spare tokens are left, it is computed again after at most ``LOOK_EVERY`` tokens."""
NEAR = 512
BYTES_OF_TOKEN = 2
"""Assumed bytes for each token of a completion. If a completion certainly fits, it is not
tokenized. Its number of tokens is then estimated from its number of bytes."""
AMPLE = 256
"""``Grammar.growth`` takes long to compute, so it is usually computed after the first sampled
token. It is computed earlier only if few tokens are spare at the beginning: not more than
``AMPLE``, and not more than ``Grammar.max_growth``."""
SHARED = 32
"""If two completions have at least this number of last bytes in common, the tokens of these bytes
are reused."""
NEVER = 1 << 62


class Closing:
    """Closes one text before ``max_tokens`` are used up.

    Some texts may end now, and may also continue with nearly any text. Such a text is not closed,
    and may continue up to ``max_tokens``.

    Under a schema, a token may begin *items*: elements of arrays, or properties of objects. Each
    item extends the completion by at most the number of tokens that ``Grammar.growth`` gives. While
    the remaining tokens have room for this growth, masks are not restricted. When the room is used
    up, the completion of the text is computed. From then on, masks allow only tokens after which
    the text can be completed (``near_end``).

    Under a grammar that is not a schema, the completion is computed at intervals. The intervals
    become shorter as fewer tokens remain. If the completion does not fit any more, the text is cut
    back to the length at which a completion last fitted. The cut removes at most a quarter of the
    tokens that remained at this length.
    """

    def __init__(self, grammar: Grammar, host: Host) -> None:
        self._grammar = grammar
        self._host = host
        self._spare = min(SPARE, host.max_tokens // 16)
        self._completion: Completion | None = None
        self._read = 0
        """Number of tokens of the text that were appended to ``_completion``."""
        self._tokenized: tuple[bytes, list[int]] = (b"", [])
        """The last tokenized completion, and its tokens."""
        self._last: tuple[int, bytes] | None = None
        """The last length of the text, in tokens, at which a completion fitted in ``max_tokens``,
        and that completion; None before a completion is found."""
        self._item: int | None = 0 if grammar.is_schema else None
        """Maximum number of tokens by which one item extends the completion of the text. 0 until
        this number is computed, None for a grammar that is not a schema."""
        self._credit = 0
        """Number of tokens by which the text and its completion together may grow before the
        completion is computed again."""
        self._near: NearEnd | None = None
        self._sets: TokenSets
        """The token sets of the vocabulary, once ``_item`` is known."""
        self._restricts = False
        """Whether each mask is restricted to tokens after which the text can be completed
        (``near_end``)."""
        self._low = 0
        """While ``_credit`` is at most this number, masks exclude tokens that begin many items."""
        self.narrows = False
        """Whether ``restrict`` would restrict the next mask."""
        self._lost = False
        """Whether searches have found neither a completion of the text under a schema nor any text
        of the schema. Set by the constructor and by ``look``; cleared when a search finds a
        completion."""
        self._free = False
        """Whether the last restricted mask belongs to a string that may contain any text."""
        self.check_at = NEVER
        """The length of the text, in tokens, at which ``look`` is to be called."""
        self.end: ConstraintEnd | None = None
        """How the text ended; None until the text is closed."""
        self._most = host.max_tokens
        """Maximum tokens of the text. If the shortest text needs all tokens, this is
        ``max_tokens``. If not, it is one less. A sequence always ends at token number
        ``max_tokens``, even if its text is not complete."""
        takes = grammar.least
        if takes is None or takes >= host.max_tokens:
            if not self._goes_back_to_start():
                self._look_at_intervals(0)
                return
            takes = len(grammar.shortest_tokens or ())
        self._most -= takes < host.max_tokens
        spare = self._most - takes
        if self._item is None:
            self.check_at = 0
            if spare > self._spare:
                self._look_after(0, spare)
        elif spare <= min(grammar.max_growth, AMPLE):
            self.check_at = 0

    def copy(self, host: Host) -> Closing:
        """A copy for a fork of the sequence."""
        other = Closing(self._grammar, host)
        if self._completion is not None:
            with self._grammar.lock:
                other._completion = self._completion.copy()
        other._read, other._tokenized, other._last = self._read, self._tokenized, self._last
        other._item, other._credit = self._item, self._credit
        other._near = None if self._near is None else self._near.copy()
        other._restricts, other._free = self._restricts, self._free
        other._low, other.narrows, other._lost = self._low, self.narrows, self._lost
        if self._item:
            other._sets = self._sets
        other.check_at, other.end = self.check_at, self.end
        return other

    def append(self, tokens: Sequence[int], forced: bool) -> None:
        """Records that tokens were appended to the text. ``forced``: whether the grammar allowed
        only these tokens."""
        if self._item is None or self._lost or not tokens:
            return
        if self._restricts:
            if not self._free or not all(map(self._grammar.tokens.sets.is_whole, tokens)):
                self.check_at = 0
        elif not forced or self._item:
            self._credit -= self._cost(tokens, forced)
            if self._credit <= self._low:
                self.narrows = self._item > 0
                if self._credit <= 0:
                    self.check_at = 0

    def ahead(self, draft: Sequence[int]) -> list[Words | None]:
        """Returns a list with an element for each token of a draft. The element is the set of
        tokens that the mask after this token may allow, or None if this mask is not restricted. The
        list ends before the first token after which the completion must be computed."""
        if self._item is None:
            return [None] * len(draft)
        restricted: list[Words | None] = []
        if not self._restricts and self._item:
            credit = self._credit
            for token in draft:
                credit -= self._cost([token], forced=False)
                if credit <= 0:
                    break
                restricted.append(self._room_for(credit))
        return restricted

    def _room_for(self, credit: int) -> Words | None:
        """The tokens that are allowed if the completion may grow by at most ``credit`` tokens. They
        begin only a few items. None if all tokens are allowed."""
        assert self._item is not None
        if credit > self._low:
            return None
        return self._sets.some if credit > SOME_STARTS * self._item else self._sets.few

    def restrict(self, words: Words, text: Sequence[int]) -> None:
        """Restricts the mask ``words`` of a text that is near its end. The caller holds the
        grammar's lock."""
        if not self._item:
            return
        if not self._restricts:
            few = self._room_for(self._credit)
            if few is not None:
                words &= few
            return
        assert self._near is not None
        assert self._completion is not None
        found, tokens = self._tokenized
        if self._free and len(text) < self.check_at and self._near.restrict_again(words, found):
            return
        if self._read < len(text) and not self._near.is_free(words, found):
            anew = self._read_on(text)
            if anew is not None and self._written(anew, self._most - len(text)) is not None:
                found, tokens = self._tokenized
        spare = self._most - len(text) - len(tokens)
        ending = spare <= self._spare
        more = self._near.restrict(
            words, self._completion, found, tokens, spare, ending, self._tokens_of
        )
        self._free = more is not None
        if more is not None:
            self.check_at = len(text) + spare - more - (0 if ending else self._spare)

    def closes_instead(self, forced: Sequence[int], length: int) -> Answer | None:
        """The answer that closes the text now. None if there will be room for closing the text
        after the forced tokens."""
        found, tokens = self._tokenized
        room = self._most - length
        if not self._restricts or room - len(tokens) > len(forced):
            return None
        written = b"".join(map(self._host.vocabulary.token, forced))
        rest = self._tokens_of(found[len(written) :]) if found.startswith(written) else None
        if rest is not None and len(forced) + len(rest) <= room:
            return None
        return self._closed(0, tokens)

    def look(self, text: Sequence[int]) -> Answer | None:
        """Returns the answer that closes the text, if a later round might not be able to close it.
        If a later round can close the text, returns None and schedules the next call."""
        length = len(text)
        room = self._most - length
        if self._item == 0 and self._begins(length):
            return None
        found = self._find(text)
        takes = self._takes(found, room)
        if found is not None and takes is not None and takes <= room:
            self._last, self._lost = (length, found), False
            spare = room - takes
            if self._item is not None:
                if spare > 0:
                    self._goes_on(spare, found, room)
                    return None
            elif spare > self._spare or self._is_free(found):
                self._look_after(length, spare)
                return None
        if self._last is None and not self._goes_back_to_start():
            self._look_at_intervals(length)
            return None
        if takes is None and room > 0:
            # A later search may find a completion. For example, this search may not be able to end
            # the current string.
            self._restricts = False
            self._set_credit(min(room, 4 * LOOK_EVERY))
            self._look_after(length, self._credit)
            return None
        assert self._last is not None
        at, found = self._last
        return self._closed(length - at, self._written(found, self._most - at) or [])

    def _begins(self, length: int) -> bool:
        """Computes the number of tokens by which one item extends the completion; returns whether
        the text certainly has room for more items. The present completion is assumed to be at most
        one item longer than the shortest text."""
        growth, sets = self._grammar.growth, self._grammar.tokens.sets
        assert growth is not None
        self._item = math.ceil(growth.item * sets.per_byte)
        self._low = MAX_STARTS * self._item
        self._sets = sets
        string = math.ceil(growth.string * sets.per_byte)
        self._near = NearEnd(sets, string, self._host.vocabulary.eos_ids)
        least = self._grammar.least
        if least is None:
            return False
        # The completion may be one item longer than the shortest text, because the first sampled
        # token may have begun an item.
        self._set_credit(self._most - least - length - self._spare - 2 * self._item)
        if self._credit <= 0:
            return False
        self.check_at = NEVER
        return True

    def _goes_on(self, spare: int, found: bytes, room: int) -> None:
        assert self._item is not None
        credit = spare - self._spare - self._item
        self._restricts = credit <= 0
        self._set_credit(credit)
        self._free = False
        self.check_at = NEVER
        if self._restricts:
            self._written(found, room)

    def _set_credit(self, credit: int) -> None:
        self._credit = credit
        self.narrows = self._restricts or credit <= self._low

    def _cost(self, tokens: Sequence[int], forced: bool) -> int:
        if forced or not self._item:
            return len(tokens)
        starts = self._sets.starts
        if len(tokens) == 1:
            return 1 + self._item * starts[tokens[0]]
        return len(tokens) + self._item * sum(starts[token] for token in tokens)

    def _closed(self, back: int, tokens: list[int]) -> Answer:
        line = closing_line(len(tokens), back, self._host.max_tokens)
        self._host.log.write(f"{line}\n".encode())
        self.check_at = NEVER
        if not tokens and not back:
            self.end = "complete"
            return COMPLETE
        self.end = "closed"
        return Answer(Action.SPLICE, backtrack=back, tokens=tokens)

    def _goes_back_to_start(self) -> bool:
        """Uses the shortest text of the grammar, at length 0, as the last completion. Returns False
        if a search does not find this text, or if the text does not fit in ``max_tokens``."""
        tokens, text = self._grammar.shortest_tokens, self._grammar.shortest_text
        if tokens is None or text is None or len(tokens) > self._host.max_tokens:
            return False
        self._last = 0, text
        return True

    def _look_at_intervals(self, length: int) -> None:
        """Called if neither a completion nor a shortest text was found. Under a schema, the search
        runs again after at most a quarter of the remaining tokens. Under a grammar that is not a
        schema, the text is not closed."""
        self._lost = self._item is not None
        self.check_at = NEVER
        if self._lost:
            self._look_after(length, self._host.max_tokens - length)

    def _look_after(self, length: int, spare: int) -> None:
        quarter = max(1, spare // 4)
        self.check_at = length + (quarter if spare > NEAR else min(LOOK_EVERY, quarter))

    def _takes(self, found: bytes | None, room: int) -> int | None:
        """The number of tokens of the completion ``found``; None if ``found`` is None or if the
        vocabulary cannot write it. If the completion certainly fits in ``room``, the result is an
        estimate, because the completion is not tokenized."""
        if found is None:
            return None
        if self._item is not None:
            if self._host.vocabulary.has_every_byte:
                most = len(found)
                if room - most > self._spare + self._item:
                    return most
        elif self._tokenized[1] and len(found) < room - self._spare:
            return len(found) // BYTES_OF_TOKEN
        tokens = self._written(found, room)
        return None if tokens is None else len(tokens)

    def _written(self, found: bytes, room: int) -> list[int] | None:
        """The tokens of the completion ``found``; None if the vocabulary cannot write it. If
        reusing earlier tokens would give more than ``room`` tokens, the whole completion is
        tokenized again."""
        text, tokens = self._tokenized
        if found == text:
            return tokens
        written = self._tokens_of(found)
        if written is not None and len(written) > room:
            written = self._anew(found)
        if written is not None:
            self._tokenized = found, written
        return written

    def _tokens_of(self, text: bytes) -> list[int] | None:
        """The tokens of a completion; None if the vocabulary cannot write it. If the completion has
        a long end in common with the last tokenized completion, the tokens of this end are reused.
        So the result may have one token more than the tokenization of the whole completion."""
        known, tokens = self._tokenized
        shared = _common_end(known, text)
        if shared < min(SHARED, len(text)):
            return self._anew(text)
        number, left = 0, len(known)
        while left > shared:
            left -= len(self._host.vocabulary.token(tokens[number]))
            number += 1
        if left == len(text):
            return tokens[number:]
        first = self._anew(text[: len(text) - left])
        return None if first is None else first + tokens[number:]

    def _anew(self, text: bytes) -> list[int] | None:
        try:
            return self._host.vocabulary.tokenize(text)
        except ControllerError:
            return None

    def _is_free(self, found: bytes) -> bool:
        """Whether the text may end here and may also continue with nearly any text. Such a text is
        not closed."""
        if found or self._completion is None:
            return False
        with self._grammar.lock:
            return self._completion.free

    def _find(self, text: Sequence[int]) -> bytes | None:
        completion = self._completion
        if completion is None:
            self._completion = self._grammar.completion()
        with self._grammar.lock:
            return self._read_on(text)

    def _read_on(self, text: Sequence[int]) -> bytes | None:
        """Appends the new tokens of the text to ``_completion``. Returns the bytes that complete
        the text; None if the search does not find a completion. The caller holds the grammar's
        lock."""
        completion = self._completion
        assert completion is not None
        appended = text[self._read :]
        added = b"".join(map(self._host.vocabulary.token, appended))
        self._read = len(text)
        if not completion.append(added):
            return None
        rest = self._near.rests.get(appended[0]) if self._near and len(appended) == 1 else None
        if rest is not None and completion.keep(rest):
            return rest
        return completion.find()


def _common_end(one: bytes, other: bytes) -> int:
    """The length of the longest text with which both texts end."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one.endswith(other[len(other) - middle :]):
            least = middle
        else:
            most = middle - 1
    return least
