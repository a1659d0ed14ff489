"""The GPU worker's side of controllers: sends sampled tokens, and applies decisions.

In each round, a controller decides how its sequence continues. The sequence is sampled only after
this decision has arrived. Decisions usually arrive while the forward runs. After the forward, the
batch waits a moment for missing decisions. Then sequences without a decision are deferred, and the
step continues with the other sequences. If a decision never arrives, its sequence ends with an
error.

An *update* is the part of a STEP about one sequence. A *run* is the tokens that a sequence samples
until the next STEP (``steered.Run``). The *notes* of a sequence are the controller's logs, writes
of variables and texts for the client (``steered.Notes``).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ....protocol.bodies import encode_body
from ....protocol.errors import Code, ControllerError, RequestError, TokenbusError
from ....protocol.header import encode_header
from ....protocol.logs import about
from ....protocol.sampling import Query
from ....protocol.settings import Settings
from ....protocol.worker_messages import Start, Step, StepResult, StepSequence
from ...machine import machine_id
from ..engine.engine import Engine, PendingStep
from ..engine.sequence import MAX_SEQ, StepOutputs, TokenColumns, TokenOutput
from ..sampling.sampler import NOTHING_ALLOWED
from ..sampling.under import Under
from .decisions import (
    bias_of,
    decode_decisions,
    just_samples,
    mask_of,
    options_of,
    unders_along,
)
from .mask_file import ROWS, MaskFiles
from .metrics import WorkerMetrics
from .resumption import Given
from .steered import Run, Steered

log = logging.getLogger(__name__)

EMPTY_MASK = (
    "the controller's mask and bias forbid all possible tokens; allow at least one, or stop"
)

PATIENCE = 0.25
"""A batch waits for missing decisions for this fraction of the forward's duration, within the
bounds ``PATIENCE_S``."""
PATIENCE_S = (0.0003, 0.005)
"""The shortest and the longest time for which a batch waits for missing decisions, in seconds."""
POLL_S = 0.0005
"""While decisions are missing, the worker checks at this interval, in seconds, whether the forward
has finished."""
REPLAYED_ROUND_S = 0.25
"""Allowed average duration of a replayed round, in seconds."""
CHECK_S = 1.0
"""The worker checks for overdue decisions at this interval, in seconds."""

Key = tuple[int, int]
"""Request and sequence number."""


def decision_timeout(settings: Settings) -> float:
    """The time limit of a decision, in seconds. It is longer than the longest time that a call of a
    controller may take."""
    calls_ms = settings.controller_pre_ms + settings.controller_mid_ms + settings.controller_post_ms
    round_ms = max(calls_ms, 3 * settings.controller_script_ms)
    return settings.controller_decision_s + (settings.controller_init_ms + round_ms) / 1000


class Steering:
    """The requests with controllers, and their awaited decisions. ``post`` sends frames over a
    link.

    ``timeout_s``: time limit of a decision, in seconds of ``clock``. If a decision is overdue, its
    sequence ends with an error. ``again_s``: additional time for the first decisions of a restarted
    controller, because the restart may have to wait for a controller worker.
    """

    def __init__(
        self,
        post: Callable[[list[bytes], int], None],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        metrics: WorkerMetrics | None = None,
        again_s: float = 0.0,
    ) -> None:
        self._metrics = metrics or WorkerMetrics()
        self._post = post
        self._timeout_s = timeout_s
        self._again_s = again_s
        self._clock = clock
        self._next_check = clock() + CHECK_S
        self._requests: dict[int, Steered] = {}
        self._ended: set[int] = set()
        """The ended requests whose sequences have not been removed from ``_awaited``."""
        self._awaited: dict[Key, float] = {}
        """The sequences whose decisions have not arrived, each with the time after which its
        decision is overdue. The time is ``inf`` for a sequence that is suspended, waits for scores,
        or waits for logits before it forks."""
        self._forks: dict[Key, list[tuple[StepResult, Under]]] = {}
        """For each sequence that will fork when it has logits: its decision to fork, and the later
        decisions that must wait for the fork."""
        self._behind: dict[Key, Key] = {}
        """For each sequence with a decision in ``_forks``: the sequence that must fork first."""
        self._runs: dict[Key, Run] = {}
        """The current run of each sequence that has a run (``steered.Run``)."""
        self._early_forks: set[Key] = set()
        """The sequences that may fork before they have logits (function ``_early_forks``). Only
        used while a RESULT is applied; empty at other times."""
        self._files = MaskFiles()

    @property
    def active(self) -> bool:
        """Whether any request has a controller."""
        return bool(self._requests)

    # --- requests -------------------------------------------------------------------------------

    def start(
        self,
        request: int,
        engine: Engine,
        start: Start,
        given: Mapping[int, Given] | None = None,
        link: int = 0,
    ) -> None:
        """Starts the controller of a request that was added to its engine. ``link``: the link to
        the request's broker.

        If ``start`` has a ``replay``, the controller is restarted. Its first decisions may then
        take longer. ``given``: the entries that the client already has; they are not sent again.
        Raises RequestError, and sends nothing, if the controller's argument cannot be encoded.
        """
        try:
            body = encode_body(start, "msgpack")
        except (OverflowError, TypeError, ValueError) as error:
            raise RequestError(
                Code.INVALID_FIELD,
                f"the controller's argument cannot be encoded: {error}",
                path="$.controller_arg",
            ) from None
        eos = frozenset(() if start.ignore_eos else start.vocabulary.eos)
        if request in self._ended:
            self._sweep()
        steered = Steered(engine, eos, link, start.attempt, inspect=start.inspect)
        self._requests[request] = steered
        steered.given.update(given or {})
        rounds = sum(1 + len(one.tokens) for one in start.replay)
        for seq in engine.sequences(request):
            self._await((request, seq))
            self._awaited[request, seq] += rounds * REPLAYED_ROUND_S + self._again_s * bool(rounds)
        self._post([b"START", encode_header(request), body], link)

    def note_text_ends(self, request: int) -> None:
        """Called before a request is cancelled. Records for each of its texts whether the text is
        complete or cut, if the constraint of the text has sent the next mask. The text is complete
        if this mask allows an end-of-sequence token, and cut if it does not."""
        steered = self._requests.get(request)
        if steered is None or not steered.constrained:
            return
        engine = steered.engine
        ends = sorted(engine.loaded.eos_token_ids)[:1]
        for seq in engine.sequences(request) if ends else ():
            whole = engine.allows(request, seq, ends[0])
            if whole is not None and (request, seq) not in self._awaited:
                steered.text_ends[seq] = "complete" if whole else "cut"

    def kept_ends(self, request: int) -> list[TokenOutput]:
        """The stored last outputs of a cancelled request. They were waiting for the controller's
        last rounds."""
        steered = self._requests.get(request)
        return list(steered.ends.values()) if steered is not None else []

    def with_notes(self, request: int, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Adds unsent notes to the last outputs of a cancelled request. Leaves out outputs that the
        client already has."""
        steered = self._requests.get(request)
        if steered is None:
            return outputs
        return [steered.noted(o) for o in outputs if not steered.repeats(o)]

    def forget(self, request: int) -> None:
        """Frees the state of an ended request."""
        steered = self._requests.pop(request, None)
        if steered is None:
            return
        self._forks = {key: kept for key, kept in self._forks.items() if key[0] != request}
        self._behind = {key: fork for key, fork in self._behind.items() if key[0] != request}
        self._runs = {key: run for key, run in self._runs.items() if key[0] != request}
        # This table may have tens of thousands of suspended sequences, and hundreds of requests may
        # end at once. So the table is not searched for each request.
        self._ended.add(request)
        if len(self._ended) > len(self._requests):
            self._sweep()
        if steered.same_machine:
            self._files.close(steered.worker, steered.engine.mask_words)

    def _sweep(self) -> None:
        """Removes the sequences of ended requests from ``_awaited``."""
        ended = self._ended
        self._awaited = {key: due for key, due in self._awaited.items() if key[0] not in ended}
        ended.clear()

    # --- the step -------------------------------------------------------------------------------

    def decide(self, engine: Engine, step: PendingStep, receive: Callable[[float], None]) -> None:
        """Called after the forward was launched, and before sampling. Receives decisions while the
        forward runs and for a moment after it. Then defers the sequences without a decision.

        ``receive`` processes bus messages. Its argument is the maximum time, in seconds, that it
        waits for the first message.
        """
        receive(0.0)
        undecided = self._undecided(step)
        while undecided and not step.computed:
            receive(POLL_S)
            undecided = self._undecided(step)
        waited = 0.0
        if undecided:
            low, high = PATIENCE_S
            began = now = time.monotonic()
            until = began + min(high, max(low, PATIENCE * (began - step.launched_at)))
            while undecided and (left := until - now) > 0:
                receive(left)
                undecided = self._undecided(step)
                now = time.monotonic()
            waited = now - began
        self._metrics.of(engine.loaded.name).mask_wait_s.observe(waited)
        for request, seq in undecided:
            engine.defer(request, seq)

    def sampled(self, engine: Engine, outputs: StepOutputs) -> StepOutputs:
        """Called after sampling: sends STEPs to the controller workers. Returns the outputs for
        clients."""
        updates: dict[int, list[StepSequence]] = {}
        others, columns = outputs.others, outputs.columns
        if columns is not None:
            # Stored notes are sent with the sequence's token. Such a token cannot be in columns.
            noted = {r for r in columns.requests if r in self._requests and self._requests[r].notes}
            if noted:
                columns, with_notes = columns.without(noted)
                others = [*others, *with_notes]
        if columns is not None:
            self._update_rows(columns, updates)
        for_clients = []
        for output in others:
            steered = self._requests.get(output.request)
            if steered is None:
                for_clients.append(output)
                continue
            if steered.given and steered.repeats(output):
                continue
            output = steered.noted(output)
            has_notes = output.messages or output.logs or output.storage or output.waiting
            if output.is_report and not has_notes:
                # The report is empty, because its notes were sent with an appended token.
                continue
            if output.error == NOTHING_ALLOWED:
                output.error, output.code = EMPTY_MASK, Code.CONTROLLER_FAILED
            update = self._update(steered, output)
            if update is not None:
                _add(updates.setdefault(steered.worker, []), update)
            if output.seq not in steered.ends:
                for_clients.append(output)
        self._draft(engine, updates.values())
        for worker, sequences in updates.items():
            self._send_step(engine, worker, sequences)
        return StepOutputs(for_clients, columns)

    def expire(self) -> list[TokenOutput]:
        """Ends the sequences whose decisions are overdue. Does nothing if the last check was less
        than ``CHECK_S`` ago. Returns the last outputs that were stored for the ended sequences."""
        now = self._clock()
        if now < self._next_check:
            return []
        self._next_check = now + CHECK_S
        ends: list[TokenOutput] = []
        for key in [key for key, due in self._awaited.items() if due <= now]:
            steered = self._requests.get(key[0])
            if steered is None:
                continue
            text = f"the controller worker did not send a decision within {self._timeout_s:g} s"
            log.warning("request %d, sequence %d: %s", *key, text, extra=about(key[0]))
            ends += self._fail(steered, key, text, Code.CONTROLLER_FAILED)
        return ends

    # --- decisions ------------------------------------------------------------------------------

    def on_result(
        self, worker: int, body: bytes, attachments: list[bytes], link: int = 0
    ) -> list[TokenOutput]:
        """Applies the decisions of a RESULT that arrived over ``link``. Returns the stored last
        outputs of the sequences whose last round is now complete.

        If an entry is malformed or cannot be applied, only its own sequence ends, with an error.
        Raises RequestError if the body is not a valid RESULT.
        """
        ends: list[TokenOutput] = []
        valid, invalid, usual, host, attempts = decode_decisions(body)
        for request, seq, row in zip(usual[::3], usual[1::3], usual[2::3], strict=False):
            if not self._samples_in_row(worker, request, seq, row):
                valid.append(StepResult(request, seq, "sample", row=row))
        self._early_forks = _early_forks(valid)
        for one in valid:
            if self._samples_under_row(worker, one):
                continue
            steered = self._steered_by(worker, one.request, host, link, attempts)
            if steered is None:
                continue
            try:
                ends += self._on_decision(steered, one, attachments)
            except Exception as error:
                ends += self._refuse(steered, one, error)
        for entry in invalid:
            steered = self._steered_by(worker, entry.request, host, link, attempts)
            if steered is not None:
                text = f"the controller worker sent a malformed decision: {entry.error}"
                key = (entry.request, entry.seq)
                log.warning("request %d, sequence %d: %s", *key, text, extra=about(key[0]))
                ends += self._fail(steered, key, text, Code.CONTROLLER_FAILED)
        return ends

    def _samples_under_row(self, worker: int, one: StepResult) -> bool:
        """A fast path for the most frequent decision, which samples a token under a mask in the
        mask file. If the decision or the request needs more work, or the sequence does not wait for
        a decision, returns False and changes nothing."""
        if one.row is None or not just_samples(one) or one.constraint is not None:
            return False
        if one.along or one.takes_drafts or one.biased or one.has_options or one.run > 1:
            return False
        return self._samples_in_row(worker, one.request, one.seq, one.row)

    def _samples_in_row(self, worker: int, request: int, seq: int, row: int) -> bool:
        """Applies a decision that samples a sequence's next token under a mask in the mask file. If
        the request needs more work, or the sequence does not wait for a decision, returns False and
        changes nothing."""
        steered = self._requests.get(request)
        if steered is None or steered.worker != worker:
            return False
        key, file = (request, seq), steered.file
        if steered.inspect or steered.ends or self._behind or file is None:
            return False
        if not 0 <= row < ROWS or key not in self._awaited:
            return False
        if not steered.engine.sample_under(*key, file.rows[row]):
            return False
        del self._awaited[key]
        return True

    def _steered_by(
        self, worker: int, request: int, host: str, link: int, attempts: Mapping[int, int]
    ) -> Steered | None:
        """The request of a decision from ``worker``. None if the decision is outdated. This is the
        case if the request has ended or is at another broker, if another worker runs its
        controller, or if the controller was restarted after the decision."""
        steered = self._requests.get(request)
        if steered is None or steered.link != link:
            return None
        if not steered.worker:
            if attempts.get(request, 0) != steered.attempt:
                log.debug("ignored a decision of an earlier attempt of request %d", request)
                return None
            steered.worker = worker
            steered.same_machine = host == machine_id()
            if steered.same_machine:
                steered.file = self._files.open(worker, steered.engine.mask_words)
        elif steered.worker != worker:
            text = "ignored a decision for request %d from worker %d: its controller runs elsewhere"
            log.warning(text, request, worker, extra=about(request))
            return None
        return steered

    def _on_decision(
        self, steered: Steered, one: StepResult, attachments: list[bytes]
    ) -> list[TokenOutput]:
        if one.action in ("stop", "error"):
            steered.stopped.add(one.seq)
        if steered.inspect:
            steered.round_us[one.seq] = steered.round_us.get(one.seq, 0) + one.round_us
        if one.constraint is not None:
            steered.constrained = True
            if one.action == "stop":
                steered.text_ends[one.seq] = one.constraint
        if one.takes_drafts and not steered.inspect:
            steered.takes_drafts = True
            steered.engine.take_drafts(one.request)
        end = steered.ends.pop(one.seq, None)
        if end is not None:
            self._awaited.pop((one.request, one.seq), None)
            steered.note(one)
            return [steered.noted(end)]
        key = (one.request, one.seq)
        along = one.along and key in self._awaited and not self._behind and just_samples(one)
        mask = mask_of(one, steered.file, attachments)
        bias, vocab = None, steered.engine.loaded.vocab_size
        if one.biased:
            bias = bias_of(one, steered.file, attachments, vocab)
        self._take(steered, one, Under(mask, bias, options_of(one, vocab)))
        if along:
            unders = unders_along(one, steered.file, attachments, vocab)
            steered.engine.sample_along(*key, unders)
        return []

    def _undecided(self, step: PendingStep) -> list[Key]:
        """First makes the forks that waited for logits. Then returns the ready sequences without a
        decision."""
        for key in step.ready if self._forks else ():
            self._make_forks(key)
        ended = self._ended
        return [key for key in step.ready if key in self._awaited and key[0] not in ended]

    def _make_forks(self, key: Key) -> None:
        """Applies the decisions that waited for the logits of a sequence. Called when the sequence
        has logits or has ended."""
        waiting = self._forks.pop(key, [])
        for one, _ in waiting:
            for seq in (one.seq, *one.children):
                self._behind.pop((one.request, seq), None)
        for one, under in waiting:
            steered = self._requests[one.request]
            try:
                self._take(steered, one, under)
            except Exception as error:
                self._refuse(steered, one, error)

    def _take(self, steered: Steered, one: StepResult, under: Under) -> None:
        engine, key = steered.engine, (one.request, one.seq)
        before = self._behind.get(key) if self._behind else None
        if before is not None:
            self._forks[before].append((one, under))
            self._behind.update(((one.request, child), before) for child in one.children)
        elif key not in self._awaited:
            self._void(steered, key, one.action)
        elif just_samples(one) and self._samples(engine, one, under):
            del self._awaited[key]
        elif not engine.alive(*key):
            self._void(steered, key, one.action)
        elif not self._changed(steered, one):
            del self._awaited[key]
        elif one.action == "fork" and not (engine.ready(*key) or self._forks_early(engine, key)):
            # The fork waits until the sequence has logits. If it did not wait, each resulting
            # sequence would have to compute the remaining tokens.
            self._awaited[key] = math.inf
            self._forks[key] = [(one, under)]
            self._behind.update(((one.request, seq), key) for seq in (one.seq, *one.children))
        else:
            self._apply(engine, one, under)

    def _samples(self, engine: Engine, one: StepResult, under: Under) -> bool:
        """Applies a decision that only samples. If ``Engine.sample_under`` cannot apply the
        decision, returns False and changes nothing."""
        mask = under.mask if one.run == 1 else None
        if not engine.sample_under(one.request, one.seq, mask, under.bias, under.options):
            return False
        self._begin_run(engine, one, under)
        return True

    def _begin_run(self, engine: Engine, one: StepResult, under: Under) -> None:
        """If a decision covers several tokens or asks for log-probabilities, begins a run: the
        tokens that the sequence samples until the next STEP (``steered.Run``). Raises
        ControllerError if the mask of a run has the wrong size."""
        if one.run == 1 and not one.logprobs:
            return
        endings = under.mask if one.run > 1 else None
        if endings is not None and len(endings) != engine.mask_words:
            text = f"the mask of a run has {len(endings)} words; expected {engine.mask_words}"
            raise ControllerError(Code.CONTROLLER_FAILED, text)
        # The mask is copied, because the run continues after this step.
        ends = None if endings is None else endings.copy()
        self._runs[one.request, one.seq] = Run(one.run, ends, one.logprobs)

    def _forks_early(self, engine: Engine, key: Key) -> bool:
        """Whether a sequence can fork before it has logits. It can if each resulting sequence then
        drops or appends tokens, and at most one of their common tokens has not been computed."""
        return key in self._early_forks and engine.num_missing(*key) <= 1

    def _void(self, steered: Steered, key: Key, action: str) -> None:
        """Ignores a decision, because its sequence has ended, does not exist, or already has a
        decision for this round."""
        log.debug("ignored the decision %s for %s, which does not wait for a decision", action, key)
        self._awaited.pop(key, None)
        if action not in ("fork", "stop", "error") and not steered.engine.alive(*key):
            # The sequence ended while the controller decided. The controller now waits for a token,
            # an answer to its query, scores or a wake-up. This STEP reports the end. After a
            # decision to fork, a STEP is not needed, because the controller sends another decision
            # before it waits.
            self._send_step(steered.engine, steered.worker, [StepSequence(*key, [], "error")])

    def _changed(self, steered: Steered, one: StepResult) -> bool:
        """Makes the changes that a decision requires before its action: resumes the sequence,
        stores its notes, and drops and appends its tokens. Returns whether the sequence is still
        alive."""
        engine, key = steered.engine, (one.request, one.seq)
        engine.resume(*key)
        steered.note(one)
        if one.prompt:
            engine.begin_anew(*key, one.prompt)
        if (one.backtrack or one.ff_tokens) and engine.alive(*key):
            engine.splice(*key, one.backtrack, one.ff_tokens)
        if one.pin is not None and engine.alive(*key):
            engine.pin(*key, self._clock() + one.pin.seconds, one.pin.owner)
        if steered.has_report(one.seq):
            # The report is sent now, and not with the next token, because the controller may wait
            # for the client's answer.
            engine.report(*key)
        # If a decision to fork waits for logits, this method is called twice for it. The changes
        # must be made only once.
        one.backtrack, one.ff_tokens, one.logs, one.storage, one.wakes = 0, [], "", [], 0
        one.messages, one.prompt, one.pin, one.awaits = [], [], None, 0
        return engine.alive(*key)

    def _apply(self, engine: Engine, one: StepResult, under: Under) -> None:
        """Applies the action of a decision to a live sequence."""
        key = (one.request, one.seq)
        match one.action:
            case "sample":
                mask = under.mask if one.run == 1 else None
                engine.set_mask(*key, mask, under.bias, under.options)
                engine.reschedule(*key)
                self._begin_run(engine, one, under)
                del self._awaited[key]
            case "fork":
                self._check_children(engine, one)
                del self._awaited[key]
                children = engine.fork(*key, len(one.children), one.children)
                for seq in (one.seq, *children) if children else ():
                    self._await((one.request, seq))
            case "suspend":
                engine.suspend(*key)
                self._awaited[key] = math.inf
            case "score":
                engine.score_texts(*key, one.texts)
                self._awaited[key] = math.inf
            case "look":
                engine.look(*key, one.query or Query())
                del self._awaited[key]
            case "stop":
                del self._awaited[key]
                engine.end(*key, one.finish)
            case "error":
                del self._awaited[key]
                engine.end(*key, "error", one.error or "the controller failed", one.code)

    @staticmethod
    def _check_children(engine: Engine, one: StepResult) -> None:
        """Raises ControllerError if the number of a new sequence is not valid, occurs twice, or
        belongs to a live sequence."""
        children = one.children
        known = any(not 0 < seq <= MAX_SEQ or engine.alive(one.request, seq) for seq in children)
        if known or len(set(children)) < len(children):
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the fork numbers the new sequences {children}; expected unused, distinct numbers",
            )

    # --- failures -------------------------------------------------------------------------------

    def _await(self, key: Key) -> None:
        self._awaited[key] = self._clock() + self._timeout_s

    def _refuse(self, steered: Steered, one: StepResult, error: Exception) -> list[TokenOutput]:
        """Ends the sequence of a decision that cannot be applied."""
        key = (one.request, one.seq)
        if isinstance(error, TokenbusError):
            return self._fail(steered, key, error.message, error.code)
        log.error("the decision %s for %s cannot be applied", one.action, key, exc_info=error)
        text = f"the controller's decision cannot be applied: {type(error).__name__}: {error}"
        return self._fail(steered, key, text, Code.INTERNAL)

    def _fail(self, steered: Steered, key: Key, error: str, code: Code | str) -> list[TokenOutput]:
        """Ends a sequence with an error. Returns its stored last output, if it has one."""
        engine = steered.engine
        end = steered.ends.pop(key[1], None)
        self._awaited.pop(key, None)
        self._runs.pop(key, None)
        if end is not None:
            end.finish_reason, end.error, end.code = "error", error, code
            return [steered.noted(end)]
        before = self._behind.get(key)
        if engine.alive(*key):
            engine.end(*key, "error", error, code)
        elif before is not None:
            failed = StepResult(*key, "error", error=error, code=str(code))
            self._forks[before].append((failed, Under()))
        else:
            self._void(steered, key, "sample")
        return []

    # --- messages -------------------------------------------------------------------------------

    def _update_rows(self, columns: TokenColumns, updates: dict[int, list[StepSequence]]) -> None:
        """For each row with a controller, adds an update that reports the sampled token. The next
        decision of the row's sequence is then awaited."""
        due = self._clock() + self._timeout_s
        numbers = columns.tokens.tolist(), columns.logprobs.tolist()
        for sequence, token, logprob in zip(columns.sequences, *numbers, strict=True):
            request, seq = sequence.request, sequence.seq
            steered = self._requests.get(request)
            if steered is not None:
                if steered.given:
                    steered.given.pop(seq, None)
                update = StepSequence(request, seq, [token])
                if self._runs and not self._ends_run(update, logprob):
                    continue
                self._awaited[request, seq] = due
                updates.setdefault(steered.worker, []).append(update)

    def _update(self, steered: Steered, output: TokenOutput) -> StepSequence | None:
        """The update that reports an output to its controller; None if no report is needed.

        If a sequence ends with a token, and its controller has not decided to stop, the controller
        runs a last round. The last output is stored until this round is complete.
        """
        if output.token is None and output.is_input:
            self._await((output.request, output.seq))
            read = StepSequence(output.request, output.seq, [])
            read.scores = output.scores
            read.distributions = [output.distribution] if output.distribution is not None else []
            return read
        reason, token, stop = output.finish_reason, output.token, ""
        # An appended token has no log-probability. The controller has chosen the token itself.
        drawn = [token] if token is not None and output.logprob is not None else []
        update = StepSequence(output.request, output.seq, drawn, reason)
        if self._runs and not self._ends_run(update, output.logprob or 0.0):
            return None
        if reason is None:
            if not drawn:
                return None
            self._await((output.request, output.seq))
        else:
            self._make_forks((output.request, output.seq))
            if output.seq in steered.stopped or not (token is not None or steered.worker):
                return None
            if token is not None:
                if reason == "length" and output.logprob is not None and token in steered.eos:
                    # Without a controller, the sequence would have ended with this token, for the
                    # reason "stop".
                    reason = "stop"
                self._await((output.request, output.seq))
                if output.shortened and isinstance(output.stop, str):
                    # The controller receives the stop string, so that it can find the end of the
                    # text before the string.
                    stop = output.stop
                output.finish_reason = reason
                output.shortened = output.shortened and not stop
                steered.ends[output.seq] = output
        update.ended, update.stop = reason, stop
        if update.tokens and output.distribution is not None:
            update.distributions = [output.distribution]
        return update

    def _ends_run(self, update: StepSequence, logprob: float) -> bool:
        """Adds the token of an update, and its log-probability, to the sequence's run. If the run
        continues, returns False. If the run ends, puts all its tokens into the update and returns
        True. If the sequence does not have a run, returns True."""
        key = update.request, update.seq
        run = self._runs.get(key)
        if run is None:
            return True
        ends = bool(update.tokens) and run.take(update.tokens[0], logprob)
        if not ends and update.ended is None:
            return False
        del self._runs[key]
        update.tokens, update.logprobs = run.tokens, run.logprobs
        return True

    def _draft(self, engine: Engine, updates: Iterable[list[StepSequence]]) -> None:
        """Adds drafts to the updates of sequences whose controllers compute a mask after each token
        of a draft."""
        takers = {
            (update.request, update.seq): update
            for sequences in updates
            for update in sequences
            if update.ended is None and self._requests[update.request].takes_drafts
        }
        if takers:
            for key, draft in engine.draft_ahead(list(takers)).items():
                takers[key].draft = list(draft)

    def _send_step(self, engine: Engine, worker: int, sequences: list[StepSequence]) -> None:
        step = Step(sequences=sequences)
        file = self._files.get(worker, engine.mask_words)
        if file is not None:
            step.masks, step.rows, step.row_bytes = file.path, ROWS, file.row_bytes
            step.bias_bytes = file.bias_bytes
        link = self._requests[sequences[0].request].link
        self._post([b"STEP", encode_header(0, worker), encode_body(step, "msgpack")], link)


def _early_forks(decisions: Sequence[StepResult]) -> set[Key]:
    """Among the sequences that these decisions of a RESULT fork, finds those that may fork early. A
    sequence may fork early if the next decision of each resulting sequence drops or appends
    tokens."""
    if not any(one.action == "fork" for one in decisions):
        return set()
    found: set[Key] = set()
    changes: dict[Key, bool] = {}
    for one in reversed(decisions):
        if one.action == "fork":
            numbers = (one.seq, *one.children)
            if all(changes.get((one.request, seq), False) for seq in numbers):
                found.add((one.request, one.seq))
        changes[one.request, one.seq] = bool(one.backtrack or one.ff_tokens or one.prompt)
    return found


def _add(updates: list[StepSequence], update: StepSequence) -> None:
    """Adds an update to a list. If the last update is of the same sequence, joins the two. A
    verified draft gives several updates of one sequence."""
    last = updates[-1] if updates else None
    if last is None or (last.request, last.seq) != (update.request, update.seq):
        updates.append(update)
        return
    last.tokens += update.tokens
    last.distributions += update.distributions
    last.logprobs += update.logprobs
    last.ended, last.stop = update.ended, update.stop
