"""Resumes a moved stream: derives its sequences from the entries that its client has received.

A sequence without a controller resumes after its last token. A sequence with a controller resumes
at its *resume point*: the last received entry with a sampled token, scores, a distribution or a
fork. The controller is replayed up to the resume point and then decides again. It repeats entries
that the client already has, and these entries are not sent again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ....protocol.messages import Token
from ....protocol.worker_messages import Replay
from ..sampling.distributions import LOWEST


@dataclass(slots=True)
class Given:
    """The outputs that a restarted controller of a sequence repeats. They are not sent again,
    because the client already has them."""

    entries: int = 0
    """Number of entries after the resume point: appended and dropped tokens."""
    log_chars: int = 0
    """Number of characters of the controller's log since the sequence's last sampled token, or
    since its beginning if no token was sampled."""
    writes: int = 0
    """Number of writes to variables since the sequence's last sampled token, or since its beginning
    if no token was sampled."""

    messages: int = 0
    """Number of texts for the client since the sequence's last sampled token, or since its
    beginning if no token was sampled."""

    def __bool__(self) -> bool:
        return bool(self.entries or self.log_chars or self.writes or self.messages)

    def take(self, logs: str, storage: list[Any]) -> tuple[str, list[Any]]:
        """Returns the parts of ``logs`` and ``storage`` that the client does not have yet."""
        chars, writes = min(len(logs), self.log_chars), min(len(storage), self.writes)
        self.log_chars -= chars
        self.writes -= writes
        return logs[chars:], storage[writes:]

    def take_messages(self, messages: list[str]) -> list[str]:
        """The texts of ``messages`` that the client does not have yet."""
        had = min(len(messages), self.messages)
        self.messages -= had
        return messages[had:]


@dataclass(slots=True, eq=False)
class Resumed:
    """One sequence of a stream, in the state that its client has received."""

    seq: int
    tokens: list[int] = field(default_factory=list)
    """The tokens after the prompt, up to the resume point."""
    prompt: list[int] = field(default_factory=list)
    """The new prompt, if a prompt replaced all tokens of the sequence before the resume point.
    Empty if the sequence still has the prompt of its request."""
    num_drops: int = 0
    """How many entries up to the resume point dropped tokens."""
    given: Given = field(default_factory=Given)
    alive: bool = True
    replay: Replay = field(init=False)
    """The replay of the sequence's controller up to the resume point."""
    _later: list[Token] = field(default_factory=list)
    """The entries after the resume point."""

    def __post_init__(self) -> None:
        self.replay = Replay(self.seq, [])

    @property
    def num_sent(self) -> int:
        """Number of tokens after the prompt that the client has received."""
        tokens = list(self.tokens)
        for entry in self._later:
            _apply(tokens, entry)
        return len(tokens)

    def take(self, entry: Token) -> None:
        """Adds an entry that the client has received."""
        sampled = entry.token is not None and entry.logprob is not None
        self.given.log_chars += len(entry.logs)
        self.given.writes += len(entry.storage)
        self.given.messages += len(entry.messages)
        if not entry.is_report:
            self._later.append(entry)
        if entry.is_input:
            if entry.distribution is not None:
                self.replay.distributions[len(self.replay.tokens)] = entry.distribution
            if entry.wakes:
                self.replay.wakes[len(self.replay.tokens)] = entry.wakes
            if entry.scores:
                self.replay.scores[len(self.replay.tokens)] = entry.scores
            self.replay.tokens.append(entry.token or 0)
            self.replay.logprobs.append(max(entry.logprob or 0.0, LOWEST))
            self.reach()
            self.given = Given()
        if entry.finish_reason is not None:
            self.alive, self.replay.ended, self.replay.last = False, True, sampled

    def reach(self) -> None:
        """Moves the resume point to the end of the entries so far."""
        for entry in self._later:
            _apply(self.tokens, entry)
            self.prompt = entry.prompt or self.prompt
            self.num_drops += entry.backtrack > 0 or bool(entry.prompt)
        self._later.clear()

    def settle(self) -> None:
        """Counts the entries that the controller will repeat. Called after the last entry."""
        self.given.entries = len(self._later)


@dataclass(slots=True)
class Resumption:
    """All sequences of a stream, parents before their forks."""

    sequences: dict[int, Resumed]

    @property
    def live(self) -> list[Resumed]:
        """The sequences that have not ended."""
        return [one for one in self.sequences.values() if one.alive]

    @property
    def given(self) -> dict[int, Given]:
        """By sequence: the outputs that its controller repeats and the client already has."""
        return {one.seq: one.given for one in self.live if one.given}

    @property
    def replay(self) -> list[Replay]:
        """The replays with which the controllers are restarted."""
        return [one.replay for one in self.sequences.values()]


def resume(entries: Iterable[Token], n: int = 1, steered: bool = False) -> Resumption:
    """The sequences of a stream whose client has received ``entries``.

    ``n``: number of sequences at the beginning, before any fork. ``steered``: whether the stream
    has a controller.
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
        sequences[seq] = Resumed(seq, list(of.tokens), of.prompt)
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
