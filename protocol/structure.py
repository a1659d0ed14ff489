"""Divides answers into parts, such as text, thinking and tool calls.

A ``Structure`` defines the parts that an answer may have. An ``Automaton`` determines the bytes
that may follow at each position. From the automaton, the controller worker computes the masks of
the constraint ``structural``. The gateway divides an answer with a ``Reader``, which uses the same
automaton. So the parts that a client receives agree with the constraint.

An answer is a series of phases. A phase has free text, or a tag, or both. A tag has a ``begin``, a
content and an ``end``; after a tag, another phase begins. In the bytes of an answer, a special
token is its name between two bytes ``SPECIAL``. UTF-8 does not use this byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct

from .decoders import json_decoder

SPECIAL = b"\xff"
"""The byte before and after the name of a special token."""
MAX_TAGS = 512
MAX_PHASES = 16
MAX_TEXT = 4096
"""Maximum number of characters of ``begin``, and of ``end``."""

Kind = Literal["text", "reasoning", "call"]


class StructureError(ValueError):
    """A structure that is not valid; the message says why."""


class Tag(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of an answer between two texts, ``begin`` and ``end``."""

    begin: str
    """The text that begins the tag. When its first ``trigger`` characters have occurred, its other
    characters must follow."""
    trigger: int = 0
    """Number of characters of ``begin`` that trigger the tag; 0 stands for all characters."""
    end: str = ""
    """The text that ends the tag. It must not be empty if ``content`` is ``text``, because ``text``
    content ends at the first occurrence of ``end``. ``json`` content ends at the end of the JSON
    value."""
    content: Literal["text", "json", "none"] = "text"
    schema: dict[str, Any] | bool | None = None
    """The schema of ``json`` content; None if every JSON object is valid."""
    excludes: list[str] = []
    """Texts that the content may not contain."""
    kind: Kind = "text"
    name: str = ""
    """The function's name, for a ``call``."""
    max_tokens: int | None = None
    """Maximum number of tokens of ``text`` content. When the content has this number of tokens,
    ``closing`` and ``end`` are appended."""
    closing: str = ""
    """The text that is inserted before ``end`` if the content has reached ``max_tokens``."""
    then: int
    """The index of the phase after the tag."""


