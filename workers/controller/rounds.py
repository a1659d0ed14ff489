"""A round: the calls to one controller between two sampled tokens.

A round calls post_process with the sampled tokens, then pre_process and mid_process. If pre_process
or mid_process appends tokens, post_process and pre_process follow for these tokens.

Each round has one result. The result may drop and append tokens. It then does one of the following:
sample under a mask and a bias, read a distribution, score texts, fork, suspend or stop. A *draft*
is a list of tokens that the GPU worker expects next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ...protocol.errors import Code, ControllerError, TokenbusError
from ...protocol.logs import about
from ...protocol.sampling import Distribution, Query, Scores
from ...protocol.worker_messages import Pin, StepResult
from . import contexts
from .along import Place, allow_all, decide_along, goes_on, runs_ahead, takes_drafts
from .biases import Bias
from .host import Host
from .interface import Action, Answer, Batched, Constraint, Controller, DecidesAhead
from .variable_calls import SequenceVariables

log = logging.getLogger(__name__)


class Stage(Enum):
    """The state of a sequence."""

    RUNNING = "running"
    """The round of the sequence runs or is queued."""
    WAITING = "waiting"
    """The sequence waits for the model."""
    SUSPENDED = "suspended"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class ControlledSequence:
    """A sequence and its controller."""

    seq: int
    controller: Controller
    host: Host
    variables: SequenceVariables
    mask: memoryview
    """The buffer for the mask of mid_process, ``[4 * ceil(vocab / 32)]`` bytes."""
    row: int | None = None
    """The row of the shared file (``masks.py``) that ``mask`` refers to. None if masks are sent as
    attachments."""
    bias_view: memoryview | None = None
    """The buffer for the bias, in row ``row``. None if biases are sent as attachments."""
    bias: bytes = b""
    """The bias of the last mid_process, which is sent as an attachment. Empty if that call had no
    bias, or if the bias is in a row."""
    along: list[Place] = field(default_factory=list)
    """Buffers for the decisions after each token of a draft (``along.py``). If ``mask`` is a row of
    the shared file, these buffers are rows too."""
    batched: Batched | None = field(default=None, init=False)
    """The controller, if its usual rounds (``round_jobs``) can run in a batch with rounds of other
    controllers."""
    ahead: DecidesAhead | None = field(default=None, init=False)
    """The controller, if it implements ``DecidesAhead``."""
    stage: Stage = Stage.RUNNING
    prompt_length: int = 0
    """Number of tokens of the prompt."""
    length: int = 0
    """Number of tokens after the prompt."""
    slow: bool = False
    """Whether the last round took so long that the next round gets a separate thread."""
    seen_changes: int = 0
    """Number of changes that other sequences of the request had made when the last pre_process
    began."""
    wakes: int = 0
    """Number of wake-ups since the last sampled token."""
    woken: bool = False
    """Whether the last round began with a wake-up."""
    awaits: int = 0
    """The number of the input that the sequence has awaited since its last result
    (``StepResult.awaits``). 0 if the sequence does not wait for an input."""
    forks: int = 0
    """Number of forks that the sequence has made."""
    children: int = 0
    """Number of sequences that were forked from this sequence."""

    def __post_init__(self) -> None:
        """Stores which protocols the controller implements, because each check takes 25 µs."""
        if isinstance(self.controller, Batched):
            self.batched = self.controller
        if isinstance(self.controller, DecidesAhead):
            self.ahead = self.controller


@dataclass(slots=True)
class Change:
    """The tokens that a round drops and appends, combined from the answers of all calls of the
    round."""

    backtrack: int = 0
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    """The prompt with which the sequence begins anew; empty if the sequence keeps its prompt."""
    pin: Pin | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        """Replaces all tokens of the sequence by a new prompt."""
        self.backtrack, self.tokens, self.prompt, self.pin = 0, [], list(prompt), None

    def splice(self, backtrack: int, tokens: Sequence[int]) -> None:
        """Drops ``backtrack`` tokens from the end, and then appends ``tokens``. The tokens that
        this round has appended are dropped first."""
        taken = min(backtrack, len(self.tokens))
        if taken:
            del self.tokens[-taken:]
        self.backtrack += backtrack - taken
        self.tokens += tokens


Fork = Callable[[ControlledSequence, int], list[ControlledSequence]]
"""A function that creates the given number of copies of a sequence. Raises ControllerError if the
request would then have more than ``Limits.forks`` sequences."""


TOKEN_BYTES = 4
"""The bytes that are counted for a token of a new prompt or of a scored text, and for a dropped
token."""

LOOK_BYTES = 8
"""The bytes that are counted for each number of a distribution that a controller reads without
sampling."""


class Rounds:
    """Runs the rounds of the sequences of one request. Each method that runs a round returns the
    results to send.

    ``changes`` returns, for a sequence, the number of changes (tokens, writes, ends) that other
    sequences of the request have made.
    """

    def __init__(
        self,
        fork: Fork,
        changes: Callable[[ControlledSequence], int],
        owner: Callable[[], int] = lambda: 0,
        count_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``owner`` returns the number of the request's tenant (``Pin.owner``).
        ``count_bytes`` raises ControllerError if the request exceeds ``Limits.used_bytes``."""
        self._fork = fork
        self._changes = changes
        self._owner = owner
        self._count_bytes = count_bytes
        self.takes_runs = False
        """Whether a result may allow several tokens before the next round (``StepResult.run``)."""

    def begin(
        self, sequence: ControlledSequence, prompt: Sequence[int], n: int = 1
    ) -> list[StepResult]:
        """Runs init_prompt, forks the sequence into ``n`` sequences, and runs the first round of
        each."""
        return self._guarded(sequence, lambda: self._begin(sequence, prompt, n))

    def sampled(
        self,
        sequence: ControlledSequence,
        tokens: Sequence[int],
        draft: Sequence[int] = (),
        distributions: Sequence[Distribution] = (),
        logprobs: Sequence[float] = (),
    ) -> list[StepResult]:
        """Runs the round after tokens were sampled, or after the controller has read a distribution
        without sampling. If the decision is only to sample, the result also has the decisions after
        the tokens of ``draft``. ``distributions`` and ``logprobs`` are the answers that the
        controller asked for. They are empty if it did not ask."""
        sequence.variables.begin_round()
        sequence.woken = False
        sequence.wakes = 0
        sequence.host.give(distributions, logprobs=logprobs)
        return self._guarded(sequence, lambda: self._sampled(sequence, tokens, draft))

    def batched(self, sequence: ControlledSequence, token: int) -> list[StepResult]:
        """The result of a round that ran in a batch. Its action is always to sample under a
        mask."""
        sequence.variables.begin_round()
        sequence.woken = False
        sequence.wakes = 0
        sequence.length += 1
        assert sequence.batched is not None
        sequence.batched.batched(token)
        return [_result(sequence, "sample", masked=True)]

    def scored(self, sequence: ControlledSequence, scores: Scores) -> list[StepResult]:
        """Runs the round after the texts of the last round were scored."""
        sequence.variables.begin_round()
        sequence.woken = False
        sequence.wakes = 0
        sequence.host.give(scores=scores)
        return self._guarded(sequence, lambda: self._scored(sequence))

    def again(self, sequence: ControlledSequence) -> list[StepResult]:
        """Runs the round of a sequence that was woken."""
        sequence.variables.begin_round()
        sequence.woken = True
        sequence.wakes += 1
        return self._guarded(sequence, lambda: self._decide(sequence))

    def ended(
        self,
        sequence: ControlledSequence,
        tokens: Sequence[int],
        stop: bytes = b"",
        distributions: Sequence[Distribution] = (),
        logprobs: Sequence[float] = (),
    ) -> list[StepResult]:
        """Calls post_process for the last time, after the GPU worker has ended the sequence.
        ``stop``: the stop string that ended the sequence; the text ends before this string."""
        sequence.host.give(distributions, logprobs=logprobs)
        return self._guarded(sequence, lambda: self._ended(sequence, tokens, stop))

    def see_changes(self, sequence: ControlledSequence) -> None:
        """Called before pre_process, or before a call that includes pre_process. Records the number
        of changes so far. Only later changes wake the sequence."""
        if sequence.ahead is None or not sequence.ahead.has_decided:
            sequence.seen_changes = self._changes(sequence)

    # --- inside ---------------------------------------------------------------------------------

    def _begin(
        self, sequence: ControlledSequence, prompt: Sequence[int], n: int
    ) -> list[StepResult]:
        controller = sequence.controller
        sequence.prompt_length = len(prompt)
        controller.init_prompt(prompt)
        if n == 1:
            results = self._decide(sequence)
        else:
            results = self._forked(sequence, Change(), n - 1, at_start=True)
        if isinstance(controller, Constraint) and results[0].constraint is None:
            results[0].constraint = controller.text_end()
        results[0].takes_drafts = takes_drafts(controller)
        return results

    def _sampled(
        self, sequence: ControlledSequence, tokens: Sequence[int], draft: Sequence[int]
    ) -> list[StepResult]:
        sequence.length += len(tokens)
        tokens = self._caught_up(sequence, tokens)
        self.see_changes(sequence)
        if sequence.controller.post_process(tokens, 0).action is Action.STOP:
            results = [_stopped(sequence)]
        else:
            results = self._decide(sequence)
        host = sequence.host
        if not host.ignore_eos and any(token in host.vocabulary.eos_ids for token in tokens):
            _end_of_sequence(results)
        if draft:
            _look_along(sequence, results, draft)
        return results

    def _scored(self, sequence: ControlledSequence) -> list[StepResult]:
        self.see_changes(sequence)
        if sequence.controller.post_process((), 0).action is Action.STOP:
            return [_stopped(sequence)]
        return self._decide(sequence)

    def _ended(
        self, sequence: ControlledSequence, tokens: Sequence[int], stop: bytes
    ) -> list[StepResult]:
        if tokens:
            tokens = self._caught_up(sequence, tokens)
            if sequence.ahead is not None:
                sequence.ahead.ends()
            sequence.controller.post_process(tokens, 0)
        return [_stopped(sequence, stop=stop)]

    @staticmethod
    def _caught_up(sequence: ControlledSequence, tokens: Sequence[int]) -> Sequence[int]:
        """Runs a round for each token except the last one, if several tokens were sampled at once
        along a draft. The results of these rounds are dropped, because a copy of the controller has
        made the same decisions. Returns the tokens for the next round."""
        controller = sequence.controller
        if len(tokens) < 2 or not runs_ahead(controller):
            return tokens
        for token in tokens[:-1]:
            samples = (
                controller.post_process([token], 0).action is not Action.STOP
                and goes_on(controller.pre_process())
                and controller.mid_process((sequence.seq,), sequence.mask).action is Action.CONTINUE
            )
            if not samples:
                raise ControllerError(
                    Code.CONTROLLER_FAILED,
                    f"after token {token} of a draft, the controller did not sample, but its copy "
                    "did; with takes_drafts, decisions may depend only on the prompt, the argument "
                    "and the tokens",
                )
        return tokens[-1:]

    def _decide(
        self, sequence: ControlledSequence, group: Sequence[int] | None = None
    ) -> list[StepResult]:
        """Calls pre_process and mid_process. Directly after a fork, the first call is mid_process,
        and ``group`` has the numbers of the resulting sequences."""
        change = Change()
        controller = sequence.controller
        for _ in range(sequence.host.limits.silent_rounds):
            if group is None:
                self.see_changes(sequence)
                answer = controller.pre_process()
                appends = answer.action is Action.SPLICE or answer.tokens
                if appends and self._append(sequence, change, answer):
                    return [_stopped(sequence, change)]
                if answer.action is Action.SPLICE:
                    continue
                if answer.action is Action.SUSPEND:
                    return [_result(sequence, "suspend", change)]
                if answer.action is Action.STOP or (
                    answer.action is Action.FORK and answer.count == 0
                ):
                    return [_stopped(sequence, change)]
                if answer.action is Action.FORK and answer.count > 1:
                    return self._forked(sequence, change, answer.count - 1)
            else:
                self.see_changes(sequence)  # The call may include pre_process.
            answer = controller.mid_process(group or (sequence.seq,), sequence.mask)
            group = None
            if answer.action is Action.AGAIN:
                continue
            if answer.action is Action.CONTINUE:
                runs = answer.run > 1
                masked = answer.masked and (self.takes_runs or not runs)
                result = _result(sequence, "sample", change, masked)
                result.query, result.override = answer.query, answer.override
                result.logprobs = answer.logprobs
                if runs and self.takes_runs:
                    result.run = answer.run
                if answer.bias is not None or sequence.bias:
                    _give_bias(sequence, result, answer.bias)
                return [result]
            if answer.action is Action.SCORE:
                self._count_bytes(TOKEN_BYTES * sum(map(len, answer.texts)))
                result = _result(sequence, "score", change)
                result.texts = [list(text) for text in answer.texts]
                return [result]
            if answer.action is Action.LOOK:
                result = _result(sequence, "look", change)
                result.query = query = answer.query or Query()
                self._count_bytes(LOOK_BYTES * (2 + query.top + len(query.tokens)))
                return [result]
            if answer.action is Action.STOP:
                stopped = _stopped(sequence, change)
                if answer.complete:
                    stopped.finish = "stop"
                return [stopped]
            if self._changed(sequence, change, answer):
                return [_stopped(sequence, change)]
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the controller appended tokens in {sequence.host.limits.silent_rounds} rounds "
            "without sampling; it must sample, suspend or stop earlier",
        )

    def _append(self, sequence: ControlledSequence, change: Change, answer: Answer) -> bool:
        """Drops and appends tokens as ``answer`` requests, and calls post_process for them. Returns
        whether post_process stops the sequence."""
        drop, tokens = answer.backtrack, answer.tokens
        if not drop and not tokens:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                "the splice neither drops nor appends tokens; a splice must drop or append some",
            )
        if drop > sequence.length:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the splice drops {drop} tokens; the sequence has {sequence.length} beyond its "
                "prompt",
            )
        appended, most = len(change.tokens) + len(tokens), sequence.host.limits.appended_tokens
        if appended > most:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the controller appended {appended} tokens without sampling; at most {most} are "
                "allowed",
            )
        _check_tokens(sequence, tokens)
        self._count_bytes(TOKEN_BYTES * drop)
        change.splice(drop, tokens)
        sequence.length += len(tokens) - drop
        sequence.host.give()
        self.see_changes(sequence)
        return sequence.controller.post_process(tokens, drop).action is Action.STOP

    def _changed(self, sequence: ControlledSequence, change: Change, answer: Answer) -> bool:
        """Handles an answer of mid_process after which the round continues with post_process.
        Returns whether post_process stops the sequence."""
        match answer.action:
            case Action.BEGIN:
                return self._begin_anew(sequence, change, answer.tokens)
            case Action.SAVE | Action.OPEN:
                return self._use_context(sequence, change, answer)
        return self._append(sequence, change, answer)

    def _use_context(self, sequence: ControlledSequence, change: Change, answer: Answer) -> bool:
        """Saves or opens a context, and calls post_process. Returns whether post_process stops the
        sequence."""
        host, variables, refusal = sequence.host, sequence.variables, ""
        try:
            if answer.action is Action.OPEN:
                tokens = contexts.opened(variables, host.vocabulary, answer.name)
                return self._begin_anew(sequence, change, tokens)
            given = answer.name, answer.tokens, answer.pin_s
            contexts.save(variables, host.vocabulary, *given, host.limits.appended_tokens)
            if answer.pin_s:
                change.pin = Pin(answer.pin_s, self._owner())
        except contexts.Refusal as error:
            refusal = str(error)
        host.give(refusal=refusal)
        self.see_changes(sequence)
        return sequence.controller.post_process((), 0).action is Action.STOP

    def _begin_anew(
        self, sequence: ControlledSequence, change: Change, prompt: Sequence[int]
    ) -> bool:
        """Replaces all tokens of a sequence by a new prompt, and calls post_process for it. Returns
        whether post_process stops the sequence."""
        most = sequence.host.limits.appended_tokens
        if not 0 < len(prompt) <= most:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the new prompt has {len(prompt)} tokens; expected 1 to {most}",
            )
        _check_tokens(sequence, prompt)
        self._count_bytes(TOKEN_BYTES * (sequence.length + len(prompt)))
        dropped = sequence.prompt_length + sequence.length
        change.begin(prompt)
        sequence.prompt_length, sequence.length = len(prompt), 0
        sequence.host.give()
        self.see_changes(sequence)
        return sequence.controller.post_process(prompt, dropped).action is Action.STOP

    def _forked(
        self, sequence: ControlledSequence, change: Change, more: int, at_start: bool = False
    ) -> list[StepResult]:
        """Forks a sequence, and continues the round of each resulting sequence. If the fork is due
        to the request's ``n``, the round continues with pre_process. After any other fork, it
        continues with mid_process."""
        children = self._fork(sequence, more)
        forked = _result(sequence, "fork", change)
        forked.children = [child.seq for child in children]
        group = None if at_start else [sequence.seq, *forked.children]
        results = [forked]
        for each in (sequence, *children):
            results += self._guarded(each, lambda each=each: self._decide(each, group))  # type: ignore[misc]
        return results

    @staticmethod
    def _guarded(
        sequence: ControlledSequence, round_: Callable[[], list[StepResult]]
    ) -> list[StepResult]:
        """Runs a round. If the round fails, only its sequence ends."""
        try:
            return round_()
        except TokenbusError as error:
            failed = _result(sequence, "error")
            failed.error, failed.code = error.message, str(error.code)
        except BaseException as error:
            # Panics of native libraries are BaseExceptions. The code of a Python controller may
            # also raise a BaseException.
            number = about(sequence.host.request)
            log.exception("a round of sequence %d failed", sequence.seq, extra=number)
            failed = _result(sequence, "error")
            failed.error = f"the controller worker failed: {error!r}"
            failed.code = str(Code.INTERNAL)
        return [failed]


