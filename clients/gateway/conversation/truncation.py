"""Shortens conversations that do not fit into the context of their model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....protocol.errors import Code, RequestError
from ..context import Gateway
from ..leniency import Ignored
from ..models import ServedModel
from .parts import Conversation, Result, Turn, of_kind
from .rendering import prompt_ids


async def fitting_ids(
    gateway: Gateway, model: ServedModel, conversation: Conversation, ignored: Ignored
) -> list[int]:
    """The token ids of a conversation, shortened as its ``fitting`` says. Raises ApiError 400."""
    how, context = conversation.fitting, model.info.context_length
    if how.reserve is None:
        ids = await prompt_ids(gateway, model, conversation, ignored)
        return last_tokens(ids, how.last_tokens, context)
    # A greater reserve would leave no room for the conversation.
    room = context - min(how.reserve if how.reserve > 0 else 1, max(1, context // 2))
    begins = exchanges(conversation.turns)
    first = 0
    found = await _ids(gateway, model, conversation, ignored)
    fits = found is not None and len(found) <= room
    if not fits and len(begins) > 1:
        # The number of tokens falls with each exchange that is left out.
        last = len(begins) - 1
        while first < last:
            middle = (first + last) // 2
            found = await _ids(gateway, model, without(conversation, begins, middle), ignored)
            if found is not None and len(found) <= room:
                last = middle
            else:
                first = middle + 1
        ignored.add(f"truncation: the oldest {first} exchanges are left out")
        conversation = without(conversation, begins, first)
    return await prompt_ids(gateway, model, conversation, ignored)


async def _ids(
    gateway: Gateway, model: ServedModel, conversation: Conversation, ignored: Ignored
) -> list[int] | None:
    """The token ids of a conversation; None if it is too long to be tokenized."""
    try:
        return await prompt_ids(gateway, model, conversation, ignored)
    except RequestError as error:
        if error.code != Code.PROMPT_TOO_LONG:
            raise
        return None


def exchanges(turns: Sequence[Turn]) -> list[int]:
    """The places of the turns with which exchanges begin: turns of the user that have no result.
    The conversation before the first of them is a part of the first exchange."""
    begins = [
        place
        for place, turn in enumerate(turns)
        if turn.role == "user" and not of_kind(turn.parts, Result)
    ]
    return [0, *begins[1:]] if begins else [0]


def without(conversation: Conversation, begins: Sequence[int], count: int) -> Conversation:
    """A conversation without its ``count`` oldest exchanges. System and developer messages stay."""
    start = begins[count]
    turns = conversation.turns
    kept = [turn for turn in turns[:start] if turn.role in ("system", "developer")]
    return replace(conversation, turns=[*kept, *turns[start:]])


def last_tokens(ids: list[int], count: int | None, context: int) -> list[int]:
    """The last ``count`` tokens of a prompt; -1: as many as leave room for one further token; None:
    all tokens."""
    if count is None:
        return ids
    keep = context - 1 if count < 0 else count
    return ids[len(ids) - keep :] if len(ids) > keep else ids
