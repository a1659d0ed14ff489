"""Beam search: each step keeps the most likely continuations of all beams together.

Each beam is a sequence. In each step, a beam reads the distribution of the next token. It writes
the most likely tokens and its score to a variable, and suspends until all beams have written. Each
beam then computes which continuations are kept; all beams get the same result. If several
continuations of a beam are kept, the beam forks. If none is kept, the beam stops. After the last
step, only the sequence with the result remains.

    tokenbus controller serve beams:Beams
    tokenbus controller run beams:Beams --arg '{"width": 3, "tokens": 20}' --prompt 'def add(a, b):'

``tokenbus controller serve`` imports the module from the current folder, so copy this file there.
"""

from __future__ import annotations

import json

from tokenbus.workers.controller.python import (
    Controller,
    Decision,
    Query,
    fork,
    go_on,
    look,
    splice,
    stop,
    suspend,
)


class Beams(Controller):
    """Searches for a likely text of ``tokens`` tokens with ``width`` beams. The argument is
    ``{"width": number, "tokens": number}``."""

    def __init__(self) -> None:
        arg = self.arg if isinstance(self.arg, dict) else {}
        self.width = int(arg.get("width", 3))
        self.tokens = int(arg.get("tokens", self.host.max_tokens - 1))
        if not 0 < self.tokens < self.host.max_tokens:
            raise ValueError(
                f"tokens is {self.tokens}; it must be at least 1 and less than max_tokens, which "
                f"is {self.host.max_tokens}"
            )
        self.step = self.beam = 0
        self.beams = 1
        """Number of beams in the current step."""
        self.score = 0.0
        """The log-probability of the text of this beam."""
        self.found: list[tuple[int, float]] = []
        """The kept continuations of this beam: each token, and the score of the text that ends with
        it."""
        self.places: list[int] = []
        """For each entry of ``found``: the number of the beam that the continuation becomes."""
        self.waits = False

    def pre_process(self) -> Decision | None:
        """Suspends until all beams have written their most likely tokens. Then chooses the
        continuations, and forks or stops."""
        if not self.waits:
            return go_on()
        written = self.vars.read(f"step {self.step}")
        if written is None or written.version < self.beams:
            return suspend()
        self.choose([json.loads(line) for line in written.value.splitlines()])
        if not self.found:
            return stop()
        return fork(len(self.found)) if len(self.found) > 1 else go_on()

    def choose(self, written: list[tuple[int, float, dict[str, float]]]) -> None:
        """Chooses the most likely continuations of all beams, and stores the chosen continuations
        of this beam."""
        every = [
            (-(score + logprob), beam, int(token))
            for beam, score, top in written
            for token, logprob in top.items()
        ]
        width = 1 if self.step + 1 == self.tokens else self.width
        chosen = sorted(every)[:width]
        mine = [(place, one) for place, one in enumerate(chosen) if one[1] == self.beam]
        self.places = [place for place, _ in mine]
        self.found = [(token, -cost) for _, (cost, _, token) in mine]
        self.beams = len(chosen)

    def mid_process(self, fork_group: list[int]) -> Decision:
        """Appends the chosen token, or reads the distribution of the next token."""
        if not self.waits:
            return stop() if self.step == self.tokens else look(Query(top=self.width))
        place = fork_group.index(self.seq)
        token, self.score = self.found[place]
        self.beam, self.waits = self.places[place], False
        self.step += 1
        if self.step == self.tokens:
            self.log(f"score {self.score:.3f}")
        return splice(0, [token])

    def post_process(self, tokens: list[int], backtrack: int) -> Decision | None:
        """Writes the most likely next tokens of this beam to the variable of the current step."""
        for seen in self.distributions:
            line = json.dumps([self.beam, self.score, seen.top])
            self.vars.append(f"step {self.step}", line + "\n")
            self.waits = True
        return go_on()
