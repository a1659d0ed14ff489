"""The controller of a sequence under a grammar."""

from __future__ import annotations

from collections.abc import Sequence

from ....protocol.errors import Code, ControllerError
from .. import interface
from ..host import Host
from ..interface import GO_ON, STOP, Answer, Controller, Then
from .guest import ANY, COMPLETE, FORCED
from .guests import Shared

SHOWN = 200
"""Characters of the text so far that an error shows."""

_MASKED = Answer(Then.GO_ON, masked=True)


class GrammarController:
    """One sequence: its place in the guest of its grammar, and its text so far."""

    def __init__(self, shared: Shared, host: Host, place: int, text: list[int]) -> None:
        self._shared = shared
        self._guest = shared.guest
        self._host = host
        self._place = place
        self._text = text

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Nothing: the grammar is of what comes after the prompt."""

    def pre_process(self) -> Answer:
        """As ``interface.Controller`` says."""
        return GO_ON

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """What the grammar allows next; appends what must come, and stops where nothing can."""
        flags = self._guest.mask(self._place, mask)
        if flags & ANY:
            if flags & FORCED:
                tokens = self._guest.forced(self._place)
                if tokens:
                    return Answer(Then.SPLICE, tokens=tokens)
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
        if self._guest.append(self._place, tokens) < len(tokens):
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the tokens {list(tokens)} cannot follow here; the text so far: {self._shown()}",
            )
        self._text += tokens
        return GO_ON

    def fork(self, host: Host) -> Controller:
        """As ``interface.Controller`` says; the fork has the same place in the text."""
        place = self._guest.fork(self._place)
        self._shared.share()
        return GrammarController(self._shared, host, place, list(self._text))

    def close(self) -> None:
        """As ``interface.Controller`` says."""
        self._guest.end(self._place)
        self._shared.release()

    def _shown(self) -> str:
        token = self._host.vocabulary.token
        text = b"".join(map(token, self._text)).decode("utf-8", "replace")
        return repr(text if len(text) <= SHOWN else f"…{text[-SHOWN:]}")
