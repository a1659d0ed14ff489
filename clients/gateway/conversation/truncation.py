"""Shortens conversations that do not fit into the context of their model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....protocol.errors import Code, RequestError
from ..bodies.leniency import Ignored
from ..models import ServedModel
from .parts import Conversation, Result, Turn, of_kind
from .rendering import Resources, prompt_ids


async def fitting_ids(
    resources: Resources, model: ServedModel, conversation: Conversation, ignored: Ignored
) -> list[int]:
    """The token ids of a conversation, which is shortened as ``conversation.fitting`` requests.
    Raises ApiError or TokenbusError."""
    how, context = conversation.fitting, model.info.context_length
    if how.reserve is None:
        whole = await prompt_ids(resources, model, conversation, ignored)
        return last_tokens(whole, how.last_tokens, context)
    # At most half of the context is reserved for the answer, so the conversation has at least half.
    room = context - min(how.reserve if how.reserve > 0 else 1, max(1, context // 2))
    begins = exchanges(conversation.turns)

    async def ids_without(count: int) -> list[int] | None:
        """The token ids without the ``count`` oldest exchanges; None if these ids are too many."""
        rest = without(conversation, begins, count)
        try:
            fitting = await prompt_ids(resources, model, rest, ignored)
        except RequestError as error:
            if error.code != Code.PROMPT_TOO_LONG:
                raise
            return None
        return fitting if len(fitting) <= room else None

    if (found := await ids_without(0)) is not None:
        return found
    # A binary search finds the smallest number of exchanges to leave out, because the prompt gets
    # shorter with each exchange that is left out.
    count = len(begins) - 1
    first = min(1, count)
    while first < count:
        middle = (first + count) // 2
        ids = await ids_without(middle)
        if ids is None:
            first = middle + 1
        else:
            count, found = middle, ids
    if count:
        ignored.add(f"truncation: the oldest {count} exchanges are left out")
    if found is None:
        found = await prompt_ids(resources, model, without(conversation, begins, count), ignored)
    return found


def exchanges(turns: Sequence[Turn]) -> list[int]:
    """The index of the first turn of each exchange. An exchange begins with a turn of the user
    that has no results of calls, and ends before the next such turn. Turns before the first such
    turn belong to the first exchange."""
    begins = [
        place
        for place, turn in enumerate(turns)
        if turn.role == "user" and not of_kind(turn.parts, Result)
    ]
    return [0, *begins[1:]] if begins else [0]


def without(conversation: Conversation, begins: Sequence[int], count: int) -> Conversation:
    """A conversation without its ``count`` oldest exchanges, but with all system and developer
    messages. ``begins``: the result of ``exchanges``."""
    start = begins[count]
    turns = conversation.turns
    kept = [turn for turn in turns[:start] if turn.role in ("system", "developer")]
    return replace(conversation, turns=[*kept, *turns[start:]])


def last_tokens(ids: list[int], count: int | None, context: int) -> list[int]:
    """The last ``count`` tokens of a prompt; all tokens if ``count`` is None. The count -1 keeps as
    many tokens as fit into the context together with one new token."""
    if count is None:
        return ids
    keep = context - 1 if count < 0 else count
    return ids[len(ids) - keep :] if len(ids) > keep else ids
