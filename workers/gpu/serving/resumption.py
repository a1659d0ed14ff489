"""Where a stream goes on that began elsewhere: from what its client was sent to its sequences.

Pure: entries in, sequences out. A sequence without a controller goes on behind its last token. One
with a controller restarts at its *resume point*: its last sampled token, or the last fork that the
client knows of which it is a part, where that is later. Its controller is replayed up to there and
decides anew; what it gives again that the client has already is suppressed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ....protocol.messages import Token
from ....protocol.worker_messages import Replay


@dataclass(slots=True)
class Given:
    """The entries of a sequence that its client already has and that its restarted controller
    repeats: they are not sent again."""

    entries: int = 0
    """Entries behind the resume point: appended and dropped tokens."""
    log_chars: int = 0
    """Characters of its log since its last sampled token or its beginning."""
    writes: int = 0
    """Writes to variables since then."""

    def __bool__(self) -> bool:
        return bool(self.entries or self.log_chars or self.writes)

    def take(self, logs: str, storage: list[Any]) -> tuple[str, list[Any]]:
        """The part that its client does not have yet of the next piece of its log and of the next
        writes."""
        chars, writes = min(len(logs), self.log_chars), min(len(storage), self.writes)
        self.log_chars -= chars
        self.writes -= writes
        return logs[chars:], storage[writes:]


@dataclass(slots=True, eq=False)
class Resumed:
    """One sequence of a stream, as its client knows it."""

    seq: int
    tokens: list[int] = field(default_factory=list)
    """After the prompt, at the place where the sequence goes on."""
    given: Given = field(default_factory=Given)
    alive: bool = True
    replay: Replay = field(init=False)
    """How its controller gets there."""
    _behind: list[Token] = field(default_factory=list)
    """The entries behind its resume point."""

    def __post_init__(self) -> None:
        self.replay = Replay(self.seq, [])

    @property
    def num_sent(self) -> int:
        """Tokens after the prompt that the client has."""
        tokens = list(self.tokens)
        for entry in self._behind:
            _apply(tokens, entry)
        return len(tokens)

    def take(self, entry: Token) -> None:
        """The client has been sent one more entry of it."""
        sampled = entry.token is not None and entry.logprob is not None
        self.given.log_chars += len(entry.logs)
        self.given.writes += len(entry.storage)
        self._behind.append(entry)
        if sampled:
            assert entry.token is not None
            if entry.distribution is not None:
                self.replay.distributions[len(self.replay.tokens)] = entry.distribution
            if entry.wakes:
                self.replay.wakes[len(self.replay.tokens)] = entry.wakes
            self.replay.tokens.append(entry.token)
            self.reach()
            self.given = Given()
        if entry.finish_reason is not None:
            self.alive, self.replay.ended, self.replay.last = False, True, sampled

    def reach(self) -> None:
        """Its resume point is behind all of its entries so far."""
        for entry in self._behind:
            _apply(self.tokens, entry)
        self._behind.clear()

    def settle(self) -> None:
        """No more entries follow: counts those that are given again."""
        self.given.entries = len(self._behind)


@dataclass(slots=True)
class Resumption:
    """All sequences of a stream, parents before their forks."""

    sequences: dict[int, Resumed]

    @property
    def live(self) -> list[Resumed]:
        """Those that have not ended."""
        return [one for one in self.sequences.values() if one.alive]

    @property
    def given(self) -> dict[int, Given]:
        """By sequence: what its client has that is given again."""
        return {one.seq: one.given for one in self.live if one.given}

    @property
    def replay(self) -> list[Replay]:
        """How its controllers are started again."""
        return [one.replay for one in self.sequences.values()]


def resume(entries: Iterable[Token], n: int = 1, steered: bool = False) -> Resumption:
    """The sequences of a stream whose client was sent ``entries``.

    ``n``: its sequences from the outset, without a fork. ``steered``: it has a controller.
    """
    sequences = {seq: Resumed(seq) for seq in range(n)}
    for entry in entries:
        seq, parent = entry.seq, entry.parent
        if parent is None or parent not in sequences:
            one = sequences.setdefault(seq, Resumed(seq))
            one.take(entry)
            continue
        of = sequences[parent]
        of.reach()
        sequences[seq] = Resumed(seq, list(of.tokens))
        of.replay.forks.append(seq)
    for one in sequences.values():
        if steered:
            one.settle()
        else:
            one.reach()
            one.given = Given()
    return Resumption(sequences)


def _apply(tokens: list[int], entry: Token) -> None:
    if entry.backtrack:
        del tokens[-entry.backtrack :]
    if entry.token is not None:
        tokens.append(entry.token)
