"""Whatever arrives and whatever fails, each START and each sequence of a STEP gets a RESULT.

The worker is real, but has no connection. Tests put messages into its inbox, and read its messages
from the outbox of its link.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec import json, msgpack
from tokenbus.protocol.errors import Code, ControllerError
from tokenbus.protocol.header import Header, decode_header, encode_header
from tokenbus.protocol.settings import Settings
from tokenbus.protocol.worker_messages import (
    Registered,
    Replay,
    Result,
    Start,
    Step,
    StepResult,
    StepSequence,
    TokenizerAnswer,
    Variable,
    VocabularyName,
)
from tokenbus.workers.bus import FromBus
from tokenbus.workers.controller import interface, store_requests
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.controller.python import Controller, Decision, PythonProgram, sample, suspend
from tokenbus.workers.controller.runtime import ThreadRuntime
from tokenbus.workers.controller.variable_calls import VariableCalls
from tokenbus.workers.controller.worker import ControllerWorker

from ...processes import until
from .played import engine
from .tokens.small_tokenizers import byte_level

BOUND_S = 300.0
GPU = 7


class Fails(Controller):
    """Raises an exception that is not an ``Exception``, like a panic of a native library."""

    def mid_process(self, fork_group: list[int]) -> Decision:
        raise asyncio.CancelledError("cancelled by itself")


class Counts(Controller):
    """Samples, and logs the tokens of each round."""

    def post_process(self, tokens: list[int], backtrack: int) -> Decision | None:
        self.log(tokens)
        return super().post_process(tokens, backtrack)


class Suspends(Controller):
    """Sequence 0 suspends itself in its second round. The other sequence samples."""

    rounds = 0

    def pre_process(self) -> Decision | None:
        self.rounds += 1
        return suspend() if self.seq == 0 and self.rounds == 2 else None

    def mid_process(self, fork_group: list[int]) -> Decision:
        return sample()


class Reads(Controller):
    """Reads a variable in its first round, after its request has ended."""

    began = threading.Event()
    ended = threading.Event()
    errors: ClassVar[list[str]] = []

    def mid_process(self, fork_group: list[int]) -> Decision:
        self.began.set()
        assert self.ended.wait(BOUND_S)
        try:
            self.host.variables.get("name")
        except ControllerError as error:
            self.errors.append(error.message)
            raise
        return sample()


class Refuses:
    """A program whose error message is not valid Unicode."""

    def start(self, host: Host) -> interface.Controller:
        raise ControllerError(Code.CONTROLLER_FAILED, "not \ud800 today")


class Panics:
    """A program that raises an exception that is not an ``Exception``."""

    def start(self, host: Host) -> interface.Controller:
        raise BaseException("a panic")


class Worker:
    """The worker under test, and the messages that it posted."""

    def __init__(self, folder: Path) -> None:
        programs: dict[str, Program] = {
            "refuses": Refuses(),
            "panics": Panics(),
            "free": PythonProgram(Controller),
            "counts": PythonProgram(Counts),
            "fails": PythonProgram(Fails),
            "reads": PythonProgram(Reads),
            "suspends": PythonProgram(Suspends),
        }
        settings = Settings(run_dir=str(folder))
        runtime = ThreadRuntime(engine, programs)
        self.worker = ControllerWorker(settings, served=runtime)
        self._bus = self.worker._bus
        self._thread = threading.Thread(target=self.worker.run, daemon=True)
        self._bus.start = lambda: None  # type: ignore[method-assign]
        self._thread.start()

    def send(
        self, kind: bytes, body: bytes, request: int = 0, *attachments: bytes, gpu: int = GPU
    ) -> None:
        header = decode_header(encode_header(request, gpu))
        self._bus._inbox.put([FromBus(kind, header, body, list(attachments))])

    def start(self, request: int, controller: str, n: int = 1) -> StepResult:
        """Sends START and the tokenizer; returns the first result."""
        self.begin(request, controller, n)
        return self.result(request)

    def attempts(self) -> dict[int, int]:
        """The attempts that the next RESULT names, by request."""
        named = msgpack.decode(self.first(b"RESULT")[2], type=Result).attempts
        self._bus._links[0]._outbox.clear()
        return named

    def begin(
        self, request: int, controller: str, n: int = 1, *replay: Replay, attempt: int = 0
    ) -> None:
        """Sends START and the tokenizer, and does not wait for the result."""
        name = VocabularyName(fingerprint="f", size=300, eos=[0])
        start = Start(
            controller=controller,
            prompt=[1],
            n=n,
            max_tokens=9,
            model="m",
            vocabulary=name,
            replay=list(replay),
            attempt=attempt,
        )
        self.send(b"START", msgpack.encode(start), request, b"tenant")
        tokenizer = byte_level().to_str().encode()
        self.send(b"TOKENIZER_JSON", msgpack.encode(TokenizerAnswer(fingerprint="f")), 0, tokenizer)

    def step(self, request: int, seq: int = 0, **more: Any) -> StepResult:
        stepped = StepSequence(request, seq, [5], **more)
        self.send(b"STEP", msgpack.encode(Step(sequences=[stepped])))
        return self.result(request, seq)

    def result(self, request: int, seq: int = 0) -> StepResult:
        """The next result of a sequence."""
        found: list[StepResult] = []

        def there() -> bool:
            for frames in list(self._bus._links[0]._outbox):
                if frames[0] != b"RESULT":
                    continue
                assert decode_header(frames[1]).address == GPU
                sequences = msgpack.decode(frames[2], type=Result).sequences
                found.extend(one for one in sequences if (one.request, one.seq) == (request, seq))
            return bool(found)

        until(there, BOUND_S, f"no RESULT for sequence {seq} of request {request}")
        self._bus._links[0]._outbox.clear()
        return found[-1]

    def first(self, kind: bytes) -> list[bytes]:
        """The first message of a type."""
        until(
            lambda: kind in [f[0] for f in list(self._bus._links[0]._outbox)],
            BOUND_S,
            f"no {kind!r}",
        )
        return next(list(f) for f in list(self._bus._links[0]._outbox) if f[0] == kind)

    def close(self) -> None:
        self.worker.stop("the test is over")
        for _, request in list(self.worker._groups):
            self.send(b"END", msgpack.encode({"requests": [request]}))
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.close()


@pytest.mark.parametrize(
    ("controller", "says"), [("refuses", "not \\ud800 today"), ("panics", "a panic")]
)
def test_a_start_that_fails_in_any_way_gets_a_result(
    worker: Worker, controller: str, says: str
) -> None:
    result = worker.start(1, controller)
    assert result.action == "error"
    assert says in (result.error or "")
    assert worker.start(2, "free").action == "sample", "the worker continues"


def test_a_start_that_cannot_be_read_gets_a_result(worker: Worker) -> None:
    worker.send(b"START", msgpack.encode({"controller": 5}), 3, b"tenant")
    result = worker.result(3)
    assert result.action == "error"
    assert "$.controller" in (result.error or "")
    worker.send(b"START", b"\xc1", 4)
    assert worker.result(4).action == "error"


def test_the_first_result_of_a_start_names_its_attempt(worker: Worker) -> None:
    """A GPU worker that has started a controller again ignores its results until one names this
    attempt."""
    for attempt, controller in ((1, "free"), (2, "refuses"), (3, "free")):
        worker.begin(1, controller, attempt=attempt)
        assert worker.attempts() == {1: attempt}
    stepped = StepSequence(1, 0, [5])
    worker.send(b"STEP", msgpack.encode(Step(sequences=[stepped])))
    assert worker.attempts() == {}
    # The RESULT also names the attempt if only another field of START cannot be decoded.
    worker.send(b"START", msgpack.encode({"controller": 5, "attempt": 6}), 3, b"tenant")
    assert worker.attempts() == {3: 6}


def test_a_round_that_raises_what_is_no_exception_ends_its_sequence(worker: Worker) -> None:
    result = worker.start(1, "fails")
    assert (result.action, result.code) == ("error", "controller_failed")
    assert "CancelledError: cancelled by itself" in (result.error or "")
    assert worker.start(2, "free").action == "sample", "no thread was lost"


def test_a_step_of_an_unknown_request_or_sequence_gets_a_result(worker: Worker) -> None:
    assert worker.start(1, "free").action == "sample"
    for request, seq in ((1, 5), (99, 0)):
        result = worker.step(request, seq)
        assert result.action == "error"
        assert f"does not have sequence {seq}" in (result.error or "")
    assert worker.step(1).action == "sample"


def test_a_step_of_an_earlier_attempt_at_another_gpu_worker_is_void(worker: Worker) -> None:
    """The GPU worker that the request has left was not notified yet. Its token does not belong to
    the attempt for which the controller was started."""
    worker.start(1, "counts")
    stale = Step(sequences=[StepSequence(1, 0, [6])])
    worker.send(b"STEP", msgpack.encode(stale), gpu=GPU + 1)
    result = worker.step(1)
    assert (result.action, result.logs) == ("sample", "[5]\n")


def test_a_suspended_sequence_that_the_gpu_worker_ends_gets_a_result(worker: Worker) -> None:
    worker.start(1, "suspends", n=2)
    assert worker.step(1).action == "suspend"
    assert worker.step(1, ended="length").action == "stop"
    assert worker.step(1, seq=1).action == "sample"


def test_a_step_whose_mask_file_cannot_be_mapped_gets_masks_as_attachments(worker: Worker) -> None:
    worker.start(1, "free")
    step = Step(
        sequences=[StepSequence(1, 0, [5])],
        masks="/proc/self/fd/0#no number",
        rows=1 << 62,
        row_bytes=1 << 62,
    )
    worker.send(b"STEP", msgpack.encode(step))
    assert worker.result(1).action == "sample"


def test_the_main_loop_waits_for_no_group(worker: Worker) -> None:
    """While a thread holds the lock of a group, the rounds of other groups run. The step of the
    locked group runs later."""
    for request in (1, 2, 3):
        worker.start(request, "free")
    locked, ended = (worker.worker._groups[0, request] for request in (1, 3))
    with locked._lock, ended._lock:
        for request in (1, 2):
            step = Step(sequences=[StepSequence(request, 0, [5])])
            worker.send(b"STEP", msgpack.encode(step))
        worker.send(b"END", msgpack.encode({"requests": [3]}))
        assert worker.result(2).action == "sample"
        assert worker.step(2).action == "sample"
        until(lambda: ended.closed, BOUND_S, "the request has ended")
        assert (0, 3) not in worker.worker._groups
    assert worker.result(1).action == "sample"


def test_the_main_loop_waits_for_no_result_that_is_being_sent(worker: Worker) -> None:
    for request in (1, 2, 3):
        worker.start(request, "free")
    with worker.worker._order:
        worker.send(b"STEP", msgpack.encode(Step(sequences=[StepSequence(1, 0, [5])])))
        for request in (2, 3):
            worker.send(b"END", msgpack.encode({"requests": [request]}))
        until(lambda: (0, 3) not in worker.worker._groups, BOUND_S, "the request has ended")
    assert worker.result(1).action == "sample"


@pytest.mark.parametrize("body", [b"\xc1", b"not msgpack", b""])
def test_a_store_request_that_cannot_be_read_gets_an_error(worker: Worker, body: bytes) -> None:
    worker.send(b"UPLOAD", body, 5, b"tenant")
    frames = worker.first(b"ERROR")
    assert decode_header(frames[1]).request == 5


def test_a_store_request_beyond_the_share_of_its_tenant_gets_an_error(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_requests, "MAX_BYTES", store_requests.REQUEST_BYTES)
    worker.send(b"TAGS", msgpack.encode({"stream_id": 6}), 5, b"tenant")
    frames = worker.first(b"ERROR")
    assert decode_header(frames[1]).request == 5
    body = json.decode(frames[2])
    assert (body["code"], body["stream_id"]) == ("queue_full", 6)


def test_sessions_without_a_key_have_separate_shares_of_the_store_requests(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_serve, requests = threading.Event(), worker.worker._store_requests
    serve = requests._serve

    def serve_later(message: FromBus) -> None:
        assert may_serve.wait(BOUND_S)
        serve(message)

    def ask(request: int, session: int) -> None:
        worker.send(b"TAGS", msgpack.encode({"stream_id": 1}), request, b"", gpu=session)

    def codes() -> dict[int, str]:
        errors = [f for f in list(worker._bus._links[0]._outbox) if f[0] == b"ERROR"]
        return {decode_header(f[1]).request: json.decode(f[2])["code"] for f in errors}

    monkeypatch.setattr(requests, "_serve", serve_later)
    monkeypatch.setattr(store_requests, "MAX_BYTES", 4 * store_requests.REQUEST_BYTES)
    for request, session in ((1, 7), (2, 7), (3, 7), (4, 8), (5, 7)):
        ask(request, session)
    until(lambda: 5 in codes(), BOUND_S, "the last request is refused")
    assert codes() == {3: "queue_full", 5: "queue_full"}
    may_serve.set()
    until(lambda: len(codes()) == 5, BOUND_S, "every request is answered")


def test_a_malformed_answer_of_the_state_worker_disturbs_no_other_message(worker: Worker) -> None:
    header = Header(0, 0, 0)
    messages = [FromBus(b"VARIABLE_ANSWER", header, b"\xc1", []), FromBus(b"STEP", header, b"", [])]
    assert [m.type for m in worker.worker._take_answers(messages)] == [b"STEP"]


def test_a_second_start_of_a_request_closes_the_controllers_of_the_first(worker: Worker) -> None:
    worker.start(1, "free")
    first = worker.worker._groups[0, 1]
    assert worker.start(1, "free").action == "sample"
    assert not first._sequences
    assert worker.worker._groups[0, 1] is not first


def test_an_operation_that_begins_after_its_request_ended_is_refused(worker: Worker) -> None:
    worker.begin(1, "reads")
    assert Reads.began.wait(BOUND_S)
    worker.send(b"END", msgpack.encode({"requests": [1]}))
    # The next START shows that END has been handled.
    assert worker.start(2, "free").action == "sample"
    Reads.ended.set()
    until(lambda: Reads.errors, BOUND_S, "the operation fails")
    assert Reads.errors == ["the request 1 has ended, so its variables were dropped"]


def test_operations_of_a_request_that_ended_wait_no_longer() -> None:
    sent = threading.Event()
    calls = VariableCalls(lambda frames, link: sent.set())
    errors: list[str] = []

    def asks() -> None:
        try:
            calls.perform(Variable(1, 0, 1, "get", "name"))
        except ControllerError as error:
            errors.append(error.message)

    thread = threading.Thread(target=asks, daemon=True)
    thread.start()
    assert sent.wait(BOUND_S)
    calls.cancel(2)
    calls.cancel(1)
    thread.join(BOUND_S)
    assert errors == ["the request 1 has ended, so its variables were dropped"]


# --- requests that began at another worker --------------------------------------------------------


def test_a_replay_is_answered_and_its_sequences_go_on(worker: Worker) -> None:
    worker.begin(1, "suspends", 2, Replay(0, [], [4]), Replay(4, [5, 6]))
    assert worker.result(1, 4).action == "sample"
    assert worker.step(1, seq=4).action == "sample"
    assert worker.step(1, seq=0).action == "suspend"


def test_a_replay_whose_controller_cannot_be_made_gets_an_error_for_each_live_sequence(
    worker: Worker,
) -> None:
    worker.begin(1, "refuses", 1, Replay(0, [5], [1, 2], ended=True), Replay(1, []), Replay(2, []))
    frames = worker.first(b"RESULT")
    results = msgpack.decode(frames[2], type=Result).sequences
    assert [(one.seq, one.action) for one in results] == [(1, "error"), (2, "error")]


def test_a_worker_that_registers_anew_drops_all_controllers_and_what_they_would_send(
    worker: Worker,
) -> None:
    worker.start(1, "free")
    first = worker.worker._groups[0, 1]
    registered = Registered(worker=8, heartbeat_s=1.0, expiry_s=5.0)
    worker.send(b"REGISTERED", msgpack.encode(registered))
    assert worker.start(2, "free").action == "sample"
    assert first.closed
    assert list(worker.worker._groups) == [(0, 2)]


def test_a_long_replay_lets_other_requests_go_first(worker: Worker) -> None:
    """With one thread for starts, a short start that arrives later is answered before the
    replay."""
    starts = worker.worker._starts
    starts._slots = 1
    worker.start(1, "free")
    long = [5] * 20_000
    worker.begin(2, "free", 1, Replay(0, long))
    worker.begin(3, "free")
    frames = worker.first(b"RESULT")
    assert msgpack.decode(frames[2], type=Result).sequences[0].request == 3
    assert worker.result(2).action == "sample"
