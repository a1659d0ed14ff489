"""The GPU worker's step without sockets. The test acts as the controller worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.header import decode_header
from tokenbus.protocol.sampling import Sampling
from tokenbus.protocol.worker_messages import (
    Result,
    Start,
    Step,
    StepResult,
    StepSequence,
    VocabularyName,
)
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig, TokenOutput
from tokenbus.workers.gpu.engine.packing import Packed
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.gpu.model.runner import Forward
from tokenbus.workers.gpu.serving.steering import Steering
from tokenbus.workers.machine import machine_id

from .engine_client import ClientView

WORKER = 7
"""The id of the controller worker."""
TIMEOUT_S = 60.0
"""Time after which a decision is overdue, in seconds."""
Answers = Callable[[StepSequence], Iterable[StepResult]]
"""A controller's decisions on an update of a sequence; the first update has no tokens."""


class CountingEngine(Engine):
    """An engine that counts the tokens that its model computes."""

    forwarded = 0

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        super().__init__(loaded, config)
        launch = self._runner.launch

        def counted(packed: Packed, drawn: Callable[[], torch.Tensor] | None = None) -> Forward:
            self.forwarded += len(packed.ids)
            return launch(packed, drawn)

        self._runner.launch = counted  # type: ignore[method-assign]


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch on one thread. A second thread does not speed up small steps, and may be delayed
    on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def counting(loaded: LoadedModel, overlap: bool = False) -> CountingEngine:
    return CountingEngine(loaded, EngineConfig(kv_cache_bytes=32 * 2**20, overlap=overlap))


class Bench:
    """An engine with controlled requests. It runs the same steps as ``GpuWorker``."""

    def __init__(self, engine: Engine, host: str | None = None) -> None:
        """``host``: the machine of the controller worker; this machine if None."""
        self.engine = engine
        self.worker = WORKER
        """The controller worker that the broker chooses."""
        self.now = 0.0
        """The time on the clock of ``steering``, in seconds."""
        self.steering = Steering(self._posted, TIMEOUT_S, lambda: self.now)
        self.starts: list[tuple[int, Start]] = []
        self.steps: list[Step] = []
        self.updates: list[StepSequence] = []
        """The updates that the controller worker has received but not answered."""
        self.received: dict[int, list[TokenOutput]] = {}
        """The outputs that the client of each request has received."""
        self.live: dict[int, int] = {}
        self.waited = 0
        """Number of times that a step waited for missing decisions."""
        self._host = machine_id() if host is None else host
        self._inbox: deque[tuple[bool, bytes, list[bytes]]] = deque()
        """For each RESULT that has not arrived: whether it arrives while the next step waits, its
        body, and its attachments. If that step does not wait, the RESULT arrives after the step."""

    # --- the client -----------------------------------------------------------------------------

    def add(
        self,
        request: int,
        prompt: list[int],
        sampling: Sampling,
        *,
        controller: bool = True,
        ignore_eos: bool = True,
        text: bool = False,
    ) -> None:
        """Adds a request in the same way as ``GpuWorker``."""
        loaded = self.engine.loaded
        self.engine.add(request, prompt, sampling, text=text)
        self.live[request] = 1
        self.received[request] = []
        if controller:
            vocabulary = VocabularyName(
                fingerprint="f", size=loaded.vocab_size, eos=sorted(loaded.eos_token_ids)
            )
            start = Start(
                controller="c",
                prompt=prompt,
                max_tokens=sampling.max_tokens,
                model="m",
                vocabulary=vocabulary,
                ignore_eos=ignore_eos,
            )
            self.steering.start(request, self.engine, start)

    def client(self, request: int) -> ClientView:
        """The tokens, texts and ends that the client of a request has received."""
        client = ClientView()
        client.take(self.received[request])
        return client

    def tokens(self, request: int, seq: int = 0) -> list[int]:
        return self.client(request).tokens[seq]

    # --- the controller worker ------------------------------------------------------------------

    def send(
        self, *results: StepResult, masks: Iterable[np.ndarray] = (), while_waiting: bool = False
    ) -> None:
        """Sends decisions, which arrive before the next step or while the next step waits."""
        if results:
            body = encode_body(Result(sequences=list(results), host=self._host), "msgpack")
            self._inbox.append((while_waiting, body, [m.tobytes() for m in masks]))

    # --- the step -------------------------------------------------------------------------------

    def step(self) -> None:
        """Runs the same code as ``GpuWorker._step``."""
        engine = self.engine
        self._deliver(while_waiting=not engine.has_work)
        self._receive_outputs(self.steering.expire())
        if not engine.has_work:
            return
        step = engine.begin()
        self.steering.decide(engine, step, self._receive)
        self._receive_outputs(self.steering.sampled(engine, engine.finish(step)).as_outputs())
        self._inbox = deque((False, body, masks) for _, body, masks in self._inbox)

    def run(self, answers: Answers, steps: int = 2000) -> None:
        """Runs steps until every stream has ended. Each update is answered before the next step."""
        for request, _ in self.starts:
            self.send(*answers(StepSequence(request, 0, [])))
        self.starts.clear()
        for _ in range(steps):
            updates, self.updates = self.updates, []
            for update in updates:
                self.send(*answers(update))
            if not any(self.live.values()):
                return
            self.step()
        raise AssertionError(f"streams that did not end in {steps} steps: {self.live}")

    @property
    def blocks(self) -> float:
        """The number of used blocks."""
        return self.engine.stats()["kv_blocks_used"]

    def check_nothing_is_left(self) -> None:
        """Checks that the engine is idle: all requests have ended, no decision is missing, and all
        blocks are free."""
        steering = self.steering
        assert not steering.active
        assert not steering._awaited
        assert not steering._forks
        assert not steering._behind
        assert not self.engine.has_requests
        assert self.blocks == 0

    def _receive(self, wait_s: float) -> None:
        self.waited += wait_s > 0
        self._deliver(while_waiting=wait_s > 0)

    def _deliver(self, while_waiting: bool) -> None:
        while self._inbox and (while_waiting or not self._inbox[0][0]):
            _, body, attachments = self._inbox.popleft()
            self._receive_outputs(self.steering.on_result(self.worker, body, attachments))

    def _receive_outputs(self, outputs: list[TokenOutput]) -> None:
        for o in outputs:
            self.received[o.request].append(o)
            self.live[o.request] += (o.parent is not None) - (o.finish_reason is not None)
            if self.live[o.request] == 0:
                self.steering.forget(o.request)

    def _posted(self, frames: list[bytes], link: int) -> None:
        message_type, header, body = frames
        if message_type == b"START":
            self.starts.append((decode_header(header).request, decode_as(Start, body)))
            return
        assert message_type == b"STEP"
        assert decode_header(header).address == self.worker
        step: Step = decode_as(Step, body)
        assert step.sequences
        self.steps.append(step)
        self.updates += step.sequences


def sample(update: StepSequence, seq: int | None = None, **more: object) -> StepResult:
    """The decision to sample the next token of a sequence."""
    return StepResult(update.request, update.seq if seq is None else seq, "sample", **more)  # type: ignore[arg-type]


def freely(update: StepSequence) -> list[StepResult]:
    """The decisions of a controller that allows every token and stops at the sequence's end."""
    if update.ended is not None:
        return [StepResult(update.request, update.seq, "stop")]
    return [sample(update)]
