"""A controller that takes its decisions from its argument, for tests of a whole system.

The argument is ``{"do": [...], "tells": true}``. ``do`` lists decisions and commands in order.
After the last one, the controller samples without a mask. ``tells``: the controller logs the
arguments of post_process.

["append", tokens]            ["splice", drop, tokens]       ["sample", tokens or null]
["fork", [list, list, ...]]   ["suspend"]                    ["wait", variable]
["stop"]                      ["fail", text]                 ["sleep", seconds]
["log", text]                 ["set", variable, text]        ["eos_stops"]
["look", top]                 logs the most likely tokens
["print", text]               to standard output, and the same to standard error
["special", name]             logs the id of this special token

"sample" may have a bias after its tokens: an object of values by token, or a number by which the
values of a dense bias are multiplied. A sequence of a fork continues with the list at its place in
the fork group.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenbus.workers.controller.python import (
    Controller,
    Decision,
    Query,
    append,
    fork,
    go_on,
    look,
    sample,
    splice,
    stop,
    suspend,
)

Decides = Callable[..., Decision]
"""Makes a decision from the arguments that follow its name in a list."""
BEFORE: dict[str, Decides] = {"append": append, "suspend": suspend, "stop": stop}
AT: dict[str, Decides] = {
    "sample": sample,
    "splice": splice,
    "stop": stop,
    "look": lambda top: look(Query(top)),
}


class Scripted(Controller):
    """The controller that the module's docstring describes."""

    def __init__(self) -> None:
        arg = self.arg if isinstance(self.arg, dict) else {}
        self.todo: list[list[Any]] = list(arg.get("do", ()))
        self.tells: bool = arg.get("tells", False)
        self.places: list[list[list[Any]]] = []
        self.eos_stops = False

    def pre_process(self) -> Decision:
        while self.todo and self._quietly(self.todo[0]):
            self.todo.pop(0)
        first: list[Any] = self.todo[0] if self.todo else ["sample", None]
        kind, *args = first
        if kind == "wait":
            if self.vars.get(args[0]) is None:
                return suspend()
            self.todo.pop(0)
            return self.pre_process()
        if kind not in ("append", "fork", "suspend", "stop"):
            return go_on()
        self.todo.pop(0)
        if kind == "fork":
            self.places = args[0]
            return fork(len(self.places))
        return BEFORE[kind](*args)

    def mid_process(self, fork_group: list[int]) -> Decision:
        if self.places:
            self.todo = list(self.places[fork_group.index(self.seq)])
            self.places = []
        while self.todo and self._quietly(self.todo[0]):
            self.todo.pop(0)
        if not self.todo or self.todo[0][0] not in AT:
            return sample()
        kind, *args = self.todo.pop(0)
        if kind == "sample" and len(args) == 2:
            args[1] = self._bias(args[1])
        return AT[kind](*args)

    def _bias(self, what: dict[str, float] | float) -> dict[int, float] | list[float]:
        if isinstance(what, dict):
            return {int(token): value for token, value in what.items()}
        return [token * 31 % 8 * what for token in range(self.host.vocabulary.size)]

    def post_process(self, tokens: list[int], backtrack: int) -> Decision:
        if self.tells:
            self.log(tokens, backtrack)
        for seen in self.distributions:
            self.log(list(seen.top))
        return stop() if self.eos_stops and self.host.vocabulary.eos in tokens else go_on()

    def _quietly(self, what: list[Any]) -> bool:
        """Runs a command that is not a decision; returns whether ``what`` is such a command."""
        kind, *args = what
        if kind == "log":
            self.log(args[0], end="")
        elif kind == "print":
            print(*args)
            print(*args, file=sys.stderr)
        elif kind == "special":
            self.log(self.special_token(*args))
        elif kind == "set":
            self.vars.set(*args)
        elif kind == "sleep":
            time.sleep(args[0])
        elif kind == "fail":
            raise ValueError(args[0])
        elif kind == "eos_stops":
            self.eos_stops = True
        else:
            return False
        return True


class Slow(Controller):
    """Sleeps for 50 ms before each token."""

    def mid_process(self, fork_group: list[int]) -> Decision:
        time.sleep(0.05)
        return sample()


class Gated(Controller):
    """Makes one decision for each byte of the file that its argument names. Waits until the file
    has more bytes."""

    def __init__(self) -> None:
        self.rounds = 0

    def mid_process(self, fork_group: list[int]) -> Decision:
        self.rounds += 1
        while Path(str(self.arg)).stat().st_size < self.rounds:
            time.sleep(0.002)
        return sample()


class Unwilling(Controller):
    """Raises an exception in init_prompt."""

    def init_prompt(self, prompt: list[int]) -> None:
        raise ValueError("not today")
