"""When the text of a sequence under an llguidance grammar is closed, and with which tokens."""

from __future__ import annotations

from collections.abc import Sequence

from .....protocol.errors import ControllerError
from .....protocol.messages import ConstraintEnd
from ...host import Host
from ...interface import COMPLETE, Action, Answer
from .completion import Completion
from .matchers import Grammar

SPARE = 8
"""The text is closed when at most so many tokens are left beyond those that closing it takes; at
most a sixteenth of ``max_tokens``."""
LOOK_EVERY = 32
"""How to close a text is computed at least every so many tokens where at most ``NEAR`` are left
beyond those that closing it takes, else after a quarter of these: and so where few are left."""
NEAR = 512
BYTES_OF_TOKEN = 2
"""A completion that surely fits is taken to have tokens of so many bytes."""
AT_ONCE = 1024
"""Bytes that are appended in one call, which holds the interpreter lock."""
NEVER = 1 << 62


class Closing:
    """Closes one text before ``max_tokens`` are used up.

    A text that may end anywhere, and go on with anything, is not closed: it ends by its length.

    The completion of the text is computed at intervals that become shorter as the room that it
    leaves does. Where a text has come to need more than is left since it was last computed, it goes
    back to there: at most by a quarter of the room that there was.
    """

    def __init__(self, grammar: Grammar, host: Host) -> None:
        self._grammar = grammar
        self._host = host
        self._spare = min(SPARE, host.max_tokens // 16)
        self._completion: Completion | None = None
        self._read = 0
        """Tokens of the text that the completion has read."""
        self._tokenized: tuple[bytes, list[int]] = (b"", [])
        """The completion that was tokenized last, and its tokens."""
        self._last: tuple[int, bytes] | None = None
        """The last length at which a completion fitted in ``max_tokens``, and the completion; None
        where none was searched for, or the search found none."""
        self.check_at = NEVER
        """The length of the text at which ``look`` is to be called."""
        self.end: ConstraintEnd | None = None
        """Once the text is closed: how it ends."""
        self._most = host.max_tokens
        """Most tokens of the text. The last token of ``max_tokens`` ends the sequence by its
        length, so it is used only where the shortest text needs it."""
        takes = grammar.least
        if takes is None or takes >= host.max_tokens:
            if not self._goes_back_to_start():
                return
            takes = len(grammar.shortest_tokens or ())
        self._most -= takes < host.max_tokens
        spare = self._most - takes
        self.check_at = 0
        if spare > self._spare:
            self._look_after(0, spare)

    def copy(self, host: Host) -> Closing:
        """For a fork of the sequence."""
        other = Closing(self._grammar, host)
        if self._completion is not None:
            with self._grammar.lock:
                other._completion = self._completion.copy()
        other._read, other._tokenized, other._last = self._read, self._tokenized, self._last
        other.check_at, other.end = self.check_at, self.end
        return other

    def look(self, text: Sequence[int]) -> Answer | None:
        """What closes the text, if there would be no room for it later; else None."""
        length = len(text)
        room = self._most - length
        found = self._find(text)
        takes = self._takes(found, room)
        if found is not None and takes is not None and takes <= room:
            self._last = length, found
            spare = room - takes
            if spare > self._spare or self._is_free(found):
                self._look_after(length, spare)
                return None
        if self._last is None and not self._goes_back_to_start():
            self.check_at = NEVER
            return None
        if takes is None and room > 0:
            # The search may find one soon, for example behind a string that it cannot end.
            self._look_after(length, min(room, 4 * LOOK_EVERY))
            return None
        assert self._last is not None
        at, found = self._last
        return self._closed(length - at, self._written(found) or [])

    def _closed(self, back: int, tokens: list[int]) -> Answer:
        after = f" after {back} were dropped" if back else ""
        self._host.log.write(
            f"closed with {len(tokens)} more tokens{after}: "
            f"max_tokens is {self._host.max_tokens}\n".encode()
        )
        self.check_at = NEVER
        if not tokens and not back:
            self.end = "complete"
            return COMPLETE
        self.end = "closed"
        return Answer(Action.SPLICE, backtrack=back, tokens=tokens)

    def _goes_back_to_start(self) -> bool:
        """Whether a shortest text of the grammar is found, and fits in ``max_tokens``."""
        tokens, text = self._grammar.shortest_tokens, self._grammar.shortest_text
        if tokens is None or text is None or len(tokens) > self._host.max_tokens:
            return False
        self._last = 0, text
        return True

    def _look_after(self, length: int, spare: int) -> None:
        quarter = max(1, spare // 4)
        self.check_at = length + (quarter if spare > NEAR else min(LOOK_EVERY, quarter))

    def _takes(self, found: bytes | None, room: int) -> int | None:
        """How many tokens a completion has; None where none was found, or the vocabulary cannot
        write it. It is tokenized only where it might not fit; else the number is an estimate."""
        if found is None:
            return None
        if self._tokenized[1] and len(found) < room - self._spare:
            return len(found) // BYTES_OF_TOKEN
        tokens = self._written(found)
        return None if tokens is None else len(tokens)

    def _written(self, found: bytes) -> list[int] | None:
        if found != self._tokenized[0]:
            try:
                self._tokenized = found, self._host.vocabulary.tokenize(found)
            except ControllerError:
                return None
        return self._tokenized[1]

    def _is_free(self, found: bytes) -> bool:
        """Whether the text is one that ends by its length, as if there were no grammar."""
        if found or self._completion is None:
            return False
        with self._grammar.lock:
            return self._completion.free

    def _find(self, text: Sequence[int]) -> bytes | None:
        completion = self._completion
        if completion is None:
            completion = self._completion = self._grammar.completion()
        added = b"".join(map(self._host.vocabulary.token, text[self._read :]))
        self._read = len(text)
        for at in range(0, len(added), AT_ONCE):
            with self._grammar.lock:
                if not completion.append(added[at : at + AT_ONCE]):
                    return None
        with self._grammar.lock:
            return completion.find()
