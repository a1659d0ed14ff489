"""Draft lengths: a draft grows while it saves more than it costs.

If a forward has few rows, its time is the time to read the weights from memory, and another row
costs little. If it has more rows, arithmetic bounds its time, and each further row costs the same
(``Costs.of``). If any sequence of a step has a draft, the step costs ``draft_cost`` more for each
of its sequences. Let p, q, r, ... be the probabilities that the first, second, third, ... draft
token is accepted if the tokens before it were accepted. The draft then yields p + pq + pqr + ...
more tokens on average. Draft lengths are chosen so that the number of tokens of a step, divided by
the step's cost, is as high as possible. So a single sequence gets long drafts. In a large batch,
only likely drafts are made.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

MAX_DRAFT_TOKENS = 31
"""Maximum number of tokens of a draft. The forward also computes the token before the draft, and so
at most 32 tokens of a sequence."""
FADE = 0.9
"""The weight of an observation is multiplied by this factor for each later observation of the same
kind of draft (``kind_of``)."""
PRIOR = 2.0
"""The weight of an initial probability, as a number of observations."""
FIRST_GUESSES = (0.4, 0.4, 0.6, 0.8, 0.9, 0.7)
"""The initial probability that a draft token is accepted, for each kind of draft. The kinds are:
matches of up to 2 tokens, up to 4, up to 8, up to 16, and more, and tokens from a draft model."""
WRITTEN = len(FIRST_GUESSES) - 1
"""The kind of drafts from a draft model."""
MAX_WRITTEN = 8
"""Maximum number of tokens of a draft from a draft model."""


class Costs(NamedTuple):
    """The cost of rows on a device, relative to a forward of one row."""

    few_rows: int
    """Up to this number of rows, a step's time is bound by memory bandwidth."""
    few_cost: float
    """The cost of another row up to ``few_rows``."""
    row_cost: float
    """The cost of another row beyond ``few_rows``."""
    draft_cost: float
    """The cost of attention over several rows and of verification. If any sequence of a step has a
    draft, the step has this cost for each of its sequences."""
    max_sequences: int
    """Maximum number of sequences of a step with drafts. Larger steps do not look up drafts."""

    def of(self, rows: int) -> float:
        """The cost of a forward of this number of rows."""
        few = min(rows, self.few_rows)
        return 1 + (few - 1) * self.few_cost + (rows - few) * self.row_cost


CPU = Costs(6, 0.04, 0.15, 0.2, 8)
CUDA = Costs(256, 0.004, 0.004, 0.1, 64)


def kind_of(match_length: int) -> int:
    """The kind of a draft: an index in ``FIRST_GUESSES``. ``match_length``: the length of the
    draft's match."""
    return 0 if match_length <= 2 else min((match_length - 1).bit_length(), 5) - 1


@dataclass(slots=True)
class Acceptance:
    """The outcomes of one sequence's drafts by kind, and the expected acceptance of the next
    draft."""

    accepted: list[float] = field(default_factory=lambda: [PRIOR * p for p in FIRST_GUESSES])
    verified: list[float] = field(default_factory=lambda: [PRIOR] * len(FIRST_GUESSES))

    def observe(self, kind: int, drafted: int, accepted: int) -> None:
        """Records that ``accepted`` of ``drafted`` tokens were accepted. Tokens after the first
        rejected token do not count."""
        verified = accepted + (accepted < drafted)
        fading = FADE**verified
        self.accepted[kind] = self.accepted[kind] * fading + accepted
        self.verified[kind] = self.verified[kind] * fading + verified

    def expected(self, kind: int) -> float:
        """The probability that a draft token is accepted, given that the tokens before it were
        accepted."""
        return self.accepted[kind] / self.verified[kind]

    def fork(self) -> Acceptance:
        """A copy of the outcomes, for a fork."""
        return Acceptance(list(self.accepted), list(self.verified))


def lengths(probabilities: Items[Iterable[float]], rows: int, costs: Costs) -> list[int]:
    """The number of draft tokens for each sequence. ``probabilities``: for each sequence, the
    acceptance probabilities of its draft tokens, in order. At most ``MAX_DRAFT_TOKENS``
    probabilities of a sequence are read. Reading stops at a token that cannot save more than it
    costs.

    ``rows``: number of rows of the step without drafts, one for each sequence; at least 1.
    """
    tokens = float(rows)
    best = tokens / costs.of(rows)
    least = costs.of(rows + 1) - costs.of(rows)
    gains: list[tuple[float, int]] = []
    for i, each in enumerate(probabilities):
        gain = 1.0
        for p in islice(each, MAX_DRAFT_TOKENS):
            gain *= p
            if gain <= best * least:
                break
            gains.append((gain, i))
    # More probable tokens come first. The tokens of a draft stay in order, because each is at most
    # as probable as the token before it.
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
    """The number of tokens that a draft model writes for each sequence of a step; 0 if a draft is
    not worth its cost. ``probabilities``: for each sequence, the acceptance probability of its
    draft tokens.

    ``forward_cost``: the cost of a draft model's forward, relative to a forward of the large model.
    Each position of the drafts needs one forward.
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
