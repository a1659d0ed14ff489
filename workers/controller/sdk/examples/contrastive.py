"""Contrastive sampling: if the model is uncertain, chooses the token that repeats the text least.

A model that hesitates between many tokens tends to fall into a loop. If the entropy is above a
bound, one of the likeliest tokens replaces the sampled token: the token with the greatest score.
The score is the log-probability minus a penalty for each token that would be repeated. If the model
is certain, its token stays. Source: Su et al., "A Contrastive Framework for Neural Text Generation"
(2022), whose penalty is the similarity of hidden states.

    tokenbus controller serve contrastive:Contrastive
    tokenbus controller run contrastive:Contrastive --arg '{"entropy": 1.0}' --prompt 'def add('

The module of a served controller is imported from the current folder, so copy this file there.
"""

from __future__ import annotations

from tokenbus.workers.controller.python import Controller, Decision, Query, sample, splice

ENTROPY = 1.0
"""The bound of the entropy, in nats."""
PENALTY = 1.0
"""The number that is subtracted from a token's log-probability, once for each token of the text
that would be repeated."""
MAX = 4
"""Maximum length of a repetition, in tokens. Longer repetitions are not distinguished."""
TOP = 8
"""Number of the likeliest tokens among which the next one is chosen."""


def repeated(text: list[int], token: int) -> int:
    """The length of the longest suffix of ``text`` that occurs earlier in ``text``, followed by
    ``token``. At most ``MAX``; -1 if the token has not occurred."""
    longest = -1
    for place, before in enumerate(text):
        if before == token:
            same = 0
            while same < min(MAX, place) and text[place - 1 - same] == text[-1 - same]:
                same += 1
            longest = max(longest, same)
    return longest


class Contrastive(Controller):
    """The argument: ``{"entropy": number, "penalty": number}``, both optional."""

    query = Query(top=TOP)

    def __init__(self) -> None:
        arg = self.arg if isinstance(self.arg, dict) else {}
        self.entropy = float(arg.get("entropy", ENTROPY))
        self.penalty = float(arg.get("penalty", PENALTY))
        self.text_so_far: list[int] = []
        self.chosen: int | None = None
        """The token that replaces the last token of the text; None if that token stays."""

    def init_prompt(self, prompt: list[int]) -> None:
        """Records the prompt, so that tokens that repeat it get a penalty too."""
        self.text_so_far = list(prompt)

    def mid_process(self, fork_group: list[int]) -> Decision:
        """Replaces the last token, or samples the next one."""
        chosen, self.chosen = self.chosen, None
        return sample() if chosen is None else splice(1, [chosen])

    def post_process(self, tokens: list[int], backtrack: int) -> Decision | None:
        """Chooses another token if the model was uncertain, and appends ``tokens`` to the text."""
        del self.text_so_far[len(self.text_so_far) - backtrack :]
        for seen in self.distributions:
            if seen.entropy > self.entropy:
                best = max(seen.top, key=lambda token: seen.top[token] - self.cost(token))
                if [best] != tokens:
                    self.chosen = best
        self.text_so_far += tokens
        return None if self.chosen is not None else super().post_process(tokens, backtrack)

    def cost(self, token: int) -> float:
        """The penalty for ``token`` as the next token of the text."""
        return self.penalty * (1 + repeated(self.text_so_far, token))
