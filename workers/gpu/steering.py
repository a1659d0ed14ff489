"""The GPU worker's side of controllers: what was sampled goes out, what was decided comes in.

A sequence with a controller is sampled when its decision for this round is there. Decisions come
while the forward runs; one that is late is waited for a moment, and then its sequence is held: it
sits out until the decision has come, and nobody else waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...protocol.bodies import encode_body
from ...protocol.errors import Code, RequestError
from ...protocol.header import encode_header
from ...protocol.worker_messages import Result, Start, Step, StepResult, StepSequence
from ..machine import machine_id
from .engine import Engine, PendingStep
from .mask_file import ROWS, MaskFile
from .sampler import NOTHING_ALLOWED
from .sequence import TokenOutput

log = logging.getLogger(__name__)

EMPTY_MASK = "its controller allows no token that may come here; allow one at least, or stop"

PATIENCE = 0.25
"""How long a batch waits for late decisions, as a part of the time its forward took."""
PATIENCE_S = (0.0003, 0.005)
"""At least and at most."""

Key = tuple[int, int]
"""Request and sequence."""


@dataclass(slots=True, eq=False)
class Steered:
    """A request with a controller."""

    engine: Engine
    eos: frozenset[int]
    """The tokens that end its sequences, where their controller does not make more of them."""
    worker: int = 0
    """The controller worker that has it; 0 until it has answered."""
    ends: dict[int, TokenOutput] = field(default_factory=dict)
    """Sequences that have ended, whose controller is still to say its last."""
    gone: set[int] = field(default_factory=set)
    """Sequences whose controller has said its last."""
    notes: dict[int, tuple[str, list[Any]]] = field(default_factory=dict)
    """By sequence: logs and writes that go with its next token."""


class Steering:
    """Requests with controllers. ``post`` sends frames."""

    def __init__(self, post: Callable[[list[bytes]], None]) -> None:
        self._post = post
        self._requests: dict[int, Steered] = {}
        self._awaited: set[Key] = set()
        """Sequences whose decision has not come."""
        self._forks: dict[Key, list[tuple[StepResult, np.ndarray | None]]] = {}
        """Forks of sequences that have no logits yet, and all that was decided behind them."""
        self._behind: dict[Key, Key] = {}
        self._files: dict[tuple[int, int], MaskFile | None] = {}
        """By controller worker and words of a mask."""

    @property
    def active(self) -> bool:
        """Whether any request has a controller."""
        return bool(self._requests)

    # --- requests -------------------------------------------------------------------------------

    def start(self, request: int, engine: Engine, start: Start) -> None:
        """A request that was just added to its engine gets its controller.

        Raises RequestError where the controller's argument cannot be sent on; then nothing is sent.
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
        self._requests[request] = Steered(engine, eos)
        self._awaited.add((request, 0))
        self._post([b"START", encode_header(request), body])

    def ends_of(self, request: int) -> list[TokenOutput]:
        """The ends of a request that is cancelled, whose controllers are not waited for."""
        steered = self._requests.get(request)
        return list(steered.ends.values()) if steered is not None else []

    def noted(self, request: int, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """The last outputs of a request that is cancelled, with what its controllers had said."""
        steered = self._requests.get(request)
        return outputs if steered is None else [self._noted(steered, o) for o in outputs]

    def forget(self, request: int) -> None:
        """A request is over."""
        if self._requests.pop(request, None) is not None:
            self._awaited = {key for key in self._awaited if key[0] != request}
            for kept in (self._behind, self._forks):
                for key in [key for key in kept if key[0] == request]:
                    del kept[key]

    # --- the step -------------------------------------------------------------------------------

    def decide(
        self, engine: Engine, step: PendingStep, forward_s: float, receive: Callable[[float], None]
    ) -> None:
        """Between forward and sampling: takes decisions in, waits a little, holds who is late.

        ``receive`` takes what the bus has, waiting up to so many seconds for it.
        """
        receive(0.0)
        late = self._late(engine, step)
        if late and len(late) < len(step.ready):
            low, high = PATIENCE_S
            until = time.monotonic() + min(high, max(low, PATIENCE * forward_s))
            while late and (left := until - time.monotonic()) > 0:
                receive(left)
                late = self._late(engine, step)
        for request, seq in late:
            engine.hold(request, seq)

    def sampled(self, engine: Engine, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """After sampling: tells the controller workers; returns what clients may hear of now."""
        news: dict[int, list[StepSequence]] = {}
        heard = []
        for output in outputs:
            steered = self._requests.get(output.request)
            if steered is None:
                heard.append(output)
                continue
            output = self._noted(steered, output)
            if output.error == NOTHING_ALLOWED:
                output = output._replace(error=EMPTY_MASK, code=Code.CONTROLLER_FAILED)
            told = self._told_of(steered, output)
            if told is not None:
                news.setdefault(steered.worker, []).append(told)
            if output.seq not in steered.ends:
                heard.append(output)
        for worker, sequences in news.items():
            self._tell(engine, worker, sequences)
        return heard

    def on_result(self, worker: int, result: Result, attachments: list[bytes]) -> list[TokenOutput]:
        """Decisions have come; returns the ends that clients may hear of now."""
        heard: list[TokenOutput] = []
        for one in result.sequences:
            steered = self._requests.get(one.request)
            if steered is None:
                continue
            if not steered.worker:
                steered.worker = worker
                self._open_file(worker, steered.engine, result.host)
            if one.then in ("stop", "error"):
                steered.gone.add(one.seq)
            end = steered.ends.pop(one.seq, None)
            if end is not None:
                self._awaited.discard((one.request, one.seq))
                self._note(steered, one)
                heard.append(self._noted(steered, end))
                continue
            mask = self._mask(steered, one, attachments)
            self._take(steered, one, mask)
        return heard

    # --- decisions ------------------------------------------------------------------------------

    def _late(self, engine: Engine, step: PendingStep) -> list[Key]:
        """Who is ready and not decided. Forks that waited for their logits are made first."""
        for key in step.ready if self._forks else ():
            self._make_forks(key)
        return [key for key in step.ready if key in self._awaited]

    def _make_forks(self, key: Key) -> None:
        """Takes in what waited for the logits of a sequence, which are there or never will be."""
        waiting = self._forks.pop(key, [])
        for one, _ in waiting:
            for seq in (one.seq, *one.children):
                self._behind.pop((one.request, seq), None)
        for one, mask in waiting:
            self._take(self._requests[one.request], one, mask)

    def _take(self, steered: Steered, one: StepResult, mask: np.ndarray | None) -> None:
        engine, key = steered.engine, (one.request, one.seq)
        before = self._behind.get(key) if self._behind else None
        if before is not None:
            self._forks[before].append((one, mask))
            self._behind.update(((one.request, child), before) for child in one.children)
        elif _just_samples(one) and engine.go_on(*key, mask):
            self._awaited.discard(key)
        elif not engine.alive(*key):
            self._too_late(steered, one)
        elif not self._changed(steered, one):
            self._awaited.discard(key)
        elif one.then == "fork" and not engine.ready(*key):
            # Its forks would each compute what it still has to compute.
            self._forks[key] = [(one, mask)]
            self._behind.update(((one.request, seq), key) for seq in (one.seq, *one.children))
        else:
            try:
                self._apply(engine, one, mask)
            except RequestError as error:
                engine.end(*key, "error", error.message, error.code)

    def _too_late(self, steered: Steered, one: StepResult) -> None:
        """A decision for a sequence that has ended, or that was never made: it is void."""
        key = (one.request, one.seq)
        log.debug("a decision for %s came too late: %s", key, one.then)
        self._awaited.discard(key)
        if one.then == "sample":
            # Its controller takes it to be with the model; it may have been busy when it was told.
            ended = StepSequence(one.request, one.seq, [], "error")
            self._tell(steered.engine, steered.worker, [ended])

    def _changed(self, steered: Steered, one: StepResult) -> bool:
        """Wakes a sequence, drops and appends; whether it goes on after what was appended."""
        engine, key = steered.engine, (one.request, one.seq)
        engine.resume(*key)
        self._note(steered, one)
        if one.backtrack or one.ff_tokens:
            engine.splice(*key, one.backtrack, one.ff_tokens)
        # All this happens once, where a fork waits after it.
        one.backtrack, one.ff_tokens, one.logs, one.storage = 0, [], "", []
        return engine.alive(*key)

    def _apply(self, engine: Engine, one: StepResult, mask: np.ndarray | None) -> None:
        """Does to a sequence what its controller decided."""
        key = (one.request, one.seq)
        match one.then:
            case "sample":
                engine.set_mask(*key, mask)
                engine.release(*key)
                self._awaited.discard(key)
            case "fork":
                children = engine.fork(*key, len(one.children), one.children)
                self._awaited.update((one.request, child) for child in children)
            case "suspend":
                engine.suspend(*key)
            case "stop":
                self._awaited.discard(key)
                engine.end(*key, one.finish)
            case "error":
                self._awaited.discard(key)
                engine.end(*key, "error", one.error or "the controller failed", one.code)

    # --- logs and writes ------------------------------------------------------------------------

    @staticmethod
    def _note(steered: Steered, one: StepResult) -> None:
        """Keeps what a round printed and wrote, for the sequence's next token."""
        if one.logs or one.storage:
            logs, storage = steered.notes.get(one.seq, ("", []))
            steered.notes[one.seq] = (logs + one.logs, [*storage, *one.storage])

    @staticmethod
    def _noted(steered: Steered, output: TokenOutput) -> TokenOutput:
        noted = steered.notes.pop(output.seq, None) if output.parent is None else None
        if noted is None:
            return output
        return output._replace(logs=output.logs + noted[0], storage=[*output.storage, *noted[1]])

    # --- messages -------------------------------------------------------------------------------

    def _told_of(self, steered: Steered, output: TokenOutput) -> StepSequence | None:
        """What a controller worker is told of an output; None where it need not know.

        Where a sequence ends otherwise than by its controller, this one has the last word: its end
        is kept until that has come.
        """
        reason, token = output.finish_reason, output.token
        # One that was fast-forwarded has no probability, and is known to its controller.
        drawn = [token] if token is not None and output.logprob is not None else []
        if reason is None:
            if not drawn:
                return None
            self._awaited.add((output.request, output.seq))
        else:
            self._make_forks((output.request, output.seq))
            if output.seq in steered.gone or not (token is not None or steered.worker):
                return None
            if token is not None:
                if reason == "length" and drawn and token in steered.eos:
                    # Without a controller it would have ended with this token just so.
                    reason = "stop"
                self._awaited.add((output.request, output.seq))
                steered.ends[output.seq] = output._replace(finish_reason=reason)
        return StepSequence(output.request, output.seq, drawn, reason)

    def _tell(self, engine: Engine, worker: int, sequences: list[StepSequence]) -> None:
        step = Step(sequences=sequences)
        file = self._files.get((worker, engine.mask_words))
        if file is not None:
            step.masks, step.rows, step.row_bytes = file.path, ROWS, file.row_bytes
        self._post([b"STEP", encode_header(0, worker), encode_body(step, "msgpack")])

    def _open_file(self, worker: int, engine: Engine, host: str) -> None:
        """The first word of a controller worker: on this machine, masks are shared from now on."""
        key = (worker, engine.mask_words)
        if key not in self._files:
            self._files[key] = None
            if host == machine_id():
                try:
                    self._files[key] = MaskFile(engine.mask_words)
                except OSError as error:
                    log.warning("masks are sent, as they cannot be shared: %s", error)

    def _mask(
        self, steered: Steered, one: StepResult, attachments: list[bytes]
    ) -> np.ndarray | None:
        if one.row is not None:
            file = self._files[steered.worker, steered.engine.mask_words]
            assert file is not None
            row: np.ndarray = file.rows[one.row]
            return row
        if one.attachment is not None:
            return np.frombuffer(attachments[one.attachment], dtype=np.uint32)
        return None


def _just_samples(one: StepResult) -> bool:
    """Whether a decision is the usual one: nothing but a mask."""
    return one.then == "sample" and not (one.backtrack or one.ff_tokens or one.logs or one.storage)
