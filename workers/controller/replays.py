"""Replays the controllers of a request from the recorded inputs of their sequences.

All rounds run again with their recorded inputs: the prompt, the sampled tokens, and the answers to
operations on variables, which the state worker stores. If the decisions of a controller depend only
on these inputs, the replay restores the controller's state.

The replay returns only the results that the GPU worker may not have applied yet. For each sequence,
these are the results after its last recorded event. An event is a sampled token, scores, a
distribution, or a fork that the GPU worker has applied.

The children of a fork are replayed before their parent continues. So all earlier children of a
sequence have been replayed before the sequence forks again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...protocol.errors import Code, ControllerError, TokenbusError
from ...protocol.worker_messages import Replay, StepResult
from .along import takes_drafts
from .biases import forbids
from .interface import Constraint
from .limits import Limits
from .rounds import ControlledSequence, Rounds

TIMES = 10
"""The time limits in ``Limits`` are multiplied by this factor for replayed calls. So a call that
ended in time on one machine does not exceed its limit on a slower machine."""
MAX_IDLE_WAKES = 10_000
"""Maximum number of rounds in a row in which a sequence suspends and receives no recorded answer.
This bound applies only if the number of the sequence's wake-ups was not recorded."""

Steps = Generator[None, None, list[StepResult]]
"""A replay as a generator: it yields between rounds, so that other work can run, and returns the
results to send."""


@dataclass(slots=True, eq=False)
class _Past:
    """The replay of one sequence."""

    replay: Replay
    sequence: ControlledSequence
    tokens: int = 0
    """Number of sampled tokens whose rounds have been replayed."""
    forks: int = 0
    """Number of children that the replayed forks of this sequence have created."""
    last: StepResult | None = None
    idle_wakes: int = 0
    kept: list[tuple[int, StepResult]] = field(default_factory=list)
    """The results since the last sampled token or the last applied fork, each with its position
    among the results of all sequences."""
    logs: str = ""
    messages: list[str] = field(default_factory=list)
    storage: list[Any] = field(default_factory=list)
    """``logs``, ``messages`` and ``storage`` (writes to variables) come from results that
    ``forked`` has dropped. ``keep`` adds them to the next result."""
    failure: str = ""
    """The reason why the sequence cannot be replayed; empty while it can."""

    def keep(self, place: int, result: StepResult) -> None:
        if self.logs or self.storage or self.messages:
            result.logs = self.logs + result.logs
            result.storage = [*self.storage, *result.storage]
            result.messages = [*self.messages, *result.messages]
            self.logs, self.storage, self.messages = "", [], []
        self.kept.append((place, result))

    def forked(self) -> None:
        """Handles a fork that the GPU worker has applied. The results up to the fork are dropped;
        their logs, writes and messages are added to the next kept result."""
        for _, result in self.kept:
            self.logs += result.logs
            self.storage = [*self.storage, *result.storage]
            self.messages = [*self.messages, *result.messages]
        self.kept.clear()

    def sampled(self) -> None:
        """Handles a sampled token: the GPU worker has applied all earlier results."""
        self.kept.clear()
        self.logs, self.storage, self.messages = "", [], []


