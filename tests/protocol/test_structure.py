"""The automaton of answers that have several parts, and the documentation's example of such an
answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenbus.protocol.structure import Automaton, Reader, decode_structure, special

PAGE = Path(__file__).parents[2] / "docs" / "constraints.md"
EXAMPLE = re.search(r"```json\n(\{\"phases\".*?)```", PAGE.read_text(), re.DOTALL)
assert EXAMPLE is not None
STRUCTURE = decode_structure(EXAMPLE[1].encode())

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>'


def read(text: bytes, size: int, names: tuple[str, ...] = ()) -> list[tuple[str, bytes]]:
    """The kinds and texts of the parts of ``text``, which is read in pieces of ``size`` bytes."""
    reader = Reader(Automaton(STRUCTURE, names))
    pieces = [p for at in range(0, len(text), size) for p in reader.feed(text[at : at + size])]
    parts: list[tuple[str, bytes]] = []
    for piece in [*pieces, *reader.end()]:
        if piece.begins or not parts or parts[-1][0] != piece.kind:
            parts.append((piece.kind, b""))
        parts[-1] = piece.kind, parts[-1][1] + piece.data
    return parts


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_an_answer_is_split_the_same_way_however_it_arrives(size: int) -> None:
    text = f"<think>a < b</think> It is <tool. {CALL}"
    wanted = [("reasoning", b"a < b"), ("text", b" It is <tool. "), ("call", b'{"a": "}"}')]
    assert read(text.encode(), size) == wanted


def test_an_answer_may_end_only_where_its_phase_says() -> None:
    automaton = Automaton(STRUCTURE)
    for text, may in (("", True), ("a <tool", True), ("<think>a", False), (CALL[:-1], False)):
        state = automaton.walk(automaton.start(), text.encode())
        assert automaton.may_end(state) == may
    assert automaton.may_end(automaton.walk(automaton.start(), CALL.encode()))


@pytest.mark.parametrize(
    "text", ["a</think>", CALL + "b", CALL.replace("}\n", "}x"), "<tool_call> {", CALL[:39] + "1"]
)
def test_what_the_structure_does_not_allow_leads_nowhere(text: str) -> None:
    automaton = Automaton(STRUCTURE)
    assert automaton.walk(automaton.start(), text.encode()).mode == "dead"
    assert read(text.encode(), 3)[0][0] in ("text", "call")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (CALL[:39] + "1 a", [("call", "1"), ("text", " a")]),
        ("a <tool_call> b", [("text", "a <tool_call> b")]),
    ],
)
def test_text_after_a_byte_that_is_not_allowed_is_free_text(
    text: str, parts: list[tuple[str, str]]
) -> None:
    assert read(text.encode(), 3) == [(kind, part.encode()) for kind, part in parts]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a <tool", [("text", b"a <tool")]),
        ("a <tool_call>", [("text", b"a ")]),
        ("<think>a</thi", [("reasoning", b"a</thi")]),
        (CALL[:-3], [("call", b'{"a": "}"}')]),
    ],
)
def test_an_unfinished_begin_or_end_is_dropped_only_if_nothing_else_may_follow(
    text: str, parts: list[tuple[str, bytes]]
) -> None:
    assert read(text.encode(), 3) == parts


def test_special_tokens_are_allowed_where_they_are_part_of_a_tag() -> None:
    names = ("<tool_call>", "</tool_call>", "<other>")
    automaton = Automaton(STRUCTURE, names)
    marked = CALL.encode()
    for name in names[:2]:
        marked = marked.replace(name.encode(), special(name))
    assert automaton.may_end(automaton.walk(automaton.start(), marked))
    assert read(b"see " + marked, 1000, names)[1] == ("call", b'{"a": "}"}')
    assert read(b"no <tool_call> here", 1, names) == [("text", b"no <tool_call> here")]
    assert automaton.walk(automaton.start(), b"a" + special("<other>")).mode == "dead"
