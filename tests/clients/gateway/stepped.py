"""A GPU worker that runs no model, and sends tokens only when the test calls ``step``."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tokenbus.protocol.bodies import Encoding, decode_as, encode_body
from tokenbus.protocol.frames import Frames
from tokenbus.protocol.header import Flag, Header, encode_header, encode_token_header
from tokenbus.protocol.messages import (
    FinishReason,
    Generate,
    ModelInfo,
    ModelTokenizerRequest,
    Msg,
    Token,
    TokenizerFiles,
)
from tokenbus.protocol.worker_messages import Register, Registered
from tokenbus.workers.bus import Bus, FromBus
from tokenbus.workers.gpu import embedded

WAIT_S = 120.0
"""Time limit for the arrival of a message, in seconds. Only a hang reaches this limit."""


def encoding_to(header: Header) -> Encoding:
    """The encoding of messages to the client of a request."""
    return "msgpack" if header.flags & Flag.MSGPACK else "json"


class Stepped:
    """A request that a ``SteppedWorker`` runs."""

    def __init__(self, post: Callable[[Frames], None], message: FromBus) -> None:
        self._post = post
        self.request = message.header.request
        self._session = message.header.address
        self._encoding = encoding_to(message.header)
        self.generate: Generate = decode_as(Generate, message.body)
        self.prompt = (
            list(memoryview(message.attachments[0]).cast("I")) if message.attachments else []
        )
        """The token ids of the prompt."""
        self._stream_id = self.generate.stream_id
        self.sent = 0
        """Number of tokens that were sent."""
        self._entries: list[Token] = []

    def step(
        self, count: int = 1, finish_reason: FinishReason | None = None, text: str = "x"
    ) -> None:
        """Sends the next ``count`` tokens, each with ``text``. If a finish reason is given, the
        last token ends the request."""
        entries = [
            Token(
                token=7,
                stream_id=self._stream_id,
                logprob=-1.0,
                finish_reason=None,
                pos=self.sent + i,
                text=text,
            )
            for i in range(count)
        ]
        self.sent += count
        self._entries += entries
        if finish_reason is not None:
            entries[-1].finish_reason = finish_reason
        finished = [] if finish_reason is None else [self.request]
        self._send(entries, finished)

    def send_again(self) -> None:
        """Answers an ATTACH of a client that has received nothing, and sends all entries again."""
        answer = Msg(stream_id=self._stream_id, attached=0)
        head = encode_header(self.request, self._session)
        self._post([b"MSG", head, encode_body(answer, self._encoding)])
        self._send(self._entries, [])

    def _send(self, entries: list[Token], finished: list[int]) -> None:
        body = encode_body(entries, self._encoding)
        self._post([b"TOKEN", encode_token_header([self._session], finished), body])


class SteppedWorker:
    """A GPU worker in the test, by default for a model ``stepped`` with the embedded tokenizer."""

    def __init__(
        self,
        back: str,
        capacity: int,
        model: str = "stepped",
        tokenizer: str | None = None,
        template: str = "",
    ) -> None:
        """``tokenizer`` is the text of the model's ``tokenizer.json``, or None for the embedded
        model's. ``template`` is the model's chat template."""
        self._template = template
        self._capacity = capacity
        self._model = model
        self._json = tokenizer or (embedded.path() / "tokenizer.json").read_text()
        self._arrived: deque[FromBus] = deque()
        self._bus = Bus(back, self._registration, lambda: (0, {}), self._tokenizer)
        self._bus.start()

    def begun(self) -> Stepped:
        """Waits for the next request, and returns it."""
        return Stepped(self._bus.post, self._next(b"GENERATE"))

    def attached(self) -> int:
        """Waits for the next ATTACH, and returns the id of the attached request."""
        return self._next(b"ATTACH").header.request

    def cancelled(self) -> int:
        """Waits for the next CANCEL, and returns the id of the cancelled request."""
        return self._next(b"CANCEL").header.request

    def was_cancelled(self, stream: Stepped) -> bool:
        """Whether a CANCEL of the request ``stream`` has arrived."""
        self._arrived.extend(self._bus.take(0.0))
        return any(
            m.type == b"CANCEL" and m.header.request == stream.request for m in self._arrived
        )

    def close(self) -> None:
        """Leaves the bus."""
        self._bus.close("the test is over")

    def _next(self, kind: bytes) -> FromBus:
        deadline = time.monotonic() + WAIT_S
        while True:
            for message in self._arrived:
                if message.type == kind:
                    self._arrived.remove(message)
                    return message
            if time.monotonic() > deadline:
                pytest.fail(f"no {kind.decode()} within {WAIT_S} s")
            self._arrived.extend(self._bus.take(1.0))

    def _registration(self) -> Register:
        info = ModelInfo(
            name=self._model,
            vocab_size=4096,
            context_length=2**20,
            eos_token_ids=[0],
            fingerprint=self._model,
        )
        return Register(
            name=f"gpu-{self._model}",
            role="gpu",
            version=1,
            pid=os.getpid(),
            host="here",
            capacity=self._capacity,
            models=[info],
            default=self._model,
        )

    def _tokenizer(self, messages: list[FromBus]) -> list[FromBus]:
        """Answers requests for the tokenizer on the bus thread, and returns the other messages."""
        others = []
        for message in messages:
            if message.type == b"REGISTERED":
                self._bus.registered(decode_as(Registered, message.body, "msgpack"))
                continue
            if message.type != b"TOKENIZER":
                others.append(message)
                continue
            header, encoding = message.header, encoding_to(message.header)
            asked = decode_as(ModelTokenizerRequest, message.body)
            files = TokenizerFiles(
                fingerprint=self._model, json=self._json, chat_template=self._template
            )
            answer = encode_body(Msg(stream_id=asked.stream_id, tokenizer=files), encoding)
            head = encode_header(header.request, header.address, Flag.FINAL)
            self._bus.post([b"MSG", head, answer])
        return others


@contextmanager
def stepped_worker(
    back: str,
    capacity: int,
    model: str = "stepped",
    tokenizer: str | None = None,
    template: str = "",
) -> Iterator[SteppedWorker]:
    """A ``SteppedWorker`` that registers with the broker at ``back``."""
    worker = SteppedWorker(back, capacity, model, tokenizer, template)
    try:
        yield worker
    finally:
        worker.close()