class GroupReplay:
    """The replay of one request. ``replays``: the recorded sequences, as in ``Start.replay``."""

    def __init__(
        self, replays: Sequence[Replay], rounds: Rounds, drop: Callable[[ControlledSequence], None]
    ) -> None:
        """``drop`` removes a sequence that has ended."""
        self._replays = {one.seq: one for one in replays}
        self._rounds = rounds
        self._drop = drop
        self._pasts: dict[int, _Past] = {}
        self._made: list[ControlledSequence] = []
        """Sequences that the last round created."""
        self._places = 0
        self.recorded = {seq for one in replays for seq in (one.seq, *one.forks)}
        """The numbers of all recorded sequences."""

    def numbers(self, parent: ControlledSequence, more: int) -> list[int] | None:
        """The recorded numbers of the ``more`` sequences that a fork creates; None if the GPU
        worker has not applied the fork. Raises ControllerError if, before the replay, the sequence
        did not fork here or created a different number of sequences."""
        past = self._pasts.get(parent.seq)
        if past is None:
            if parent.seq not in self._replays:
                return None
            # The sequence forks in the round that created it.
            past = self._pasts[parent.seq] = _Past(self._replays[parent.seq], parent)
        replay = past.replay
        if past.forks < len(replay.forks):
            recorded = replay.forks[past.forks : past.forks + more]
            if len(recorded) != more:
                raise _differs(
                    f"{_where(past)} it forks into {more} more sequences, but the first time into "
                    f"{len(recorded)}"
                )
            past.forks += more
            return recorded
        if past.tokens < len(replay.tokens):
            raise _differs(f"{_where(past)} it forks, but the first time it did not")
        return None

    def made(self, children: Sequence[ControlledSequence]) -> None:
        """Records the new sequences that a round has created."""
        self._made += children

    def run(
        self,
        first: ControlledSequence,
        begin: Callable[[], list[StepResult]],
        closed: Callable[[], bool],
    ) -> Steps:
        """Runs ``begin`` and then all recorded rounds. Stops early if ``closed()`` becomes true.
        Returns the results to send."""
        replay = self._replays.setdefault(first.seq, Replay(first.seq, []))
        self._pasts[first.seq] = _Past(replay, first)
        stack = [first.seq, *self._take(begin())]
        while stack and not closed():
            yield
            past = self._pasts[stack[-1]]
            results = self._next(past)
            if results is None:
                stack.pop()
                self._settle(past)
            else:
                stack += self._take(results)
        return self._results()

    # --- inside ---------------------------------------------------------------------------------

    def _next(self, past: _Past) -> list[StepResult] | None:
        """Runs the next round of a sequence, and returns its results; None if the replay of the
        sequence is complete, or cannot continue."""
        replay, sequence, last = past.replay, past.sequence, past.last
        assert last is not None
        left = len(replay.tokens) - past.tokens
        if not left and past.forks == len(replay.forks):
            return None
        if last.action == "suspend":
            past.idle_wakes = 0 if sequence.variables.repeated else past.idle_wakes + 1
            recorded = replay.wakes.get(past.tokens)
            awake = past.idle_wakes <= MAX_IDLE_WAKES
            if awake if recorded is None else sequence.wakes < recorded:
                return self._rounds.again(sequence)
            past.failure = f"{_where(past)} it stays suspended, but the first time it continued"
        elif last.action == "error":
            past.failure = f"{last.error}"
        elif last.action == "stop":
            past.failure = f"{_where(past)} it stops, but the first time it continued"
        elif not left:
            past.failure = f"{_where(past)} it samples, but the first time it forked"
        elif (scores := replay.scores.get(past.tokens)) is not None:
            if [*map(len, last.texts)] == [*map(len, scores)]:
                past.tokens += 1
                past.sampled()
                return self._rounds.scored(sequence, scores)
            past.failure = f"{_where(past)} it does not score the same texts as the first time"
        elif last.action == "score":
            past.failure = f"{_where(past)} it scores texts, but the first time it sampled"
        elif (found := replay.distributions.get(past.tokens)) is not None and not found.rank:
            if last.action == "look":
                past.tokens += 1
                past.sampled()
                return self._rounds.sampled(sequence, (), distributions=[found])
            past.failure = f"{_where(past)} it samples, but the first time it read a distribution"
        elif last.action == "look":
            past.failure = f"{_where(past)} it reads a distribution, but the first time it sampled"
        else:
            token = replay.tokens[past.tokens]
            if _may_sample(sequence, last, token):
                past.tokens += 1
                past.sampled()
                ends = replay.last and past.tokens == len(replay.tokens)
                run = self._rounds.ended if ends else self._rounds.sampled
                seen = [found] if found is not None else []
                logprobs = replay.logprobs[past.tokens - 1 : past.tokens] if last.logprobs else []
                return run(sequence, [token], distributions=seen, logprobs=logprobs)
            past.failure = (
                f"{_where(past)} it forbids token {token}, which was sampled the first time"
            )
        return None

    def _take(self, results: list[StepResult]) -> list[int]:
        """Keeps the results of a round; returns the numbers of the sequences that the round
        created, in reverse order."""
        made = {child.seq: child for child in self._made}
        self._made.clear()
        for result in results:
            past = self._pasts[result.seq]
            past.last = result
            past.keep(self._places, result)
            self._places += 1
            if result.action != "fork":
                continue
            applied = result.children[0] in self.recorded
            if applied:
                past.forked()
            for child in result.children:
                # If a fork was not applied and its parent has ended, the children never existed at
                # the GPU worker, so they count as ended.
                new = Replay(child, [], ended=past.replay.ended and not applied)
                if child not in self._pasts:
                    self._pasts[child] = _Past(self._replays.get(child, new), made[child])
        return [seq for seq in reversed(made) if seq in self._pasts]

    def _settle(self, past: _Past) -> None:
        """Called when the replay of a sequence is complete or has failed. If the sequence had
        already ended before the replay, drops it."""
        sequence = past.sequence
        if past.replay.ended:
            self._drop(sequence)
        elif past.last is not None and past.last.action == "suspend":
            # The sequence is woken once, because other sequences may have made changes since its
            # last round.
            sequence.seen_changes = -1

    def _results(self) -> list[StepResult]:
        kept: list[tuple[int, StepResult]] = []
        request = 0
        for past in self._pasts.values():
            sequence = past.sequence
            request = sequence.host.request
            if past.replay.ended:
                continue
            if not past.failure:
                kept += past.kept
                continue
            failed = _failure(request, sequence.seq, past.failure)
            failed.logs = past.last.logs if past.last is not None else ""
            kept.append((self._places, failed))
        for seq in self._replays.keys() - self._pasts.keys():
            if not self._replays[seq].ended:
                text = f"it does not create sequence {seq}, which it created the first time"
                kept.append((self._places, _failure(request, seq, text)))
        kept.sort(key=lambda one: (one[0], one[1].seq))
        results = [result for _, result in kept]
        if results and results[0].constraint is None:
            # The first result reports to the GPU worker whether the controller is a constraint.
            past_of_first = self._pasts.get(results[0].seq)
            controller = past_of_first.sequence.controller if past_of_first is not None else None
            if isinstance(controller, Constraint):
                with contextlib.suppress(TokenbusError):
                    results[0].constraint = controller.text_end()
            results[0].takes_drafts = controller is not None and takes_drafts(controller)
        return results


