"""The controller of a sequence that is constrained by an llguidance grammar. Tokens are *forced* if
only their text may follow. To *close* a text means to complete it before ``max_tokens`` are used
up. A *draft* is a list of tokens that the GPU worker expects next."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from .....protocol.errors import Code, ControllerError, RequestError
from .....protocol.messages import ConstraintEnd
from ...host import Host
from ...interface import COMPLETE, CONTINUE, STOP, Action, Answer
from ..text_before import before_end, tokens_before
from .checking.checked_text import CheckedText
from .closing import Closing
from .consuming import consume
from .matchers import Grammar
from .trial import reason

SHOWN = 200
"""Maximum characters of the text so far in an error message."""
TIMED_TOKENS = 256
"""Maximum number of appended tokens that together may take the CPU time ``Limits.mid_s``."""

_MASKED = Answer(Action.CONTINUE, masked=True)


class MatcherController:
    """The controller of one sequence. ``name`` is the name of the constraint; ``text`` has the
    sequence's tokens after the prompt."""

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher,
        host: Host,
        closing: Closing,
        name: str,
        text: Sequence[int] = (),
        checked: CheckedText | None = None,
    ) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._host = host
        self.closing = closing
        """Decides when and how the text is closed."""
        self._name = name
        self._text = list(text)
        self._checked = grammar.checked_text() if checked is None else checked
        """The text whose values are checked (``checked_text``). None if masks enforce the whole
        schema."""
        self._forced = False
        """Whether the next appended tokens were forced."""
        self._mask: memoryview | None = None
        """The mask to which ``_words`` and ``_address`` refer."""
        self._words: np.ndarray[tuple[int], np.dtype[np.uint32]]
        self._address = 0
        tokens = grammar.tokens
        self._own_mask = bytearray(4 * -(-tokens.size // 32)) if tokens.endless else None
        """A buffer for masks, if llguidance's vocabulary has one token more than the model's. None
        if both have the same tokens."""

    @property
    def shortest(self) -> Sequence[int] | None:
        """The tokens of the shortest text that a search found; None if no text was found."""
        return self._grammar.shortest_tokens

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Raises RequestError if even the shortest text has more than ``max_tokens``. If this
        constraint is a part of another constraint, the method is not called, because the part may
        be optional."""
        most, least = self._host.max_tokens, self._grammar.least
        if least is not None and least <= most:
            return
        takes = len(self._grammar.shortest_tokens or ())
        if takes > most:
            raise RequestError(
                Code.INVALID_FIELD,
                f"{self._name}: max_tokens is {most}, but the shortest text takes {takes} tokens; "
                f"it must be at least {takes}",
                path="$.max_tokens",
            )

    def pre_process(self) -> Answer:
        """Always continues."""
        return CONTINUE

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """Writes the token mask, or returns a splice of forced tokens or of tokens that close the
        text. Stops if only the end of the sequence may follow.

        llguidance's compute_ff_tokens, which computes forced tokens, keeps Python's lock. Computing
        a mask does not. If a token is forced, the mask allows only this token. So compute_ff_tokens
        is called at the beginning of a text, and later only if the mask has few nonzero words
        (u32).
        """
        if self.closing.end is not None:
            return COMPLETE
        left = self._host.max_tokens - len(self._text)
        if left <= 0:
            return STOP
        if len(self._text) >= self.closing.check_at:
            closed = self.closing.look(self._text)
            if closed is not None:
                return closed
        if mask is not self._mask:
            self._use_mask(mask)
        with self._grammar.lock:
            # The first tokens of a text are usually forced.
            forced = [] if self._text else self._forced_tokens()
            if not forced:
                self._fill(mask)
                if self.closing.narrows:
                    self.closing.restrict(self._words, self._text)
                if self._checked is not None:
                    self._restrict(self._checked, mask)
                if np.count_nonzero(self._words) > self._grammar.tokens.end_words:
                    return _MASKED
                forced = self._forced_tokens()
            complete = self._matcher.is_accepting()
            if self._matcher.is_error():
                raise self._failed()
        if forced:
            closed = self.closing.closes_instead(forced, len(self._text))
            if closed is not None:
                return closed
            self._forced = True
            # At least one token of ``max_tokens`` is left, so that another round follows. If
            # necessary, that round closes the text.
            return Answer(Action.SPLICE, tokens=forced[: max(1, left - 1)])
        if bytes(mask) != self._grammar.tokens.only_end:
            return _MASKED
        if not complete:
            raise self._failed()
        return COMPLETE

    def _restrict(self, checked: CheckedText, mask: memoryview) -> None:
        """Removes from the mask the tokens that would end an invalid value."""
        checked.restrict(self._words)
        if self.closing.narrows and not self._words.any():
            self._fill(mask)
            checked.restrict(self._words)
        if not self._words.any():
            raise self._error(
                Code.CONTROLLER_FAILED,
                "each token that the grammar allows here would end a value that the schema does "
                "not allow",
            )

    def _forced_tokens(self) -> list[int]:
        forced: list[int] = self._matcher.compute_ff_tokens()
        return forced if self._checked is None else self._checked.allowed(forced)

    def masks_along(self, draft: Sequence[int], masks: Sequence[memoryview]) -> int:
        """Writes the masks after the tokens of a draft. Stops at the first place where a token is
        forced, only the end of the sequence may follow, or the closing must be computed."""
        until = min(self.closing.check_at, self._host.max_tokens) - len(self._text) - 1
        draft = before_end(draft, self._host.vocabulary)[: max(0, until)]
        restricted = self.closing.ahead(draft)
        draft = draft[: len(restricted)]
        if self.closing.end is not None or not draft:
            return 0
        matcher, most = self._grammar.copy(self._matcher), self._host.limits.mid_s
        checked = None if self._checked is None else self._checked.copy()
        along = zip(draft, masks, restricted, strict=False)
        for number, (token, mask, few_starts) in enumerate(along):
            with self._grammar.lock:
                began = time.thread_time()
                if not matcher.consume_tokens([token]) or time.thread_time() - began > most:
                    return number
                words = self._fill_from(matcher, mask)
                if few_starts is not None:
                    words &= few_starts
                if checked is not None:
                    if not checked.append([token]):
                        return number
                    checked.restrict(words)
                few = np.count_nonzero(words) <= self._grammar.tokens.end_words
                if few or matcher.is_error():
                    return number
        return min(len(draft), len(masks))

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Advances by the appended tokens; stops at an end-of-sequence token."""
        # After a draft, several tokens may arrive together. The GPU worker has dropped the tokens
        # after an end-of-sequence token.
        after = STOP if tokens and tokens[-1] in self._host.vocabulary.eos_ids else CONTINUE
        if after is STOP:
            tokens = tokens[:-1]
        if self.closing.end is not None or (after is STOP and not tokens):
            return after
        matcher = self._matcher
        most = self._host.limits.mid_s
        for at in range(0, len(tokens), TIMED_TOKENS):
            some = tokens[at : at + TIMED_TOKENS]
            took = consume(matcher, some, most, self._grammar.lock)
            if took is None:
                raise self._failed()
            if took > most:
                raise self._too_slow(took)
        if self._checked is not None:
            with self._grammar.lock:
                if not self._checked.append(tokens):
                    raise self._error(
                        Code.CONTROLLER_FAILED,
                        "the appended text ends a value that the schema does not allow",
                    )
        self._text += tokens
        self.closing.append(tokens, self._forced)
        self._forced = False
        return after

    def text_end(self, stop: bytes = b"") -> ConstraintEnd:
        """Returns ``closed`` if closing has changed the text, and ``complete`` if the grammar
        accepts the unchanged text. Returns ``cut`` if the text is neither. If ``stop`` is given,
        only the text before this stop string counts."""
        if not stop and self.closing.end is not None:
            return self.closing.end
        matcher, checked = self._matcher, self._checked
        if stop:
            tokens = tokens_before(stop, self._text, self._host.vocabulary)
            matcher = self._grammar.start()
            if tokens is None or consume(matcher, tokens, lock=self._grammar.lock) is None:
                return "cut"
            checked = self._grammar.checked_text()
        with self._grammar.lock:
            if checked is not None and not (
                (not stop or checked.append(tokens or ())) and checked.may_end
            ):
                return "cut"
            return "complete" if matcher.is_accepting() else "cut"

    def fork(self, host: Host) -> MatcherController:
        """A controller with a copy of the matcher."""
        matcher = self._grammar.copy(self._matcher)
        return MatcherController(
            self._grammar,
            matcher,
            host,
            self.closing.copy(host),
            self._name,
            self._text,
            None if self._checked is None else self._checked.copy(),
        )

    def close(self) -> None:
        """Does nothing: the matcher is freed with this object."""

    def _use_mask(self, mask: memoryview) -> None:
        self._mask = mask
        self._words = np.frombuffer(mask, np.uint32)
        place = mask if self._own_mask is None else self._own_mask
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(place))

    def _fill(self, mask: memoryview) -> None:
        own = self._own_mask
        if own is None:
            self._matcher.unsafe_compute_mask_ptr(self._address, len(mask))
            return
        self._matcher.unsafe_compute_mask_ptr(self._address, len(own))
        end = self._grammar.tokens.size - 1
        own[end >> 3] &= ~(1 << (end & 7))
        mask[:] = own[: len(mask)]

    def _fill_from(self, matcher: LLMatcher, mask: memoryview) -> np.ndarray:
        """The mask of another matcher, as u32 words."""
        own = self._own_mask
        place = mask if own is None else own
        address = ctypes.addressof(ctypes.c_char.from_buffer(place))
        matcher.unsafe_compute_mask_ptr(address, len(place))
        if own is not None:
            end = self._grammar.tokens.size - 1
            own[end >> 3] &= ~(1 << (end & 7))
            mask[:] = own[: len(mask)]
        return np.frombuffer(mask, np.uint32)

    def _failed(self) -> ControllerError:
        self._grammar.give_up()
        why = self._matcher.get_error()
        if why.startswith("NoExtension") or not why:
            why = "the grammar does not allow any token of this model's vocabulary here"
        return self._error(Code.CONTROLLER_FAILED, reason(why))

    def _too_slow(self, took: float) -> ControllerError:
        most = self._host.limits.mid_s
        return self._error(
            Code.CONTROLLER_TIMEOUT,
            f"parsing a token took {1000 * took:.0f} ms of CPU time, because the grammar is too "
            f"ambiguous; at most {1000 * most:g} ms are allowed",
        )

    def _error(self, code: Code, why: str) -> ControllerError:
        token = self._host.vocabulary.token
        text = b"".join(map(token, self._text)).decode("utf-8", "replace")
        shown = repr(text if len(text) <= SHOWN else f"…{text[-SHOWN:]}")
        return ControllerError(code, f"{why}; the text so far: {shown}")
