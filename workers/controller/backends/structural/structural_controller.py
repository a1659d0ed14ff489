"""The controller of one sequence whose answer has several parts.

A *tag* is a part between two literal texts, such as the thinking or a tool call
(``protocol.structure.Tag``). A *value* is a text that a separate constraint limits: the JSON of a
tag, or the rest of the answer. A *draft* is a list of tokens that the GPU worker expects next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .....protocol.errors import Code, ControllerError, RequestError
from .....protocol.messages import ConstraintEnd
from .....protocol.structure import State
from ... import interface
from ...host import Host
from ...interface import CONTINUE, STOP, Action, Answer, Constraint, TakesDrafts
from ..text_before import before_end
from .free_masks import FreeMasks

Arg = str | dict[str, Any] | list[Any] | bool | None
StartValue = Callable[[str, Arg, Host], Constraint]
"""Makes the controller of a value: a built-in constraint with its argument."""

MAX_CHARACTER_BYTES = 4
"""Maximum bytes of a character in UTF-8. Each token has at least one byte, so a character is
complete after at most this number of tokens."""

_MASKED = Answer(Action.CONTINUE, masked=True)


class StructuralController:
    """The controller of one sequence. It stores the automaton's state after the sequence's tokens,
    and calls the controller of the current value."""

    def __init__(self, masks: FreeMasks, start_value: StartValue, host: Host) -> None:
        self._masks = masks
        self._automaton = masks.automaton
        self._start_value = start_value
        self._host = host
        self._tokens: list[int] = []
        self._state = self._automaton.start()
        self._inner: Constraint | None = None
        self._inner_mask = b""
        """The mask of the value without the tags. Empty unless the text may continue with either
        the value or a tag."""
        self._spent = 0
        """Number of tokens of the current part."""
        self._before: list[State] = []
        """The state before each token of the current part."""
        self._ended = False
        """Whether the model has sampled an end-of-sequence token where the answer may end."""
        self._closed = False
        """Whether the JSON of a tag was completed early because few tokens were left."""
        self._settled: State | None = None
        """The last state of free text whose mask was written; None before the first such mask."""
        self._settled_mask = b""
        """The mask of ``_settled``, including end-of-sequence tokens."""
        self._settled_until = 0
        """Number of tokens of the current part up to which ``_settled_mask`` is valid."""
        self._marked = masks.marks(self._state).search
        """A function that searches a token's text for a byte that may change the state
        ``_settled``."""
        self._enter()

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Raises RequestError if even the shortest answer has more than ``max_tokens``."""
        state = self._state
        if state.mode == "value" and self._inner is not None and not state.tags:
            self._inner.init_prompt(prompt)
        if state.mode != "text" or self._automaton.may_end(state):
            return
        takes = min(map(self._tokens_of, state.tags), default=0)
        most = self._host.max_tokens
        if takes > most:
            raise RequestError(
                Code.INVALID_FIELD,
                f"structural: max_tokens is {most}, but the shortest text takes {takes} tokens; it "
                f"must be at least {takes}",
                path="$.max_tokens",
            )

    def pre_process(self) -> Answer:
        """Always continues."""
        return CONTINUE

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """Writes the mask of the current part, or returns a splice that appends a literal text."""
        if len(self._tokens) >= self._host.max_tokens:
            return STOP
        state = self._state
        if state is self._settled and self._spent < self._settled_until:
            mask[:] = self._settled_mask
            return _MASKED
        if self._inner is not None:
            return self._of_schema(self._inner, mask)
        closing = self._closing()
        if closing:
            return self._append(self._masks.table.of_literal(closing))
        free = state.mode == "content" or self._is_text(state)
        if not free and not self._automaton.may_end(state):
            forced = self._masks.forced(state)
            if forced:
                return self._append(forced)
        mask[:] = self._masks.get(state)
        if self._automaton.may_end(state):
            if not free and not _any(mask):
                return interface.COMPLETE
            self._allow_end(mask, state)
        if not _any(mask):
            raise self._error("no token of this model's vocabulary can follow in the structure")
        if free:
            self._settle(state, mask)
        return _MASKED

    def masks_along(self, draft: Sequence[int], masks: Sequence[memoryview]) -> int:
        """Writes the masks after the tokens of a draft, up to the first token after which a value
        begins or ends, or a text is forced."""
        left = self._host.max_tokens - len(self._tokens) - 1
        draft = before_end(draft, self._host.vocabulary)[: max(0, left)]
        state, inner = self._state, self._inner
        if inner is None:
            return self._free_along(draft, masks)
        if not isinstance(inner, TakesDrafts) or (state.mode == "value" and state.tags):
            return 0
        written = inner.masks_along(draft, masks)
        return written if state.mode == "value" else self._json_along(draft, masks[:written])

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Advances by the appended tokens; stops at an end-of-sequence token."""
        if backtrack:
            # Only the controller of a value drops tokens, in order to complete the value. So all
            # appended tokens belong to the value.
            self._take_back(backtrack)
            assert self._inner is not None
            self._inner.post_process(tokens, backtrack)
            for token in tokens:
                self._advance(token, followed=True)
            return CONTINUE
        for token in tokens:
            if token in self._host.vocabulary.eos_ids:
                self._ended = self._automaton.may_end(self._state)
                return STOP
            self._advance(token)
        return CONTINUE

    def text_end(self, stop: bytes = b"") -> ConstraintEnd:
        """Returns ``cut`` if the answer may not end here, ``closed`` if a value was completed early
        because few tokens were left, and ``complete`` in all other cases. If ``stop`` is given,
        only the text before this stop string counts."""
        if stop:
            text = b"".join(map(self._masks.bytes_of, self._tokens))
            state = self._automaton.walk(self._automaton.start(), text.partition(stop)[0])
            if state.mode == "value":
                if self._inner is None or self._state.mode != "value":
                    return "cut"
                return self._inner.text_end(stop)
            return "complete" if self._automaton.may_end(state) else "cut"
        if self._state.mode == "value" and self._inner is not None:
            return self._inner.text_end()
        if not (self._ended or self._automaton.may_end(self._state)):
            return "cut"
        return "closed" if self._closed else "complete"

    def fork(self, host: Host) -> StructuralController:
        """A controller with a copy of the state."""
        other = StructuralController(self._masks, self._start_value, host)
        other.close()
        other._tokens, other._state = [*self._tokens], self._state
        other._spent, other._inner_mask = self._spent, self._inner_mask
        other._before, other._closed = [*self._before], self._closed
        if self._inner is not None:
            other._inner = self._inner.fork(self._within(host))
        return other

    def close(self) -> None:
        """Closes the controller of the value."""
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()

    # --- inside ---------------------------------------------------------------------------------

    def _is_text(self, state: State) -> bool:
        return state.mode == "text" and self._automaton.structure.phases[state.phase].text

    def _settle(self, state: State, mask: memoryview) -> None:
        """Caches the mask of a state of free text. Most tokens do not change the state. The round
        after such a token only copies the cached mask."""
        tag = self._automaton.structure.tags[state.tags[0]] if state.mode == "content" else None
        most = tag.max_tokens if tag is not None else None
        self._settled, self._settled_mask = state, bytes(mask)
        self._settled_until = self._host.max_tokens if most is None else most
        self._marked = self._masks.marks(state).search

    def _is_spent(self, state: State, spent: int) -> bool:
        """Whether a part must be closed. This is the case if the part is the content of a tag and
        has used up the tag's ``max_tokens``. ``spent``: the number of tokens of the part."""
        if state.mode != "content":
            return False
        most = self._automaton.structure.tags[state.tags[0]].max_tokens
        return most is not None and spent >= most

    def _append(self, tokens: Sequence[int]) -> Answer:
        left = self._host.max_tokens - len(self._tokens)
        return Answer(Action.SPLICE, tokens=tokens[:left])

    def _closing(self) -> bytes:
        """The bytes that end the text of a tag whose ``max_tokens`` are used up. Empty if the text
        need not end now, or if it ends inside a character."""
        state = self._state
        if not self._is_spent(state, self._spent):
            return b""
        tag = state.tags[0]
        most = self._automaton.structure.tags[tag].max_tokens or 0
        tail = b"".join(map(self._masks.bytes_of, self._tokens[-MAX_CHARACTER_BYTES:]))
        if self._spent < most + MAX_CHARACTER_BYTES and _ends_inside(tail):
            return b""
        return self._automaton.closings[tag]

    def _free_along(self, draft: Sequence[int], masks: Sequence[memoryview]) -> int:
        """Implements ``masks_along`` for text, and for the beginnings and ends of tags."""
        state, spent = self._state, self._spent
        for number, (token, mask) in enumerate(zip(draft, masks, strict=False)):
            before, data = state, self._masks.bytes_of(token)
            state = self._masks.follow(before, data) if data else State("dead")
            spent += 1
            if (state.part, state.mode) != (before.part, before.mode):
                spent = 0
            free = state.mode == "content" or self._is_text(state)
            if state.mode in ("dead", "value") or self._automaton.holds_json(state):
                return number
            may_end = self._automaton.may_end(state)
            if not free and not may_end and self._masks.forced(state):
                return number
            if self._is_spent(state, spent):
                return number
            mask[:] = self._masks.get(state)
            if may_end:
                if not free and not _any(mask):
                    return number
                self._allow_end(mask, state)
            if not _any(mask):
                return number
        return min(len(draft), len(masks))

    def _json_along(self, draft: Sequence[int], masks: Sequence[memoryview]) -> int:
        """Removes the tokens that the tag forbids from the masks that the schema's controller has
        written along a draft. Returns the number of masks that are valid in the tag."""
        state = self._state
        for number, (token, mask) in enumerate(zip(draft, masks, strict=False)):
            state = self._masks.follow(state, self._masks.bytes_of(token))
            if not self._automaton.holds_json(state):
                return number
            if not self._forbid(state, mask):
                return number
        return len(masks)

    def _forbid(self, state: State, mask: memoryview) -> bool:
        """Removes the tokens that a tag forbids from a schema's mask; returns whether any token is
        left."""
        for token in self._masks.forbidden(state):
            mask[token >> 3] &= ~(1 << (token & 7))
        return _any(mask)

    def _of_schema(self, inner: Constraint, mask: memoryview) -> Answer:
        """Calls mid_process of a value's controller, and adapts its answer and its mask to the
        structure."""
        answer = inner.mid_process((self._host.seq,), mask)
        state = self._state
        if answer.action is Action.STOP:
            whole = answer.complete and self._automaton.may_end(state)
            return interface.COMPLETE if whole else STOP
        if state.mode == "value":
            return self._with_tags(answer, mask) if state.tags else answer
        if answer.action is Action.SPLICE:
            return answer
        if not self._forbid(state, mask):
            raise self._error("the tag forbids every token that its schema allows here")
        return answer

    def _with_tags(self, answer: Answer, mask: memoryview) -> Answer:
        """Writes a mask that allows the tokens of a value and the tokens of the tags that may
        replace the value."""
        if answer.action is Action.SPLICE:
            mask[:] = bytes(len(mask))
            token = answer.tokens[0]
            mask[token >> 3] |= 1 << (token & 7)
        self._inner_mask = bytes(mask)
        tags = self._masks.get(self._state)
        both = int.from_bytes(mask, "little") | int.from_bytes(tags, "little")
        mask[:] = both.to_bytes(len(mask), "little")
        return _MASKED

    def _allow_end(self, mask: memoryview, state: State) -> None:
        vocabulary = self._host.vocabulary
        name = self._automaton.structure.phases[state.phase].end
        only = vocabulary.special.get(name) if name else None
        for token in (only,) if only in vocabulary.eos_ids else vocabulary.eos_ids:
            assert token is not None
            mask[token >> 3] |= 1 << (token & 7)

    def _tokens_of(self, tag: int) -> int:
        """The number of tokens of the shortest form of a tag, including its end."""
        given, table = self._automaton.structure.tags[tag], self._masks.table
        takes = len(table.of_literal(self._automaton.begins[tag]))
        takes += len(table.of_literal(self._automaton.shortest_end(tag)))
        if given.content == "json":
            inner = self._start_value("json_schema", given.schema, self._host)
            takes += len(getattr(inner, "shortest", None) or ())
            inner.close()
        return takes

    def _take_back(self, count: int) -> None:
        """Removes the last ``count`` tokens of the value, because the value's controller drops
        them."""
        if count > len(self._before):
            raise self._error(f"cannot drop {count} tokens: the value has {len(self._before)}")
        self._state = self._before[-count]
        del self._before[-count:]
        del self._tokens[-count:]

    def _advance(self, token: int, followed: bool = False) -> None:
        """Appends a token. ``followed``: the value's controller has already received the token."""
        before = self._state
        if before is self._settled and before is not None:
            text = self._host.vocabulary.token(token)
            if text and not self._marked(text):
                self._tokens.append(token)
                self._spent += 1
                return
        data = self._masks.bytes_of(token)
        after = self._masks.follow(before, data) if data else State("dead")
        if before.mode == "value":
            if not followed:
                after = self._advance_value(token, after)
        elif after.mode == "dead":
            raise self._error(f"the structure does not allow the token {token} ({data!r}) here")
        elif self._inner is not None and not followed:
            self._inner.post_process([token], 0)
        self._tokens.append(token)
        self._before.append(before)
        if self._inner is None or before.mode != "value" or after.mode != "dead":
            self._state = after
        self._spent += 1
        if (self._state.part, self._state.mode) != (before.part, before.mode):
            inner = self._inner
            if inner is not None and before.mode == "content" and inner.text_end() == "closed":
                self._closed = True
            self.close()
            self._enter()

    def _advance_value(self, token: int, after: State) -> State:
        """Passes a token to the controller of the value, or closes that controller if the token
        begins a tag that replaces the value. Returns the state after the token."""
        inner = self._inner
        if inner is None:
            return after
        fits = not self._inner_mask or self._inner_mask[token >> 3] >> (token & 7) & 1
        self._inner_mask = b""
        if fits and after.mode in ("value", "dead"):
            inner.post_process([token], 0)
            return after
        self.close()
        # The value does not allow this token. So the token is part of the ``begin`` of a tag, whose
        # rest must follow.
        return after._replace(mode="begin") if after.mode == "value" else after

    def _enter(self) -> None:
        """Called when a part of the answer begins: resets the counts. If the part is a value, makes
        the controller of the value."""
        self._spent = 0
        self._before = []
        self._inner_mask = b""
        structure, state = self._automaton.structure, self._state
        host = self._within(self._host)
        if state.mode == "value":
            phase = structure.phases[state.phase]
            self._inner = self._start_value(phase.controller, phase.arg, host)
        elif self._automaton.holds_json(state):
            schema = structure.tags[state.tags[0]].schema
            self._inner = self._start_value("json_schema", schema, host)

    def _within(self, host: Host) -> Host:
        """The host of a value. Its ``max_tokens`` are the remaining tokens minus the tokens of the
        text that must follow the value."""
        left = host.max_tokens - len(self._tokens)
        if self._state.mode == "content":
            end = self._automaton.shortest_end(self._state.tags[0])
            left -= len(self._masks.table.of_literal(end))
        return replace(host, max_tokens=max(1, left))

    def _error(self, why: str) -> ControllerError:
        text = b"".join(map(self._masks.bytes_of, self._tokens)).decode("utf-8", "replace")
        return ControllerError(Code.CONTROLLER_FAILED, f"{why}; the text so far: {text[-200:]!r}")


def _any(mask: memoryview) -> bool:
    return bytes(mask) != bytes(len(mask))


def _ends_inside(text: bytes) -> bool:
    """Whether a text ends inside the bytes of a character in UTF-8."""
    for length in range(1, min(MAX_CHARACTER_BYTES, len(text)) + 1):
        byte = text[-length]
        if byte >> 6 != 0b10:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return needed > length
    return False