def replayed_limits(limits: Limits) -> Limits:
    """The limits of calls that are replayed."""
    return replace(
        limits,
        init_s=TIMES * limits.init_s,
        pre_s=TIMES * limits.pre_s,
        mid_s=TIMES * limits.mid_s,
        post_s=TIMES * limits.post_s,
        script_s=TIMES * limits.script_s,
    )


def usual_limits(limits: Limits, usual: Limits) -> Limits:
    """Returns ``limits`` with the time limits of ``usual``."""
    return replace(
        limits,
        init_s=usual.init_s,
        pre_s=usual.pre_s,
        mid_s=usual.mid_s,
        post_s=usual.post_s,
        script_s=usual.script_s,
    )


def failed_start(
    request: int, replays: Sequence[Replay], error: str, code: str = Code.INTERNAL
) -> list[StepResult]:
    """The results of a request whose controller cannot be created: an error for each sequence that
    has not ended."""
    live = [one.seq for one in replays if not one.ended] or [0]
    return [StepResult(request, seq, "error", error=error, code=str(code)) for seq in live]


def _where(past: _Past) -> str:
    return f"after {past.tokens} of {len(past.replay.tokens)} sampled tokens"


def _differs(what: str) -> ControllerError:
    return ControllerError(Code.CONTROLLER_FAILED, what)


def _failure(request: int, seq: int, what: str) -> StepResult:
    text = (
        f"the controller cannot continue on another worker, because its replay failed: {what}; its "
        "decisions may depend only on its prompt, argument, tokens and variables"
    )
    return StepResult(request, seq, "error", error=text, code=str(Code.CONTROLLER_FAILED))


def _may_sample(sequence: ControlledSequence, last: StepResult, token: int) -> bool:
    """Whether the mask and the bias of a result allow a token. During a replay, sequences have no
    rows of the shared file, so the mask and the bias are in buffers."""
    masked = last.attachment is not None and last.run == 1
    if masked and not sequence.mask[token >> 3] >> (token & 7) & 1:
        return False
    return last.bias_attachment is None or not forbids(sequence.bias, token)
