"""Records the calls of a controller, so that they can be repeated in a new process."""

from __future__ import annotations

import array
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from ..host import Host
from ..limits import Limits
from .messages import Advance, Item, Mid, Prompt, ToGuest

MAX_REPEATED = 64
"""Maximum number of rounds that one request of a replay repeats."""


class Begun(NamedTuple):
    """The beginning of a sequence in the recorded calls."""

    host: Host


Call: TypeAlias = "Prompt | Item | Mid | array.array[int]"
"""A recorded call. An array stands for several rounds, each of which has one sampled token and no
other input."""


class Recording:
    """The recorded calls of a sequence. The calls of its ancestors up to each fork come first."""

    def __init__(self, host: Host, parent: Recording | None = None) -> None:
        before = parent.events if parent is not None else []
        copied = (event[:] if isinstance(event, array.array) else event for event in before)
        self.events: list[Begun | Call] = [*copied, Begun(host)]
        """The calls in order, beginning with the first ancestor of the sequence. A ``Begun``
        precedes the calls of each sequence."""

    def add(self, call: Prompt | Mid) -> None:
        """Records a call."""
        self.events.append(call)

    def add_round(self, item: Item) -> None:
        """Records a round. A round whose only input is one sampled token takes four bytes."""
        if item != Item(0, item.tokens) or item.tokens is None or len(item.tokens) != 1:
            self.events.append(item)
            return
        last = self.events[-1]
        if isinstance(last, array.array):
            last.append(item.tokens[0])
        else:
            self.events.append(array.array("I", item.tokens))


def repetitions(
    call: Call, handle: int, limits: Limits, max_items: int
) -> Iterator[tuple[ToGuest, float]]:
    """The requests that repeat a call for the controller ``handle``, each with its CPU time limit
    in seconds. ``max_items``: maximum items of a request."""
    match call:
        case Prompt():
            yield Prompt(handle, call.tokens), limits.init_s
        case Mid():
            yield Mid(handle, call.group), limits.watched_round_s
        case Item():
            yield Advance([addressed(call, handle)]), limits.watched_round_s
        case _:
            most = min(MAX_REPEATED, max_items)
            items = [Item(handle, [token]) for token in call]
            for at in range(0, len(items), most):
                yield Advance(items[at : at + most]), most * limits.watched_round_s


def addressed(item: Item, handle: int, limits: Limits | None = None) -> Item:
    """A copy of an item, addressed to the controller ``handle``. ``limits``: the controller's new
    limits if they have changed."""
    return Item(
        handle,
        item.tokens,
        item.backtrack,
        item.last,
        item.distributions,
        limits or item.limits,
        item.scores,
        item.refusal,
        item.logprobs,
    )
