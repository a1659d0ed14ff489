"""Arranges the turns of a conversation for templates that refuse the order of the turns.

Agents send a system message in the middle, several system messages, or consecutive messages of one
role. Many templates refuse such orders. A conversation is first rendered unchanged. If the template
refuses this order, the turns are rearranged in up to three steps, until the template accepts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .parts import Result, Role, Text, Turn, of_kind, text_of

BREAK = "\n\n"
"""The text that is inserted between the texts of two messages that are joined."""


def arrangements(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Yields the turns unchanged, and then up to three arrangements, each made from the previous
    one. The first has one system message, at the beginning, and joins consecutive turns of a role.
    In the second, if a turn has text and results of calls, the text is moved into the last result.
    The third has a user's message in place of the system message. An arrangement that
    equals the previous one is left out."""
    given = list(turns)
    yield given
    merged = _merged(_hoisted(given))
    if merged != given:
        yield merged
    joined = [_in_result(turn) for turn in merged]
    if joined != merged:
        yield joined
    folded = _merged(_folded(joined))
    if folded != joined:
        yield folded


def without_developers(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with system messages in place of developer messages."""
    return [_as(turn, "system") if turn.role == "developer" else turn for turn in turns]


def _hoisted(turns: list[Turn]) -> list[Turn]:
    """One turn with the text of all system and developer messages, and then the other turns."""
    system = [turn for turn in turns if turn.role in ("system", "developer")]
    others = [turn for turn in turns if turn.role in ("user", "assistant")]
    if not system:
        return others
    text = BREAK.join(text_of(turn.parts) for turn in system)
    return [Turn(system[0].role, [Text(text)]), *others]


def _merged(turns: list[Turn]) -> list[Turn]:
    """Joins consecutive turns of one role. A turn with results of calls is not joined to earlier
    turns, so that results precede all texts of their turn."""
    rows: list[list[Turn]] = []
    for turn in turns:
        if rows and rows[-1][0].role == turn.role and not of_kind(turn.parts, Result):
            rows[-1].append(turn)
        else:
            rows.append([turn])
    return [_one(row) for row in rows]


def _one(row: list[Turn]) -> Turn:
    """Joins consecutive turns of one role. If several turns have text, their texts are joined into
    one, which follows the other parts."""
    if len(row) == 1:
        return row[0]
    parts = [part for turn in row for part in turn.parts]
    texts = [text for turn in row if (text := text_of(turn.parts))]
    if len(texts) > 1:
        others = (part for part in parts if not isinstance(part, Text))
        parts = [*others, Text(BREAK.join(texts))]
    return replace(row[0], parts=parts)


def _folded(turns: list[Turn]) -> list[Turn]:
    """The turns with a user's turn in place of the system message."""
    system = [turn for turn in turns[:1] if turn.role in ("system", "developer")]
    return [*(_as(turn, "user") for turn in system), *turns[len(system) :]]


def _in_result(turn: Turn) -> Turn:
    """Moves the text of a turn to the end of the turn's last result. A turn without results or
    without text is not changed."""
    results, text = of_kind(turn.parts, Result), text_of(turn.parts)
    if not results or not text:
        return turn
    last = replace(results[-1], parts=[Text(f"{text_of(results[-1].parts)}{BREAK}{text}")])
    return replace(turn, parts=[*results[:-1], last])


def _as(turn: Turn, role: Role) -> Turn:
    return replace(turn, role=role)
