"""Contrastive sampling: if the model is uncertain, chooses the token that repeats the text least.

An uncertain model, which gives many tokens similar probabilities, tends to repeat itself. If the
entropy of the next token is above a bound, the sampled token is replaced: from the most likely
tokens, the token with the greatest score is chosen. The score is the token's log-probability, minus
a penalty for each token of the repetition that it would complete. If the entropy is not above the
bound, the sampled token stays. Source: Su et al., "A Contrastive Framework for Neural Text
Generation" (2022), whose penalty is the similarity of hidden states.

    tokenbus controller serve contrastive:Contrastive
    tokenbus controller run contrastive:Contrastive --arg '{"entropy": 1.0}' --prompt 'def add('

``tokenbus controller serve`` imports the module from the current folder, so copy this file there.
"""

from __future__ import annotations

from tokenbus.workers.controller.python import Controller, Decision, Query, sample, splice

ENTROPY = 1.0
"""Default bound of the entropy, in nats."""
PENALTY = 1.0
"""Default penalty: the number that is subtracted from a token's log-probability for each token of
the repetition that it would complete."""
MAX = 4
"""Maximum number of tokens before the last token of a repetition that are counted."""
TOP = 8
"""Number of most likely tokens from which the next token is chosen."""


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
    """Replaces tokens that repeat the text. The argument is ``{"entropy": number, "penalty":
    number}``; both fields are optional."""

    query = Query(top=TOP)

    def __init__(self) -> None:
        arg = self.arg if isinstance(self.arg, dict) else {}
        self.entropy = float(arg.get("entropy", ENTROPY))
        self.penalty = float(arg.get("penalty", PENALTY))
        self.text_so_far: list[int] = []
        self.chosen: int | None = None
        """The token that replaces the last token of the text; None if that token stays."""

    def init_prompt(self, prompt: list[int]) -> None:
        """Stores the prompt, so that tokens that repeat the prompt also get a penalty."""
        self.text_so_far = list(prompt)

    def mid_process(self, fork_group: list[int]) -> Decision:
        """Replaces the last token, or samples the next token."""
        chosen, self.chosen = self.chosen, None
        return sample() if chosen is None else splice(1, [chosen])

    def post_process(self, tokens: list[int], backtrack: int) -> Decision | None:
        """If the entropy was above the bound, chooses the token that replaces the sampled token.
        Appends ``tokens`` to the stored text."""
        del self.text_so_far[len(self.text_so_far) - backtrack :]
        for seen in self.distributions:
            if seen.entropy > self.entropy:
                best = max(seen.top, key=lambda token: seen.top[token] - self.cost(token))
                if [best] != tokens:
                    self.chosen = best
        self.text_so_far += tokens
        return None if self.chosen is not None else super().post_process(tokens, backtrack)

    def cost(self, token: int) -> float:
        """The penalty of ``token`` as the next token of the text."""
        return self.penalty * (1 + repeated(self.text_so_far, token))
