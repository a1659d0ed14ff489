"""Handles INPUT, by which a client sends a text to the program of one of its streams.

The broker passes each input to the state worker, and does not store it. The state worker stores the
inputs of a request in order, each once, so that a replayed program receives the same inputs. Then
the broker notifies the request's controller worker. A client sends an input again until it receives
the answer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..protocol.bodies import decode_as, encode_body
from ..protocol.errors import Code
from ..protocol.header import decode_header, encode_header
from ..protocol.messages import MAX_INPUT_BYTES, MAX_WAITING_INPUTS, Input, InputAnswer, Msg
from ..protocol.shares import fits_share
from ..protocol.worker_messages import Inputs as Arrived
from ..protocol.worker_messages import Variable, VariableAnswer
from .controllers import Controllers
from .outgoing import Outgoing, Side
from .request import Request
from .session import Session
from .state import BrokerState
from .worker import RETRY_AFTER_S, Worker

AGAIN_S = 0.5
"""If the client repeats an input within this number of seconds after the broker has passed it on,
the broker drops the repetition."""
MAX_UNANSWERED_BYTES = 32 * 1024 * 1024
"""Maximum bytes of the unanswered inputs of all clients together. An input counts each time it is
passed on, because each repetition adds a message to the state worker's queue."""
INPUT_BYTES = 4_096
"""Bytes that count for an unanswered input in addition to its text, each time it is passed on. They
bound the number of inputs, because the state worker takes some 40 µs for each, and the operations
of other clients wait meanwhile."""


@dataclass(slots=True)
class _Passed:
    """An input that was passed to the state worker, and has no answer."""

    owner: str
    """The client's key; without a key, the id of the client's session."""
    size: int = 0
    """The bytes of all messages that passed the input on."""
    at: float = 0.0
    """The time at which the input was last passed on, in seconds."""


