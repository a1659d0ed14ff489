"""The controller of a sequence that is constrained by a grammar. A *draft* is a list of tokens that
the GPU worker expects next."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from .....protocol.errors import Code, ControllerError
from .....protocol.messages import ConstraintEnd
from ... import interface
from ...host import Host
from ...interface import CONTINUE, STOP, Action, Answer, Batch
from ..text_before import before_end, closing_line, tokens_before
from .grammar_instance import ANY, COMPLETE, FORCED, SINGLE
from .shared_instances import Shared

SHOWN = 200
"""Maximum characters of the text so far in an error message."""
SPARE = 8
"""To *close* a text means to append its *closing*, a short text that completes it. Tokens are
*spare* if ``max_tokens`` allows them in addition to the closing. The controller closes the text
when only this number of spare tokens is left. If a sixteenth of ``max_tokens`` is less, that number
applies instead. If several tokens lead to an equally short end, the controller does not append the
closing: the model samples one of these tokens."""
MAX_TRIED = 64
"""Maximum number of allowed tokens for which the controller computes a closing. If the grammar
allows more tokens, the controller appends the closing at once."""
MAX_SHORT_WAY = 32
"""If a closing has at most this number of tokens, the controller first computes the closing after
each allowed token. It appends a longer closing at once, because these computations would take
long."""
LOOK_EVERY = 32
"""Maximum number of tokens between two computations of the closing. Near the end of the text the
interval is shorter (``_look_after``)."""

_MASKED = Answer(Action.CONTINUE, masked=True)


class GrammarController:
    """The controller of one sequence. ``place`` is the sequence's number in the grammar instance;
    ``text`` has the sequence's tokens after the prompt."""

    def __init__(self, shared: Shared, host: Host, place: int, text: list[int]) -> None:
        self._shared = shared
        self._guest = shared.guest
        self._host = host
        self._place = place
        self._text = text
        self._spare = min(SPARE, host.max_tokens // 16)
        self._check_at = 0
        """The number of tokens of the text at which the closing is computed next."""
        self._last_closing: tuple[int, bytes] | None = None
        """The last length of the text, in tokens, at which the closing fitted in ``max_tokens``,
        and this closing."""
        self._bytewise = False
        """Whether the last tokenized closing had more tokens than half of its bytes."""
        self._too_few = False
        """Whether the text cannot be closed, because no closing has ever fitted in
        ``max_tokens``."""
        self._closed = False
        self._end: ConstraintEnd | None = None
        """How the text ended; None until the text is closed."""

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Does nothing: the grammar constrains only the text after the prompt."""

    def pre_process(self) -> Answer:
        """Always continues."""
        return CONTINUE

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """Writes the token mask, or returns a splice. The splice appends forced tokens (the only
        text that may follow) or the closing. Stops if the text is complete and no token may follow,
        or if ``max_tokens`` is reached."""
        if self._closed:
            return interface.COMPLETE
        left = self._host.max_tokens - len(self._text)
        if left <= 0:
            return STOP
        if len(self._text) >= self._check_at and (closing := self._closing(mask)) is not None:
            return closing
        flags = self._guest.mask(self._place, mask)
        if flags & ANY:
            return self._unclosed(flags)
        if flags & COMPLETE:
            return interface.COMPLETE
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            "the grammar does not allow any token of this model's vocabulary here; the text so "
            f"far: {self._shown()}",
        )

    def _unclosed(self, flags: int) -> Answer:
        """The answer if the mask allows at least one token. ``flags``: the flags of the mask."""
        if flags & FORCED:
            left = self._host.max_tokens - len(self._text)
            tokens = self._guest.forced(self._place)[: left - 1]
            # A single allowed token is sampled. Appending it would not save a forward, and a round
            # that appends tokens cannot run in a batch.
            if tokens and not (len(tokens) == 1 and flags & SINGLE):
                return Answer(Action.SPLICE, tokens=tokens)
        return _MASKED

    def masks_along(self, draft: Sequence[int], masks: Sequence[memoryview]) -> int:
        """Writes the masks after the tokens of a draft. Stops where the closing must be
        computed."""
        length = len(self._text)
        until = min(self._check_at, self._host.max_tokens) - length - 1
        draft = before_end(draft, self._host.vocabulary)[: max(0, until)]
        if self._closed or not draft:
            return 0
        return self._guest.masks_along(self._place, draft, masks)

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Advances by the appended tokens; stops at an end-of-sequence token."""
        # After a draft, several tokens may arrive together. The GPU worker has dropped the tokens
        # after an end-of-sequence token.
        after = STOP if tokens and tokens[-1] in self._host.vocabulary.eos_ids else CONTINUE
        if after is STOP:
            tokens = tokens[:-1]
        if self._closed or not tokens:
            return after
        if self._guest.append(self._place, tokens) < len(tokens):
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the grammar does not allow the tokens {list(tokens)} here; the text so far: "
                f"{self._shown()}",
            )
        self._text += tokens
        if self._too_few and len(self._text) >= self._host.max_tokens:
            self._report_cut()
        return after

    def batch(self, token: int) -> tuple[Batch, int] | None:
        """The grammar instance and the sequence's number in it, if the next round can run in a
        batch. None if the text ends with ``token``, or if the closing must be computed after
        ``token``."""
        length = len(self._text) + 1
        if self._closed or length >= self._check_at or length >= self._host.max_tokens:
            return None
        if token in self._host.vocabulary.eos_ids:
            return None
        return self._guest, self._place

    def batched(self, token: int) -> None:
        """Records that the batch has appended the token to the text."""
        self._text.append(token)

    def text_end(self, stop: bytes = b"") -> ConstraintEnd:
        """Returns ``closed`` if closing has changed the text, and ``complete`` if the grammar
        accepts the unchanged text. Returns ``cut`` if the text is neither. If ``stop`` is given,
        only the text before this stop string counts."""
        if stop:
            tokens = tokens_before(stop, self._text, self._host.vocabulary)
            return "complete" if tokens is not None and self._accepts(tokens) else "cut"
        if self._end is not None:
            return self._end
        return "complete" if self._guest.complete(self._place) else "cut"

    def fork(self, host: Host) -> GrammarController:
        """A controller for the sequence of ``host``, with a copy of the text."""
        place = self._guest.fork(self._place)
        self._shared.share()
        return GrammarController(self._shared, host, place, list(self._text))

    def close(self) -> None:
        """Ends the sequence in the instance."""
        self._guest.end(self._place)
        self._shared.release()

    def _accepts(self, tokens: Sequence[int]) -> bool:
        place = self._guest.start()
        try:
            followed = self._guest.append(place, tokens) if tokens else 0
            return followed == len(tokens) and self._guest.complete(place)
        finally:
            self._guest.end(place)

    def _closing(self, mask: memoryview) -> Answer | None:
        """The answer that closes the text. None if a later round can certainly close the text. If
        several tokens lead to an equally short end, the answer is a mask of these tokens."""
        # The text and its closing may have at most ``max_tokens`` - 1 tokens. A sequence always
        # ends at token number ``max_tokens``, even if its text is not complete.
        length, most = len(self._text), self._host.max_tokens
        room = most - length - 1
        text = self._guest.closing(self._place)
        takes = self._most_tokens(text, room) if text is not None else None
        if text is not None and takes is not None and takes <= room:
            self._last_closing = length, text
            spare = room - takes
            if spare > self._spare:
                self._look_after(spare)
                return None
            if 0 < takes <= MAX_SHORT_WAY:
                answer = self._short_ways(mask, takes)
                if answer is not None:
                    return answer
        elif room > 0:
            # The closing does not fit now. A later closing may be shorter, but an appended token
            # rarely shortens the closing by more than the token's own length.
            self._look_after(min(takes - room, 8 * room) if takes is not None else 0)
            return None
        if self._last_closing is None:
            self._too_few = True
            return None
        at, text = self._last_closing
        tokens = self._host.vocabulary.tokenize(text)
        back = length - at
        self._closed = True
        ended = not tokens and not back
        if not ended or self._continues(mask):
            self._log(closing_line(len(tokens), back, most))
        if ended:
            self._end = "complete"
            return interface.COMPLETE
        self._end = "closed"
        return Answer(Action.SPLICE, backtrack=back, tokens=tokens)

    def _continues(self, mask: memoryview) -> bool:
        """Whether a token other than an end-of-sequence token may follow. Overwrites the mask."""
        self._guest.mask(self._place, mask)
        for token in self._host.vocabulary.eos_ids:
            mask[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        return any(mask)

    def _short_ways(self, mask: memoryview, takes: int) -> Answer | None:
        """Allows only tokens after which the closing has fewer than ``takes`` tokens.

        Clears the mask and returns None if the closing is to be appended at once. This is the case
        if the grammar allows more than ``MAX_TRIED`` tokens. It is also the case if the grammar
        allows several tokens, but the closing becomes shorter after at most one of them."""
        flags = self._guest.mask(self._place, mask)
        bits = int.from_bytes(mask, "little")
        number = bits.bit_count()
        if number == 1:
            return self._unclosed(flags)
        mask[:] = bytes(len(mask))
        if number > MAX_TRIED:
            return None
        words = np.frombuffer(bits.to_bytes(len(mask), "little"), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist()
        short = [token for token in allowed if self._takes_after(token) < takes]
        if len(short) < 2:
            return None
        for token in short:
            mask[token >> 3] |= 1 << (token & 7)
        if len(short) < number and self._end is None:
            self._end = "closed"
            most = self._host.max_tokens
            self._log(f"only the shortest texts were allowed in the end: max_tokens is {most}")
        return _MASKED

    def _takes_after(self, token: int) -> float:
        """The number of tokens of the closing after ``token``; ``inf`` if the text cannot be closed
        then."""
        try:
            place = self._guest.fork(self._place)
        except ControllerError:  # The grammar instance has no room for another sequence.
            return inf
        try:
            self._guest.append(place, [token])
            text = self._guest.closing(place)
            return inf if text is None else len(self._host.vocabulary.tokenize(text))
        except ControllerError:  # The vocabulary cannot write the closing.
            return inf
        finally:
            self._guest.end(place)

    def _report_cut(self) -> None:
        """Logs that the text is cut, unless it is complete at ``max_tokens``."""
        if not self._guest.complete(self._place):
            most = self._host.max_tokens
            self._log(f"the text is not closed: max_tokens is {most}, too few to complete the text")

    def _look_after(self, tokens: int) -> None:
        """Schedules the next computation of the closing. It follows after an eighth of ``tokens``,
        but after at least 1 and at most ``LOOK_EVERY`` tokens. ``tokens``: an estimate of the
        number of tokens before the controller's decision can change."""
        self._check_at = len(self._text) + max(1, min(LOOK_EVERY, tokens // 8))

    def _most_tokens(self, text: bytes, room: int) -> int | None:
        """An upper bound of the number of tokens of the closing ``text``; None if the vocabulary
        cannot write the closing. Tokenizing a long text takes long. So if ``room`` is much larger
        than the number of bytes, the text is not tokenized, and the number of bytes is returned."""
        vocabulary = self._host.vocabulary
        spare = room - len(text)
        bounded = spare > self._spare if self._bytewise else spare >= 8 * LOOK_EVERY
        if bounded and vocabulary.has_every_byte:
            return len(text)
        try:
            tokens = len(vocabulary.tokenize(text))
        except ControllerError:
            return None
        self._bytewise = 2 * tokens > len(text)
        return tokens

    def _log(self, message: str) -> None:
        self._host.log.write(f"{message}\n".encode())

    def _shown(self) -> str:
        token = self._host.vocabulary.token
        text = b"".join(map(token, self._text)).decode("utf-8", "replace")
        return repr(text if len(text) <= SHOWN else f"…{text[-SHOWN:]}")