def _check_tokens(sequence: ControlledSequence, tokens: Sequence[int]) -> None:
    """Raises ControllerError for the first token that is outside the vocabulary."""
    size = sequence.host.vocabulary.size
    for token in tokens:
        if not 0 <= token < size:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the controller appended token {token}; token ids of this model are 0 to "
                f"{size - 1}",
            )


def _end_of_sequence(results: list[StepResult]) -> None:
    """Changes the result of the round after an end-of-sequence token so that the sequence ends.
    Does nothing if the controller's decision does more than sample or stop."""
    first = results[0]
    changes = first.backtrack or first.ff_tokens or first.prompt
    alone = len(results) == 1 and not changes
    if alone and first.action in ("sample", "stop"):
        first.action, first.finish = "stop", "stop"
        first.row = first.attachment = None
        first.bias_row = first.bias_attachment = None
        first.query = first.override = None
        first.logprobs = False


def _give_bias(sequence: ControlledSequence, result: StepResult, bias: Bias | None) -> None:
    """Adds the bias of mid_process to the round's result. If ``bias`` is None, drops the bias of
    the previous round."""
    sequence.bias = b""
    if bias is None:
        return
    if sequence.bias_view is not None:
        bias.write(sequence.bias_view)
        result.bias_row = sequence.row
    else:
        sequence.bias = bias.encoded()
        result.bias_attachment = 0


