"""Classifier-free guidance: the text follows its prompt more than a second, negative prompt.

Sequence 0 is the text. Its fork, the guide, has both prompts, and then the tokens of the text. A
token has the log-probability c in the text and u in the guide. The logits for sampling are scale *
c + (1 - scale) * u. Sampling from c with the bias (1 - scale) / scale * u, at a temperature divided
by scale, gives the same result. The guide writes u of its 64 likeliest tokens to a variable. All
other tokens get the smallest of these values. Source: Sanchez et al., "Stay on Topic with
Classifier-Free Guidance" (2023).

    tokenbus controller serve guidance:Guidance
    tokenbus controller run guidance:Guidance --prompt 'def add(a, b):' \
        --arg '{"prompt": "# untested code\\n", "scale": 1.5}'

The module of a served controller is imported from the current folder, so copy this file there.
"""

from __future__ import annotations

import json

from tokenbus.workers.controller.python import (
    Controller,
    Decision,
    Override,
    Query,
    fork,
    go_on,
    sample,
    splice,
    stop,
    suspend,
)


class Guidance(Controller):
    """The argument: ``{"prompt": text, "scale": number, "temperature": number}``. If
    ``temperature`` is missing, the likeliest token is sampled."""

    def __init__(self) -> None:
        arg = self.arg if isinstance(self.arg, dict) else {}
        self.scale, self.temperature = float(arg["scale"]), float(arg.get("temperature", 0.0))
        self.second = self.host.vocabulary.tokenize(arg["prompt"].encode())
        # The guide has the second prompt and the whole text, and both count towards max_tokens.
        self.length = self.host.max_tokens - len(self.second) - 1
        self.role = ""
        self.step = 0
        self.undo = False
        """In the text: whether its first token, which was sampled without the guide, must be
        dropped."""
        self.seen: dict[int, float] = {}
        """In the text: the likeliest tokens of the guide, with their log-probabilities."""
        self.waits = False
        """In the guide: whether the guide has written its likeliest tokens and waits for the text's
        token."""
        self.follows = 0
        """In the guide: the token of the text that replaces the guide's own token."""

    def pre_process(self) -> Decision | None:
        """In the first round, forks into the text and the guide. Later, suspends until the other
        sequence has written the value that this step needs."""
        if not self.role:
            return fork(2)
        if self.step >= self.length:
            return stop()
        if self.role == "guide" and not self.waits:
            return go_on()
        written = self.vars.read("guide" if self.role == "text" else "text")
        if written is None or written.version <= self.step:
            return suspend()
        if self.role == "text":
            self.seen = {int(token): p for token, p in json.loads(written.value).items()}
            return go_on()
        self.follows = int(written.value.split()[self.step])
        return stop() if self.follows == self.host.vocabulary.eos else go_on()

    def mid_process(self, fork_group: list[int]) -> Decision:
        """Samples the text's token with a bias from the guide's log-probabilities. The guide
        samples only to get its log-probabilities."""
        if not self.role:
            self.role = "text" if self.seq == fork_group[0] else "guide"
            self.undo = self.role == "text"
            # A fork begins with mid_process, which cannot suspend.
            return sample() if self.undo else splice(0, self.second)
        if self.role == "guide":
            return splice(1, [self.follows]) if self.waits else sample(query=Query(top=64))
        if self.undo:
            return splice(1)
        least, factor = min(self.seen.values()), (1 - self.scale) / self.scale
        bias = {token: factor * (p - least) for token, p in self.seen.items()}
        return sample(None, bias, override=Override(self.temperature / self.scale))

    def post_process(self, tokens: list[int], backtrack: int) -> Decision | None:
        """Writes the guide's log-probabilities, or the text's token, for the other sequence."""
        if self.role == "guide":
            for seen in self.distributions:
                self.vars.set("guide", json.dumps(seen.top))
            if backtrack:
                self.step += 1
            self.waits = bool(self.distributions)
        elif self.undo:
            self.undo = not backtrack
        else:
            self.vars.append("text", f"{tokens[0]} ")
            self.step += 1
            return super().post_process(tokens, backtrack)
        return go_on()
