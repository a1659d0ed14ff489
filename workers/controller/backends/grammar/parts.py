"""Runs a combination that cannot be compiled to one automaton. The parts of the combination
constrain the text one after another.

A plan gives each part a number, its *position*, and lists the positions that may follow each
position, as in Glushkov's construction of automata. A part that may be repeated may have several
positions.

If the text so far can be parsed in several ways, the sequence is in several positions at once. Each
of these positions has its own controller, and the mask is the union of the controllers' masks. A
token belongs to one part: no token spans the end of one part and the beginning of the next. Tokens
are *forced* if only their text may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .....protocol.errors import Code, ControllerError
from .....protocol.messages import ConstraintEnd
from ... import interface
from ...host import Host
from ...interface import CONTINUE, STOP, Action, Answer, Constraint
from ..text_before import tokens_before
from .combination import Part
from .refusals import refusal

MAX_POSITIONS = 256
"""Maximum number of parts of a plan. A part that may be repeated n times counts n times."""
MAX_WAYS = 32
"""Maximum number of ways to parse the text so far."""

_MASKED = Answer(Action.CONTINUE, masked=True)

Start = Callable[[Part, Host], Constraint]
"""A function that makes the controller of one part of a plan."""


@dataclass(slots=True)
class Plan:
    """The parts of a combination by position. Each position in ``follow[p]`` may come after
    position p. A text may begin with each position in ``first``. It may end with each position in
    ``last``."""

    parts: list[Part] = field(default_factory=list)
    budgets: list[int | None] = field(default_factory=list)
    """For each position, the maximum number of tokens of the part; None if neither the part nor an
    enclosing part has ``max_tokens``."""
    follow: list[set[int]] = field(default_factory=list)
    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    empty: bool = False
    """Whether the text may be empty, without any part."""


def make_plan(root: Part) -> Plan:
    """The plan of a combination. Raises RequestError if the plan has too many parts."""
    plan = Plan()
    plan.first, plan.last, plan.empty = _planned(plan, root, None)
    return plan


def _planned(plan: Plan, part: Part, most: int | None) -> tuple[set[int], set[int], bool]:
    """Adds a part to the plan; returns the part's first and last positions, and whether the part
    may be left out. ``most``: the smallest ``max_tokens`` of the enclosing parts."""
    if part.max_tokens is not None:
        most = part.max_tokens if most is None else min(most, part.max_tokens)
    if part.regular or part.kind not in ("sequence", "alternation", "repetition"):
        if len(plan.parts) == MAX_POSITIONS:
            raise refusal(
                f"combination: {part.place} exceeds the limit of {MAX_POSITIONS} parts; each copy "
                "of a repeated part counts"
            )
        plan.parts.append(part)
        plan.budgets.append(most)
        plan.follow.append(set())
        here = {len(plan.parts) - 1}
        return here, here, False
    if part.kind == "alternation":
        firsts, lasts, empties = zip(*(_planned(plan, p, most) for p in part.parts), strict=True)
        return set().union(*firsts), set().union(*lasts), any(empties)
    if part.kind == "sequence":
        return _in_a_row(plan, [_planned(plan, p, most) for p in part.parts])
    [inner] = part.parts
    copies = max(part.least, 1) if part.most is None else part.most
    rows = []
    for number in range(1, copies + 1):
        first, last, empty = _planned(plan, inner, most)
        if part.most is None and number == copies:
            for position in last:
                plan.follow[position] |= first
        rows.append((first, last, empty or number > part.least))
    return _in_a_row(plan, rows)


def _in_a_row(
    plan: Plan, rows: Sequence[tuple[set[int], set[int], bool]]
) -> tuple[set[int], set[int], bool]:
    firsts: set[int] = set()
    lasts: set[int] = set()
    empty = True
    for first, last, may_be_left_out in rows:
        for position in lasts:
            plan.follow[position] |= first
        if empty:
            firsts |= first
        lasts = lasts | last if may_be_left_out else set(last)
        empty = empty and may_be_left_out
    return firsts, lasts, empty


@dataclass(slots=True)
class Way:
    """One way to parse the text so far: the position of the current part, the part's controller,
    and the controller's last mask."""

    position: int
    controller: Constraint
    mask: bytes = b""