def _look_along(
    sequence: ControlledSequence, results: list[StepResult], draft: Sequence[int]
) -> None:
    """Adds the masks and biases after the tokens of a draft to the result of a round, if the
    round's decision is only to sample."""
    first, controller = results[0], sequence.controller
    if len(results) > 1 or first.action != "sample" or first.has_options or first.run > 1:
        return
    if first.backtrack or first.ff_tokens or first.prompt or first.logs or first.messages:
        return
    if not takes_drafts(controller):
        return
    masked = first.row is not None or first.attachment is not None
    if not masked and not runs_ahead(controller):
        return
    written = decide_along(controller, sequence.host, draft, sequence.along)
    if written and not masked:
        allow_all(sequence.mask)
        first.row, first.attachment = sequence.row, 0 if sequence.row is None else None
    places = sequence.along[:written]
    # The positions of attachments are filled in when the result is sent
    # (``pending_result.attach``).
    first.along = [place.row or 0 for place in places]
    if any(place.biased for place in places):
        first.biases_along = [(place.row or 0) if place.biased else None for place in places]


def _stopped(
    sequence: ControlledSequence, change: Change | None = None, stop: bytes = b""
) -> StepResult:
    """The result of a sequence that ends. For a constraint, the result says how the text ends
    (``ConstraintEnd``)."""
    result = _result(sequence, "stop", change)
    if isinstance(sequence.controller, Constraint):
        result.constraint = sequence.controller.text_end(stop)
    return result


def _result(
    sequence: ControlledSequence, action: str, change: Change | None = None, masked: bool = False
) -> StepResult:
    """The result of a round, with its log and its writes to variables."""
    return StepResult(
        sequence.host.request,
        sequence.seq,
        action,  # type: ignore[arg-type]
        change.backtrack if change is not None else 0,
        change.tokens if change is not None else [],
        row=sequence.row if masked else None,
        attachment=0 if masked and sequence.row is None else None,
        logs=sequence.host.log.take(),
        storage=sequence.variables.take_writes(),
        wakes=sequence.wakes,
        messages=sequence.variables.take_messages(),
        prompt=change.prompt if change is not None else [],
        pin=change.pin if change is not None else None,
        awaits=sequence.variables.awaits if action == "suspend" else 0,
    )