class Inputs:
    """Passes the inputs of clients to the state worker, and the worker's answers back to the
    clients."""

    def __init__(self, state: BrokerState, controllers: Controllers) -> None:
        self._state = state
        self._out = state.out
        self._controllers = controllers
        self._quotas = state.quotas
        self._passed: dict[int, dict[int, _Passed]] = {}
        """The unanswered inputs, by request and number."""
        self._bytes = Counter[str]()
        """The bytes of the unanswered inputs of each owner."""
        self._worker_id: int | None = None
        """The id of the state worker to which the unanswered inputs were passed."""

    def on_input(self, session: Session, frames: list[bytes]) -> None:
        """Handles the INPUT of a client. Raises RequestError if the message is malformed."""
        message: Input = decode_as(Input, frames[1])
        worker = self._controllers.state_worker()
        if worker is not None and worker.id != self._worker_id:
            # Another state worker has registered. The former one does not answer any more, so the
            # inputs that were passed to it are forgotten.
            self._worker_id = worker.id
            self._passed.clear()
            self._bytes.clear()
        refusal = self._refusal(session, message)
        if refusal is not None:
            self._answer(session, message.stream_id, refusal)
            return
        request = session.streams[message.stream_id]
        if self._is_recent(request, message.number):
            return
        assert worker is not None
        text = message.text.encode("utf-8", "replace")
        self._note(request, message.number, len(text) + INPUT_BYTES)
        request.steered.has_inputs = True
        operation = Variable(request.id, 0, message.number, "give", "", text)
        tenant = self._quotas.variables(request)
        sent = [b"VARIABLE", encode_header(request.id), encode_body(operation, "msgpack")]
        sent += [] if tenant is None else [tenant.encode()]
        self._out.append(Outgoing(Side.BACK, worker.peer, sent, True))

    def _refusal(self, session: Session, message: Input) -> InputAnswer | None:
        """The answer to an input that is refused; None if the broker does not refuse the input."""
        refused = InputAnswer(number=message.number)
        request = session.streams.get(message.stream_id)
        if request is None or not request.open:
            refused.code = Code.UNKNOWN_STREAM
            refused.message = f"this session has no live stream {message.stream_id}"
        elif request.steering is None:
            refused.code = Code.UNSUPPORTED
            refused.message = (
                f"stream {message.stream_id} has no program that could receive an input; begin it "
                "with a controller"
            )
        elif (size := len(message.text.encode("utf-8", "replace"))) > MAX_INPUT_BYTES:
            refused.code = Code.TOO_LARGE
            refused.message = f"the input has {size} bytes; at most {MAX_INPUT_BYTES} are allowed"
        elif self._controllers.state_worker() is None:
            refused.code, refused.retry_after_s = Code.NO_WORKER, RETRY_AFTER_S
            refused.message = "no state worker is running, so the input cannot be stored; try again"
        elif self._is_recent(request, message.number):
            return None
        elif self._is_crowded(request, message.number):
            refused.code, refused.retry_after_s = Code.QUEUE_FULL, RETRY_AFTER_S
            refused.message = (
                f"{MAX_WAITING_INPUTS} inputs of stream {message.stream_id} wait for an answer; "
                "more are not allowed"
            )
        elif not self._fits(_owner(session), size + INPUT_BYTES):
            refused.code, refused.retry_after_s = Code.QUEUE_FULL, RETRY_AFTER_S
            refused.message = (
                f"{self._bytes.total()} of at most {MAX_UNANSWERED_BYTES} bytes of inputs wait for "
                f"an answer, {self._bytes[_owner(session)]} of them for this client; one client "
                "may use at most half of the bytes that other clients leave free"
            )
        else:
            return None
        return refused

    def on_answer(self, frames: list[bytes]) -> None:
        """Handles the state worker's answer about an input: notifies the request's controller
        worker, and answers the client."""
        id_ = decode_header(frames[1]).request
        stored: VariableAnswer = decode_as(VariableAnswer, frames[2], "msgpack")
        self._release(id_, stored.count)
        request = self._state.requests.get(id_)
        if request is None or request.steering is None:
            return
        if stored.error is None:
            worker = request.steering.worker
            if worker is not None and request.steering.started:
                self._out.to_worker(worker, b"INPUTS", Arrived(number=stored.count), request.id)
            answer = InputAnswer(number=stored.count)
        else:
            answer = InputAnswer(
                number=stored.count,
                code=Code.QUEUE_FULL if stored.again else Code.TOO_LARGE,
                message=stored.error,
                retry_after_s=RETRY_AFTER_S if stored.again else None,
            )
        self._answer(request.session, request.stream_id, answer)

    def _is_recent(self, request: Request, number: int) -> bool:
        """Whether an input is unanswered and was passed on less than ``AGAIN_S`` ago."""
        known = self._passed.get(request.id, {}).get(number)
        return known is not None and self._state.now < known.at + AGAIN_S

    def _is_crowded(self, request: Request, number: int) -> bool:
        """Whether an input is new (not yet passed on), and its request already has too many
        unanswered inputs."""
        passed = self._passed.get(request.id, {})
        return number not in passed and len(passed) >= MAX_WAITING_INPUTS

    def _note(self, request: Request, number: int, size: int) -> None:
        """Records that an input is passed on, in a message of ``size`` bytes."""
        owner = _owner(request.session)
        known = self._passed.setdefault(request.id, {}).setdefault(number, _Passed(owner))
        known.size += size
        known.at = self._state.now
        self._bytes[owner] += size

    def _fits(self, owner: str, size: int) -> bool:
        """Whether another input of a client, with ``size`` bytes, may wait for the state worker."""
        return fits_share(self._bytes[owner], self._bytes.total(), MAX_UNANSWERED_BYTES, size)

    def _release(self, request: int, number: int) -> None:
        passed = self._passed.get(request, {})
        known = passed.pop(number, None)
        if known is None:
            return
        if not passed:
            del self._passed[request]
        self._bytes[known.owner] -= known.size
        if not self._bytes[known.owner]:
            del self._bytes[known.owner]

    def _answer(self, session: Session, stream_id: int, answer: InputAnswer) -> None:
        self._out.to_session(session, b"MSG", Msg(stream_id=stream_id, input=answer))


def answers_input(worker: Worker, frames: list[bytes]) -> bool:
    """Whether a worker's message answers an input. Such an answer is for the broker itself, because
    the broker has sent the input to the state worker."""
    return (
        frames[0] == b"VARIABLE_ANSWER"
        and worker.role == "state"
        and not decode_header(frames[1]).address
    )


def _owner(session: Session) -> str:
    return session.key or str(session.id)
