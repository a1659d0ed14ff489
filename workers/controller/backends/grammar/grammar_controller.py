"""The controller of a sequence under a grammar."""

from __future__ import annotations

from collections.abc import Sequence

from .....protocol.errors import Code, ControllerError
from ... import interface
from ...host import Host
from ...interface import CONTINUE, STOP, Action, Answer, Controller
from .grammar_instance import ANY, COMPLETE, FORCED
from .shared_instances import Shared

SHOWN = 200
"""Characters of the text so far that an error shows."""
SPARE = 8
"""Tokens that the model may add to what is needed to close the text, in one token of its own; of
short texts a sixteenth."""
LOOK_EVERY = 32
"""How often a sequence is asked what closing it needs, in tokens, where there is time."""

_MASKED = Answer(Action.CONTINUE, masked=True)


class GrammarController:
    """One sequence: its place in the guest of its grammar, and its text so far."""

    def __init__(self, shared: Shared, host: Host, place: int, text: list[int]) -> None:
        self._shared = shared
        self._guest = shared.guest
        self._host = host
        self._place = place
        self._text = text
        self._spare = min(SPARE, host.max_tokens // 16)
        self._look_at = 0
        """The length at which it is asked again."""
        self._way_back: tuple[int, list[int]] | None = None
        """The last length from which there was time for a closing, and that."""
        self._closed = False

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Nothing: the grammar is of what comes after the prompt."""

    def pre_process(self) -> Answer:
        """As ``interface.Controller`` says."""
        return CONTINUE

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """What the grammar allows next; appends what must come, and stops where nothing can."""
        if self._closed:
            return interface.COMPLETE
        left = self._host.max_tokens - len(self._text)
        if left <= 0:
            return STOP
        if len(self._text) >= self._look_at and (closing := self._closing()) is not None:
            return closing
        flags = self._guest.mask(self._place, mask)
        if flags & ANY:
            if flags & FORCED:
                tokens = self._guest.forced(self._place)[: left - 1]
                if tokens:
                    return Answer(Action.SPLICE, tokens=tokens)
            return _MASKED
        if flags & COMPLETE:
            return interface.COMPLETE
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            "no token of this model can go on with the text as the grammar needs it; the text so "
            f"far: {self._shown()}",
        )

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Follows what was appended; stops at the end of the sequence."""
        eos = self._host.vocabulary.eos_ids
        if tokens and tokens[-1] in eos:
            return STOP
        if self._closed:
            return CONTINUE
        if self._guest.append(self._place, tokens) < len(tokens):
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the tokens {list(tokens)} cannot follow here; the text so far: {self._shown()}",
            )
        self._text += tokens
        return CONTINUE

    def fork(self, host: Host) -> Controller:
        """As ``interface.Controller`` says; the fork has the same place in the text."""
        place = self._guest.fork(self._place)
        self._shared.share()
        return GrammarController(self._shared, host, place, list(self._text))

    def close(self) -> None:
        """As ``interface.Controller`` says."""
        self._guest.end(self._place)
        self._shared.release()

    def _closing(self) -> Answer | None:
        """Closes the text, where it is time: later there might be no room for it."""
        # With its last token a sequence has ended by its length, complete or not.
        length, most = len(self._text), self._host.max_tokens
        room = most - length - 1
        closing = self._guest.closing(self._place)
        if closing is not None and len(closing) <= room:
            self._way_back = length, closing
            spare = room - len(closing)
            if spare > self._spare:
                self._look_at = length + max(1, min(LOOK_EVERY, spare // 8))
                return None
        elif room > 0:
            self._look_at = length + 1
            return None
        if self._way_back is None:
            self._say(f"not closed: there was no time for it, as max_tokens is {most}")
            return None
        at, tokens = self._way_back
        back = length - at
        self._closed = True
        after = f" after {back} were taken back" if back else ""
        self._say(f"closed with {len(tokens)} more tokens{after}: max_tokens is {most}")
        if not tokens and not back:
            return interface.COMPLETE
        return Answer(Action.SPLICE, backtrack=back, tokens=tokens)

    def _say(self, what: str) -> None:
        self._host.log.write(f"{what}\n".encode())

    def _shown(self) -> str:
        token = self._host.vocabulary.token
        text = b"".join(map(token, self._text)).decode("utf-8", "replace")
        return repr(text if len(text) <= SHOWN else f"…{text[-SHOWN:]}")
