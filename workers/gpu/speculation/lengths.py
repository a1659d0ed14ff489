"""How long a draft is: as long as what it saves is more than what it costs.

While a forward waits for memory to give the weights, a row more costs little; then it is bound by
arithmetic, and each row costs as much as the one before (``Costs.of``). Where any sequence of a
step has a draft, the step costs ``draft_cost`` more for each of its sequences. If the tokens of a
draft are accepted with probabilities p, q, r, ... each, given that those before them were, the
draft yields p + pq + pqr + ... more tokens. Draft lengths maximize the tokens of a step divided by
its cost. So a lone sequence gets long drafts, and the more sequences share a step the more certain
a draft must be.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

MOST = 31
"""Tokens of a draft at most: with the one before it they are a forward of 32."""
FADE = 0.9
"""The weight of an observation after each later one of its kind."""
PRIOR = 2.0
"""The weight of the first guess, in observations."""
FIRST_GUESSES = (0.4, 0.4, 0.6, 0.8, 0.9, 0.7)
"""The initial probability that a token of a draft is accepted: for a match of up to 2, 4, 8, 16 and
more tokens, and for a token from a draft model."""
WRITTEN = len(FIRST_GUESSES) - 1
"""The kind of a draft that a draft model writes."""
MAX_WRITTEN = 8
"""Tokens that a draft model writes at most."""


class Costs(NamedTuple):
    """The cost of rows on a device, over a forward of one row."""

    few_rows: int
    """Up to this number of rows, a step's time is bound by memory bandwidth."""
    few_cost: float
    """A row more of these."""
    row_cost: float
    """A row more beyond them."""
    draft_cost: float
    """For each sequence of a step in which any has a draft: attention over several rows, and
    verification."""
    max_sequences: int
    """Sequences of a step with drafts at most: with more, nothing is looked up."""

    def of(self, rows: int) -> float:
        """A forward of this many rows."""
        few = min(rows, self.few_rows)
        return 1 + (few - 1) * self.few_cost + (rows - few) * self.row_cost


CPU = Costs(6, 0.04, 0.15, 0.2, 8)
CUDA = Costs(256, 0.004, 0.004, 0.1, 64)


def kind_of(match_length: int) -> int:
    """The kind of a draft, by the length of the match that it comes from."""
    return 0 if match_length <= 2 else min((match_length - 1).bit_length(), 5) - 1


@dataclass(slots=True)
class Acceptance:
    """The outcomes of the drafts of one sequence, by their kind, and what to expect of the next."""

    accepted: list[float] = field(default_factory=lambda: [PRIOR * p for p in FIRST_GUESSES])
    verified: list[float] = field(default_factory=lambda: [PRIOR] * len(FIRST_GUESSES))

    def observe(self, kind: int, drafted: int, accepted: int) -> None:
        """Records that ``accepted`` of ``drafted`` tokens were accepted. The first refused token is
        the last one that gives information."""
        verified = accepted + (accepted < drafted)
        fading = FADE**verified
        self.accepted[kind] = self.accepted[kind] * fading + accepted
        self.verified[kind] = self.verified[kind] * fading + verified

    def expected(self, kind: int) -> float:
        """The probability that a token of a draft is accepted, where those before it were."""
        return self.accepted[kind] / self.verified[kind]

    def fork(self) -> Acceptance:
        """The same experience, for a fork."""
        return Acceptance(list(self.accepted), list(self.verified))


def lengths(probabilities: Items[Iterable[float]], rows: int, costs: Costs) -> list[int]:
    """How many tokens to draft for each of some sequences, by the probability of each one's tokens,
    one after another, of which no more than ``MOST`` are asked for, and none that cannot count.

    ``rows``: those of the step without drafts, one for each sequence, at least one.
    """
    tokens = float(rows)
    best = tokens / costs.of(rows)
    least = costs.of(rows + 1) - costs.of(rows)
    gains: list[tuple[float, int]] = []
    for i, each in enumerate(probabilities):
        gain = 1.0
        for p in islice(each, MOST):
            gain *= p
            if gain <= best * least:
                break
            gains.append((gain, i))
    # The more probable tokens first: within a draft this is their order.
    gains.sort(key=lambda gain: -gain[0])
    chosen = 0
    for number, (gain, _) in enumerate(gains, 1):
        tokens += gain
        value = tokens / (costs.of(rows + number) + costs.draft_cost * rows)
        if value > best:
            best, chosen = value, number
    found = [0] * len(probabilities)
    for _, i in gains[:chosen]:
        found[i] += 1
    return found


def written_length(
    probabilities: Items[float], rows: int, costs: Costs, forward_cost: float
) -> int:
    """How many tokens a draft model writes for each of some sequences of a step, by the probability
    of each one's tokens; 0 where none are worth their cost.

    ``forward_cost``: what a forward of the draft model costs, over one of the large model; it needs
    one for each place of the drafts.
    """
    if not probabilities:
        return 0
    tokens, drafted = float(rows), len(probabilities)
    best, chosen = tokens / costs.of(rows), 0
    gains = list(probabilities)
    for count in range(1, MAX_WRITTEN + 1):
        tokens += sum(gains)
        cost = costs.of(rows + count * drafted) + costs.draft_cost * rows
        cost += count * forward_cost * costs.of(drafted)
        gains = [gain * p for gain, p in zip(gains, probabilities, strict=True)]
        if tokens / cost > best:
            best, chosen = tokens / cost, count
    return chosen
