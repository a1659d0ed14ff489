"""Forwards messages from one worker to another. The broker reads only the headers of these
messages."""

from __future__ import annotations

from ..protocol.header import decode_header, encode_header
from ..protocol.tenants import Tenant
from .controllers import Controllers
from .inputs import Inputs, answers_input
from .outgoing import Outgoing, Side
from .state import BrokerState
from .worker import Worker

_BACK = Side.BACK
RELAYED = frozenset(
    (
        b"STEP",
        b"RESULT",
        b"FETCH_TOKENIZER",
        b"TOKENIZER_JSON",
        b"VARIABLE",
        b"VARIABLE_ANSWER",
        b"MODULE_TABLE",
        b"MODULE_TABLE_ANSWER",
        b"FETCH_MODULE",
        b"MODULE_BYTES",
        b"WEIGHTS_PART",
    )
)
"""The types of the messages that workers send to each other."""


class Relay:
    """Passes messages from one worker to another."""

    def __init__(self, state: BrokerState, controllers: Controllers, inputs: Inputs) -> None:
        self._inputs = inputs
        self._state = state
        self._controllers = controllers
        self._quotas = state.quotas

    def on_message(self, worker: Worker, frames: list[bytes]) -> None:
        """Passes a message from one worker to another. In the message's header, the receiver's id
        is replaced by the sender's."""
        if answers_input(worker, frames):
            self._inputs.on_answer(frames)
            return
        message_type, header = frames[0], decode_header(frames[1])
        controllers = self._controllers
        tenant: Tenant | None = None
        receivers: list[Worker | None]
        if message_type in (b"VARIABLE", b"MODULE_TABLE"):
            # Without a state worker the message is dropped; the controller worker sends it again.
            receivers = [controllers.state_worker()]
            if message_type == b"VARIABLE":
                tenant = self._quotas.variables(self._state.requests.get(header.request))
        elif message_type == b"FETCH_MODULE" and not header.address:
            receivers = [other for other in controllers.of_modules() if other is not worker]
        else:
            receivers = [self._state.workers.get(header.address)]
        sent_by = encode_header(header.request, worker.id, header.flags)
        whose = () if tenant is None else (tenant.encode(),)
        for receiver in receivers:
            if receiver is not None:
                sent = (message_type, sent_by, *frames[2:], *whose)
                self._state.out.append(Outgoing(_BACK, receiver.peer, sent, True))
