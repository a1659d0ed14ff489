"""Runs rounds of several sequences in one request to their guest process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .channel import MASK_BYTES, MAX_ANSWER_BYTES
from .messages import Advance, Item
from .process import Cause, GuestDied, GuestProcess

ITEM_BYTES = 128 * 1024
"""Maximum bytes of the answer of one item of a batch, without its bias. The log of a round, which
is part of the answer, has up to 64 KiB."""


@dataclass(frozen=True, slots=True)
class ProcessBatch:
    """Runs the rounds of several sequences of one process (``interface.Batch``)."""

    process: GuestProcess

    def rounds(self, turns: Sequence[tuple[int, int]], masks: Sequence[memoryview]) -> list[bool]:
        """Runs the round of each turn (a sequence and its sampled token). Returns for each turn
        whether its round was usual (``interface.Batch``). The other rounds have run too. Their
        controllers have stored the answers."""
        row = len(masks[0])
        # The answer of an item may have a bias, with 32 bits for each bit of the mask, and a log.
        answer = 32 * row + ITEM_BYTES
        most = max(1, min(MASK_BYTES // row, MAX_ANSWER_BYTES // answer))
        done: list[bool] = []
        for at in range(0, len(turns), most):
            done += self._some(turns[at : at + most], masks[at : at + most], row)
        return done

    def _some(
        self, turns: Sequence[tuple[int, int]], masks: Sequence[memoryview], row: int
    ) -> list[bool]:
        process = self.process
        found = [process.controllers.get(handle) for handle, _ in turns]
        controllers = [each for each in found if each is not None]
        if len(controllers) < len(turns):
            return [False] * len(turns)
        limit_s = max(each.limits.watched_round_s for each in controllers)
        marks = [each.mark() for each in controllers]
        if None in marks:
            return [False] * len(turns)
        request = Advance([Item(handle, [token]) for handle, token in turns])
        try:
            with process.channel() as channel:
                answer = process.request(channel, request, limit_s, len(turns))
                if len(answer.items) != len(turns):
                    process.kill("it sent the wrong number of answers")
                    raise GuestDied(process.dead, Cause.KILLED)
                done = []
                for place, outcome in enumerate(answer.items):
                    mask = channel.masks[place * row : (place + 1) * row]
                    usual = controllers[place].take_batched(turns[place][1], outcome, mask)
                    if usual:
                        masks[place][:] = mask
                    done.append(usual)
                return done
        except GuestDied as died:
            for place, (controller, mark) in enumerate(zip(controllers, marks, strict=True)):
                controller.lost(died, mark, place == died.item)
            return [False] * len(turns)