class Phase(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A phase of an answer. It determines the bytes that may follow."""

    text: bool = False
    """Whether free text may follow."""
    controller: str = ""
    """The built-in constraint that determines the rest of the answer, instead of free text."""
    arg: str | dict[str, Any] | list[Any] | None = None
    """The argument of the built-in constraint, as in ``controller_arg``."""
    tags: list[int] = []
    """Indices of the tags that may begin anywhere in the free text."""
    first: list[int] = []
    """Indices of the tags that may begin only at the beginning of the phase."""
    excludes: list[str] = []
    """Texts that the free text may not contain."""
    may_end: bool = False
    """Whether the answer may end in this phase."""
    end: str = ""
    """The name of the end-of-sequence token with which the answer may end. If empty, any
    end-of-sequence token may end the answer."""


class Structure(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The argument of the constraint ``structural``."""

    phases: list[Phase]
    tags: list[Tag]
    inside: int | None = None
    """The index of the tag in whose content the answer begins, because the tag's ``begin`` is in
    the prompt."""

    def check(self) -> None:
        """Raises StructureError if the structure is inconsistent."""
        if not self.phases or len(self.phases) > MAX_PHASES or len(self.tags) > MAX_TAGS:
            raise StructureError(
                f"there are {len(self.phases)} phases and {len(self.tags)} tags; 1 to "
                f"{MAX_PHASES} phases and at most {MAX_TAGS} tags are allowed"
            )
        for number, phase in enumerate(self.phases):
            for named in (*phase.tags, *phase.first):
                if not 0 <= named < len(self.tags):
                    raise StructureError(f"phases[{number}] has the tag {named}, which is unknown")
            if phase.text and phase.controller:
                raise StructureError(f"phases[{number}] has text and a controller; give only one")
            if phase.tags and not phase.text:
                raise StructureError(f"phases[{number}] has tags in its text, but text is false")
        for number, tag in enumerate(self.tags):
            self._check_tag(number, tag)
        if self.inside is not None and not 0 <= self.inside < len(self.tags):
            raise StructureError(
                f"inside is {self.inside}; expected the index of one of the {len(self.tags)} tags"
            )

    def _check_tag(self, number: int, tag: Tag) -> None:
        if not 0 <= tag.then < len(self.phases):
            raise StructureError(
                f"tags[{number}].then is {tag.then}; "
                f"expected the index of one of the {len(self.phases)} phases"
            )
        if not tag.begin or max(len(tag.begin), len(tag.end)) > MAX_TEXT:
            raise StructureError(
                f"tags[{number}].begin and end have {len(tag.begin)} and {len(tag.end)} "
                f"characters; expected 1 to {MAX_TEXT} and 0 to {MAX_TEXT}"
            )
        if not 0 <= tag.trigger <= len(tag.begin):
            raise StructureError(
                f"tags[{number}].trigger is {tag.trigger}; expected 0 to {len(tag.begin)}, the "
                "length of begin"
            )
        if tag.content == "text" and not tag.end:
            raise StructureError(f"tags[{number}] has text content without an end; set end")
        if tag.max_tokens is not None and (tag.max_tokens < 0 or tag.content != "text"):
            raise StructureError(
                f"tags[{number}].max_tokens is {tag.max_tokens}; expected at least 0, "
                "in a tag with text content"
            )


FREE_TEXT: Final[dict[str, Any]] = {"phases": [{"text": True, "may_end": True}], "tags": []}
"""The structure that allows any text."""


def decode_structure(arg: bytes) -> Structure:
    """Reads and checks a structure. Raises StructureError if the structure is not valid."""
    try:
        structure = json_decoder(Structure).decode(arg)
    except msgspec.MsgspecError as error:
        raise StructureError(str(error)) from None
    structure.check()
    return structure


class Piece(NamedTuple):
    """Some bytes of one part of an answer."""

    kind: Kind
    tag: int | None
    """The index of the part's tag; None if the part is free text."""
    data: bytes
    begins: bool = False
    """Whether the tag begins here; ``data`` is empty then."""


Mode = Literal["text", "value", "begin", "content", "end", "dead"]


class State(NamedTuple):
    """The position in an answer, by mode:

    - ``text`` and ``value``: in a phase. ``tags`` are the tags of ``Phase.first`` whose ``begin``
      starts with all bytes of the phase so far. ``at`` is the number of these bytes; 0 if there is
      no such tag.
    - ``begin``: in the ``begin`` of a tag. ``tags`` are the tags that this may be. Their ``begin``
      starts with the last ``at`` bytes of the answer so far.
    - ``content``: in the content of the only tag in ``tags``. ``phase`` is the phase after this
      tag.
    - ``end``: in the ``end`` of the only tag in ``tags``, after its first ``at`` bytes. ``phase``
      is the phase after this tag.
    - ``dead``: after a byte that is not allowed.
    """

    mode: Mode
    phase: int = 0
    tags: tuple[int, ...] = ()
    at: int = 0
    near: bytes = b""
    """The longest suffix of the bytes so far that is a proper prefix of a watched text
    (``Automaton.watched``)."""
    depth: int = 0
    """Number of open brackets of JSON."""
    quoted: int = 0
    """0 outside of JSON strings, 1 in a JSON string, 2 after a backslash in a JSON string."""
    part: int = 0
    """The number of the current part, which increases when a part begins."""
    last: int = -1
    """The index of the tag that began or ended last; -1 before the first tag."""


_DEAD = State("dead")


class Automaton:
    """The states of a structure, and the transition for each byte. The automaton is immutable, so
    several readers can share it."""

    def __init__(self, structure: Structure, special: Iterable[str] = ()) -> None:
        """``special``: the special tokens of the vocabulary, which are not text."""
        names = sorted((name for name in special if name), key=len, reverse=True)
        phases, tags = structure.phases, structure.tags
        self.structure = structure
        self.begins = [_with_special(tag.begin, names) for tag in tags]
        self.triggers = [
            _with_special(tag.begin[: tag.trigger or len(tag.begin)], names) for tag in tags
        ]
        self.ends = [_with_special(tag.end, names) for tag in tags]
        self.closings = [_with_special(tag.closing + tag.end, names) for tag in tags]
        self._never = [[_with_special(one, names) for one in each.excludes] for each in phases]
        self._not_inside = [[_with_special(one, names) for one in tag.excludes] for tag in tags]
        self._triggers = [
            list(dict.fromkeys(self.triggers[tag] for tag in phase.tags)) for phase in phases
        ]
        self._watched = [
            [*triggers, *never] for triggers, never in zip(self._triggers, self._never, strict=True)
        ]
        self._watched_inside = [
            [end, *never] if tag.content == "text" else never
            for tag, end, never in zip(tags, self.ends, self._not_inside, strict=True)
        ]
        self.special = {name for name in names if any(name in t.begin + t.end for t in tags)}
        """The special tokens that the structure uses."""

    def start(self) -> State:
        """The state of an empty answer."""
        inside = self.structure.inside
        if inside is not None:
            return State("content", self.structure.tags[inside].then, (inside,), last=inside)
        return self._enter(0, State("text"))

    def may_end(self, state: State) -> bool:
        """Whether an answer may end in a state. In the mode ``value``, the caller also checks that
        the value is complete."""
        if state.mode not in ("text", "value"):
            return False
        phase = self.structure.phases[state.phase]
        return phase.may_end and (phase.text or state.mode == "value" or not state.at)

    def watched(self, state: State) -> Sequence[bytes]:
        """The texts that change the state when they occur in free text or in a tag's content.
        Except in JSON and at the beginning of a phase, no other bytes change the state."""
        if state.mode == "content":
            return self._watched_inside[state.tags[0]]
        return self._watched[state.phase]

    def holds_json(self, state: State) -> bool:
        """Whether the position is in the content of a ``json`` tag."""
        return state.mode == "content" and self.structure.tags[state.tags[0]].content == "json"

    def shortest_end(self, tag: int) -> bytes:
        """The shortest literal text that leads from the end of a tag's content to a possible end of
        the answer. If the answer may not end in a phase, the text continues with the phase's
        shortest tag without content. If the phase has no such tag, the text stops in this phase."""
        text, number = self.ends[tag], self.structure.tags[tag].then
        for _ in self.structure.phases:
            phase = self.structure.phases[number]
            literal = [t for t in phase.first if self.structure.tags[t].content == "none"]
            if phase.may_end or not literal:
                break
            shortest = min(literal, key=lambda t: len(self.begins[t] + self.ends[t]))
            text += self.begins[shortest] + self.ends[shortest]
            number = self.structure.tags[shortest].then
        return text

    def step(self, state: State, byte: int) -> State:
        """The state after a byte; its mode is ``dead`` if the byte is not allowed."""
        match state.mode:
            case "text" | "value":
                return self._text(state, byte)
            case "begin":
                tags = self._fitting(state, byte)
                return self._began(state, tags, state.at + 1) if tags else _DEAD
            case "content":
                return self._content(state, byte)
            case "end":
                return self._end(state, byte)
        return _DEAD

    def walk(self, state: State, data: bytes) -> State:
        """The state after the bytes of ``data``."""
        for byte in data:
            state = self.step(state, byte)
        return state

    # --- inside ---------------------------------------------------------------------------------

    def _enter(self, number: int, before: State, tag: int = -1) -> State:
        """The state at the beginning of a phase."""
        phase = self.structure.phases[number]
        mode: Mode = "value" if phase.controller else "text"
        return State(mode, number, tuple(phase.first), part=before.part + 1, last=tag)

    def _fitting(self, state: State, byte: int) -> tuple[int, ...]:
        """The tags in ``state`` whose ``begin`` has this byte at the index ``state.at``."""
        at = state.at
        return tuple(t for t in state.tags if self.begins[t][at : at + 1] == bytes([byte]))

    def _text(self, state: State, byte: int) -> State:
        phase = self.structure.phases[state.phase]
        first = self._fitting(state, byte)
        whole = [t for t in first if len(self.triggers[t]) == state.at + 1]
        if whole:
            same = self.triggers[whole[0]]
            return self._began(
                state, tuple(t for t in first if self.triggers[t] == same), len(same)
            )
        if not first and (not (phase.text or phase.controller) or self._cut(state)):
            return _DEAD
        watched = self._watched[state.phase]
        near = state.near + bytes([byte])
        for trigger in self._triggers[state.phase]:
            if near.endswith(trigger):
                same_tags = tuple(t for t in phase.tags if self.triggers[t] == trigger)
                return self._began(state, same_tags, len(trigger))
        kept = _kept(near, watched)
        if any(near.endswith(text) for text in self._never[state.phase]):
            return _DEAD
        if not first and _leaves_special(state.near, byte, kept):
            return _DEAD
        return state._replace(tags=first, at=state.at + 1 if first else 0, near=kept)

    def _cut(self, state: State) -> bool:
        """Whether a tag's ``begin`` starts with all bytes of the phase so far, and these bytes end
        inside the name of a special token."""
        begun = [self.begins[tag][: state.at] for tag in state.tags]
        return bool(begun) and begun[0].count(SPECIAL) % 2 == 1

    def _began(self, state: State, tags: tuple[int, ...], at: int) -> State:
        for tag in tags:
            if len(self.begins[tag]) == at:
                return self._into(tag, state)
        return State("begin", state.phase, tags, at, part=state.part, last=state.last)

    def _into(self, tag: int, before: State) -> State:
        given = self.structure.tags[tag]
        part = before.part + 1
        if given.content != "none":
            return State("content", given.then, (tag,), part=part, last=tag)
        if self.ends[tag]:
            return State("end", given.then, (tag,), part=part, last=tag)
        return self._enter(given.then, before, tag)

    def _content(self, state: State, byte: int) -> State:
        tag = state.tags[0]
        near = state.near + bytes([byte])
        text = self.structure.tags[tag].content == "text"
        if text and near.endswith(self.ends[tag]):
            return self._enter(state.phase, state, tag)
        if any(near.endswith(never) for never in self._not_inside[tag]):
            return _DEAD
        kept = _kept(near, self._watched_inside[tag])
        if _leaves_special(state.near, byte, kept):
            return _DEAD
        state = state._replace(near=kept)
        return state if text else self._json(state, byte)

    def _json(self, state: State, byte: int) -> State:
        depth, quoted = state.depth, state.quoted
        if quoted == 2:
            quoted = 1
        elif quoted == 1:
            quoted = {0x5C: 2, 0x22: 0}.get(byte, 1)
        elif byte == 0x22:
            quoted = 1
        elif byte in b"{[":
            depth += 1
        elif byte in b"}]":
            depth -= 1
        if depth or quoted:
            return state._replace(depth=depth, quoted=quoted)
        if byte not in b'}]"':
            return _DEAD  # A number has no closing delimiter, so its end is not certain.
        tag = state.tags[0]
        if self.ends[tag]:
            return State("end", state.phase, (tag,), part=state.part, last=tag)
        return self._enter(state.phase, state, tag)

    def _end(self, state: State, byte: int) -> State:
        tag = state.tags[0]
        end = self.ends[tag]
        if end[state.at] != byte:
            return _DEAD
        if state.at + 1 == len(end):
            return self._enter(state.phase, state, tag)
        return state._replace(at=state.at + 1)


def _kept(near: bytes, watched: Sequence[bytes]) -> bytes:
    """The longest suffix of ``near`` that is a proper prefix of a watched text."""
    for at in range(len(near)):
        rest = near[at:]
        if any(len(text) > len(rest) and text.startswith(rest) for text in watched):
            return rest
    return b""


def _leaves_special(before: bytes, byte: int, kept: bytes) -> bool:
    """Whether a byte is part of a special token that no watched text contains."""
    if before.count(SPECIAL) % 2 == 0:
        return byte == SPECIAL[0] and not kept
    inside = len(before) - before.rfind(SPECIAL)
    return len(kept) < inside + 1


class Reader:
    """Reads one answer. Returns each piece of the answer as soon as the part that contains it is
    certain."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self.state = automaton.start()
        self._held = b""
        """Bytes that are held back, because they may belong to the ``begin`` or ``end`` of a
        tag."""

    def feed(self, data: bytes) -> list[Piece]:
        """Reads more bytes of the answer; returns the pieces that are now certain.

        If the structure does not allow a byte, all later bytes are returned as free text. The byte
        itself is returned as content if it is in a tag's content, and as free text if it is not.
        Such an answer was cut, or was not generated under the masks of the structure.
        """
        pieces: list[Piece] = []
        for byte in data:
            before = self.state
            self.state = self._automaton.step(before, byte)
            self._held += bytes([byte])
            self._moved(before, pieces)
        return _joined(pieces)

    def end(self) -> list[Piece]:
        """Ends the answer; returns the pieces that were held back. In the modes ``begin`` and
        ``end``, the held bytes belong to an unfinished tag, and are dropped."""
        pieces: list[Piece] = []
        if self.state.mode not in ("begin", "end"):
            self._give(pieces, self.state, len(self._held))
        return pieces

    def _moved(self, before: State, pieces: list[Piece]) -> None:
        after, held = self.state, len(self._held)
        if after.mode == "dead":
            self._give(pieces, before, held)
        elif after.part != before.part:
            self._give(pieces, before, held - self._marker(before, after))
            self._held = b""
            if after.mode == "content":
                tag = after.tags[0]
                pieces.append(Piece(self._automaton.structure.tags[tag].kind, tag, b"", True))
        elif after.mode == "end":
            if before.mode == "content":
                self._give(pieces, before, held)
        elif after.mode == "content":
            text = not self._automaton.holds_json(after)
            self._give(pieces, after, held - (len(after.near) if text else 0))
        else:
            # As long as the whole phase so far may be the beginning of a tag, all bytes of the
            # phase are held back.
            marked = after.at if after.tags else len(after.near)
            self._give(pieces, before, held - marked)

    def _marker(self, before: State, after: State) -> int:
        """The number of trailing bytes of ``_held`` that do not belong to the previous part."""
        if before.mode == "content":
            json = self._automaton.holds_json(before)
            return 0 if json else len(self._automaton.ends[after.last])
        return len(self._held) if before.mode == "end" else len(self._automaton.begins[after.last])

    def _give(self, pieces: list[Piece], state: State, count: int) -> None:
        if count <= 0:
            return
        data, self._held = self._held[:count], self._held[count:]
        if state.mode == "content":
            tag = state.tags[0]
            pieces.append(Piece(self._automaton.structure.tags[tag].kind, tag, data))
        else:
            pieces.append(Piece("text", None, data))


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and not last.begins and not piece.begins and last[:2] == piece[:2]:
            joined[-1] = last._replace(data=last.data + piece.data)
        else:
            joined.append(piece)
    return joined


def _with_special(text: str, names: Sequence[str]) -> bytes:
    """Encodes a text, and marks the special tokens in it. ``names``: the names of the special
    tokens, the longest first."""
    for name in names:
        before, found, after = text.partition(name)
        if found:
            marked = special(name)
            return _with_special(before, names) + marked + _with_special(after, names)
    return text.encode()


def special(name: str) -> bytes:
    """The bytes that stand for a special token in the input of a reader."""
    return SPECIAL + name.encode() + SPECIAL