class PartsController:
    """The controller of one sequence that follows a plan."""

    def __init__(self, plan: Plan, start: Start, host: Host) -> None:
        self._plan = plan
        self._start = start
        self._host = host
        self._text: list[int] = []
        self._ways: list[Way] = []
        self._waiting: list[Way] = []
        """The ways whose controllers have not been called in this round yet; empty between
        rounds."""
        self._complete = plan.empty
        """Whether the text may end here, because a part may end here and this part may be the
        last."""
        self._closed = False
        """Whether the controller of a part has closed the text. To close a text means to complete
        it early, because few tokens are left."""
        self._begun = False

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Does nothing: the parts constrain only the text after the prompt."""

    def pre_process(self) -> Answer:
        """Always continues."""
        return CONTINUE

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """Writes the union of the masks of all ways. If only one way exists, appends its forced
        tokens. Stops if no token is allowed."""
        if len(self._text) >= self._host.max_tokens:
            return STOP
        waiting = self._waiting = self._ways
        self._ways = []
        begun: set[int] = set()
        if not self._begun:
            self._begun = True
            begun |= self._plan.first
            waiting += [self._open(position) for position in sorted(begun)]
        forced: list[Answer] = []
        complete, closed = self._complete, False
        while waiting:
            way = waiting[0]
            mask[:] = bytes(len(mask))
            answer = way.controller.mid_process((self._host.seq,), mask)
            ended = answer.complete
            if answer.action is Action.SPLICE and not np.frombuffer(mask, np.uint32).any():
                # A splice without a mask closes the text of this way. The splice becomes the
                # answer, because ``max_tokens`` leaves no room for the other ways.
                self._only(waiting.pop(0))
                return answer
            del waiting[0]
            if answer.action is not Action.STOP:
                ended = self._takes_end(mask)
                way.mask = bytes(mask)
                self._ways.append(way)
                forced.append(answer)
                way_closed = False
            else:
                way_closed = ended and way.controller.text_end() == "closed"
                way.controller.close()
            if not ended:
                continue
            if way.position in self._plan.last:
                complete = True
                closed = closed or way_closed
            for position in sorted(self._plan.follow[way.position] - begun):
                begun.add(position)
                waiting.append(self._open(position))
            if len(waiting) + len(self._ways) > MAX_WAYS:
                raise ControllerError(
                    Code.CONTROLLER_FAILED,
                    f"the text can be parsed in more than {MAX_WAYS} ways; make the parts "
                    "less ambiguous",
                )
        self._complete, self._closed = complete, closed
        if not self._ways:
            return interface.COMPLETE if complete else STOP
        if len(self._ways) == 1 and not complete and forced[0].action is Action.SPLICE:
            return forced[0]
        return self._joined(mask, complete)

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Advances the ways whose masks allow the first appended token, and closes the other
        ways."""
        # After a draft, several tokens may arrive together. The GPU worker has dropped the tokens
        # after an end-of-sequence token.
        after = STOP if tokens and tokens[-1] in self._host.vocabulary.eos_ids else CONTINUE
        if after is STOP:
            tokens = tokens[:-1]
        if after is STOP and not tokens:
            return after
        del self._text[len(self._text) - backtrack :]
        self._text += tokens
        self._complete = False
        if len(self._ways) > 1:
            ways, self._ways = self._ways, []
            for way in ways:
                if _allows(way.mask, tokens[0]):
                    self._ways.append(way)
                else:
                    way.controller.close()
        for way in self._ways:
            way.controller.post_process(tokens, backtrack)
        return after

    def text_end(self, stop: bytes = b"") -> ConstraintEnd:
        """How the text ends, according to the first way in which the plan may end here; ``cut`` if
        the plan may not end here. If ``stop`` is given, only the text before this stop string
        counts."""
        if stop:
            return self._end_before(stop)
        if self._complete:
            return "closed" if self._closed else "complete"
        ends: dict[int, ConstraintEnd] = {}
        for way in self._ways:
            end = way.controller.text_end()
            if end != "cut" and ends.get(way.position) != "complete":
                ends[way.position] = end
        reached, begun = list(ends), set(ends)
        if not self._begun:
            begun |= self._plan.first
            reached += [p for p in self._plan.first if self._may_be_empty(p)]
        for position in reached:
            if position in self._plan.last:
                return ends.get(position, "complete")
            for after in self._plan.follow[position] - begun:
                begun.add(after)
                if self._may_be_empty(after):
                    reached.append(after)
        return "cut"

    def fork(self, host: Host) -> PartsController:
        """A controller with copies of all ways."""
        other = PartsController(self._plan, self._start, host)
        other._text, other._complete, other._begun = [*self._text], self._complete, self._begun
        try:
            for way in self._ways:
                controller = way.controller.fork(self._within(host, way.position))
                other._ways.append(Way(way.position, controller, way.mask))
        except BaseException:
            other.close()
            raise
        return other

    def close(self) -> None:
        """Closes the controllers of all ways."""
        ways = self._ways + self._waiting
        self._ways, self._waiting = [], []
        for way in ways:
            way.controller.close()

    # --- inside ---------------------------------------------------------------------------------

    def _end_before(self, stop: bytes) -> ConstraintEnd:
        """Parses the text before ``stop`` again, because the ways of the whole text differ from the
        ways of its beginning."""
        tokens = tokens_before(stop, self._text, self._host.vocabulary)
        if tokens is None:
            return "cut"
        shorter = PartsController(self._plan, self._start, self._host)
        mask = memoryview(bytearray(4 * -(-self._host.vocabulary.size // 32)))
        try:
            for token in tokens:
                shorter.mid_process((self._host.seq,), mask)
                shorter.post_process((token,), 0)
            return "cut" if shorter.text_end() == "cut" else "complete"
        except ControllerError:
            return "cut"
        finally:
            shorter.close()

    def _open(self, position: int) -> Way:
        host = self._within(self._host, position)
        return Way(position, self._start(self._plan.parts[position], host))

    def _may_be_empty(self, position: int) -> bool:
        controller = self._open(position).controller
        try:
            return controller.text_end() == "complete"
        finally:
            controller.close()

    def _within(self, host: Host, position: int) -> Host:
        left = host.max_tokens - len(self._text)
        budget = self._plan.budgets[position]
        return replace(host, max_tokens=left if budget is None else min(left, budget))

    def _only(self, way: Way) -> None:
        self.close()
        self._ways = [way]
        self._complete = False

    def _takes_end(self, mask: memoryview) -> bool:
        """Clears the bit of the end-of-sequence token in a mask; returns whether the bit was
        set."""
        eos = self._host.vocabulary.eos
        if eos < 0 or not mask[eos >> 3] >> (eos & 7) & 1:
            return False
        mask[eos >> 3] &= ~(1 << (eos & 7))
        return True

    def _joined(self, mask: memoryview, complete: bool) -> Answer:
        whole = np.frombuffer(mask, np.uint32)
        whole[:] = 0
        for way in self._ways:
            whole |= np.frombuffer(way.mask, np.uint32)
        eos = self._host.vocabulary.eos
        if complete and eos >= 0:
            mask[eos >> 3] |= 1 << (eos & 7)
        if not whole.any():
            return interface.COMPLETE if complete else STOP
        return _MASKED


def _allows(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)
