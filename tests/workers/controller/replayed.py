"""Requests whose stream is cut off at any event and replayed, as on a GPU worker that takes over
the stream.

The events of a stream are applied one by one. An event is a sampled token, or a result of a
controller. The transcript is a prefix of the events. A new group replays the controllers from the
transcript. Its results are applied to each sequence from the sequence's resume point, and the
stream continues.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenbus.protocol.worker_messages import Replay, StepResult
from tokenbus.workers.controller.host import Vocabulary, allowed
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.sequence_group import Round, SequenceGroup
from tokenbus.workers.variables import VariableStorage

PROMPT = [2, 3, 4]
WIDE = Limits(init_s=10.0, pre_s=1.0, mid_s=1.0, post_s=1.0)


@dataclass
class Life:
    """The state of a sequence."""

    tokens: list[int] = field(default_factory=list)
    """The tokens after the prompt."""
    sampled: list[int] = field(default_factory=list)
    forks: list[list[int]] = field(default_factory=list)
    end: str = ""
    last: bool = False
    masks: list[bytes | None] = field(default_factory=list)
    """The mask of each sampling; None: no mask."""
    logs: str = ""
    storage: list[Any] = field(default_factory=list)
    """``logs`` and ``storage``: the logs and writes in the entries that were sent."""
    noted_logs: str = ""
    noted_storage: list[Any] = field(default_factory=list)
    """``noted_logs`` and ``noted_storage``: the logs and writes that the next entry will have."""
    carried: tuple[int, int] = (0, 0)
    """The lengths of ``logs`` and ``storage`` when the last token was sampled."""
    given: tuple[int, int] = (0, 0)
    """The lengths of the logs and of the writes that the replayed controller repeats."""
    suspended: bool = False
    resume: Life | None = None
    """The state at the resume point: after the last sampled token or fork."""

    def carry(self) -> None:
        self.logs += self.noted_logs
        self.storage += self.noted_storage
        self.noted_logs, self.noted_storage = "", []

    def mark(self) -> None:
        """Makes the current state the resume point. Leaves out the noted logs and writes, because
        no entry has them yet."""
        resume = copy.deepcopy(self, {id(self.resume): None})
        resume.noted_logs, resume.noted_storage = "", []
        self.resume = resume


class Ended(Exception):
    """The stream was cut off."""


class Stream:
    """A request with its controllers. The model samples by (seed, sequence, position). The client
    is cut off after ``cut`` events."""

    limits = WIDE

    def __init__(
        self,
        program: Callable[[], Program],
        vocabulary: Vocabulary,
        arg: str = "",
        seed: int = 0,
        max_tokens: int = 24,
        n: int = 1,
    ) -> None:
        self.program, self.vocabulary = program, vocabulary
        self.arg, self.seed, self.max_tokens, self.n = arg, seed, max_tokens, n
        self.storage = VariableStorage()
        self.lives: dict[int, Life] = {0: Life()}
        self.events = 0
        self._cut: int | None = None
        self._ahead = 0
        self._seen: dict[int, Life] | None = None
        self.group = self._new_group()

    # --- running --------------------------------------------------------------------------------

    def run(self, cut: int | None = None, ahead: int = 0) -> Stream:
        """Runs the request from its beginning to its end, or until it is cut off.

        When it is cut off, the client has seen ``cut`` events, and the workers are ``ahead`` events
        further.
        """
        results = self.group.begin(self.program(), self.vocabulary, PROMPT, self.n)
        return self._until_cut(results, cut, ahead)

    def replays(self) -> list[Replay]:
        """The sequences of the transcript, parents before their forks."""
        return [
            Replay(
                seq,
                list(life.sampled),
                [c for cs in life.forks for c in cs],
                bool(life.end),
                life.last,
            )
            for seq, life in sorted(self.lives.items())
        ]

    def resume(self, cut: int | None = None, ahead: int = 0) -> Stream:
        """Continues the request at another worker."""
        told = self.replays()
        self.group = self._new_group()
        if told == [Replay(0, [])]:
            self.lives = {0: Life()}
            return self.run(cut, ahead)
        for seq, life in self.lives.items():
            if not life.end:
                resumed = life.resume or Life()
                resumed.resume = copy.deepcopy(resumed)
                chars, writes = resumed.carried
                resumed.given = len(resumed.logs) - chars, len(resumed.storage) - writes
                self.lives[seq] = resumed
        steps = self.group.begin_again(self.program(), self.vocabulary, PROMPT, self.n, told)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                return self._until_cut(ended.value, cut, ahead)

    def _until_cut(self, results: list[StepResult], cut: int | None, ahead: int) -> Stream:
        self.events, self._cut, self._ahead, self._seen = 0, cut, ahead, None
        try:
            self._play(results)
        except Ended:
            pass
        else:
            left = [seq for seq, life in self.lives.items() if not life.end]
            assert not left, f"the sequences {left} have not ended"
        self.group.close()
        self.group.free()
        if self._seen is not None:
            self.lives = self._seen
        return self

    @property
    def over(self) -> bool:
        """Whether the client has seen the ends of all sequences."""
        return all(life.end for life in self.lives.values())

    def _new_group(self) -> SequenceGroup:
        return SequenceGroup(
            1, 1, self.limits, self.arg.encode(), self.max_tokens, False, self.storage.apply
        )

    def _play(self, results: list[StepResult]) -> None:
        rounds: deque[Round] = deque()
        ready: set[int] = set()
        while True:
            woken, failed = self.group.record(results) if results else ([], [])
            rounds += woken
            for result in results:
                self._event()
                self._apply(result)
                if result.action == "sample":
                    ready.add(result.seq)
            self.group.free()
            results = failed
            if failed:
                continue
            if rounds:
                results = rounds.popleft()()
            elif ready:
                seq = self._next_of(ready)
                ready.discard(seq)
                results = self._sample(seq)
            else:
                woken, results = self.group.wake_idle()
                rounds += woken
                if not (woken or results):
                    return

    def _event(self) -> None:
        if self._cut is not None:
            if self.events == self._cut:
                self._seen = copy.deepcopy(self.lives)
            if self.events == self._cut + self._ahead:
                raise Ended
        self.events += 1

    def _next_of(self, ready: set[int]) -> int:
        sampled = sum(len(life.sampled) for life in self.lives.values())
        return sorted(ready)[self._draw("next", sampled) % len(ready)]

    def _draw(self, *of: object) -> int:
        return random.Random(zlib.crc32(repr((self.seed, of)).encode())).getrandbits(32)

    def _apply(self, result: StepResult) -> None:
        life = self.lives[result.seq]
        assert not life.end, "a result for a sequence that has ended"
        chars, writes = life.given
        life.noted_logs += result.logs[chars:]
        life.noted_storage += result.storage[writes:]
        life.given = max(0, chars - len(result.logs)), max(0, writes - len(result.storage))
        life.suspended = result.action == "suspend"
        del life.tokens[len(life.tokens) - result.backtrack :]
        life.tokens += result.ff_tokens
        if result.ff_tokens:
            life.carry()
        match result.action:
            case "sample":
                mask = self.group.mask(result.seq) if result.attachment is not None else None
                life.masks.append(mask)
            case "fork":
                life.forks.append(list(result.children))
                life.mark()
                for child in result.children:
                    self.lives[child] = Life(list(life.tokens))
                    self.lives[child].mark()
            case "stop" | "error":
                life.end = result.error or result.finish
                life.carry()

    def _sample(self, seq: int) -> list[StepResult]:
        life = self.lives[seq]
        mask = life.masks[-1]
        size = self.vocabulary.size
        may = list(range(size)) if mask is None else list(allowed(mask, size))
        token = may[self._draw(seq, len(life.tokens)) % len(may)]
        over = len(life.tokens) + 1 >= self.max_tokens
        stepped = self.group.step(seq, [token], over, None)
        assert stepped is not None
        if over:
            # The token and the end of the sequence are one entry, which is sent after the last
            # round.
            [result] = stepped[1]()
            self.group.record([result])
            self._event()
            life.tokens.append(token)
            life.sampled.append(token)
            life.last = True
            life.noted_logs += result.logs
            life.noted_storage += result.storage
            life.carry()
            life.end = "length"
            return []
        results = stepped[1]()
        self._event()
        life.tokens.append(token)
        life.sampled.append(token)
        life.carry()
        life.carried = len(life.logs), len(life.storage)
        life.mark()
        return results

    def outcome(self) -> dict[int, tuple[object, ...]]:
        """The results of each sequence, in a form that can be compared."""
        return {
            seq: (life.tokens, life.forks, life.end, life.logs, life.storage, life.masks)
            for seq, life in self.lives.items()
        }
